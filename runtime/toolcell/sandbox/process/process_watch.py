"""Measure a sandbox's process tree from outside, where there is no cgroup, and signal all of it.

Resident memory includes pages that a fork shares with its zygote, so the memory before any script runs is subtracted.
A sum above the limit is checked again by proportional size, which counts a shared page once.

However short the life of a process: the kernel adds its CPU time to that of whoever waits for it, and until then it can
be measured. Where SIGCHLD is ignored nobody has to wait and the time is lost, so scripts may not change that signal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from toolcell.sandbox.backend import Sample
from toolcell_bridge.entry.process_usage import (
    BEGAN,
    PAGE_BYTES,
    RESIDENT,
    THREADS,
    descendants,
    own_s,
    read_row,
    waited_for_s,
)

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
    pinned: dict[int, int] = {}
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                pinned[pid] = os.pidfd_open(pid)
        for pid in pinned.keys() & find():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pinned[pid], number)
    finally:
        for fd in pinned.values():
            os.close(fd)


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


class TreeWatch:
    """Measures one sandbox's processes from time to time and keeps the peaks."""

    def __init__(self, pid: int, memory_bytes: int) -> None:
        """Take what it has now as what it has before any script runs.

        Raises:
            OSError: it has ended, or cannot be measured.
        """
        row = read_row(pid)
        self._root, self._began = pid, row[BEGAN]
        self.memory_bytes = memory_bytes
        self._base_bytes = int(row[RESIDENT]) * PAGE_BYTES
        self._sample = Sample()
        self._looking = threading.Lock()

    def look(self) -> Sample:
        """Measure now. Any thread may call it.

        Raises:
            OSError: it cannot be measured: the host has no descriptor left.
        """
        with self._looking:
            rows = self._rows()
            if not rows:
                return self._sample
            before, count = self._sample, sum(int(row[THREADS]) for row in rows.values())
            resident = {pid: max(0, int(row[RESIDENT]) * PAGE_BYTES - self._base_bytes) for pid, row in rows.items()}
            memory = sum(resident.values())
            if memory > self.memory_bytes:
                memory = sum(_proportional_bytes(pid, resident[pid]) for pid in rows)
            self._sample = Sample(
                cpu_s=max(before.cpu_s, sum(own_s(pid, row) + waited_for_s(row) for pid, row in rows.items())),
                peak_memory_bytes=max(before.peak_memory_bytes, memory),
                processes=count,
                peak_processes=max(before.peak_processes, count),
            )
            return self._sample

    def _rows(self) -> dict[int, list[bytes]]:
        """Read the row of every process; none when the first has ended.

        Parents are read before their children, so that a child that is waited for meanwhile is missed once, and not
        counted twice.
        """
        rows = {}
        for pid in tree_of(self._root):
            try:
                rows[pid] = read_row(pid)
            except GONE:
                continue
        return rows if self._root in rows and rows[self._root][BEGAN] == self._began else {}


def _proportional_bytes(pid: int, resident_bytes: int) -> int:
    """Return the proportional size of a process: `resident_bytes` if the kernel does not tell, 0 if it has ended."""
    try:
        import psutil  # few scripts come near their limit
    except (ImportError, OSError):  # the host has no descriptor left
        return resident_bytes
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0
    except psutil.AccessDenied:
        return resident_bytes
