"""Fills a directory with packages for an image's interpreter: copies of what is installed here, else wheels.

Nothing is ever installed inside a container, so no build needs a network of its own, and no package's code runs.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path

from packaging.utils import canonicalize_name

import toolcell_bridge
from toolcell.errors import PackageError
from toolcell.sandbox.docker.images.reference import sources_in
from toolcell.sandbox.process import package_sources

GUEST_NEEDS = ("msgpack", "RestrictedPython")

ASK = """\
import json, os, platform, sys, sysconfig
libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
print(json.dumps({
    "version": platform.python_version(), "implementation": sys.implementation.name,
    "cache_tag": sys.implementation.cache_tag or "", "soabi": sysconfig.get_config_var("SOABI") or "",
    "machine": platform.machine(), "glibc": (libc or "").partition(" ")[2],
}))
"""

INSTALL_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class ImagePython:
    """What of an image's interpreter decides which files it can import."""

    version: str
    implementation: str
    cache_tag: str
    soabi: str
    machine: str
    glibc: str
    """Empty with another C library."""

    @classmethod
    def read(cls, told: str) -> ImagePython:
        """Read what `ASK` printed.

        Raises:
            ValueError, TypeError: it printed something else.
        """
        return cls(**json.loads(told))

    @property
    def short(self) -> str:
        """3.11, for example."""
        return ".".join(self.version.split(".")[:2])

    @property
    def platforms(self) -> list[str]:
        """Wheel platforms it can load, the newest first."""
        if not self.glibc:
            return [f"musllinux_1_{minor}_{self.machine}" for minor in (2, 1)]
        newest = _numbers(self.glibc)[1]
        names = [f"manylinux_2_{minor}_{self.machine}" for minor in range(newest, 4, -1)]
        return [*names, *(f"{name}_{self.machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1"))]

    @property
    def can_use_ours(self) -> bool:
        """Whether a compiled module that is installed here loads there."""
        ours = (sys.implementation.cache_tag, sysconfig.get_config_var("SOABI") or "", platform.machine())
        kind, glibc = platform.libc_ver()
        same = (self.cache_tag, self.soabi, self.machine) == ours and sys.platform == "linux"
        return same and kind == "glibc" and bool(self.glibc) and _numbers(self.glibc) >= _numbers(glibc)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def fill_guest(site: Path, python: ImagePython) -> dict[str, str]:
    """Put the guest of this installation, and what it imports, into `site`; tells names and versions."""
    package = Path(toolcell_bridge.__file__).parent
    for path in sources_in(package):
        copy = site / package.name / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    fill(site, [f"{name}=={version(name)}" for name in GUEST_NEEDS], python)
    return {**versions_in(site), "toolcell-bridge": toolcell_bridge.__version__}


def fill(site: Path, packages: Sequence[str], python: ImagePython, pinned: Mapping[str, str] | None = None) -> str:
    """Put `packages` and what they need into `site`; returns who provided them.

    Args:
        pinned: versions that hold if a package of that name is among them.

    Raises:
        UsageError: a requirement is malformed.
        PackageError: they cannot be had for this interpreter.
    """
    wanted = package_sources.parse_wanted(packages)
    why = "of another interpreter or C library"
    if python.can_use_ours:
        ours = package_sources.probe_interpreter(Path(sys.executable))
        installed = package_sources.find_installed(wanted, ours)
        if isinstance(installed, package_sources.Installed) and _keeps(installed, pinned or {}):
            site.mkdir(parents=True, exist_ok=True)
            package_sources.copy_installed(installed, site)
            return "installed"
        why = installed if isinstance(installed, str) else "of versions that the image has otherwise"
    try:
        return _download(site, [item.text for item in wanted], python, pinned or {})
    except PackageError as exc:
        raise PackageError(f"{exc}\n(no installed copy was used: {why})") from exc


def _keeps(installed: package_sources.Installed, pinned: Mapping[str, str]) -> bool:
    return all(pinned.get(name, dist.version) == dist.version for name, dist in installed.found.items())


def _download(site: Path, texts: Sequence[str], python: ImagePython, pinned: Mapping[str, str]) -> str:
    site.mkdir(parents=True, exist_ok=True)
    constraints = site.with_name(f"{site.name}-constraints.txt")
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pinned.items())))
    name, command = installer(site, python)
    try:
        done = subprocess.run(
            [*command, "--constraint", str(constraints), *texts],
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise PackageError(f"{name} could not fetch {', '.join(texts)}: {exc}") from exc
    finally:
        constraints.unlink()
    if done.returncode:
        told = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise PackageError(f"{name} could not fetch {', '.join(texts)} for Python {python.version}:\n{told}")
    shutil.rmtree(site / "bin", ignore_errors=True)
    return name


def installer(site: Path, python: ImagePython) -> tuple[str, list[str]]:
    """The command that installs wheels of another interpreter: pip, else uv.

    Raises:
        PackageError: there is neither.
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
    """Remove test suites, sources and headers, which nobody imports and which are a third of the bytes."""
    for name in ("tests", "_tests"):
        for folder in [path for path in site.rglob(name) if path.is_dir()]:
            shutil.rmtree(folder, ignore_errors=True)
    for pattern in ("*.pyx", "*.pxd", "*.c", "*.cpp", "*.h", "*.a"):
        for path in site.rglob(pattern):
            path.unlink()


def drop_distributions(site: Path, had: Mapping[str, str]) -> None:
    """Remove packages that the image has already, in the same version."""
    for dist in distributions(path=[str(site)]):
        if had.get(canonicalize_name(dist.metadata["Name"])) == dist.version:
            for path in dist.files or ():
                Path(str(dist.locate_file(path))).unlink(missing_ok=True)


def versions_in(site: Path) -> dict[str, str]:
    """Name and version of every package in a directory."""
    return {canonicalize_name(dist.metadata["Name"]): dist.version for dist in distributions(path=[str(site)])}


def read_requirements(lines: Iterable[str]) -> list[str]:
    """The requirements in a file that has one per line and comments."""
    stripped = (line.partition("#")[0].strip() for line in lines)
    return [line for line in stripped if line]
