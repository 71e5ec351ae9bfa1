"""A zygote's namespaces, and the read-only root of its sandboxes: interpreter, libraries, five devices, nothing else.

There is no /proc, not even a fresh one: its mountinfo would show a guest the host path behind every bind, and
/proc/self/mem writes through page protection. CPython, numpy and pandas work without it.

The host makes a plan of it. `build` carries that out in a fresh mount namespace and pivots into the new root.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from toolcell_bridge.isolation.syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    SIGCHLD,
    mount,
    pivot_root,
    syscall,
    umount2,
)

STAGING = ("/tmp", "/mnt", "/run", "/dev/shm")
"""Directories in which the new root can be built. The mount is private and gone after the pivot."""

DEVICES = ("null", "zero", "full", "random", "urandom")
ST_NOEXEC = 8


Pairs = Sequence[tuple[str, str]]


def build(binds: Pairs, files: Pairs, links: Pairs, directories: Sequence[str]) -> None:
    """Build the root, pivot into it and unmount the old one. The host's `RootPlan` says what each of these is.

    Call it in a fresh mount namespace, while this process may still look up the sources.

    Raises:
        OSError: names the mount that failed; nothing outside this namespace was changed.
    """
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    # Opened before the staging mount covers a directory that may hold some of them.
    sources = [os.open(source, os.O_PATH | os.O_CLOEXEC) for source, _ in binds]
    devices = [os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC) for name in DEVICES]
    staging = next(path for path in STAGING if os.path.isdir(path))
    mount("tmpfs", staging, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=16m,nr_inodes=8192")
    os.chdir(staging)
    for directory in directories:
        os.makedirs(f".{directory}", 0o755, exist_ok=True)
    for target, text in files:
        os.makedirs(os.path.dirname(f".{target}"), 0o755, exist_ok=True)
        with open(f".{target}", "w", encoding="utf-8") as file:
            file.write(text)
    for descriptor, (_, target) in zip(sources, binds, strict=True):
        _bind(descriptor, f".{target}", MS_NODEV)
    for descriptor, name in zip(devices, DEVICES, strict=True):
        _bind(descriptor, f"./dev/{name}", MS_NOEXEC)
    for target, to in links:
        os.makedirs(os.path.dirname(f".{target}"), 0o755, exist_ok=True)
        os.symlink(to, f".{target}")
    for descriptor in (*sources, *devices):
        os.close(descriptor)
    pivot_root(".", ".")
    umount2(".", MNT_DETACH)
    os.chdir("/")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _bind(descriptor: int, target: str, flags: int) -> None:
    """Bind the file or directory of `descriptor` onto `target`, read-only. Makes the mount point."""
    source = f"/proc/self/fd/{descriptor}"
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
    if os.path.isdir(source):
        os.makedirs(target, 0o755, exist_ok=True)
    elif not os.path.lexists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
    mount(source, target, None, MS_BIND)
    # Flags come with a remount; one that the source's own mount has locked (noexec) must be repeated.
    locked = MS_NOEXEC if os.statvfs(target).f_flag & ST_NOEXEC else 0
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags | locked)


# Entering user, pid, mount, net, ipc, uts and cgroup namespaces. `procfs` maps ids into them.

ALL = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP


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
