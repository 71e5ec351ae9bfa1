"""Resolve requirements with uv, else pip, and unpack wheels: no code of a package runs.

An installer never sees an environment: it says which wheels are wanted, and `package_copies` unpacks those that are not
in the cache yet.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from toolcell.errors import PackageError
from toolcell.sandbox.process.package_sources import Installed, TargetInterpreter, Wanted, copy_distribution, logger
from toolcell.support.text import for_terminal

INSTALL_TIMEOUT_S = 900.0
"""An installer that needs longer is stuck on its network."""

INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
"""In the environment, from where installers take packages in place of PyPI."""

_ERROR_LINES = 15
"""How many lines of an installer's output an error repeats."""


@dataclass(frozen=True, slots=True)
class PackageSource:
    """Where the files of one distribution come from."""

    name: str
    """As `canonicalize_name` returns it."""
    identity: str
    """Equal for equal files: a digest of the wheel, of all wheels of a version, or of an installed RECORD."""
    fill: Callable[[Path], None]
    """Puts the files into an empty directory."""


def use_package_index(url: str) -> None:
    """Take the packages of sandboxes from another index than PyPI: installers read the environment of this process."""
    os.environ.update(dict.fromkeys(INDEX_VARIABLES, url))
    place = urlsplit(url)
    if place.scheme == "http":  # pip leaves such an index out unless it is told
        os.environ["PIP_TRUSTED_HOST"] = place.netloc.rpartition("@")[2]


