"""Read what packages are wanted, and find those that the interpreter already has."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import urlsplit

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from toolcell.errors import PackageError, UsageError
from toolcell.support.log import logger_of
from toolcell.support.text import for_terminal
from toolcell_bridge.guest.errors import OTHER_NAMES

logger = logger_of(__name__)
"""At level INFO: what an installer does, line by line. The command line shows it."""

LEFT_OUT = frozenset({"direct_url.json", "INSTALLER", "REQUESTED", "uv_cache.json"})
"""Files of a .dist-info directory that name paths of this machine or say nothing about the package."""

_PROBE = """
import importlib.util, json, sys, sysconfig
print(json.dumps({
    "tag": [sys.implementation.cache_tag, sysconfig.get_config_var("SOABI") or "", sysconfig.get_platform()],
    "version": sys.version.split()[0],
    "site": [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))],
    "pip": importlib.util.find_spec("pip") is not None,
}))
"""


@dataclass(frozen=True, slots=True)
class TargetInterpreter:
    """What of an interpreter decides which files it can import."""

    python: Path
    version: str
    tag: str
    """Implementation, ABI and platform."""
    site: tuple[str, ...]
    """Its site-packages directories, in the order it looks."""
    has_pip: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """One requirement of the caller."""

    text: str
    """Normalised; passed to an installer."""
    requirement: Requirement | None
    """None for a wheel file, which is never looked up among the installed."""
    identity: str
    """Its part of the cache key. For a wheel file it includes a digest of the content."""


def why_none(wanted: Sequence[Wanted], installed: Installed | str) -> str:
    """Return why no installed copy was used, and which packages have the modules that were named in their place."""
    modules = {
        module.lower(): f"\nthe module {module} is in the package {name}" for module, name in OTHER_NAMES.items()
    }
    names = [item.requirement.name.lower() for item in wanted if item.requirement is not None]
    return f"\n(no installed copy was used: {installed})" + "".join(modules.get(name, "") for name in names)


@dataclass(frozen=True, slots=True)
class Installed:
    """The distributions that satisfy everything wanted, dependencies included."""

    found: Mapping[str, Distribution]

    @property
    def identities(self) -> dict[str, str]:
        """Name to version and list of files: another build of the same version is another environment."""
        return {
            name: f"{name}=={dist.version} {_digest(dist.read_text('RECORD'))}"
            for name, dist in sorted(self.found.items())
        }


def probe_interpreter(python: Path) -> TargetInterpreter:
    """Run `python` to find out what it is. The running interpreter is not started again.

    A virtual environment and the interpreter behind it are one interpreter here: what this one can import fits both.

    Raises:
        PackageError: it cannot be run.
    """
    if os.path.realpath(python) == os.path.realpath(sys.executable):
        site = tuple(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
        tag = (sys.implementation.cache_tag or "", sysconfig.get_config_var("SOABI") or "", sysconfig.get_platform())
        return TargetInterpreter(Path(sys.executable), sys.version.split()[0], " ".join(tag), site, _has_pip())
    try:
        done = subprocess.run([str(python), "-I", "-c", _PROBE], capture_output=True, text=True, timeout=30, check=True)
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise PackageError(f"cannot ask {python} which packages it takes: {exc}") from exc
    return TargetInterpreter(python, answer["version"], " ".join(answer["tag"]), tuple(answer["site"]), answer["pip"])


def _has_pip() -> bool:
    from importlib.util import find_spec

    return find_spec("pip") is not None


def parse_wanted(packages: Sequence[str]) -> tuple[Wanted, ...]:
    """Validate what the caller asked for: requirements by name, or local wheel files.

    An installer never reads what it gets from here as anything else.

    Raises:
        UsageError: something else was given, an option, a URL or a directory for instance.
    """
    if isinstance(packages, str):
        raise UsageError(f"packages must be a list of requirements, not the text {packages!r}")
    wanted = {item.identity: item for item in map(_parse_one, packages)}
    return tuple(wanted[identity] for identity in sorted(wanted))


def _parse_one(text: object) -> Wanted:
    if not isinstance(text, str):
        raise UsageError(f"a package is named by text, not by {text!r}")
    if text.endswith(".whl"):
        return _local_wheel(Path(text))
    try:
        requirement = Requirement(text)
    except InvalidRequirement as exc:
        problem = str(exc).partition("\n")[0]
        raise UsageError(f"{text!r} is not a requirement such as 'pandas>=2,<4' ({problem})") from exc
    if requirement.url:
        raise UsageError(f"{text!r} names a URL; name a package, or give the path of a local wheel file")
    requirement.name = canonicalize_name(requirement.name)
    return Wanted(str(requirement), requirement, str(requirement))


def _local_wheel(path: Path) -> Wanted:
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise UsageError(f"cannot read the wheel file {path}: {exc.strerror}") from exc
    return Wanted(str(path.absolute()), None, f"{path.name} {_digest(content)}")


def _digest(content: str | bytes | None) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content or b"").hexdigest()


def find_installed(wanted: Iterable[Wanted], interpreter: TargetInterpreter) -> Installed | str:
    """Find installed distributions for the requirements and their dependencies; returns a text if one is missing."""
    environment = _marker_environment(interpreter)
    found: dict[str, Distribution] = {}
    followed: set[tuple[str, str]] = set()
    queue: list[tuple[Requirement, str]] = []
    for item in wanted:
        if item.requirement is None:
            return f"{item.text} is a wheel file"
        queue.append((item.requirement, ""))
    while queue:
        requirement, asked_by_extra = queue.pop()
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": asked_by_extra}):
            continue
        name = canonicalize_name(requirement.name)
        dist = found.get(name) or next(iter(distributions_in(interpreter.site, name)), None)
        if dist is None:
            return f"{requirement.name} is not installed"
        if problem := _unusable(dist, requirement):
            return problem
        found[name] = dist
        for extra in {"", *requirement.extras} - {done for seen, done in followed if seen == name}:
            followed.add((name, extra))
            queue += [(Requirement(line), extra) for line in dist.requires or ()]
    return Installed(found)


def _marker_environment(interpreter: TargetInterpreter) -> dict[str, str]:
    environment = {name: str(value) for name, value in default_environment().items()}
    short = ".".join(interpreter.version.split(".")[:2])
    return environment | {"python_full_version": interpreter.version, "python_version": short}


def _unusable(dist: Distribution, requirement: Requirement) -> str | None:
    """Return why an installed distribution does not satisfy `requirement`; None when it does."""
    if not requirement.specifier.contains(dist.version, prereleases=True):
        return f"{requirement.name} {dist.version} is installed, {requirement.specifier} is wanted"
    if dist.read_text("RECORD") is None:
        return f"{requirement.name} was installed without a list of its files"
    if json.loads(dist.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
        return f"{requirement.name} is installed as a link to its source tree"
    return None


def rows_of(dist: Distribution) -> list[list[str]]:
    """Return the rows of a distribution's RECORD: a file in its directory, relative to that, a digest and a size.

    Whoever made the package wrote the RECORD. What leads out of the directory, or is not a file there, is left out.

    Raises:
        PackageError: it is not a table.
    """
    site = Path(str(dist.locate_file(""))).resolve()
    try:
        rows = [row for row in csv.reader((dist.read_text("RECORD") or "").splitlines()) if row]
    except (csv.Error, UnicodeDecodeError) as exc:
        raise PackageError(f"the RECORD of {dist.metadata['Name']!r:.80} cannot be read: {exc}") from exc
    return [row for row in rows if _is_file_in(site, row[0])]


def files_of(dist: Distribution) -> list[Path]:
    """Return the files of a distribution in its directory, relative to that."""
    return [Path(row[0]) for row in rows_of(dist)]


def _is_file_in(site: Path, name: str) -> bool:
    path = Path(name)
    if "\0" in name or ".." in path.parts or path.is_absolute():
        return False
    try:  # an installer may have made the file itself a link, into its cache
        return (site / path).is_file() and (site / path).parent.resolve().is_relative_to(site)
    except OSError:
        return False


def distributions_in(site: Path | Sequence[str], name: str | None = None) -> list[Distribution]:
    """Return what is installed in a directory or on a path, or what of it has a name.

    A package that was half removed has no METADATA.
    """
    path = [str(site)] if isinstance(site, Path) else list(site)
    found = distributions(path=path) if name is None else distributions(path=path, name=name)
    return [dist for dist in found if dist.read_text("METADATA") and dist.metadata["Name"]]


def copy_installed(installed: Installed, target: Path) -> None:
    for dist in installed.found.values():
        for name in files_of(dist):
            if name.suffix == ".pyc" or name.name in LEFT_OUT:
                continue
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(str(dist.locate_file(str(name)))), copy)


# Install wheels with uv, else pip: no code of a package runs.

INSTALL_TIMEOUT_S = 900.0
"""An installer that needs longer is stuck on its network."""

INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
"""In the environment, from where installers take packages in place of PyPI."""

_ERROR_LINES = 15
"""How many lines of an installer's output an error repeats."""


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
        logger.info("%s", text)
        if self._is_shown:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"packages: {for_terminal(text).strip()}"[:width])

    def end(self) -> None:
        if self._is_shown:
            self._write("")

    def _write(self, line: str) -> None:
        with self._lock:
            try:
                sys.stderr.write(f"\r\x1b[K{line}")
                sys.stderr.flush()
            except (OSError, ValueError):  # a terminal that was closed must not end a build
                self._is_shown = False


