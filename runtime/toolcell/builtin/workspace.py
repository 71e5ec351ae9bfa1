"""`Workspace`: a directory whose files tools may read and change, and that they cannot leave.

Every operation opens its path below the descriptor of the directory; no path is checked first and opened later. What
is opened must be a regular file or a directory: a device, a fifo or a socket is refused and never waited for.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from toolcell.builtin.beneath import LeavesDirectory, open_beneath
from toolcell.errors import ToolError, UsageError
from toolcell.support.checks import check_path
from toolcell.support.files import make_private_folder
from toolcell.support.text import for_terminal, one_line

# `Glob`: which relative paths a pattern such as `src/**/*.py` means. Its cost does not grow with clever patterns.


MAX_CHARS = 500
MAX_PARTS = 32
ANY_DEPTH = "**"


class Glob:
    """`*` and `?` match in one name, `[...]` one character, `**` any number of directories. Case counts."""

    def __init__(self, pattern: str) -> None:
        """Read a pattern.

        Raises:
            ToolError: it is empty, too long, absolute, or has a part `..`.
        """
        parts = pattern.split("/")
        shown = one_line(pattern, 100)
        if not pattern or len(pattern) > MAX_CHARS or len(parts) > MAX_PARTS:
            raise ToolError(f"a pattern has 1 to {MAX_CHARS} characters and at most {MAX_PARTS} parts: {shown!r}")
        if pattern.startswith("/") or ".." in parts:
            raise ToolError(f"a pattern is relative to the listed directory and has no '..': {shown!r}")
        self._parts: list[re.Pattern[str] | None] = []
        for part in parts:
            if part in ("", "."):
                continue
            try:
                one = None if part == ANY_DEPTH else re.compile(fnmatch.translate(re.sub(r"\*+", "*", part)))
            except re.error as exc:
                raise ToolError(f"a pattern that cannot be read: {shown!r}: {exc}") from exc
            if one is not None or not (self._parts and self._parts[-1] is None):
                self._parts.append(one)

    def matches(self, path: str) -> bool:
        return len(self._parts) in self._after(path.split("/"))

    def may_be_below(self, names: Sequence[str]) -> bool:
        """Return whether something below this directory can match."""
        return any(place < len(self._parts) for place in self._after(names))

    def _after(self, names: Sequence[str]) -> set[int]:
        """Return every place in the pattern at which one can be after these names: one step for each place and name."""
        places = self._open({0})
        for name in names:
            following = set()
            for place in places:
                if place == len(self._parts):
                    continue
                part = self._parts[place]
                if part is None:
                    following.add(place)
                elif part.match(name):
                    following.add(place + 1)
            places = self._open(following)
        return places

    def _open(self, places: set[int]) -> set[int]:
        """Add the places behind each `**`, which also matches nothing."""
        return places | {place + 1 for place in places if place < len(self._parts) and self._parts[place] is None}


# Files of a workspace that are replaced as a whole, and those that are refused because they have another name.


DRAFT = ".toolcell-draft-"
"""Begins the name of a file that is being written. Only a killed process leaves one; listings do not show it."""


def require_own_file(status: os.stat_result) -> None:
    """Check that this is a regular file with one name.

    A second name may be outside the workspace: whoever made it shows a file to tools that they were not given.

    Raises:
        OSError: it is something else.
    """
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, f"a hard link: the file has {status.st_nlink} names; copy it to give it one")


def replace_file(folder: int, name: str, content: bytes) -> None:
    """Write a draft beside the file, and rename it."""
    mode = 0o644
    with suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            raise OSError(errno.ELOOP, "a symbolic link; delete it first, or write the file it points to")
        require_own_file(status)
        mode = stat.S_IMODE(status.st_mode) & 0o777
    draft = f"{DRAFT}{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
        raise


MAX_FILE_BYTES = 8 * 1024 * 1024
MAX_ENTRIES = 2000
"""Entries that one listing shows."""
MAX_VISITED = 100_000
"""Entries that one listing with a pattern looks at."""
MAX_DEPTH = 64
MAX_PATH_BYTES = 4096
MAX_NAME_BYTES = 255
SHOWN_CHARS = 200

_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_LOOK = getattr(os, "O_PATH", os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


class Entry(NamedTuple):
    """One name in a directory."""

    path: str
    """Relative to the directory that was listed."""
    kind: str
    """file, directory, link or other. A link is not followed."""
    size: int


@dataclass(frozen=True, slots=True)
class Listing:
    """What a directory contains."""

    entries: tuple[Entry, ...]
    truncated: bool
    """There is more than one listing shows."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts about a file or directory."""

    name: str
    kind: str
    size: int
    modified_s: float


