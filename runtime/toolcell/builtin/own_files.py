"""Files of a workspace that are replaced as a whole, and those that are refused because they have another name."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

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
