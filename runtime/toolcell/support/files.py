"""Files and directories that appear whole or not at all, that are for their owner alone, or that are locked.

Every function is safe in several threads and processes at once.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolcell.errors import UsageError

# Files and folders for their owner alone, and files that strangers may have put there: regular ones are read.


def open_to_others(status: os.stat_result) -> str:
    """Say who else can use a file or folder; nothing when this user owns it and nobody else can."""
    mode = stat.S_IMODE(status.st_mode)
    if not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not mode & 0o077):
        return ""
    wanted = "0700" if stat.S_ISDIR(status.st_mode) else "0600"
    return f"belongs to user {status.st_uid} and has mode {mode:04o}: it must be yours and have mode {wanted}"


def open_regular_file(path: Path, *, may_be_link: bool = False) -> int:
    """Open a file for reading; return the descriptor.

    Raises:
        OSError: it cannot be read, is a link, or is not a regular file; a pipe is not waited for.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags | (0 if may_be_link else getattr(os, "O_NOFOLLOW", 0)))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_regular_file(path: Path, limit: int, *, is_private: bool = False, may_be_link: bool = False) -> bytes:
    """Return the first `limit` bytes of a file. `is_private`: only if nobody else can use it.

    Raises:
        PermissionError: others can use it, and it is to be private.
        OSError: it cannot be read, is a link, or is not a regular file; a pipe is not waited for.
    """
    with open(open_regular_file(path, may_be_link=may_be_link), "rb") as file:
        if is_private and (problem := open_to_others(os.fstat(file.fileno()))):
            raise PermissionError(errno.EACCES, problem, str(path))
        return file.read(limit)


def make_private_folder(folder: Path) -> None:
    """Make a folder and what is missing above it, each for its owner alone, whatever the umask is.

    `mkdir(mode=, parents=True)` gives the mode to the last one only. What is there stays as it is.

    Raises:
        OSError: one cannot be made, or is not a folder.
    """
    if folder.is_dir():
        return
    for each in reversed((folder, *folder.parents)):
        try:
            os.mkdir(each, 0o700)
        except FileExistsError:
            pass
        except OSError:
            if not each.is_dir():  # such as a file system that can only be read
                raise
    if not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))


def make_own_folder(folder: Path) -> None:
    """Make a folder, or check that nobody else can use the one that is there.

    Raises:
        UsageError: others can read or write it, or it belongs to somebody else.
        OSError: it cannot be made.
    """
    make_private_folder(folder)
    if problem := open_to_others(folder.stat()):
        raise UsageError(
            f"{folder} is for what scripts did and for keys, and it {problem}; chown it, and chmod 700 {folder}"
        )


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


# Locks of files: they end with the process that holds them, also after SIGKILL.
#
# Not `filelock`: on a file system without flock it falls back to a lock that survives SIGKILL.


def lock(descriptor: int, *, wait: bool, shared: bool = False) -> bool:
    """Lock an open file until its descriptor is closed. False: another holder has it, and `wait` is False.

    Raises:
        OSError: this system or file system has no such locks.
    """
    try:
        import fcntl
    except ImportError as exc:
        raise OSError(errno.ENOTSUP, f"{sys.platform} has no POSIX file locks") from exc
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def take_lock(path: Path) -> int | None:
    """Lock a file and return its descriptor; closing it releases the lock. None: another process holds the lock.

    Raises:
        OSError: it cannot be opened or locked.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        if lock(descriptor, wait=False):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
