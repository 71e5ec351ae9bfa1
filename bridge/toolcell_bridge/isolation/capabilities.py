"""Drop every capability, and every way of regaining one.

Order matters: the bounding set and the securebits need CAP_SETPCAP, so they go before the capabilities themselves.
Each step is read back from the kernel; a step that silently did nothing is an error.
"""

from __future__ import annotations

import ctypes
import functools

from toolcell_bridge.isolation.syscalls import (
    PR_CAP_AMBIENT,
    PR_CAPBSET_DROP,
    PR_CAPBSET_READ,
    PR_GET_DUMPABLE,
    PR_GET_NO_NEW_PRIVS,
    PR_GET_SECUREBITS,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_SECUREBITS,
    prctl,
    syscall,
)

CAP_SETPCAP = 8

_VERSION_3 = 0x20080522
_AMBIENT_CLEAR_ALL = 4

LOCKED_SECUREBITS = 0b1110_1111
"""NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE on, KEEP_CAPS off, all four locked: uid 0 then means nothing."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int32))


class _Sets(ctypes.Structure):
    """effective, permitted, inheritable for capabilities 0-31, then again for 32-63."""

    _fields_ = (("words", ctypes.c_uint32 * 6),)


_HEADER = _Header(_VERSION_3, 0)
_NONE = _Sets()
_READ_BACK = _Sets()
"""Made here rather than per call: a fork that touches less copies fewer pages."""


@functools.cache
def last_capability() -> int:
    """Return the highest capability this kernel knows. Asked of prctl, because /proc may not be mounted."""
    number = 0
    while _is_known(number + 1):
        number += 1
    return number


def _is_known(capability: int) -> bool:
    try:
        prctl(PR_CAPBSET_READ, capability)
    except OSError:
        return False
    return True


def drop_bounding() -> None:
    """Empty the bounding set of this thread.

    Children inherit the empty set across fork and exec, but unshare or clone with CLONE_NEWUSER fills every set again
    (kernel/user_namespace.c, set_cred_user_ns). So a process that enters its own user namespace drops after that.

    Raises:
        OSError: EPERM without CAP_SETPCAP in the current user namespace.
    """
    for capability in range(last_capability() + 1):
        syscall("prctl", PR_CAPBSET_DROP, capability)  # forty times: without the three arguments it ignores


def drop_capabilities() -> None:
    """Clear ambient, effective, permitted and inheritable, with the securebits locked first."""
    prctl(PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL)
    prctl(PR_SET_SECUREBITS, LOCKED_SECUREBITS)
    drop_held()
    if held_capabilities() != 0 or prctl(PR_GET_SECUREBITS) != LOCKED_SECUREBITS:
        raise OSError("capset: the kernel reported success and kept capabilities")


def drop_held() -> None:
    """Clear effective, permitted and inheritable. What is left for a process that may not touch its securebits."""
    syscall("capset", ctypes.byref(_HEADER), ctypes.byref(_NONE))


def held_capabilities() -> int:
    """Return effective, permitted and inheritable of this thread, or-ed into one bit mask; 0 is what we want."""
    syscall("capget", ctypes.byref(_HEADER), ctypes.byref(_READ_BACK))
    words: list[int] = list(_READ_BACK.words)
    return (words[0] | words[1] | words[2]) | (words[3] | words[4] | words[5]) << 32


def set_no_new_privileges() -> None:
    """Make execve unable to grant anything, for this thread and its descendants, irrevocably.

    Raises:
        OSError: it did not take effect. Landlock and seccomp need it, so the caller must not go on.
    """
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if prctl(PR_GET_NO_NEW_PRIVS) != 1:
        raise OSError("prctl: PR_SET_NO_NEW_PRIVS did not take effect")


def set_undumpable() -> None:
    """Forbid core dumps and ptrace by equals; /proc/<pid> then belongs to root, so write uid maps before this.

    RLIMIT_CORE alone is not enough: a core_pattern that pipes to a program ignores it.
    """
    prctl(PR_SET_DUMPABLE, 0)
    if prctl(PR_GET_DUMPABLE) != 0:
        raise OSError("prctl: PR_SET_DUMPABLE did not take effect")


def drop_all() -> None:
    """Leave this thread without privilege of any kind. Call it single-threaded, after the last mount and id change.

    Raises:
        OSError: something stayed; the process must not run foreign code.
    """
    drop_bounding()
    drop_capabilities()
    set_no_new_privileges()
    set_undumpable()
