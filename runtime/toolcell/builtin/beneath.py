"""Open a path below a directory, never outside of it, whatever the names on the way are or become.

The kernel does it where it has `openat2`: RESOLVE_BENEATH refuses every step that leaves the directory, also when
somebody renames or replaces parts of the path meanwhile. Elsewhere `_walk` opens one name after the other, each below
the descriptor of the one before, and follows links itself.

Source: openat2(2), path_resolution(7).
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import struct
import sys
from collections import deque
from collections.abc import Sequence

from toolcell_bridge.isolation.syscalls import syscall

MAX_LINKS = 40
"""Links followed in one path. Source: MAXSYMLINKS of Linux."""

RACES = 64
"""Attempts, while the kernel says that a directory was renamed during the look-up."""

_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_BENEATH = 0x08
_HOW = struct.Struct("=QQQ")
_ABSENT = (errno.ENOSYS, errno.EPERM, None)
"""What a kernel before 5.6 says, the seccomp profile of an old container engine, and our table on another machine."""

_PATH_ONLY: int = getattr(os, "O_PATH", 0)
_STEP = _PATH_ONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY if sys.platform != "win32" else 0


class LeavesDirectory(OSError):
    """A link in the path leads out of the directory."""


def open_beneath(root: int, parts: Sequence[str], flags: int) -> int:
    """Open the path `parts` below the directory that the descriptor `root` is open on. No parts: the directory itself.

    Creates nothing. Links inside the directory are followed, unless `flags` has O_NOFOLLOW and it is the last part.

    Raises:
        LeavesDirectory: the path leads outside.
        OSError: as open(2).
    """
    if not parts:
        return os.open(".", flags | os.O_CLOEXEC, dir_fd=root)
    if not has_openat2():
        return _walk(root, parts, flags | os.O_CLOEXEC)
    how = _HOW.pack(flags | os.O_CLOEXEC, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    path = os.fsencode("/".join(parts))
    for _ in range(RACES):
        try:
            return syscall("openat2", root, path, how, len(how))
        except OSError as exc:
            if exc.errno == errno.EXDEV:
                raise LeavesDirectory(errno.EXDEV, "leads outside") from exc
            if exc.errno != errno.EAGAIN:
                raise
    raise OSError(errno.EAGAIN, "directories on the way are renamed again and again")


@functools.cache
def has_openat2() -> bool:
    """Return whether this kernel has openat2(2), and we may call it."""
    if sys.platform != "linux":
        return False
    how = _HOW.pack(os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_BENEATH)
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(syscall("openat2", descriptor, b".", how, len(how)))
    except OSError as exc:
        if exc.errno not in _ABSENT:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def _walk(root: int, parts: Sequence[str], flags: int) -> int:
    """Do what openat2 does, one name after the other.

    `..` in a link goes back to a directory that is still open here: nobody can exchange what it means.
    """
    folders = [os.dup(root)]
    waiting = deque(parts)
    links = 0
    try:
        while waiting:
            name = waiting.popleft()
            if name in ("", "."):
                continue
            if name == "..":
                if len(folders) == 1:
                    raise LeavesDirectory(errno.EXDEV, "leads outside")
                os.close(folders.pop())
                continue
            try:
                descriptor = _open_one(name, folders[-1], _STEP if waiting else flags, is_last=not waiting)
            except OSError as exc:
                target = None if not waiting and flags & os.O_NOFOLLOW else _link(name, folders[-1], exc)
                if target is None:
                    raise
                links += 1
                waiting.extendleft(reversed(_steps(target, links)))
                continue
            if not waiting:
                return descriptor
            folders.append(descriptor)
        return os.open(".", flags, dir_fd=folders[-1])
    finally:
        for descriptor in folders:
            os.close(descriptor)


def _open_one(name: str, folder: int, flags: int, *, is_last: bool) -> int:
    """Open a name that is not a link, or must not be followed.

    Raises:
        OSError: ELOOP or ENOTDIR for a link.
    """
    descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    if not (is_last and flags & _PATH_ONLY) or flags & os.O_NOFOLLOW:
        return descriptor
    if stat.S_ISLNK(os.fstat(descriptor).st_mode):  # O_PATH opens the link itself
        os.close(descriptor)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return descriptor


def _link(name: str, folder: int, exc: OSError) -> str | None:
    """Return where the link points that could not be opened; None when it is not a link."""
    if exc.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
        return None
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None


def _steps(target: str, links: int) -> list[str]:
    if target.startswith("/"):
        raise LeavesDirectory(errno.EXDEV, "leads outside")
    if links > MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target.split("/")
