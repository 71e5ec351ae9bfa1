"""Load the files that a run is given, from paths and from content, and check their names."""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Iterable, Mapping

from toolcell.config import Limits
from toolcell.errors import UsageError
from toolcell.sandbox.backend import GuestFile

FileContent = str | bytes | bytearray | memoryview | os.PathLike[str]
"""Text, bytes, or the path of a file on the host. A path that is a `str` would be text: write `Path(...)`."""

FileInput = str | os.PathLike[str] | tuple[str, FileContent] | GuestFile

MAX_PART_BYTES = 255
"""Most bytes of one part of a name. Source: NAME_MAX of Linux."""


def guest_files(
    given: Iterable[FileInput] | Mapping[str, FileContent], limits: Limits | None = None
) -> tuple[GuestFile, ...]:
    """Load the input files: a list of paths and (name, content), or a mapping from names to content.

    `limits`: of the run, where they are known: files beyond them are not read.

    Raises:
        UsageError: a file is not a regular file or cannot be read, its content is not text or bytes, its name leaves
            the workspace, two files have one name, or there is no room for them.
    """
    if given == ():
        return ()
    one: object = given
    if isinstance(one, str | bytes | os.PathLike) or not hasattr(given, "__iter__"):
        path = os.fsdecode(one) if isinstance(one, bytes) else one
        cure = f"; write files=[{path!r:.80}]" if isinstance(path, str | os.PathLike) else ""
        raise UsageError(f'files= takes a list of paths and ("name", content), not {type(given).__name__}{cure}')
    loader = _Loader(limits)
    files = tuple(map(loader.load, given.items() if isinstance(given, Mapping) else given))
    _check_names(files)
    return files


def _check_names(files: Iterable[GuestFile]) -> None:
    seen: set[str] = set()
    for file in files:
        _check_name(file.name)
        name = posixpath.normpath(file.name)
        if name in seen:
            raise UsageError(f'two input files are called {name!r}; name one of them as in files=[("other", content)]')
        seen.add(name)
    for name in seen:
        folder = posixpath.dirname(name)
        while folder:
            if folder in seen:
                raise UsageError(f"an input file cannot be called {folder!r}: {name!r} needs a folder of that name")
            folder = posixpath.dirname(folder)


def _check_name(name: str) -> None:
    parts = name.split("/")
    if not parts[-1] or posixpath.normpath(name) == "." or ".." in parts or name[0] == "/" or set(name) & {"\0", "\\"}:
        raise UsageError(f"input file name {name!r:.80} must be a relative path inside the workspace")
    try:
        longest = max(len(part.encode()) for part in parts)
    except UnicodeEncodeError as exc:
        raise UsageError(f"input file name {name!r:.80} is not valid Unicode") from exc
    if longest > MAX_PART_BYTES:
        raise UsageError(f"input file name {name!r:.80} has {longest} bytes, and {MAX_PART_BYTES} are possible")


class _Loader:
    """Loads files one after the other, as long as there is room for them."""

    def __init__(self, limits: Limits | None) -> None:
        self._limits = limits
        self._bytes = 0

    def load(self, given: object) -> GuestFile:
        """Make a workspace file from a path on the host, or from (name, content)."""
        match given:
            case GuestFile():
                file = given
            case (str() as name, content) if isinstance(given, tuple):
                file = GuestFile(name, self._content(name, content))
            case str() | os.PathLike():
                file = GuestFile(os.path.basename(os.fspath(given)), self._read(given))
            case _:
                raise UsageError(_not_a_file(given))
        self._bytes += len(file.data)
        return file

    def _check_room(self, name: str, size: int) -> None:
        most = None if self._limits is None else self._limits.disk_bytes
        if most is not None and self._bytes + size > most:
            before = f", beside {self._bytes} of those before it" if self._bytes else ""
            raise UsageError(
                f"there is no room for the input file {name!r:.80}: it has {size} bytes{before}, and a sandbox has "
                f"{most} for all its files (disk_bytes)"
            )

    def _content(self, name: str, content: object) -> bytes:
        match content:
            case bytes() | bytearray() | memoryview():
                return bytes(content)
            case str():
                try:
                    return content.encode()
                except UnicodeEncodeError as exc:
                    problem = f"the text of the input file {name!r:.80} is not valid Unicode: {exc.reason}"
                    raise UsageError(problem) from exc
            case os.PathLike():
                return self._read(content)
        cure = "; write file.read()" if hasattr(content, "read") else ""
        raise UsageError(
            f"the content of the input file {name!r:.80} must be text or bytes, not {type(content).__name__}{cure}"
        )

    def _read(self, path: str | os.PathLike[str]) -> bytes:
        name = os.fspath(path)
        try:
            # Opening a pipe waits for its writer, and a device may have no end: both are found out without waiting.
            if os.path.isdir(name):
                raise UsageError(f"input file {name!r:.80} is a folder; give its files")
            descriptor = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            with open(descriptor, "rb") as source:
                about = os.fstat(descriptor)
                if not stat.S_ISREG(about.st_mode):
                    kind = "a named pipe" if stat.S_ISFIFO(about.st_mode) else "a device"
                    raise UsageError(f"input file {name!r:.80} is {kind}; give a regular file or bytes")
                self._check_room(name, about.st_size)
                room = -1 if self._limits is None else self._limits.disk_bytes - self._bytes + 1
                return source.read(room) or b""  # None: one of the kernel's own, and there is nothing yet
        except (OSError, ValueError) as exc:
            if isinstance(exc, OSError) and exc.errno == errno.ENXIO:  # opening one is an error
                raise UsageError(f"input file {name!r:.80} is a socket; give a regular file or bytes") from None
            said = exc.strerror if isinstance(exc, OSError) else exc
            raise UsageError(f"input file {name!r:.80} cannot be read: {said}") from exc


def _not_a_file(given: object) -> str:
    got = ", ".join(type(each).__name__ for each in given) if isinstance(given, tuple) else type(given).__name__
    cure = "; write (name, file.read())" if hasattr(given, "read") else ""
    if isinstance(given, bytes) or (isinstance(given, tuple) and given and not isinstance(given[0], str)):
        cure = "; names and paths are text: write os.fsdecode(path)"
    return f"an input file is a path, or (name, content) with text or bytes as content, not ({got}){cure}"
