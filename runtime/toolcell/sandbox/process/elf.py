"""Find the shared objects that a program and its extension modules need, as glibc's loader finds them.

Reads only the dynamic section of each file and never runs one, as ldd does. A library that is opened at run time by
name is in no file's dynamic section: the few that matter are in `OPENED_BY_NAME`.

Source: elf(5), ld.so(8); the cache's layout is from glibc's sysdeps/generic/dl-cache.h.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.segments import InterpSegment

OPENED_BY_NAME = ("libgcc_s.so.1",)
"""pthread_exit and pthread_cancel load it and abort the process when they cannot."""

_MAX_CONF_DEPTH = 8

# Machine -> (multiarch directory, ld.so.cache flags of a 64-bit libc6 library)
_MACHINES = {"EM_X86_64": ("x86_64-linux-gnu", 0x0303), "EM_AARCH64": ("aarch64-linux-gnu", 0x0A03)}

_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER = struct.Struct("<20sII")
_CACHE_HEADER_BYTES = 48
_CACHE_ENTRY = struct.Struct("<iIIIQ")


@dataclass(frozen=True, slots=True)
class SharedObject:
    """What one ELF file says about its loading."""

    machine: str
    """As pyelftools names it: EM_X86_64."""

    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    """Searched for the libraries that this file and its dependencies need; empty when there is a runpath."""

    runpath: tuple[str, ...]
    interpreter: Path | None


@dataclass(frozen=True, slots=True)
class Search:
    """Where the system's loader looks when a file does not say: its cache, then directories."""

    cache: Mapping[str, Path]
    directories: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Closure:
    """Every file the loader opens for some programs and modules."""

    interp: Path | None
    """The loader itself, from PT_INTERP."""

    libs: Mapping[str, Path]
    """Needed name -> path where the loader finds it first, links not resolved. The loader itself is among them."""

    others: tuple[Path, ...] = ()
    """Second files of a name in `libs`, found through another module's own path. Which of the two a process gets
    depends on what it loads first."""

    missing: Mapping[str, Path] = field(default_factory=dict)
    """Name that was not found -> a file that needs it. Importing that file fails; nothing else does."""


