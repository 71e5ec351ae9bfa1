"""Send a signal to every process of a sandbox, from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator

from toolcell_bridge.entry.process_usage import descendants

HAS_CHILDREN = os.path.exists("/proc/thread-self/children")
"""Kernels without these files need a pass over every process of the machine, which takes long.

Source: Linux Documentation/filesystems/proc.rst, /proc/PID/task/TID/children.
"""

GONE = FileNotFoundError, ProcessLookupError
"""What reading about a process raises when it has ended."""

ROUNDS = 32
"""Passes over processes that may fork meanwhile."""


def signal_all(find: Callable[[], Collection[int]], number: int) -> bool:
    """Send a signal once to each process that `find` lists, until it lists no other; False when that does not end."""
    signalled: set[int] = set()
    for _ in range(ROUNDS):
        fresh = {*find()} - signalled
        if not fresh:
            return True
        _signal(fresh, find, number)
        signalled |= fresh
    return False


def _signal(pids: set[int], find: Callable[[], Collection[int]], number: int) -> None:
    """Signal through pidfds, and only what is still listed: a pid alone may belong to another process by now."""
    pinned = {pid: fd for pid in pids if (fd := _pin(pid)) is not None}
    try:
        for pid in pinned.keys() & find():
            try:
                signal.pidfd_send_signal(pinned[pid], number)
            except ProcessLookupError:
                continue
    finally:
        for fd in pinned.values():
            os.close(fd)


def _pin(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def tree_of(root: int) -> list[int]:
    """Return a process and every process below it, parents first."""
    if not HAS_CHILDREN:
        return [root, *descendants(root)]
    found = [root]
    for pid in found:  # grows meanwhile
        found += [each for each in _children(pid) if each not in found]
    return found


def _children(pid: int) -> Iterator[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except GONE:
        return
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                children = file.readall().split()
        except GONE:
            continue
        yield from map(int, children)
