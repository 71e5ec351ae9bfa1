"""Files and folders for their owner alone, and files that strangers may have put there: regular ones are read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from toolcell.errors import UsageError


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
