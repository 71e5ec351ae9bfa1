"""Which shared objects a program and its extension modules need, found the way glibc's loader finds them.

Reads only the dynamic section, never runs anything (ldd does), and trusts no offset a file states. What libraries
open at run time by name is not written in any file: the few that matter are in `OPENED_BY_NAME`.

Source: elf(5), ld.so(8); cache layout from glibc's sysdeps/generic/dl-cache.h.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OPENED_BY_NAME = ("libgcc_s.so.1",)
"""pthread_exit and pthread_cancel load it and abort the process when they cannot."""

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_IDENT = b"\x7fELF\x02\x01"  # 64-bit, little-endian

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29

_FIRST_READ_BYTES = 4096
_MAX_SEGMENTS = 256
_MAX_DYNAMIC_BYTES = 256 * 1024
_MAX_STRING_BYTES = 4096
_MAX_CONF_DEPTH = 8

# e_machine -> (multiarch directory, ld.so.cache flags of a 64-bit libc6 library)
_MACHINES = {62: ("x86_64-linux-gnu", 0x0303), 183: ("aarch64-linux-gnu", 0x0A03)}

_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER = struct.Struct("<20sII")
_CACHE_HEADER_BYTES = 48
_CACHE_ENTRY = struct.Struct("<iIIIQ")


@dataclass(frozen=True, slots=True)
class SharedObject:
    """What one ELF file says about its loading."""

    machine: int
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    """Searched for this file's needs and its dependencies'; empty when there is a runpath."""

    runpath: tuple[str, ...]
    interpreter: Path | None
    soname: str | None


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
    """Name asked for -> path where the loader finds it first, links not resolved. The loader itself is among them."""

    others: tuple[Path, ...] = ()
    """Second files of a name in `libs`, found through another module's own path. Which of the two a process gets
    depends on what it loads first."""

    missing: Mapping[str, Path] = field(default_factory=dict)
    """Name asked for and not found -> a file that asks. Importing that file fails; nothing else does."""


def read_image(path: Path) -> SharedObject:
    """Read the dynamic section of one file.

    Raises:
        ValueError: not a 64-bit little-endian ELF file, or one whose offsets lead nowhere.
        OSError: it cannot be opened or read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a fifo must not hang us
    try:
        return _read_image(descriptor, path)
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"{path}: broken ELF file: {error}") from error
    finally:
        os.close(descriptor)


def closure(paths: Iterable[Path], search: Search | None = None, also: Iterable[str] = OPENED_BY_NAME) -> Closure:
    """Find everything `paths`, an interpreter and its extension modules, need in order to load.

    Raises:
        ValueError: one of `paths` is no ELF file this machine could load.
    """
    walk = _Walk(search)
    for path in paths:
        walk.add_root(path)
    for name in also:
        walk.need_if_there(name)
    return Closure(walk.interpreter, walk.libs, tuple(walk.others), walk.missing)


class _Walk:
    """A walk from file to file it needs, each read once."""

    def __init__(self, search: Search | None) -> None:
        self._given = search
        self.interpreter: Path | None = None
        self.libs: dict[str, Path] = {}
        self.others: list[Path] = []
        self.missing: dict[str, Path] = {}
        self._images: dict[Path, SharedObject | None] = {}
        self._machine = 0
        self._search = search or Search({}, ())

    def add_root(self, path: Path) -> None:
        image = read_image(path)
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

    def need_if_there(self, name: str) -> None:
        if name not in self.libs and (found := self._find(name, ())) is not None:
            self.libs[name] = found
            self._follow(found, self._image(found))

    def _follow(self, path: Path, image: SharedObject | None) -> None:
        todo: list[tuple[Path, SharedObject, tuple[Path, ...]]] = [(path, image, ())] if image else []
        while todo:
            path, image, inherited = todo.pop()
            rpath = inherited if image.runpath else (*_expand(image.rpath, path), *inherited)
            places = (*(() if image.runpath else rpath), *_expand(image.runpath, path))
            for name in image.needed:
                found = self._take(name, places, path)
                if found is not None and (found_image := self._image(found)) is not None:
                    todo.append((found, found_image, rpath))

    def _take(self, name: str, places: tuple[Path, ...], wanted_by: Path) -> Path | None:
        """Record what `name` means to `wanted_by`; returns a file only when it is new."""
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
        return next((each for each in candidates if self._image(each) is not None), None)

    def _image(self, path: Path) -> SharedObject | None:
        """Read a candidate; None, as the loader goes on, when it is absent or for another machine."""
        if path not in self._images:
            try:
                image = read_image(path)
            except (OSError, ValueError):
                image = None
            self._images[path] = image if image and image.machine == self._machine else None
        return self._images[path]


