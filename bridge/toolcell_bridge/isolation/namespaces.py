"""User, pid, mount, net, ipc, uts and cgroup namespaces: entering them, and mapping ids into them.

Knows ids and flags; what is mounted inside and who lives there is decided elsewhere.
"""

from __future__ import annotations

import ctypes
import os

from toolcell_bridge.isolation.syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    SIGCHLD,
    syscall,
)

ALL = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP


def id_map(inside: int, outside: int, count: int = 1) -> str:
    """Return the line that says: `count` ids, `inside` onwards, stand for `outside` onwards in the parent namespace."""
    return f"{inside} {outside} {count}"


def clone(flags: int) -> int:
    """Fork into new namespaces; returns the child's pid, or 0 in the child.

    For a single-threaded process whose child soon execs: libc does not learn of this fork, so its cached thread
    id is stale in the child.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = syscall("clone", flags | SIGCHLD, 0, 0, 0, 0)
    if pid:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


def write_maps(proc: int, who: str, uids: str, gids: str, deny_setgroups: bool) -> None:
    """Write the id maps, lines of `id_map`, of process `who` ("self" or a pid) below `proc`, a descriptor of a procfs.

    `deny_setgroups` must be true for a writer without privilege in the parent namespace, and comes first: a
    process that could drop a group could gain what that group is denied (user_namespaces(7)).
    """
    if deny_setgroups:
        _write(proc, f"{who}/setgroups", "deny")
    _write(proc, f"{who}/uid_map", uids)
    _write(proc, f"{who}/gid_map", gids)


def forbid_nested(proc: int) -> None:
    """Set this user namespace's own limit of user namespaces to 0."""
    _write(proc, "sys/user/max_user_namespaces", "0")


def _write(proc: int, path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