def parse_path(path: str, *, may_be_root: bool = False) -> tuple[str, ...]:
    """Return the names that a relative path consists of. No name: the workspace itself.

    Raises:
        ToolError: it is absolute, has a part `..`, or is not a possible path.
    """
    shown = one_line(path, SHOWN_CHARS)
    if not path.strip():
        if may_be_root:
            return ()
        raise ToolError("path is required")
    if path.startswith("/") or path[1:3] in (":\\", ":/"):
        raise ToolError(f"absolute paths not allowed: {shown}")
    parts = path.split("/")
    if ".." in parts or ".." in path.split("\\"):
        raise ToolError(f"path traversal not allowed: {shown}")
    if "\\" in path or for_terminal(path) != path or not set("\n\t").isdisjoint(path):
        raise ToolError(f"path has a backslash or a character that cannot be shown: {shown}")
    names = tuple(part for part in parts if part not in ("", "."))
    longest = max((len(name.encode()) for name in names), default=0)
    if longest > MAX_NAME_BYTES or len(path.encode()) > MAX_PATH_BYTES:
        raise ToolError(
            f"path is too long: {len(path.encode())} bytes of {MAX_PATH_BYTES}, the longest name has {longest} of "
            f"{MAX_NAME_BYTES}: {shown}"
        )
    if any(name.startswith(DRAFT) for name in names):
        raise ToolError(f"names that begin with {DRAFT} are reserved: {shown}")
    if not names and not may_be_root:
        raise ToolError(f"path is the workspace itself: {shown}")
    return names


