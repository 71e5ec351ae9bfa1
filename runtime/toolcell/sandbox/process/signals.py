"""Send a signal to every process of a sandbox, from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

ROUNDS = 32
"""Passes over processes that may fork meanwhile."""


def signal_all(find: Callable[[], set[int]], number: int) -> bool:
    """Send a signal once to each process that `find` lists, until it lists no other; False when that does not end."""
    signalled: set[int] = set()
    for _ in range(ROUNDS):
        fresh = find() - signalled
        if not fresh:
            return True
        _signal(fresh, find, number)
        signalled |= fresh
    return False


def _signal(pids: set[int], find: Callable[[], set[int]], number: int) -> None:
    """Signal through pidfds, and only what is still listed: a pid alone may belong to another process by now."""
    pinned = {pid: fd for pid in pids if (fd := _pin(pid)) is not None}
    try:
        for pid in find() & pinned.keys():
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


def tree_of(root: int) -> set[int]:
    """Return a process and every process below it. A pass over the processes of the machine would take long.

    Source: Linux Documentation/filesystems/proc.rst, /proc/PID/task/TID/children.
    """
    found, waiting = {root}, [root]
    while waiting:
        pid = waiting.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                    below = {int(each) for each in file.read().split()} - found
                found |= below
                waiting += below
        except OSError:  # it has ended meanwhile
            continue
    return found
