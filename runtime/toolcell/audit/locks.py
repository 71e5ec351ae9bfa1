"""Locks of files: they end with the process that holds them, also after SIGKILL."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from toolcell.errors import AuditError


def take_lock(path: Path) -> int | None:
    """Lock a file and return its descriptor; closing it releases the lock. None: another process holds the lock."""
    # Not `filelock`: on a file system without flock it falls back to a lock that survives SIGKILL, and it has no
    # shared, read-only probe such as `is_locked`, which must work for readers who may not write the directory.
    try:
        import fcntl
    except ImportError as exc:
        raise AuditError(f"audit logs need POSIX file locks, which {sys.platform} has not") from exc
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0), 0o600
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """True while a process holds the lock of a file; False without the file, or if it cannot be read."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