class Workspace:
    """The directory `root`, made if it is missing. Holds no descriptor between operations; safe in several threads."""

    def __init__(self, root: str | os.PathLike[str], *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """`max_file_bytes`: of one file that is read or written.

        Raises:
            UsageError: `root` is not a path or an empty text, the directory cannot be made, or this system has no
                directory descriptors.
        """
        if os.open not in os.supports_dir_fd:
            raise UsageError("a workspace needs directory descriptors, which this system does not have; use Linux")
        if type(max_file_bytes) is not int or max_file_bytes < 1:
            raise UsageError(f"max_file_bytes must be a positive number of bytes, not {max_file_bytes!r:.80}")
        check_path("the workspace", root)
        self.root = Path(root).absolute()
        self.max_file_bytes = max_file_bytes
        self._above: Workspace | None = None
        try:
            make_private_folder(self.root)
        except OSError as exc:
            raise UsageError(f"the workspace {str(self.root)!r:.200} cannot be made: {exc.strerror}") from exc

    def subdirectory(self, name: str) -> Workspace:
        """Return the directory of this name in it as a workspace of its own. A link of that name is refused.

        Raises:
            ToolError: it cannot be made or is not a directory.
        """
        with self._root("open") as root, _reported("open", name):
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=root)
            os.close(open_beneath(root, (name,), _FOLDER | os.O_NOFOLLOW))
        made = copy(self)
        made.root, made._above = self.root / name, self
        return made

    def read(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            ToolError: `read error: ...`, or the path is not allowed.
        """
        parts = parse_path(path)
        with self._root("read") as root, _reported("read", path):
            return self._read(root, parts)

    def open(self, path: str) -> BinaryIO:
        """Open a file of any size for reading. The caller closes it.

        Raises:
            ToolError: `read error: ...`, or the path is not allowed.
        """
        parts = parse_path(path)
        with self._root("read") as root, _reported("read", path):
            return self._open(root, parts)

    @staticmethod
    def _open(root: int, parts: tuple[str, ...]) -> BinaryIO:
        # Looked at first: to open a device can have effects of its own.
        looked = open_beneath(root, parts, _LOOK)
        try:
            require_own_file(os.fstat(looked))
        finally:
            os.close(looked)
        file = open(open_beneath(root, parts, _READ), "rb")  # noqa: SIM115
        try:
            require_own_file(os.fstat(file.fileno()))
        except BaseException:
            file.close()
            raise
        return file

    def _read(self, root: int, parts: tuple[str, ...]) -> bytes:
        with self._open(root, parts) as file:
            self._check_size(os.fstat(file.fileno()).st_size)
            data = file.read(self.max_file_bytes + 1)  # it may have grown
            self._check_size(len(data))
            return data

    def write(self, path: str, content: bytes) -> None:
        """Write a file that appears whole or not at all, and the directories above it.

        Raises:
            ToolError: `write error: ...` or `mkdir error: ...`, or the path is not allowed.
        """
        parts = parse_path(path)
        if path.endswith("/"):
            raise ToolError(f"write error: {one_line(path, SHOWN_CHARS)}: is a directory")
        with self._root("write") as root:
            with _reported("mkdir", path):
                folder = self._make_folders(root, parts[:-1])
            try:
                with _reported("write", path):
                    self._check_size(len(content))
                    replace_file(folder, parts[-1], content)
            finally:
                os.close(folder)

    def make_directory(self, path: str) -> None:
        """Make a directory and those above it. One that exists is not an error.

        Raises:
            ToolError: `mkdir error: ...`, or the path is not allowed.
        """
        parts = parse_path(path)
        with self._root("mkdir") as root, _reported("mkdir", path):
            os.close(self._make_folders(root, parts))

    @staticmethod
    def _make_folders(root: int, parts: tuple[str, ...]) -> int:
        """Return a descriptor of the last of these directories."""
        folder = os.dup(root)
        for count in range(1, len(parts) + 1):
            above = folder
            try:
                try:
                    folder = open_beneath(root, parts[:count], _FOLDER)
                except FileNotFoundError:
                    with suppress(FileExistsError):
                        os.mkdir(parts[count - 1], 0o755, dir_fd=above)
                    folder = open_beneath(root, parts[:count], _FOLDER)
            finally:
                os.close(above)
        return folder

    def delete(self, path: str) -> None:
        """Remove a file, a link, or an empty directory.

        Raises:
            ToolError: `delete error: ...`, or the path is not allowed.
        """
        parts = parse_path(path)
        with self._root("delete") as root, _reported("delete", path):
            folder = open_beneath(root, parts[:-1], _FOLDER)
            try:
                if stat.S_ISDIR(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode):
                    os.rmdir(parts[-1], dir_fd=folder)
                else:
                    os.unlink(parts[-1], dir_fd=folder)
            finally:
                os.close(folder)

    def facts(self, path: str) -> FileFacts:
        """Return facts about a file or directory; a link inside the workspace is followed.

        Raises:
            ToolError: `stat error: ...`, or the path is not allowed.
        """
        parts = parse_path(path, may_be_root=True)
        with self._root("stat") as root, _reported("stat", path):
            descriptor = open_beneath(root, parts, _LOOK)
            try:
                status = os.fstat(descriptor)
            finally:
                os.close(descriptor)
            kind = _kind(status.st_mode)
            if kind not in ("file", "directory"):
                raise OSError(errno.EINVAL, "not a file or directory")
            return FileFacts(parts[-1] if parts else ".", kind, status.st_size, status.st_mtime)

    def list(self, path: str = "", pattern: str | None = None) -> Listing:
        """Return what a directory contains, by name; with a pattern, what matches in it and below it.

        Raises:
            ToolError: `list error: ...`, or the path or pattern is not allowed.
        """
        parts = parse_path(path, may_be_root=True)
        glob = Glob(pattern) if pattern is not None else None
        found: list[Entry] = []
        with self._root("list") as root, _reported("list", path or "."):
            for count, entry in enumerate(self._entries(root, parts, glob)):
                if count >= MAX_VISITED or len(found) >= MAX_ENTRIES:
                    return Listing(tuple(found), truncated=True)
                if glob is None or glob.matches(entry.path):
                    found.append(entry)
        return Listing(tuple(found), truncated=False)

    def walk(self) -> Iterator[Entry]:
        """Return every entry of the workspace; directories come before what is in them.

        Raises:
            ToolError: `list error: ...`.
        """
        with self._root("list") as root, _reported("list", "."):
            yield from self._entries(root, (), Glob("**"))

    @staticmethod
    def _entries(root: int, top: tuple[str, ...], glob: Glob | None) -> Iterator[Entry]:
        """Yield what is in `top`, and with a glob also below it, as far as the glob may match."""
        waiting: list[tuple[str, ...]] = [()]
        while waiting:
            below = waiting.pop()
            try:
                # Only the directory that was asked for may be a link: no loops below it.
                folder = open_beneath(root, (*top, *below), _FOLDER | (os.O_NOFOLLOW if below else 0))
            except OSError:
                if not below:
                    raise
                continue  # it is gone, or closed to us
            folders = []
            for entry in _scan(folder):
                path = (*below, entry.path)
                yield entry._replace(path="/".join(path))
                if glob is not None and entry.kind == "directory" and len(path) < MAX_DEPTH and glob.may_be_below(path):
                    folders.append(path)
            waiting += reversed(folders)

    def _check_size(self, size: int) -> None:
        if size > self.max_file_bytes:
            raise OSError(errno.EFBIG, f"{size} bytes, and {self.max_file_bytes} is the limit")

    @contextmanager
    def _root(self, verb: str) -> Iterator[int]:
        try:
            descriptor = self._open_root()
        except OSError as exc:
            said = (exc.strerror or "").removeprefix("openat2: ")
            raise ToolError(f"{verb} error: the workspace cannot be opened: {said}") from exc
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_root(self) -> int:
        if self._above is None:
            return os.open(self.root, _FOLDER | os.O_CLOEXEC)
        above = self._above._open_root()
        try:
            # Whoever may write in the workspace above may have replaced this one by a link since it was made.
            return open_beneath(above, (self.root.name,), _FOLDER | os.O_NOFOLLOW)
        finally:
            os.close(above)


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "other")


def _scan(folder: int) -> list[Entry]:
    """Return the entries of a directory by name, without drafts. Closes the descriptor."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, MAX_VISITED + 1):  # one more: a listing says that it is cut
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(Entry(entry.name, _kind(status.st_mode), status.st_size))
    finally:
        os.close(folder)
    return sorted(each for each in found if not each.path.startswith(DRAFT))


@contextmanager
def _reported(verb: str, path: str) -> Iterator[None]:
    """Make an error of the system one of the tool. It names the path as it was given, never one of the host."""
    shown = one_line(path, SHOWN_CHARS)
    try:
        yield
    except LeavesDirectory as exc:
        raise ToolError(f"path escapes workspace: {shown}") from exc
    except OSError as exc:
        said = exc.strerror or os.strerror(exc.errno or 0)
        raise ToolError(f"{verb} error: {shown}: {said.removeprefix('openat2: ')}") from exc
