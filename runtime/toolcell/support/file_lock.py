"""Locks of files: they end with the process that holds them, also after SIGKILL.

Not `filelock`: on a file system without flock it falls back to a lock that survives SIGKILL, and it has no shared,
read-only probe such as `is_locked`, which must work for readers who may not write the directory.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path


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


def is_locked(path: Path) -> bool:
    """True while a process holds the lock of a file; False without the file, or if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not lock(descriptor, wait=False, shared=True)
    finally:
        os.close(descriptor)
