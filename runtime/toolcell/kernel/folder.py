"""`NotebookFolder`: which files of the host a notebook finds in its workspace, and which it may write back."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Final

from toolcell.builtin.beneath import open_beneath
from toolcell.config import Limits
from toolcell.results import OutputFile
from toolcell.support.files import read_regular_file, write_file
from toolcell.support.text import clean

NAMED: Final = 10
"""Files that a message names."""

LEFT_OUT: Final = frozenset({"__pycache__", "node_modules"})
"""Folders of these names are not copied."""
MARKS: Final = frozenset({"pyvenv.cfg", "conda-meta", "CACHEDIR.TAG"})
"""Nor are those that hold one of these: environments and caches, which other programs make again."""

MARK: Final = "user.toolcell.saved"
"""Extended attribute of a file that a kernel has written: what it wrote. It is for the next kernel in this folder."""


@dataclass(frozen=True, slots=True)
class FolderCopy:
    """What is copied into a workspace."""

    files: dict[str, bytes]
    left_out: tuple[str, ...] = ()
    """Files for which there is no room."""
    unfit: tuple[str, ...] = ()
    """Files that cannot have their names in a workspace."""

    @property
    def problems(self) -> list[str]:
        """What is missing, in words."""
        found = []
        if self.left_out:
            cure = "install the kernel with more --disk-bytes or --inodes"
            found.append(f"no room in the workspace for {_some(self.left_out)}: {cure}")
        if self.unfit:
            found.append(
                f"names with \\ or bytes that are not UTF-8 are not possible in the workspace: {_some(self.unfit)}"
            )
        return found


@dataclass(frozen=True, slots=True)
class SavedFile:
    """What a kernel has written."""

    size: int
    digest: str

    @classmethod
    def of(cls, data: bytes) -> SavedFile:
        return cls(len(data), sha256(data).hexdigest())

    @classmethod
    def marked(cls, path: Path) -> SavedFile | None:
        """Return what the file says of itself; None where no kernel has written it, or file systems keep no marks."""
        if sys.platform == "linux":
            with suppress(OSError, ValueError):
                size, digest = os.getxattr(path, MARK, follow_symlinks=False).decode().split()
                return cls(int(size), digest)
        return None

    def mark(self, path: Path) -> None:
        """Keep this with the file, where its file system can."""
        if sys.platform == "linux":
            with suppress(OSError):
                os.setxattr(path, MARK, f"{self.size} {self.digest}".encode(), follow_symlinks=False)


@dataclass
class NotebookFolder:
    """The folder of a notebook, and others that it reads."""

    path: Path
    others: tuple[Path, ...] = ()
    """Copied under their last names, and never written to."""
    is_saved: bool = False
    """What cells write is copied back."""
    _own: dict[str, SavedFile] = field(default_factory=dict)
    """Files that this kernel has written back, by name."""

    def copied(self, limits: Limits) -> FolderCopy:
        """Read what is copied: half of the room for files is left to the cells.

        Not copied: links, what is not a regular file, hidden files, environments, caches, and a folder that holds the
        user's home. A file that changes meanwhile is copied as it is read; one that vanishes or becomes something else
        is left out.
        """
        room, count = limits.disk_bytes // 2, limits.inodes // 2
        files: dict[str, bytes] = {}
        left_out, unfit = [], []
        for name, descriptor in self._found():
            with open(descriptor, "rb") as file, suppress(OSError):
                if "\\" in name or name.encode(errors="replace") != os.fsencode(name):
                    unfit.append(name)
                elif count > 0 and os.fstat(descriptor).st_size <= room and len(data := file.read(room + 1)) <= room:
                    room, count = room - len(data), count - 1
                    files[name] = data
                else:
                    left_out.append(name)
        return FolderCopy(files, tuple(left_out), tuple(unfit))

    def _found(self) -> Iterator[tuple[str, int]]:
        names = {other.resolve().name: other for other in self.others}
        if not Path.home().resolve().is_relative_to(self.path.resolve()):
            for name, descriptor in _regular_files(self.path):
                if name.partition("/")[0] in names:
                    os.close(descriptor)
                else:
                    yield name, descriptor
        for first, other in names.items():
            for name, descriptor in _regular_files(other):
                yield f"{first}/{name}", descriptor

    def save(self, files: Iterable[OutputFile], limits: Limits) -> list[str]:
        """Write files back; return what was not written, in words. A guest has chosen the names."""
        problems = []
        for file in files:
            problem = file.problem or self._save(file.name, file.data or b"", limits)
            if problem:
                problems.append(f"{clean(file.name[:200])} was not saved: {problem}")
        if len(problems) > NAMED:
            problems[NAMED:] = [f"{len(problems) - NAMED} more files were not saved"]
        return problems

    def _save(self, name: str, data: bytes, limits: Limits) -> str:
        parts = PurePosixPath(name).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if not parts or is_hidden or name.startswith("/") or "\\" in name or "\0" in name:
            return "its name is hidden, or leaves the folder"
        for other in self.others:
            if parts[0] == other.resolve().name:
                return "" if _has(other.joinpath(*parts[1:]), data) else f"{parts[0]} is read only"
        if problem := self._lack_of_room(name, len(data), limits):
            return problem
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
            write_file(target, data, mode=0o644, may_replace=partial(self._is_own, name, target))
        except FileExistsError:
            return "a file of this name is there, and no kernel has written it, or somebody has changed it since"
        except OSError as exc:
            return exc.strerror or str(exc)
        self._own[name] = SavedFile.of(data)
        self._own[name].mark(target)
        return ""

    def _lack_of_room(self, name: str, size: int, limits: Limits) -> str:
        """Say that the files of this kernel are too many or too large: cells may write new ones without end."""
        others = [file.size for own, file in self._own.items() if own != name]
        if len(others) >= limits.inodes or sum(others) + size > limits.disk_bytes:
            return (
                f"this kernel has saved {len(others)} files of {sum(others)} bytes, and may save {limits.inodes} of "
                f"{limits.disk_bytes}: install it with more --inodes or --disk-bytes"
            )
        return ""

    def _is_own(self, name: str, target: Path) -> bool:
        """Whether a file is as this kernel, or one before it, has written it."""
        own = SavedFile.marked(target) or self._own.get(name)
        return own is not None and SavedFile.of(_content(target, own.size)) == own


def _has(path: Path, data: bytes) -> bool:
    """Whether a file holds just these bytes. Links are not followed."""
    return _content(path, len(data)) == data and path.is_file()


def _content(path: Path, size: int) -> bytes:
    """Return the first bytes of a regular file, one more than `size`; nothing when there is none."""
    try:
        return read_regular_file(path, size + 1)
    except OSError:
        return b""


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(clean, names[:NAMED])) + more


def _regular_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Open the files of a folder, by name: those of each folder first. What cannot be read is not there.

    Without recursion: a thousand folders may nest. From the root, so that a folder that becomes a link leads nowhere.
    """
    try:
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        waiting: list[tuple[str, ...]] = [()]
        while waiting:
            at = waiting.pop()
            folders = []
            entries = _entries(root, at)
            if at and not MARKS.isdisjoint(name for name, _ in entries):
                continue
            for name, is_folder in entries:
                if is_folder:
                    folders.append((*at, name))
                    continue
                with suppress(OSError):
                    descriptor = open_beneath(root, (*at, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                    if stat.S_ISREG(os.fstat(descriptor).st_mode):
                        yield "/".join((*at, name)), descriptor
                    else:
                        os.close(descriptor)
            waiting += reversed(folders)
    finally:
        os.close(root)


def _entries(root: int, at: tuple[str, ...]) -> list[tuple[str, bool]]:
    """Return the names in a folder that are not hidden, and whether each is a folder."""
    try:
        descriptor = open_beneath(root, at, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return []
    try:
        with os.scandir(descriptor) as entries:
            found = [
                (each.name, each.is_dir(follow_symlinks=False)) for each in entries if not each.name.startswith(".")
            ]
    finally:
        os.close(descriptor)
    return sorted((name, is_folder) for name, is_folder in found if not (is_folder and name in LEFT_OUT))
