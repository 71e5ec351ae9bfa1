"""Load the files that a run is given, from paths and from content, and check their names."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping

from toolcell.errors import UsageError
from toolcell.sandbox.backend import GuestFile

FileContent = str | bytes | bytearray | memoryview | os.PathLike[str]
"""Text, bytes, or the path of a file on the host. A path that is a `str` would be text: write `Path(...)`."""

FileInput = str | os.PathLike[str] | tuple[str, FileContent] | GuestFile

MAX_PART_BYTES = 255
"""Of one part of a name. Source: NAME_MAX of Linux."""


def guest_files(given: Iterable[FileInput] | Mapping[str, FileContent]) -> tuple[GuestFile, ...]:
    """Load the input files: a list of paths and (name, content), or a mapping from names to content.

    Raises:
        UsageError: a file cannot be read, its content is no text or bytes, its name leaves the workspace, or two files
            have one name.
    """
    if given == ():
        return ()
    one: object = given
    if isinstance(one, str | bytes | os.PathLike) or not hasattr(given, "__iter__"):
        path = os.fsdecode(one) if isinstance(one, bytes) else one
        cure = f"; write files=[{path!r:.80}]" if isinstance(path, str | os.PathLike) else ""
        raise UsageError(f'files= takes a list of paths and ("name", content), not {type(given).__name__}{cure}')
    files = tuple(map(_guest_file, given.items() if isinstance(given, Mapping) else given))
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


def _guest_file(given: object) -> GuestFile:
    """Make a workspace file from a path on the host, or from (name, content)."""
    match given:
        case GuestFile():
            return given
        case (str() as name, content) if isinstance(given, tuple):
            return GuestFile(name, _content(name, content))
        case str() | os.PathLike():
            return GuestFile(os.path.basename(os.fspath(given)), _read(given))
    got = ", ".join(type(each).__name__ for each in given) if isinstance(given, tuple) else type(given).__name__
    cure = "; write (name, file.read())" if hasattr(given, "read") else ""
    if isinstance(given, bytes) or (isinstance(given, tuple) and given and not isinstance(given[0], str)):
        cure = "; names and paths are text: write os.fsdecode(path)"
    raise UsageError(f"an input file is a path, or (name, content) with text or bytes as content, not ({got}){cure}")


def _content(name: str, content: object) -> bytes:
    match content:
        case bytes() | bytearray() | memoryview():
            return bytes(content)
        case str():
            try:
                return content.encode()
            except UnicodeEncodeError as exc:
                raise UsageError(f"the text of the input file {name!r:.80} is not valid Unicode: {exc.reason}") from exc
        case os.PathLike():
            return _read(content)
    cure = "; write file.read()" if hasattr(content, "read") else ""
    raise UsageError(
        f"the content of the input file {name!r:.80} must be text or bytes, not {type(content).__name__}{cure}"
    )


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as source:
            return source.read()
    except (OSError, ValueError) as exc:
        said = exc.strerror if isinstance(exc, OSError) else exc
        raise UsageError(f"input file {os.fspath(path)!r:.80} cannot be read: {said}") from exc