class InstallProgress:
    """What a build is doing: log records at level INFO, or one line of a terminal if nobody reads those records."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr is not None and sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO)
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """Say what is under way."""
        logger.info("%s", text)
        if self._is_shown:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"packages: {for_terminal(text).strip()}"[:width])

    def end(self) -> None:
        """Remove the line."""
        if self._is_shown:
            self._write("")

    def _write(self, line: str) -> None:
        with self._lock:
            try:
                sys.stderr.write(f"\r\x1b[K{line}")
                sys.stderr.flush()
            except (OSError, ValueError):  # a terminal that was closed must not end a build
                self._is_shown = False


def of_installed(installed: Installed) -> list[PackageSource]:
    """Return the sources of what is installed."""
    return [
        PackageSource(name, identity, partial(copy_distribution, installed.found[name]))
        for name, identity in installed.identities.items()
    ]


def resolved(
    wanted: Sequence[Wanted], interpreter: TargetInterpreter, scratch: Path, progress: InstallProgress
) -> tuple[str, list[PackageSource]]:
    """Return the name of the installer, and the sources of what is wanted and its dependencies: wheels only.

    `scratch`: a directory for what is downloaded. The sources can be read as long as it is there.

    Raises:
        PackageError: there is no installer, or it failed; the last lines of its output are in the message.
    """
    uv = shutil.which("uv")
    if uv is None and not interpreter.has_pip:
        raise PackageError(f"neither uv nor pip is there to install packages for {interpreter.python}: install uv")
    name = "uv" if uv else "pip"
    progress.say(f"resolving {', '.join(item.text for item in wanted)} with {name}")
    if uv:
        return name, _resolved_by_uv(uv, wanted, interpreter, scratch, progress)
    return name, _downloaded_by_pip(wanted, interpreter, scratch, progress)


def _resolved_by_uv(
    uv: str, wanted: Sequence[Wanted], interpreter: TargetInterpreter, scratch: Path, progress: InstallProgress
) -> list[PackageSource]:
    asked, answer = scratch / "requirements.in", scratch / "requirements.txt"
    asked.write_text("".join(f"{item.text}\n" for item in wanted), encoding="utf-8")
    common = ["--python", str(interpreter.python), "--only-binary", ":all:", "--no-progress"]
    options = ["--generate-hashes", "--no-header", "--no-annotate", "--output-file", str(answer), "--quiet"]
    _run([uv, "pip", "compile", str(asked), *common, *options], wanted, progress)
    sources = []
    for pin, identity in _pins(answer.read_text(encoding="utf-8")):
        command = [uv, "pip", "install", "--no-deps", "--link-mode", "copy", *common, pin]
        sources.append(PackageSource(_name_of(pin), identity, partial(_install_by_uv, command, wanted, progress)))
    return sources


def _pins(text: str) -> Iterator[tuple[str, str]]:
    """Yield each pinned requirement of a `requirements.txt`, and a digest of it with the hashes of its wheels."""
    for block in text.replace("\\\n", "").splitlines():
        pin, *hashes = block.split(" --hash=")
        if pin.strip() and not pin.startswith(("#", "-")):
            whole = "\n".join([pin.strip(), *sorted(each.strip() for each in hashes)])
            yield pin.strip(), f"{pin.strip()} {hashlib.sha256(whole.encode()).hexdigest()}"


def _name_of(pin: str) -> str:
    if pin.endswith(".whl"):
        return parse_wheel_filename(Path(pin).name)[0]
    return canonicalize_name(Requirement(pin).name)


def _install_by_uv(command: Sequence[str], wanted: Sequence[Wanted], progress: InstallProgress, target: Path) -> None:
    _run([*command, "--target", str(target)], wanted, progress)


def _downloaded_by_pip(
    wanted: Sequence[Wanted], interpreter: TargetInterpreter, scratch: Path, progress: InstallProgress
) -> list[PackageSource]:
    wheels = scratch / "wheels"
    options = ["--dest", str(wheels), "--only-binary", ":all:", "--no-input"]
    quiet = ["--progress-bar", "off", "--disable-pip-version-check"]
    texts = [item.text for item in wanted]
    _run([str(interpreter.python), "-I", "-m", "pip", "download", *options, *quiet, *texts], wanted, progress)
    return [_wheel_source(path) for path in sorted(wheels.iterdir())]


def _wheel_source(path: Path) -> PackageSource:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return PackageSource(parse_wheel_filename(path.name)[0], f"{path.name} {digest}", partial(unpack_wheel, path))


def _run(command: Sequence[str], wanted: Sequence[Wanted], progress: InstallProgress) -> None:
    """Run an installer and repeat each line that it writes. It is killed when it is stuck.

    Raises:
        PackageError: it cannot be run, or it failed.
    """
    name, texts = "uv" if os.path.basename(command[0]) == "uv" else "pip", ", ".join(item.text for item in wanted)
    last: deque[str] = deque(maxlen=_ERROR_LINES)
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            stuck = threading.Timer(INSTALL_TIMEOUT_S, process.kill)
            stuck.start()
            try:
                for line in process.stdout or ():
                    if line := line.strip():
                        last.append(line)
                        progress.say(line)
            finally:
                stuck.cancel()
                if process.poll() is None and sys.exception() is not None:
                    process.kill()
    except OSError as exc:
        raise PackageError(f"{name} could not install {texts}: {exc}") from exc
    if process.returncode:
        output = "\n".join(last)
        raise PackageError(f"{name} could not install {texts} (exit status {process.returncode}):\n{output}")


def unpack_wheel(wheel: Path, target: Path) -> None:
    """Unpack a wheel as an installer would, without its scripts and headers.

    Only the names in the archive count. Its RECORD is a file like any other.

    Raises:
        PackageError: it is damaged, or has a file that belongs outside of `target`.
        OSError: a file cannot be written.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                place = None if member.is_dir() else _place(member.filename, wheel)
                if place is not None:
                    (target / place).parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(member) as packed, (target / place).open("wb") as file:
                        shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as exc:
        raise PackageError(f"the wheel {wheel.name} cannot be unpacked: {exc}") from exc


def _place(name: str, wheel: Path) -> PurePosixPath | None:
    """Return where a file of a wheel belongs, or None for scripts and headers.

    `NAME-VERSION.data` has what an installer distributes to several directories; here there is one.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise PackageError(f"the wheel {wheel.name} has a file outside of its directory: {name!r:.200}")
    if len(path.parts) > 2 and path.parts[0].endswith(".data"):
        kept = path.parts[1] in {"purelib", "platlib", "data"}
        return PurePosixPath(*path.parts[2:]) if kept else None
    return path
