"""Get the packages of a sandbox: copy what the interpreter already has, or run an installer."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from toolcell.errors import PackageError, UsageError
from toolcell.support.log import logger_of

logger = logger_of(__name__)
"""At level INFO: what an installer does, line by line. The command line shows it."""

INSTALL_TIMEOUT_S = 900.0
"""An installer that needs longer is stuck on its network."""

_ERROR_LINES = 15
"""How many lines of an installer's output an error repeats."""

_LEFT_OUT = frozenset({"direct_url.json", "INSTALLER", "REQUESTED"})
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


@dataclass(frozen=True, slots=True)
class Installed:
    """The distributions that satisfy everything wanted, dependencies included."""

    found: Mapping[str, Distribution]

    @property
    def identity(self) -> list[str]:
        """Names, versions and file lists: another build of the same version is another environment."""
        return sorted(
            f"{name}=={dist.version} {_digest(dist.read_text('RECORD'))}" for name, dist in self.found.items()
        )


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
        raise UsageError(f"{text!r} is no requirement such as 'numpy' or 'pandas>=2,<4' ({_first_line(exc)})") from exc
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


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]


def _digest(content: str | bytes | None) -> str:
    raw = content.encode() if isinstance(content, str) else content or b""
    return hashlib.sha256(raw).hexdigest()


def find_installed(wanted: Iterable[Wanted], interpreter: TargetInterpreter) -> Installed | str:
    """Find installed distributions for the requirements and their dependencies; returns a text if one is missing."""
    by_name: dict[str, Distribution] = {}
    for candidate in distributions_in(interpreter.site):
        by_name.setdefault(canonicalize_name(candidate.metadata["Name"]), candidate)
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
        dist = by_name.get(name)
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
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return f"{requirement.name} is installed as a link to its source tree"
    return None


def files_of(dist: Distribution) -> list[Path]:
    """Return the files of a distribution in its directory, relative to that, as its RECORD names them.

    A RECORD is written by whoever made the package. What leads out of the directory, or is no file there, is left out.

    Raises:
        PackageError: it is no table.
    """
    site = Path(str(dist.locate_file(""))).resolve()
    try:
        names = [row[0] for row in csv.reader((dist.read_text("RECORD") or "").splitlines()) if row]
    except (csv.Error, UnicodeDecodeError) as exc:
        raise PackageError(f"the RECORD of {dist.metadata['Name']!r:.80} cannot be read: {exc}") from exc
    inside = [Path(name) for name in names if "\0" not in name and ".." not in Path(name).parts]
    return [name for name in inside if not name.is_absolute() and _is_file_in(site, site / name)]


def _is_file_in(site: Path, path: Path) -> bool:
    try:  # an installer may have made the file itself a link, into its cache
        return path.is_file() and path.parent.resolve().is_relative_to(site)
    except OSError:
        return False


def distributions_in(site: Path | Sequence[str]) -> list[Distribution]:
    """Return what is installed in a directory or on a path. A package that was half removed has no METADATA."""
    found = distributions(path=[str(site)] if isinstance(site, Path) else list(site))
    return [dist for dist in found if dist.read_text("METADATA") and dist.metadata["Name"]]


def copy_installed(installed: Installed, target: Path) -> None:
    """Copy the files of every distribution into `target`; scripts, and files outside site-packages, stay behind."""
    for dist in installed.found.values():
        for name in files_of(dist):
            if name.suffix == ".pyc" or name.name in _LEFT_OUT:
                continue
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(str(dist.locate_file(str(name)))), copy)


def install(wanted: Iterable[Wanted], interpreter: TargetInterpreter, target: Path) -> str:
    """Let uv, else pip, put what is wanted into `target`, from wheels only: no package's code runs here.

    Returns:
        The installer's name.

    Raises:
        PackageError: there is no installer, or it failed; the last lines of its output are in the message.
    """
    name, command = _installer(interpreter, target)
    texts = [item.text for item in wanted]
    logger.info("installing %s with %s", ", ".join(texts), name)
    try:
        status, lines = _run_installer([*command, *texts])
    except OSError as exc:
        raise PackageError(f"{name} could not install {', '.join(texts)}: {exc}") from exc
    if status:
        output = "\n".join(lines)
        raise PackageError(f"{name} could not install {', '.join(texts)} (exit status {status}):\n{output}")
    _remove_what_names_this_machine(target)
    return name


def _run_installer(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run it, log each line as it comes, and return its exit status and last lines. It is killed when it is stuck."""
    last: deque[str] = deque(maxlen=_ERROR_LINES)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        stuck = threading.Timer(INSTALL_TIMEOUT_S, process.kill)
        stuck.start()
        try:
            for line in process.stdout or ():
                if line := line.strip():
                    last.append(line)
                    logger.info("%s", line)
        finally:
            stuck.cancel()
            if process.poll() is None and sys.exception() is not None:
                process.kill()
    return process.returncode, list(last)


def _installer(interpreter: TargetInterpreter, target: Path) -> tuple[str, list[str]]:
    python = str(interpreter.python)
    if uv := shutil.which("uv"):
        options = [
            "--python",
            python,
            "--target",
            str(target),
            "--only-binary",
            ":all:",
            "--link-mode",
            "copy",
            "--no-progress",
        ]
        return "uv", [uv, "pip", "install", *options]
    if not interpreter.has_pip:
        raise PackageError(f"neither uv nor pip is there to install packages for {python}: install uv")
    options = ["--target", str(target), "--only-binary", ":all:", "--no-compile", "--no-input"]
    quiet = ["--progress-bar", "off", "--disable-pip-version-check", "--no-warn-script-location", "--no-warn-conflicts"]
    return "pip", [python, "-I", "-m", "pip", "install", *options, *quiet]


def _remove_what_names_this_machine(target: Path) -> None:
    """Drop scripts (their first line is a host path) and records of where wheels came from."""
    shutil.rmtree(target / "bin", ignore_errors=True)
    for left_out in (path for name in _LEFT_OUT for path in target.glob(f"*.dist-info/{name}")):
        left_out.unlink()
    for leftover in (".lock", "uv_cache.json"):
        (target / leftover).unlink(missing_ok=True)


def compile_bytecode(interpreter: TargetInterpreter, target: Path) -> None:
    """Write .pyc files that stay valid wherever `target` is mounted and whatever its times are.

    Hash-based and unchecked, so a guest neither compiles nor looks at a source's time; file names in them are relative,
    so no path of this machine is inside. Test suites are left out: nobody imports them, and they are half the files.
    A file that does not compile is the package's business.
    """
    command = [str(interpreter.python), "-s", "-P", "-m", "compileall", "-q", "-q", "-j", "0", "-r", "50"]
    options = ["--invalidation-mode", "unchecked-hash", "-s", str(target), "-x", r"/tests?/", str(target)]
    subprocess.run(
        [*command, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "PYTHONHASHSEED": "0",
        },
        check=False,
    )