def _read_image(descriptor: int, path: Path) -> SharedObject:
    head = os.pread(descriptor, _FIRST_READ_BYTES, 0)
    if not head.startswith(_IDENT):
        raise ValueError(f"{path}: not a 64-bit little-endian ELF file")
    _, _, machine, _, _, table_at, _, _, _, entry_bytes, count, _, _, _ = _HEADER.unpack_from(head)
    if entry_bytes != _PROGRAM.size or count > _MAX_SEGMENTS:
        raise ValueError(f"{path}: {count} program headers of {entry_bytes} bytes")
    end = table_at + entry_bytes * count
    table = head[table_at:end] if end <= len(head) else os.pread(descriptor, entry_bytes * count, table_at)
    segments = [_PROGRAM.unpack_from(table, entry_bytes * i) for i in range(count)]
    loads = [(vaddr, offset, size) for kind, _, offset, vaddr, _, size, _, _ in segments if kind == _PT_LOAD]
    interpreter = next((_string(descriptor, s[2], path) for s in segments if s[0] == _PT_INTERP), None)
    dynamic = next(((s[2], s[5]) for s in segments if s[0] == _PT_DYNAMIC), None)
    entries = _dynamic_entries(descriptor, *dynamic, path) if dynamic else []
    strings_at = next((_file_offset(value, loads, path) for tag, value in entries if tag == _DT_STRTAB), 0)

    def strings(wanted: int) -> tuple[str, ...]:
        return tuple(_string(descriptor, strings_at + value, path) for tag, value in entries if tag == wanted)

    runpath = _split(strings(_DT_RUNPATH))
    return SharedObject(
        machine=machine,
        needed=strings(_DT_NEEDED),
        rpath=() if runpath else _split(strings(_DT_RPATH)),
        runpath=runpath,
        interpreter=Path(interpreter) if interpreter else None,
        soname=next(iter(strings(_DT_SONAME)), None),
    )


def _dynamic_entries(descriptor: int, offset: int, size: int, path: Path) -> list[tuple[int, int]]:
    if size > _MAX_DYNAMIC_BYTES:
        raise ValueError(f"{path}: dynamic section of {size} bytes")
    raw = os.pread(descriptor, size, offset)
    whole = len(raw) - len(raw) % _DYNAMIC.size
    entries = []
    for tag, value in _DYNAMIC.iter_unpack(raw[:whole]):
        if tag == 0:
            break
        entries.append((tag, value))
    return entries


def _file_offset(address: int, loads: list[tuple[int, int, int]], path: Path) -> int:
    for vaddr, offset, size in loads:
        if vaddr <= address < vaddr + size:
            return address - vaddr + offset
    raise ValueError(f"{path}: address {address:#x} is in no segment")


def _string(descriptor: int, offset: int, path: Path) -> str:
    raw, terminator, _ = os.pread(descriptor, _MAX_STRING_BYTES, offset).partition(b"\0")
    if not terminator:
        raise ValueError(f"{path}: unterminated string at {offset:#x}")
    return os.fsdecode(raw)


def _split(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for value in values for part in value.split(":"))


def _expand(entries: tuple[str, ...], path: Path) -> tuple[Path, ...]:
    """Fill in $ORIGIN. Relative entries mean the working directory, and other tokens this CPU: neither is used."""
    origin = str(path.parent)
    filled = (entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for entry in entries)
    return tuple(Path(os.path.normpath(each)) for each in filled if each.startswith("/") and "$" not in each)


def system_search(machine: int, root: Path = Path("/")) -> Search:
    """Read the loader's configuration below `root`: its cache, or what the cache would be made from."""
    multiarch, flags = _MACHINES.get(machine, ("", 0))
    cache = _read_cache(root / "etc/ld.so.cache", flags)
    configured = () if cache else _conf_directories(root / "etc/ld.so.conf", root)
    usual = (f"lib/{multiarch}", f"usr/lib/{multiarch}", "lib64", "usr/lib64", "lib", "usr/lib")
    return Search(cache, (*configured, *(root / each for each in usual)))


def _read_cache(path: Path, flags: int) -> dict[str, Path]:
    """Parse ld.so.cache; empty when absent or strange. Entries for special CPUs are left out: the plain one serves."""
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
