"""Write input files to the workspace and read returned files from it, inside the sandbox.

Following a link here reaches nothing that the script itself could not read; the host never opens a path that a guest
named. Limits are checked here for good messages, and again by the host.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator

from toolcell_bridge.wire.invisible import is_visible
from toolcell_bridge.wire.messages import FilePart, FileProblem, PutFile

CHUNK_BYTES = 512 * 1024

_OFFICE = "application/vnd.openxmlformats-officedocument."

MEDIA_TYPES = {
    "avif": "image/avif",
    "bmp": "image/bmp",
    "gif": "image/gif",
    "ico": "image/vnd.microsoft.icon",
    "jpeg": "image/jpeg",
    "jpg": "image/jpeg",
    "png": "image/png",
    "svg": "image/svg+xml",
    "tif": "image/tiff",
    "tiff": "image/tiff",
    "webp": "image/webp",
    "flac": "audio/flac",
    "m4a": "audio/mp4",
    "mp3": "audio/mpeg",
    "ogg": "audio/ogg",
    "wav": "audio/wav",
    "mp4": "video/mp4",
    "webm": "video/webm",
    "css": "text/css",
    "csv": "text/csv",
    "htm": "text/html",
    "html": "text/html",
    "js": "text/javascript",
    "log": "text/plain",
    "md": "text/markdown",
    "py": "text/x-python",
    "tsv": "text/tab-separated-values",
    "txt": "text/plain",
    "arrow": "application/vnd.apache.arrow.file",
    "db": "application/vnd.sqlite3",
    "docx": f"{_OFFICE}wordprocessingml.document",
    "feather": "application/vnd.apache.arrow.file",
    "geojson": "application/geo+json",
    "gz": "application/gzip",
    "h5": "application/x-hdf5",
    "ipynb": "application/x-ipynb+json",
    "json": "application/json",
    "jsonl": "application/jsonl",
    "nc": "application/netcdf",
    "ndjson": "application/x-ndjson",
    "npy": "application/x-npy",
    "npz": "application/x-npz",
    "parquet": "application/vnd.apache.parquet",
    "pdf": "application/pdf",
    "pptx": f"{_OFFICE}presentationml.presentation",
    "sqlite": "application/vnd.sqlite3",
    "sqlite3": "application/vnd.sqlite3",
    "tar": "application/x-tar",
    "xlsx": f"{_OFFICE}spreadsheetml.sheet",
    "xml": "application/xml",
    "yaml": "application/yaml",
    "yml": "application/yaml",
    "zip": "application/zip",
}
"""By the end of a name. Registered with IANA, but for jsonl and those with x-, which nobody has registered."""

MAGIC = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (0, b"II*\0", "image/tiff"),
    (0, b"MM\0*", "image/tiff"),
    (8, b"WEBP", "image/webp"),
    (8, b"WAVE", "audio/wav"),
    (0, b"ID3", "audio/mpeg"),
    (0, b"fLaC", "audio/flac"),
    (0, b"OggS", "audio/ogg"),
    (4, b"ftypavif", "image/avif"),
    (4, b"ftyp", "video/mp4"),
    (0, b"%PDF-", "application/pdf"),
    (0, b"PAR1", "application/vnd.apache.parquet"),
    (0, b"ARROW1", "application/vnd.apache.arrow.file"),
    (0, b"SQLite format 3\0", "application/vnd.sqlite3"),
    (0, b"\x89HDF\r\n\x1a\n", "application/x-hdf5"),
    (0, b"\x93NUMPY", "application/x-npy"),
    (0, b"\x1f\x8b", "application/gzip"),
    (0, b"PK\x03\x04", "application/zip"),
)
"""Where in a file which bytes stand, and its type."""

IN_ZIP = {b"xl/": "xlsx", b"word/": "docx", b"ppt/": "pptx", b".npy": "npz"}
"""What names in a zip file say of it."""

HEAD_BYTES = 8192
"""First bytes of a file, for `media_type`."""


def media_type(name: str, head: bytes) -> str:
    """Media type by the end of the name, else by the first bytes."""
    if known := MEDIA_TYPES.get(name.rpartition(".")[2].lower()):
        return known
    for start, magic, kind in MAGIC:
        if head.startswith(magic, start):
            inside = [ending for part, ending in IN_ZIP.items() if kind == "application/zip" and part in head]
            return MEDIA_TYPES[inside[0]] if inside else kind
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as exc:
        return "application/octet-stream" if exc.start < len(head) - 4 else "text/plain"
    return "application/octet-stream" if b"\0" in head else "text/plain"


def requested(files: object) -> list[str]:
    """The `files=` argument of set_result as a list of path strings; one string or path is one file.

    Raises:
        TypeError: something in it is not a path.
    """
    if files is None:
        return []
    entries = files if isinstance(files, Iterable) and not isinstance(files, (str, bytes, os.PathLike)) else [files]
    names = []
    for entry in entries:
        path = os.fspath(entry) if isinstance(entry, os.PathLike) else entry
        if not isinstance(path, str):
            raise TypeError(f"files= takes paths in the workspace, such as ['chart.png'], not {path!r:.80}")
        if any("\ud800" <= char <= "\udfff" for char in path):
            raise TypeError(f"files= takes names that are valid Unicode, and {path!r:.80} is not; rename the file")
        names.append(path)
    return names


Version = tuple[int, int, int]
"""What differs when a file was changed: inode, size, time of the last change in nanoseconds."""


def find_versions(names: Iterable[str], root: str) -> dict[str, Version]:
    """Return the files that these names stand for now."""
    files = {}
    for asked in names:
        for name, problem in _expand(asked, root):
            if problem is None and (version := _version(os.path.join(root, name))) is not None:
                files[name] = version
    return files


def _version(path: str) -> Version | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns)


MAX_FILE_PROBLEMS = 900
"""Files that are named as missing, wrong or too many."""
NAME_CHARS = 1024
"""Most characters of a name and of a problem that are sent."""
MAX_NAME_BYTES = 1000
"""Most bytes of a file's name with its folders: Python makes folders inside one another up to 1000 deep."""