def read_shared_object(path: Path) -> SharedObject:
    """Read the dynamic section of one file.

    Raises:
        ValueError: not a 64-bit little-endian ELF file, or a broken one.
        OSError: it cannot be opened or read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a fifo must not block us
    with open(descriptor, "rb") as file:
        try:
            image = ELFFile(file)
            if image.elfclass != 64 or not image.little_endian:
                raise ValueError("not a 64-bit little-endian ELF file")
            return _shared_object(image)
        except OSError:
            raise
        except Exception as error:  # a parser may fail on strange bytes in any way
            raise ValueError(f"{path}: not an ELF file that can be loaded: {error}") from error


def _shared_object(image: ELFFile) -> SharedObject:
    found: dict[str, list[str]] = {"needed": [], "rpath": [], "runpath": []}
    interpreter = None
    for segment in image.iter_segments():
        if isinstance(segment, InterpSegment):
            interpreter = Path(segment.get_interp_name())
        elif isinstance(segment, DynamicSegment):
            for tag in segment.iter_tags():
                name = str(tag.entry.d_tag).removeprefix("DT_").lower()
                if name in found:
                    found[name].append(getattr(tag, name))
    runpath = _split(found["runpath"])
    return SharedObject(
        machine=str(image["e_machine"]),
        needed=tuple(found["needed"]),
        rpath=() if runpath else _split(found["rpath"]),
        runpath=runpath,
        interpreter=interpreter,
    )


def closure(paths: Iterable[Path], search: Search | None = None, also: Iterable[str] = OPENED_BY_NAME) -> Closure:
    """Find everything `paths`, an interpreter and its extension modules, need in order to load.

    Raises:
        ValueError: one of `paths` is not an ELF file this machine could load.
    """
    walk = _Walk(search)
    for path in paths:
        walk.add_root(path)
    for name in also:
        walk.need_if_present(name)
    return Closure(walk.interpreter, walk.libs, tuple(walk.others), walk.missing)


class _Walk:
    """A walk along the needs of files. Each file is read once."""

    def __init__(self, search: Search | None) -> None:
        self._given = search
        self.interpreter: Path | None = None
        self.libs: dict[str, Path] = {}
        self.others: list[Path] = []
        self.missing: dict[str, Path] = {}
        self._objects: dict[Path, SharedObject | None] = {}
        self._machine = ""
        self._search = search or Search({}, ())

    def add_root(self, path: Path) -> None:
        image = read_shared_object(path)
        if not self._machine:
            self._machine = image.machine
            self._search = self._given or system_search(image.machine)
        if image.machine != self._machine:
            raise ValueError(f"{path}: for machine {image.machine}, not {self._machine}")
        if self.interpreter is None and image.interpreter is not None:
            self.interpreter = image.interpreter
            self.libs[image.interpreter.name] = image.interpreter
        # The kernel tells a program its resolved path; a library's origin is the path it was opened by.
        origin = Path(os.path.realpath(path)) if image.interpreter else path
        self._follow(origin, image)

    def need_if_present(self, name: str) -> None:
        if name not in self.libs and (found := self._find(name, ())) is not None:
            self.libs[name] = found
            self._follow(found, self._object(found))

    def _follow(self, path: Path, image: SharedObject | None) -> None:
        todo: list[tuple[Path, SharedObject, tuple[Path, ...]]] = [(path, image, ())] if image else []
        while todo:
            path, image, inherited = todo.pop()
            rpath = inherited if image.runpath else (*_expand(image.rpath, path), *inherited)
            places = (*(() if image.runpath else rpath), *_expand(image.runpath, path))
            for name in image.needed:
                found = self._record(name, places, path)
                if found is not None and (found_object := self._object(found)) is not None:
                    todo.append((found, found_object, rpath))

    def _record(self, name: str, places: tuple[Path, ...], wanted_by: Path) -> Path | None:
        """Record which file `name` is for `wanted_by`. Return that file only when it is new."""
        if self.interpreter is not None and name == self.interpreter.name:
            return None
        found = self._find(name, places)
        if found is None:
            self.missing.setdefault(name, wanted_by)
            return None
        known = self.libs.setdefault(name, found)
        if known is found:
            return found
        if known == found or found in self.others:
            return None
        self.others.append(found)
        return found

    def _find(self, name: str, places: tuple[Path, ...]) -> Path | None:
        if "/" in name:
            candidates = [Path(name)] if name.startswith("/") else []
        else:
            cached = self._search.cache.get(name)
            candidates = [
                *(place / name for place in places),
                *([cached] if cached else ()),
                *(place / name for place in self._search.directories),
            ]
        return next((each for each in candidates if self._object(each) is not None), None)

    def _object(self, path: Path) -> SharedObject | None:
        """Read a candidate. None when it is absent or for another machine: the loader goes on then, too."""
        if path not in self._objects:
            try:
                image = read_shared_object(path)
            except (OSError, ValueError):
                image = None
            self._objects[path] = image if image and image.machine == self._machine else None
        return self._objects[path]


def _split(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(part for value in values for part in value.split(":"))


def _expand(entries: tuple[str, ...], path: Path) -> tuple[Path, ...]:
    """Fill in $ORIGIN. Entries relative to the working directory and those with other tokens are left out."""
    origin = str(path.parent)
    filled = (entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for entry in entries)
    return tuple(Path(os.path.normpath(each)) for each in filled if each.startswith("/") and "$" not in each)


def system_search(machine: str, root: Path = Path("/")) -> Search:
    """Read the loader's configuration below `root`: its cache, or the files from which the cache is made."""
    multiarch, flags = _MACHINES.get(machine, ("", 0))
    cache = _read_cache(root / "etc/ld.so.cache", flags)
    configured = () if cache else _conf_directories(root / "etc/ld.so.conf", root)
    usual = (f"lib/{multiarch}", f"usr/lib/{multiarch}", "lib64", "usr/lib64", "lib", "usr/lib")
    return Search(cache, (*configured, *(root / each for each in usual)))


def _read_cache(path: Path, flags: int) -> dict[str, Path]:
    """Parse ld.so.cache; empty when it is absent or unreadable. Entries for special CPUs are left out."""
    try:
        return parse_cache(path.read_bytes(), flags)
    except (OSError, ValueError, struct.error):
        return {}


def parse_cache(raw: bytes, flags: int) -> dict[str, Path]:
    """Return name -> path of the entries with exactly `flags`.

    Raises:
        ValueError: no cache of the format glibc 2.2 and later write, or one whose offsets lead nowhere.
    """
    start = raw.find(_CACHE_MAGIC)  # an old-format table may come first
    if start < 0:
        raise ValueError("not an ld.so.cache of the 1.1 format")
    table = raw[start:]
    _, count, _ = _CACHE_HEADER.unpack_from(table)
    end = _CACHE_HEADER_BYTES + count * _CACHE_ENTRY.size
    if end > len(table):
        raise ValueError(f"ld.so.cache: {count} entries do not fit {len(table)} bytes")
    found: dict[str, Path] = {}
    for kind, key, value, _, hwcap in _CACHE_ENTRY.iter_unpack(table[_CACHE_HEADER_BYTES:end]):
        if kind == flags and hwcap == 0:
            found.setdefault(_text_at(table, key), Path(_text_at(table, value)))
    return found


def _text_at(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    if end < 0:
        raise ValueError(f"ld.so.cache: no string at {offset}")
    return os.fsdecode(table[offset:end])


def _conf_directories(path: Path, root: Path, depth: int = 0) -> tuple[Path, ...]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return ()
    found: list[Path] = []
    for line in lines:
        words = line.partition("#")[0].split()
        if words[:1] == ["include"] and depth < _MAX_CONF_DEPTH:
            for pattern in words[1:]:
                base = root / pattern.lstrip("/") if pattern.startswith("/") else path.parent / pattern
                matches = sorted(base.parent.glob(base.name))
                found += [each for match in matches for each in _conf_directories(match, root, depth + 1)]
        elif words and words[0].startswith("/"):
            found.append(root / words[0].lstrip("/"))
    return tuple(found)
