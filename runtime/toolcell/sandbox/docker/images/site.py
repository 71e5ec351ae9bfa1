"""Fill a directory with packages for an image's interpreter: copies of installed packages, else downloaded wheels.

Nothing is installed inside a container, so a build needs no network, and no code of a package runs.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from packaging.utils import canonicalize_name

import toolcell_bridge
from toolcell.errors import PackageError
from toolcell.sandbox.docker.images.reference import sources_in
from toolcell.sandbox.process import package_sources
from toolcell.sandbox.process.package_sources import run_installer

GUEST_NEEDS = ("msgpack", "RestrictedPython")

DESCRIBE_PYTHON = """\
import json, os, platform, sys, sysconfig
libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
print(json.dumps({
    "version": platform.python_version(), "implementation": sys.implementation.name,
    "cache_tag": sys.implementation.cache_tag or "", "soabi": sysconfig.get_config_var("SOABI") or "",
    "machine": platform.machine(), "glibc": (libc or "").partition(" ")[2],
}))
"""


@dataclass(frozen=True, slots=True)
class ImagePython:
    """The properties of an image's interpreter that decide which files it can import."""

    version: str
    implementation: str
    cache_tag: str
    soabi: str
    machine: str
    glibc: str
    """Version of glibc; empty with another C library."""

    @classmethod
    def read(cls, output: str) -> ImagePython:
        """Read the output of `DESCRIBE_PYTHON`.

        Raises:
            ValueError, TypeError: the output is something else.
        """
        return cls(**json.loads(output))

    @property
    def short(self) -> str:
        """The short version, for example 3.11."""
        return ".".join(self.version.split(".")[:2])

    @property
    def platforms(self) -> list[str]:
        """Wheel platforms that it can load, newest first."""
        if not self.glibc:
            return [f"musllinux_1_{minor}_{self.machine}" for minor in (2, 1)]
        newest = _numbers(self.glibc)[1]
        names = [f"manylinux_2_{minor}_{self.machine}" for minor in range(newest, 4, -1)]
        return [*names, *(f"{name}_{self.machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1"))]

    @property
    def can_use_ours(self) -> bool:
        """A compiled module that is installed here loads there too."""
        ours = (sys.implementation.cache_tag, sysconfig.get_config_var("SOABI") or "", platform.machine())
        kind, glibc = platform.libc_ver()
        same = (self.cache_tag, self.soabi, self.machine) == ours and sys.platform == "linux"
        return same and kind == "glibc" and bool(self.glibc) and _numbers(self.glibc) >= _numbers(glibc)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def install_guest(site: Path, python: ImagePython, report: Callable[[str], object]) -> dict[str, str]:
    """Copy this installation's guest and its dependencies into `site`; return names and versions."""
    package = Path(toolcell_bridge.__file__).parent
    for path in sources_in(package):
        copy = site / package.name / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    install_packages(site, [f"{name}=={version(name)}" for name in GUEST_NEEDS], python, report)
    return {**versions_in(site), "toolcell-bridge": toolcell_bridge.__version__}


def install_packages(
    site: Path,
    packages: Sequence[str],
    python: ImagePython,
    report: Callable[[str], object],
    pinned: Mapping[str, str] | None = None,
) -> str:
    """Put `packages` and their dependencies into `site`; return what provided them: "installed", "pip" or "uv".

    Args:
        report: called with each line that an installer writes.
        pinned: versions to use for packages of these names.

    Raises:
        UsageError: a requirement is malformed.
        PackageError: a package is not available for this interpreter.
    """
    wanted = package_sources.parse_wanted(packages)
    why_not_copied = "of another interpreter or C library"
    if python.can_use_ours:
        installed = package_sources.find_installed(wanted, package_sources.probe_interpreter(Path(sys.executable)))
        if isinstance(installed, package_sources.Installed) and _matches(installed, pinned or {}):
            site.mkdir(parents=True, exist_ok=True)
            package_sources.copy_installed(installed, site)
            return "installed"
        why_not_copied = installed if isinstance(installed, str) else "of versions that the image has otherwise"
    try:
        return _download(site, [item.text for item in wanted], python, report, pinned or {})
    except PackageError as exc:
        raise PackageError(f"{exc}{package_sources.why_none(wanted, why_not_copied)}") from exc


