"""`NotebookFolder`: which files of the host a notebook finds in its workspace, and which it may write back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Final

from toolcell.config import Limits
from toolcell.results import OutputFile
from toolcell.support import clean, write_file

NAMED: Final = 10
"""Files that a message names."""


@dataclass(frozen=True, slots=True)
class FolderCopy:
    """What is copied into a workspace."""

    files: dict[str, Path]
    left_out: tuple[str, ...]
    """Files for which there is no room."""

    @property
    def problem(self) -> str:
        """What is missing, in words; empty when nothing is."""
        if not self.left_out:
            return ""
        more = f" and {len(self.left_out) - NAMED} more" if len(self.left_out) > NAMED else ""
        names = ", ".join(map(clean, self.left_out[:NAMED]))
        return f"no room in the workspace for {names}{more}: install the kernel with more --disk-bytes or --inodes"


@dataclass
class NotebookFolder:
    """The folder of a notebook, and others that it reads."""

    path: Path
    others: tuple[Path, ...] = ()
    """Copied under their last names, and never written to."""
    is_saved: bool = False
    """What cells write is copied back."""
    _own: dict[str, bytes] = field(default_factory=dict)
    """Digests of the files that were written back, by name: these are replaced, unless somebody has changed them."""

    def copied(self, limits: Limits) -> FolderCopy:
        """Choose what is copied: half of the room for files is left to the cells.

        Not copied: links, what is not a regular file, hidden files, and a folder that holds the user's home.
        """
        room, count = limits.disk_bytes // 2, limits.inodes // 2
        files: dict[str, Path] = {}
        left_out = []
        for name, path, size in self._found():
            if size > room or count <= 0:
                left_out.append(name)
                continue
            room, count = room - size, count - 1
            files[name] = path
        return FolderCopy(files, tuple(left_out))

    def _found(self) -> Iterator[tuple[str, Path, int]]:
        home = Path.home().resolve()
        if not home.is_relative_to(self.path.resolve()):
            yield from _regular_files(self.path, "")
        for other in self.others:
            yield from _regular_files(other, f"{other.resolve().name}/")

    def save(self, files: Iterable[OutputFile]) -> list[str]:
        """Write files back; return what was not written, in words. A guest has chosen the names."""
        problems = []
        for file in files:
            problem = file.problem or self._save(file.name, file.data or b"")
            if problem:
                problems.append(f"{clean(file.name[:200])} was not saved: {problem}")
        return problems

    def _save(self, name: str, data: bytes) -> str:
        parts = PurePosixPath(name).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if not parts or is_hidden or name.startswith("/") or "\\" in name or "\0" in name:
            return "its name is hidden, or leaves the folder"
        for other in self.others:
            if parts[0] == other.resolve().name:
                return "" if _has(other.joinpath(*parts[1:]), data) else f"{parts[0]} is read only"
        place = self.path
        try:
            for part in parts[:-1]:
                place /= part
                if place.is_symlink():
                    return f"{part} is a link"
                place.mkdir(exist_ok=True)
            target = place / parts[-1]
            if _has(target, data):
                return ""
            write_file(target, data, mode=0o644, replace=self._is_own(name, target))
        except FileExistsError:
            return "a file of this name is there, and this kernel has not written it, or somebody has changed it since"
        except OSError as exc:
            return exc.strerror or str(exc)
        self._own[name] = sha256(data).digest()
        return ""

    def _is_own(self, name: str, target: Path) -> bool:
        """Whether a file is as this kernel has written it."""
        if name not in self._own or target.is_symlink() or not target.is_file():
            return False
        return sha256(target.read_bytes()).digest() == self._own[name]


def _has(path: Path, data: bytes) -> bool:
    """Whether a file holds just these bytes. Links are not followed."""
    is_alike = path.is_file() and not path.is_symlink() and path.stat().st_size == len(data)
    return is_alike and path.read_bytes() == data


def _regular_files(folder: Path, prefix: str) -> Iterator[tuple[str, Path, int]]:
    """Walk a folder in the order of names. What cannot be read is not there."""
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each != "__pycache__")
        for name in sorted(names):
            path = Path(at, name)
            if name.startswith(".") or path.is_symlink() or not path.is_file() or not os.access(path, os.R_OK):
                continue
            yield prefix + path.relative_to(folder).as_posix(), path, path.stat().st_size
