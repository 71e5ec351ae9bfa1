"""Name what a machine lacks: a resource that is short, with what raises it, or a layer of isolation.

Every `OSError` in the start of a sandbox ends in `unavailable` and fails that one start. A layer that is missing fails
all of them: `IsolationRefused`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping

from toolcell.errors import SandboxUnavailable, warn_user


class IsolationRefused(SandboxUnavailable):
    """This machine does not give this isolation. Trying again changes nothing."""


def check_layers(required: Collection[str], live: Collection[str], lacks: Mapping[str, str]) -> None:
    """Check that every required layer is live. `lacks`: why some are not.

    Raises:
        IsolationRefused: names those that are not, and why.
    """
    if missing := sorted(frozenset(required) - frozenset(live)):
        named = (f"{name} ({lacks[name]})" if name in lacks else name for name in missing)
        raise IsolationRefused(f"required isolation is not live: {', '.join(named)}")


REMEDIES = {
    errno.EMFILE: "this process may not open more descriptors; raise `ulimit -n` (RLIMIT_NOFILE), or lower "
    "PoolConfig.cap",
    errno.ENFILE: "the machine's table of open files is full; raise fs.file-max",
    errno.ENOMEM: "memory is short; raise the memory limit of this process or container, or lower PoolConfig.cap",
    errno.EAGAIN: "no further process or thread is allowed; raise `ulimit -u` (RLIMIT_NPROC), the pids limit of this "
    "container or service, or kernel.pid_max",
    errno.ENOSPC: "a table of the kernel or a file system is full; look at fs.epoll.max_user_watches, "
    "user.max_pid_namespaces, user.max_mnt_namespaces and the free space of the cache",
    errno.EUSERS: "too many user namespaces; raise user.max_user_namespaces",
    errno.ETOOMANYREFS: "too many descriptors of this user are in flight between processes; raise `ulimit -n` "
    "(RLIMIT_NOFILE)",
    errno.ENOBUFS: "the kernel has no room for a message; raise the memory limit of this process, or net.core.wmem_max",
}
"""Error number to the resource that is short and what raises it."""


def describe(number: int | None, problem: str) -> str:
    """Return `problem` with the error's name, and what to do where that is known."""
    name = errno.errorcode.get(number or 0)
    if name is None:
        return problem
    remedy = REMEDIES.get(number or 0)
    return f"{name} ({os.strerror(number or 0)}): {remedy}" if remedy else f"{name}: {problem}"


ROOM = 32
"""Descriptors that are left for the rest of the program, and that a start needs for a moment."""


def open_files_allow(per_sandbox: int) -> int | None:
    """Return how many sandboxes this process has descriptors for; None where that cannot be told."""
    try:
        import resource

        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):
        return None
    return None if allowed == resource.RLIM_INFINITY else max(0, allowed - used - ROOM) // per_sandbox


def possible_cap(cap: int, each: int) -> int:
    """Return how many sandboxes may be alive at once: `cap`, or what this process has descriptors for, with a warning.

    `each`: descriptors of one sandbox; 0 when that is not known.

    Raises:
        SandboxUnavailable: it has not enough for one.
    """
    possible = open_files_allow(each) if each else None
    if possible is None or possible >= cap:
        return cap
    shortage = (
        f"each sandbox needs {each} open files here, and `ulimit -n` (RLIMIT_NOFILE) leaves room for {possible} "
        f"sandboxes, not for PoolConfig.cap = {cap}"
    )
    if not possible:
        raise SandboxUnavailable(f"{shortage}; raise it to at least {cap * each + 2 * ROOM}")
    warn_user(f"{shortage}; the cap is {possible} now. Raise the limit, or lower the cap")
    return possible


def unavailable(exc: OSError) -> SandboxUnavailable:
    """Turn an error of the machine into the failure of one start."""
    return SandboxUnavailable(f"a sandbox could not be started: {describe(exc.errno, str(exc))}")
