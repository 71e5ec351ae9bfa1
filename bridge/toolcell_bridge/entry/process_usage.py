"""Measure what each sandbox of a container uses, from one pass over /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Fields of /proc/<pid>/stat, counted from the third.
_PARENT, _UTIME, _STIME, _CUTIME, _CSTIME = 1, 11, 12, 13, 14
THREADS, BEGAN, RESIDENT = 17, 19, 21


class ProcessUsage:
    """Measures sandboxes by their process trees. Pages that a guest shares with the zygote are not counted."""

    def __init__(self) -> None:
        self._base_bytes: dict[int, int] = {}

    def begin(self, sandbox: int, zygote: int) -> None:
        """Start to count for a sandbox, right after the fork. `zygote`: what it was forked from."""
        self._base_bytes[sandbox] = _held(zygote)

    def forget(self, sandbox: int) -> None:
        """Count no more for a sandbox."""
        self._base_bytes.pop(sandbox, None)

    def measure(self, supervisors: Mapping[int, int]) -> dict[int, tuple[float, int, int]]:
        """Return (CPU seconds, bytes, processes and threads) of each sandbox.

        No process shows the pages of shared memory that it has given up and the kernel keeps, nor what is in sockets.

        `supervisors`: process id of each sandbox's supervisor -> number of the sandbox.
        """
        rows: dict[int, list[bytes]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (row := process_row(int(name))) is not None:
                rows[int(name)] = row
        members: dict[int, list[int]] = {sandbox: [] for sandbox in supervisors.values()}
        owners: dict[int, int] = dict(supervisors)
        for pid in rows:
            owner = _owner(pid, rows, owners)
            if owner and pid not in supervisors:
                members[owner].append(pid)
        return {
            sandbox: self._sum(sandbox, supervisor, rows, members[sandbox])
            for supervisor, sandbox in supervisors.items()
            if supervisor in rows
        }

    def _sum(
        self, sandbox: int, supervisor: int, rows: Mapping[int, list[bytes]], members: list[int]
    ) -> tuple[float, int, int]:
        # The ended processes below the supervisor, and for each living one its own time and that of its ended children.
        cpu_s, memory_bytes, threads = waited_for_s(rows[supervisor]), 0, 0
        for pid in members:
            row = rows[pid]
            cpu_s += own_s(pid, row) + waited_for_s(row)
            threads += int(row[THREADS])
            memory_bytes += max(0, _held(pid) - self._base_bytes.get(sandbox, 0))
        return cpu_s, memory_bytes, threads


def own_s(pid: int, row: list[bytes]) -> float:
    """Return the CPU seconds of a process and of its ended threads.

    The row counts whole ticks, of 10 ms mostly, and scripts that take less would be free. So the clock of the process
    is read where there is one.
    Source: Linux include/linux/posix-timers_types.h, make_process_cpuclock with CPUCLOCK_SCHED.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return (int(row[_UTIME]) + int(row[_STIME])) / TICKS_PER_S


def waited_for_s(row: list[bytes]) -> float:
    """Return the CPU seconds of the ended children that a process has waited for."""
    return (int(row[_CUTIME]) + int(row[_CSTIME])) / TICKS_PER_S


def read_row(pid: int) -> list[bytes]:
    """Read the fields of /proc/<pid>/stat from the third on."""
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return file.read(1024).rpartition(b")")[2].split()


def process_row(pid: int) -> list[bytes] | None:
    """Do the same; None when there is no such process."""
    try:
        return read_row(pid)
    except OSError:
        return None


def children_of(parent: int) -> list[int]:
    """List the processes whose parent is `parent`, from one pass over /proc."""
    rows = ((int(name), process_row(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid, row in rows if row is not None and int(row[1]) == parent]


def descendants(root: int) -> list[int]:
    """List every process below `root`, from one pass over /proc."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (row := process_row(int(name))) is not None:
            below.setdefault(int(row[1]), []).append(int(name))
    found, queue = [], [root]
    while queue:
        children = below.pop(queue.pop(), [])
        found += children
        queue += children
    return found


def _owner(pid: int, rows: Mapping[int, list[bytes]], owners: dict[int, int]) -> int:
    """Return the sandbox that `pid` belongs to, 0 for none. Records the result for each ancestor in `owners`."""
    path = []
    while pid not in owners:
        path.append(pid)
        row = rows.get(pid)
        pid = int(row[_PARENT]) if row is not None else 0
        if pid <= 1 or pid in path:
            break
    owner = owners.get(pid, 0)
    owners.update(dict.fromkeys(path, owner))
    return owner


def _held(pid: int) -> int:
    """Return the memory that belongs to no file on a disk, private, shared and swapped out.

    For a sandbox whose memory no cgroup counts. What two of its processes share is counted for each.
    """
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            rows = dict(row.split(b":", 1) for row in file.read(8192).splitlines())
    except OSError:
        return 0
    return sum(int(rows.get(name, b"0").split()[0]) * 1024 for name in (b"RssAnon", b"RssShmem", b"VmSwap"))
