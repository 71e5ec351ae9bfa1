"""Memory of idle processes, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import anyio
import psutil

SETTLED_S = 0.2
"""Processes that use no CPU time for so long have finished starting."""

MAX_WAIT_S = 60.0

KINDS = ("AnonPages", "Shmem", "Slab", "PageTables", "KernelStack", "Percpu")
"""Rows of /proc/meminfo: the memory of processes and of the kernel's own objects."""


def descendants() -> set[int]:
    """Return the ids of all processes below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def pss_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes. A page that several processes share is divided among them.

    Shape: smaps_rollup holds "Pss:   123 kB".
    Source: Linux Documentation/filesystems/proc.rst.
    """
    return sum(map(_pss_bytes, pids))


def _pss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


def used_bytes() -> int:
    """Return the memory in use on the whole machine, the kernel's included: page tables, mounts, sockets, tmpfs.

    The sum leaves the page cache out. Free memory is not a measure: the pages of dead processes are freed over seconds.
    Source: Linux Documentation/filesystems/proc.rst, meminfo.
    """
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        rows = (line.split() for line in meminfo)
        return sum(int(row[1]) * 1024 for row in rows if row[0].rstrip(":") in KINDS)


def cpu_ticks(pids: Iterable[int]) -> int:
    """Return the CPU time of these processes so far, in clock ticks. Processes that have exited count as none."""
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total


async def wait_settled(before: set[int], count: int) -> set[int]:
    """Wait until at least `count` new descendants exist and all are idle. Return their ids."""
    with anyio.fail_after(MAX_WAIT_S):
        last: tuple[set[int], int] | None = None
        while True:
            pids = descendants() - before
            now = (pids, cpu_ticks(pids))
            if len(pids) >= count and now == last:
                return pids
            last = now
            await anyio.sleep(SETTLED_S)


def raise_descriptor_limit() -> None:
    """Raise the limit of open files as far as allowed. Every idle sandbox holds a few."""
    if os.name != "posix":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
