"""Create files and directories that appear whole or not at all: build them beside their place, then rename.

Every function is safe in several threads and processes at once.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolcell.support.private_files import make_private_folder


@contextmanager
def new_directory(target: Path, prefix: str = ".building-") -> Iterator[Path]:
    """Yield an empty directory beside `target`. It becomes `target` when the block ends without an error.

    If another process was faster, its directory stays and this one is removed. If the block raises, nothing is left.
    `prefix` begins the name of the directory under construction, so that a caller can find what a killed process left.

    Raises:
        OSError: the directory cannot be made or renamed.
    """
    make_private_folder(target.parent)
    building = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield building
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        remove_tree(building)


def write_file(
    target: Path,
    content: bytes,
    *,
    mode: int = 0o600,
    replace: bool = True,
    may_replace: Callable[[], bool] | None = None,
) -> None:
    """Write a file that appears whole at `target`. By default only its owner may read it.

    `may_replace` is asked instead of `replace`, once the content is written. A process that is killed leaves nothing
    half-written where the file system has files without names, as those of Linux do.

    Raises:
        FileExistsError: `target` exists, and must not be replaced.
        OSError: it cannot be written; nothing is left.
    """
    start = target.name[:40]  # the whole may be as long as a name can be
    draft = target.with_name(f".{start}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor, is_nameless = _open_draft(draft, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if may_replace is not None:
                replace = may_replace()
            if is_nameless:
                # With a descriptor the link is followed; it is not used, as the path is absolute.
                os.link(f"/proc/self/fd/{descriptor}", draft if replace else target, src_dir_fd=descriptor)
        if replace:
            os.replace(draft, target)
        elif not is_nameless:
            os.link(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _open_draft(draft: Path, mode: int) -> tuple[int, bool]:
    """Open a new file; return its descriptor, and whether it has no name yet."""
    flags = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
    with suppress(OSError):
        if os.path.isdir("/proc/self/fd"):
            return os.open(draft.parent, flags | os.O_TMPFILE, mode), True
    return os.open(draft, flags | os.O_CREAT | os.O_EXCL, mode), False


def write_named(path: str | Path, lines: Iterable[str]) -> None:
    """Write a text to what a user named, a device too. A FIFO that nobody reads is an error, and not waited for.

    Raises:
        OSError: it cannot be written.
    """
    no_wait = getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | no_wait, 0o666)
    with open(descriptor, "w", encoding="utf-8") as file:
        if no_wait:
            os.set_blocking(descriptor, True)
        file.writelines(lines)


def link_or_copy(source: str, target: str) -> None:
    """Make `target` a hard link to `source`, or a copy where there are no such links or no more of them.

    Raises:
        OSError: it cannot be made.
    """
    try:
        os.link(source, target)
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS):
            raise
        shutil.copy2(source, target)


def remove_tree(path: Path) -> None:
    """Remove a directory tree, also one whose directories are read-only, or a link. A missing one is not an error."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for directory, _, _ in os.walk(path):
        os.chmod(directory, 0o700)
    shutil.rmtree(path, ignore_errors=True)
