"""A private copy of one interpreter, made once: what a guest sees as /usr, with no trace of where it came from.

An interpreter carries the path it was built or installed under in its compiled modules, its build settings and its
own binary, and that path often names a person. The copy replaces its telling part by one of the same length that says
nothing. It also makes the view one directory, where binding each shared library would make every sandbox's mount
namespace five times as large. Knows files; knows nothing of mounts or sandboxes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.process import elf

FORMAT = 3
"""Part of the key: goes up when a snapshot's content would differ."""

LEFT_OUT = frozenset({
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3",
})  # fmt: skip
"""Folders of the standard library that a script without screen, pip and test suite has no use for."""

USELESS = ("_tkinter", "nis", "ossaudiodev", "_test", "_ctypes_test", "xxlimited")
"""Extension modules for a screen, a network directory, a sound card and the test suite."""

PUBLIC = b"/usr"
ZONES = Path("/usr/share/zoneinfo")
OPENED_BY_NAME = ("libgcc_s.so.1", "libstdc++.so.6")
"""Libraries that nothing links at first and compiled packages want."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where the copy is, and how its parts are to be placed."""

    root: Path
    """To be seen as /usr."""
    libraries: str
    """The loader's own directory, below which everything it must find lies: /lib/x86_64-linux-gnu."""
    loader: str
    """Where programs expect the loader: /lib64/ld-linux-x86-64.so.2."""


def take(
    executable: Path, library: Path, platlibdir: str, packages: Path | None, harness: Sequence[Path], cache: Path
) -> Snapshot:
    """Return the snapshot of an interpreter and of the system libraries that it, `packages` and `harness` need.

    Raises:
        SandboxUnavailable: the cache cannot be written, or a library cannot be found.
    """
    key = _key(executable, library, packages, harness)
    place = cache / "views" / key
    try:
        if not (place / "manifest.json").is_file():
            _make(place, executable, library, platlibdir, [*_of(packages), *harness])
        manifest = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
    except OSError as exc:
        raise SandboxUnavailable(
            f"the interpreter's view cannot be kept in {cache}: {exc}; set XDG_CACHE_HOME to a directory that can be "
            "written"
        ) from exc
    return Snapshot(place / "usr", manifest["libraries"], manifest["loader"])


def _key(executable: Path, library: Path, packages: Path | None, harness: Sequence[Path]) -> str:
    """Changes when the interpreter, the system's libraries or the wanted packages do."""
    watched = [
        executable,
        library,
        library / "lib-dynload",
        library / "os.py",
        Path("/etc/ld.so.cache"),
        ZONES,
        *harness,
    ]
    facts = [FORMAT, str(executable), str(library), str(packages), sys.version]
    for path in watched:
        try:
            status = path.stat()
            facts += [status.st_mtime_ns, status.st_size]
        except OSError:
            facts.append("absent")
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _make(place: Path, executable: Path, library: Path, platlibdir: str, compiled: Sequence[Path]) -> None:
    """Build beside its place and rename; whoever comes second finds it done."""
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=place.parent))
    try:
        manifest = _fill(work, executable, library, platlibdir, compiled)
        (work / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        os.chmod(work, 0o755)
        try:
            work.rename(place)
        except OSError:
            if not (place / "manifest.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fill(work: Path, executable: Path, library: Path, platlibdir: str, compiled: Sequence[Path]) -> dict[str, str]:
    # The parent of the installation: its own name may be the tail of a version string that the linker merged with it.
    scrub = functools.partial(_scrub, private=str(library.parent.parent.parent).encode())
    version = library.name
    for source in _standard_library(library):
        target = work / "usr" / platlibdir / version / source.relative_to(library)
        _copy(source, target, scrub)
    _copy(executable, work / "usr" / "bin" / version, scrub)
    closure = _closure([executable, *shared_objects(library / "lib-dynload"), *compiled])
    libraries, loader = _home(closure)
    # A library that came along with its package is found there, by a path relative to the package.
    brought = {each.parent.parent for each in compiled}
    for soname, path in closure.libs.items():
        if not any(path.is_relative_to(root) for root in brought):
            _copy(Path(os.path.realpath(path)), work / "usr" / below_usr(libraries) / soname, scrub)
    if ZONES.is_dir():
        for source in ZONES.rglob("*"):
            if source.is_file() and "posix" not in source.parts and "right" not in source.parts:
                _copy(source, work / "usr" / "share" / "zoneinfo" / source.relative_to(ZONES), None)
    return {"libraries": libraries, "loader": loader}


def _standard_library(library: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        for name in names:
            if ".opt-" in name or name.endswith((".a", ".exe")) or name.startswith(USELESS):
                continue
            yield Path(folder, name)


def _copy(source: Path, target: Path, scrub: functools.partial[bytes] | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    data = source.read_bytes()
    target.write_bytes(data if scrub is None else scrub(data))
    # A compiled module is valid for the time and size of its source.
    status = source.stat()
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.chmod(target, 0o555 if status.st_mode & 0o100 else 0o444)


def _scrub(data: bytes, private: bytes) -> bytes:
    """Replace every occurrence of a path by one of the same length that says nothing."""
    if private == PUBLIC or len(private) < len(PUBLIC):
        return data
    rest = len(private) - len(PUBLIC)
    public = PUBLIC + (b"/" if rest % 2 else b"") + b"/." * (rest // 2)
    return data.replace(private, public)


def below_usr(path: str) -> str:
    """Where a system path lies inside the copy: /lib/x and /usr/lib/x are one place there."""
    return path.removeprefix("/usr").lstrip("/")


def shared_objects(folder: Path) -> list[Path]:
    """Every extension module and bundled library below `folder` that a sandbox has a use for."""
    found = (path for path in folder.rglob("*.so*") if path.is_file())
    return sorted(path for path in found if not path.name.startswith(USELESS))


def _of(packages: Path | None) -> list[Path]:
    return [] if packages is None else shared_objects(packages)


def _closure(objects: Iterable[Path]) -> elf.Closure:
    try:
        return elf.closure(objects, also=OPENED_BY_NAME)
    except (OSError, ValueError) as exc:
        raise SandboxUnavailable(f"the interpreter's shared libraries cannot be resolved: {exc}") from exc


def _home(closure: elf.Closure) -> tuple[str, str]:
    """The directory that the loader searches by default, which is where it finds libc, and the loader's own path."""
    libc = next((path for soname, path in closure.libs.items() if soname.startswith("libc.so")), None)
    if libc is None or closure.interp is None:
        raise SandboxUnavailable("the interpreter is not a dynamic executable of a glibc system")
    return os.path.dirname(libc), str(closure.interp)