def collect(
    names: Iterable[str], root: str, files: int, files_bytes: int, versions: dict[str, Version] | None = None
) -> Iterator[FilePart | FileProblem]:
    """Read the named files, directories and patterns below `root` as messages, within count and size.

    Every name yields at least one message: a part, or a problem that says what is wrong with it, until there are
    `MAX_FILE_PROBLEMS`. `versions` gets what
    `found` would return.
    """
    count, left, problems = 0, files_bytes, 0
    for asked in names:
        for name, problem in _expand(asked, root):
            if not is_visible(name):
                # Control characters and writing-direction marks: what saves or shows such a name is led astray.
                name, problem = name.encode("unicode_escape").decode("ascii"), "name has unprintable characters"
            if len(name.encode()) > MAX_NAME_BYTES:  # perhaps the content, in place of a name
                name, problem = name[:MAX_NAME_BYTES], problem or f"name has more than {MAX_NAME_BYTES} bytes"
            if problem is None and count >= files:
                problem = f"too many files (limit {files})"
            if problem is not None:
                problems += 1
                if problems == MAX_FILE_PROBLEMS:
                    yield FileProblem(name, 0, f"{problem}; it is the last that is named: there may be more")
                    return
                yield FileProblem(name, 0, problem)
                continue
            count += 1
            if versions is not None and (version := _version(os.path.join(root, name))) is not None:
                versions[name] = version
            for message in _read(name, root, left):
                if isinstance(message, FilePart):
                    left -= len(message.data)
                yield message