def _matches(installed: package_sources.Installed, pinned: Mapping[str, str]) -> bool:
    return all(pinned.get(name, dist.version) == dist.version for name, dist in installed.found.items())


def _download(
    site: Path, texts: Sequence[str], python: ImagePython, report: Callable[[str], object], pinned: Mapping[str, str]
) -> str:
    site.mkdir(parents=True, exist_ok=True)
    constraints = site.with_name(f"{site.name}-constraints.txt")
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pinned.items())))
    try:
        name, command = installer(site, python)
        run_installer([*command, "--constraint", str(constraints), *texts], texts, report)
    finally:
        constraints.unlink()
    shutil.rmtree(site / "bin", ignore_errors=True)
    return name


def installer(site: Path, python: ImagePython) -> tuple[str, list[str]]:
    """Return the name and the command of what installs wheels for another interpreter: pip, else uv.

    Raises:
        PackageError: neither is installed.
    """
    from importlib.util import find_spec

    target = ["--target", str(site), "--only-binary", ":all:"]
    if find_spec("pip"):
        platforms = [part for name in python.platforms for part in ("--platform", name)]
        kind = ["--python-version", python.short, "--implementation", "cp", *platforms]
        quiet = ["--no-compile", "--no-input", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]
        return "pip", [sys.executable, "-I", "-m", "pip", "install", *target, *kind, *quiet]
    if uv := shutil.which("uv"):
        libc = f"manylinux_2_{_numbers(python.glibc)[1]}" if python.glibc else "unknown-linux-musl"
        kind = ["--python-version", python.short, "--python-platform", f"{python.machine}-{libc}"]
        return "uv", [uv, "pip", "install", *target, *kind, "--quiet", "--link-mode", "copy"]
    raise PackageError(f"neither pip nor uv is there to fetch packages for Python {python.version}: install uv")


def drop_tests(site: Path) -> None:
    """Remove sources, headers, and test suites that are not imported with their package: a third of the bytes."""
    for name in ("tests", "_tests"):
        for folder in [path for path in site.rglob(name) if path.is_dir()]:
            if not any(_imports(path, name) for path in folder.parent.glob("*.py")):
                shutil.rmtree(folder, ignore_errors=True)
    for pattern in ("*.pyx", "*.pxd", "*.c", "*.cpp", "*.h", "*.a"):
        for path in site.rglob(pattern):
            path.unlink()


def _imports(module: Path, folder: str) -> bool:
    """Whether a module imports from a folder beside it, as PyTables and astropy do from their tests."""
    text = module.read_text(encoding="utf-8", errors="replace")
    own = rf"{re.escape(module.parent.name)}\.{folder}"
    ways = rf"from\s+(?:\.{folder}|{own})\b|from\s+\.\s+import\s.*\b{folder}\b|import\s+{own}\b"
    return re.search(rf"^[ \t]*(?:{ways})", text, re.MULTILINE) is not None


def drop_distributions(site: Path, had: Mapping[str, str]) -> None:
    """Remove packages that the image has already in the same version. `had`: name to version."""
    for dist in package_sources.distributions_in(site):
        if had.get(canonicalize_name(dist.metadata["Name"])) == dist.version:
            for path in package_sources.files_of(dist):
                (site / path).unlink()


def versions_in(site: Path) -> dict[str, str]:
    found = package_sources.distributions_in(site)
    return {canonicalize_name(dist.metadata["Name"]): dist.version for dist in found}


def read_requirements(lines: Iterable[str]) -> list[str]:
    """Return the requirements of a file with one requirement per line and comments."""
    stripped = (line.partition("#")[0].strip() for line in lines)
    return [line for line in stripped if line]