def install(wanted: Sequence[Wanted], interpreter: TargetInterpreter, site: Path, progress: InstallProgress) -> str:
    """Install what is wanted and its dependencies into a new directory, and return the name of the installer.

    Raises:
        PackageError: there is no installer, or it failed; the last lines of its output are in the message.
    """
    name, texts = "uv", [item.text for item in wanted]
    if uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--python", str(interpreter.python), "--link-mode", "copy", "--no-progress"]
    elif interpreter.has_pip:
        name = "pip"
        command = [str(interpreter.python), "-I", "-m", "pip", "install", "--no-user", "--no-compile", "--no-input"]
        command += ["--progress-bar", "off", "--disable-pip-version-check"]
    else:
        raise PackageError(f"neither uv nor pip is there to install packages for {interpreter.python}: install uv")
    progress.say(f"installing {', '.join(texts)} with {name}")
    run_installer([*command, "--only-binary", ":all:", "--target", str(site), *texts], texts, progress.say)
    return name


def run_installer(command: Sequence[str], texts: Sequence[str], say: Callable[[str], object]) -> None:
    """Run an installer and repeat each line that it writes. It is killed when it is stuck.

    Raises:
        PackageError: it cannot be run, or it failed.
    """
    name, wanted = "uv" if os.path.basename(command[0]) == "uv" else "pip", ", ".join(texts)
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
                        say(line)
            finally:
                stuck.cancel()
                if process.poll() is None and sys.exception() is not None:
                    process.kill()
    except OSError as exc:
        raise PackageError(f"{name} could not install {wanted}: {exc}") from exc
    if process.returncode:
        output = "\n".join(last)
        raise PackageError(f"{name} could not install {wanted} (exit status {process.returncode}):\n{output}")