def in_pieces(messages: Iterable[FilePart | FileProblem], frame_bytes: int) -> Iterator[FilePart | FileProblem]:
    """Divide the parts that may not fit into a message of this size. Half of it is room enough for the rest."""
    most = frame_bytes // 2
    for message in messages:
        if isinstance(message, FileProblem) or len(message.data) <= most:
            yield message
            continue
        for start in range(0, len(message.data), most):
            last = message.last and start + most >= len(message.data)
            yield FilePart(message.name, message.media_type, message.data[start : start + most], last)


def _expand(asked: str, root: str) -> Iterator[tuple[str, str | None]]:
    """(name relative to root, problem) for each file that `asked` stands for."""
    if "\0" in asked:
        yield asked.replace("\0", "\\0"), "name has a null character"
        return
    path = os.path.normpath(os.path.join(root, asked))
    name = os.path.relpath(path, root)
    if name.startswith("..") or os.path.isabs(name):
        yield asked, "outside the workspace"
    elif os.path.isdir(path) and (path == root or not os.path.islink(path)):
        yield from _walk(path, root)
    elif not os.path.lexists(path) and any(char in asked for char in "*?["):
        import glob

        found = sorted(glob.glob(path, recursive=True))
        files = [os.path.relpath(each, root) for each in found if not os.path.isdir(each)]
        yield from ((each, None) for each in files)
        if not files:
            yield asked, "missing: no file matches"
    else:
        yield name, None if os.path.lexists(path) else "missing"


OF_LIBRARIES = frozenset({".cache", ".config", ".local", "__pycache__"})
"""Folders that libraries make in the workspace, which is their home. They are returned only if they are asked for."""


def _walk(path: str, root: str) -> Iterator[tuple[str, str | None]]:
    """(name, problem) for each file below `path`, by name. Without recursion: a thousand folders may nest."""
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as exc:
            yield os.path.relpath(folder, root), f"cannot be listed: {exc.strerror}"
            continue
        folders = [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
        if folder == root:
            folders = [each for each in folders if os.path.basename(each) not in OF_LIBRARIES]
        waiting += reversed(folders)
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                yield os.path.relpath(entry.path, root), None


def _read(name: str, root: str, limit: int) -> Iterator[FilePart | FileProblem]:
    try:
        descriptor = os.open(os.path.join(root, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        is_link = exc.errno == errno.ELOOP and os.path.islink(os.path.join(root, name))
        reason = "a symbolic link; return the file it points to" if is_link else f"cannot be read: {exc.strerror}"
        yield FileProblem(name, 0, reason)
        return
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            yield FileProblem(name, 0, "not a regular file")
            return
        if status.st_size > limit:
            yield FileProblem(name, status.st_size, f"too large ({status.st_size} > {limit} bytes left)")
            return
        kind, sent = "", 0
        while True:
            # Never more than was promised: the script may still be writing to it.
            data = file.read(min(CHUNK_BYTES, status.st_size - sent))
            kind = kind or media_type(name, data[:HEAD_BYTES])
            sent += len(data)
            last = not data or sent >= status.st_size
            yield FilePart(name.replace(os.sep, "/"), kind, data, last)
            if last:
                return


def _make_folder(path: str) -> None:
    # os.makedirs gives its mode to the last folder only.
    if not os.path.isdir(path):
        _make_folder(os.path.dirname(path))
        os.mkdir(path, 0o750)


def write(message: PutFile, root: str, is_first: bool = True) -> None:
    """Write one PutFile's bytes to its file below `root`, creating folders on the way. Later pieces are appended.

    Raises:
        ValueError: the path leaves the workspace.
        OSError: it cannot be written (no space, a folder or a pipe is in the way, ...).
    """
    path = os.path.normpath(os.path.join(root, message.path))
    if not path.startswith(root + os.sep):
        raise ValueError(f"input file {message.path!r} is outside the workspace")
    _make_folder(os.path.dirname(path))
    # Scripts of a session share the workspace: a pipe that one of them made would wait for its other end.
    begin = os.O_NONBLOCK | (os.O_TRUNC if is_first else 0)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | begin, 0o640), "ab") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EEXIST, "a script made something there that is not a regular file")
        file.write(message.data)
