"""System calls that Python has no function for, and their constants.

All calls go through libc's `syscall`. So they behave the same with every libc, and every failure is an `OSError` that
names its call.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Mapping

from toolcell_bridge.isolation.syscall_numbers import SYSCALL_NUMBERS, native_machine

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

MNT_DETACH = 0x2

SIGCHLD = 17
"""As in the module `signal`, which takes longer to import than all else that the launcher needs."""

PR_SET_PDEATHSIG = 1
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_GET_SECUREBITS = 27
PR_SET_SECUREBITS = 28
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_GET_NO_NEW_PRIVS = 39
PR_CAP_AMBIENT = 47


_FAILED = -1
_MOST_ARGUMENTS = 6

LAST_DESCRIPTOR = 0x7FFF_FFFF
"""Descriptors are ints; gVisor refuses a larger number for the end of a range."""


@functools.cache
def _entries() -> tuple[Callable[..., int], ...]:
    """Return libc's `syscall`, typed for zero to six arguments.

    `c_void_p` takes integers (also negative ones), None, bytes, buffers and `byref()`, and is always 64 bits wide.
    Without `argtypes`, ctypes passes integers as 32-bit ints and leaves the upper halves undefined. The first call of
    a process makes all seven, so its forks have them already. Making one in a fork takes 250 us; a call takes 1 us.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    made = tuple(libc["syscall"] for _ in range(_MOST_ARGUMENTS + 1))
    for arguments, function in enumerate(made):
        function.argtypes = (ctypes.c_long,) + (ctypes.c_void_p,) * arguments
        function.restype = ctypes.c_long
    return made


@functools.cache
def _numbers() -> Mapping[str, int]:
    return SYSCALL_NUMBERS[native_machine()]


def syscall(call: str | int, *arguments: object) -> int:
    """Make one system call, by name or number, and return its result.

    Raises:
        OSError: with the kernel's errno; the message starts with the call's name. ENOSYS when this machine's table
            has no such name.
    """
    if isinstance(call, int):
        number = call
    else:
        known = _numbers().get(call)
        if known is None:
            raise OSError(errno.ENOSYS, f"{call}: {os.strerror(errno.ENOSYS)}")
        number = known
    result = _entries()[len(arguments)](number, *arguments)
    if result == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Move this thread into new namespaces. With CLONE_NEWPID, its future children are moved."""
    syscall("unshare", flags)


def setns(fd: int, flags: int = 0) -> None:
    """Join the namespace that `fd` refers to. `flags`: the expected kind of namespace; 0 means any."""
    syscall("setns", fd, flags)


def mount(source: str | None, target: str, fstype: str | None, flags: int = 0, data: str | None = None) -> None:
    """Call mount(2). None is a null pointer."""
    try:
        syscall("mount", _path(source), _path(target), _path(fstype), flags, _path(data))
    except OSError as error:
        # A dozen mounts follow one another; an EPERM without the target does not say which one failed.
        raise OSError(error.errno, f"{error.strerror} (flags {flags:#x})", target) from None


def umount2(target: str, flags: int = 0) -> None:
    """Call umount2(2)."""
    syscall("umount2", _path(target), flags)


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root mount and move the old one to `put_old`. If both are ".", the old one is on top."""
    syscall("pivot_root", _path(new_root), _path(put_old))


def prctl(option: int, arg2: int = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    """Call prctl(2). All five arguments are always passed, because newer options require zeroes."""
    return syscall("prctl", option, arg2, arg3, arg4, arg5)


def sethostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    raw = os.fsencode(name)
    syscall("sethostname", raw, len(raw))


def close_range(first: int, last: int = LAST_DESCRIPTOR) -> None:
    """Close descriptors `first` to `last`, both included, in one call.

    Raises:
        OSError: ENOSYS before Linux 5.9.
    """
    syscall("close_range", first, last, 0)


def _path(text: str | None) -> bytes | None:
    """Encode for a `char *`. The kernel would read a path only up to a NUL, without an error."""
    if text is None:
        return None
    raw = os.fsencode(text)
    if b"\0" in raw:
        raise ValueError(f"NUL byte in {text!r}")
    return raw
