"""Find the shared objects that a program and its modules need: the system's own loader resolves them.

The loader lists what it would map, and executes nothing of that. It gets only files that this machine runs anyway. Of
what a package brings, the names of the libraries that it needs are read, and nothing is mapped.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from toolcell.errors import SandboxUnavailable

_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3
_NEEDED, _STRINGS = 1, 5
"""Types of segments, and tags of the dynamic section. Source: elf(5)."""

_FOUND = re.compile(r"^\t([^\s/]+) => (/.*) \(0x[0-9a-f]+\)$", re.MULTILINE)

_NAME = re.compile(r"[\w.+@-]+")
"""What can be preloaded by its name: no path, nothing that the loader replaces, no space or colon between two."""

_MAX_NAME, _MAX_TAGS = 4096, 4096
"""Bounds of what is read of a file that a package brings. Real files have names of 50 bytes and 40 tags."""

_AT_ONCE = 200
"""Modules in one question to the loader: Linux takes 128 KiB for one variable."""


def loader_of(program: Path) -> Path | None:
    """Return what the kernel starts in place of a program; None for a static one, and for a script."""
    try:
        with program.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            return next(Path(_text(image, at)) for kind, at, *_ in _segments(image) if kind == _INTERPRETER)
    except (OverflowError, ValueError, struct.error, StopIteration):
        return None


def needed_by(modules: Iterable[Path]) -> set[str]:
    """Return the names of the libraries that modules say they need. A file that cannot be loaded needs none."""
    return set(chain.from_iterable(map(_needed, modules)))


def _needed(module: Path) -> list[str]:
    try:
        with module.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            segments = list(_segments(image))
            at, size = next((offset, size) for kind, offset, _, size in segments if kind == _DYNAMIC)
            tags = list(struct.iter_unpack("<qQ", image[at : at + min(size // 16, _MAX_TAGS) * 16]))
            table = next(value for tag, value in tags if tag == _STRINGS)
            moved = next(at - to for kind, at, to, long in segments if kind == _LOAD and to <= table < to + long)
            return [_text(image, table + moved + value) for tag, value in tags if tag == _NEEDED]
    except (OSError, OverflowError, ValueError, struct.error, StopIteration):
        return []


def _segments(image: mmap.mmap) -> Iterator[tuple[int, int, int, int]]:
    """Yield type, place in the file, address and size of each segment of a 64-bit little-endian file."""
    if image[:6] == b"\x7fELF\x02\x01":
        (table,), (count,) = struct.unpack_from("<Q", image, 32), struct.unpack_from("<H", image, 56)
        for kind, _, at, address, _, size, _, _ in struct.iter_unpack("<IIQQQQQQ", image[table : table + 56 * count]):
            yield kind, at, address, size


def _text(image: mmap.mmap, at: int) -> str:
    return os.fsdecode(image[at : image.find(b"\0", at, at + _MAX_NAME)])


def libraries_of(program: Path, modules: Sequence[Path] = (), names: Iterable[str] = ()) -> dict[str, Path]:
    """Return name and path of everything the loader maps for a program, the loader itself first.

    `modules`: files of one folder that the program loads. `names`: libraries to add where they can be found.

    Raises:
        SandboxUnavailable: the loader cannot be run.
        OSError: the program cannot be read.
    """
    loader = loader_of(program)
    if loader is None:
        return {}
    # Relative to their folder, which may have a space in its name.
    preloaded = [f"./{path.name}" for path in modules] + sorted(filter(_NAME.fullmatch, names))
    found = {loader.name: loader}
    for start in range(0, len(preloaded) or 1, _AT_ONCE):
        try:
            done = subprocess.run(
                [loader, "--list", program],
                cwd=modules[0].parent if modules else None,
                env={"LC_ALL": "C", "LD_PRELOAD": " ".join(preloaded[start : start + _AT_ONCE])},
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as exc:
            raise SandboxUnavailable(f"the shared libraries of {program} cannot be found: {exc}") from exc
        for name, path in _FOUND.findall(done.stdout):
            found.setdefault(name, Path(path))
    return found
