"""What idle processes cost in memory, from /proc. Knows process ids, not who they belong to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import anyio
import psutil

SETTLED_S = 0.2
"""No CPU time used for so long: whoever was starting has started."""

PATIENCE_S = 60.0

KINDS = ("AnonPages", "Shmem", "Slab", "PageTables", "KernelStack", "Percpu")
"""Of /proc/meminfo: what processes and the kernel's own objects hold."""


def descendants() -> set[int]:
    """Every process below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def pss_bytes(pids: Iterable[int]) -> int:
    """Memory of these processes, each shared page split among all that share it.

    Shape: smaps_rollup holds "Pss:   123 kB".
    Source: Linux Documentation/filesystems/proc.rst.
    """
    return sum(map(_pss_bytes, pids))


def _pss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


def used_bytes() -> int:
    """Memory that the whole machine has in use, the kernel's own included: page tables, mounts, sockets, tmpfs.

    Summed by kind, without the page cache. What is free is no measure: pages of dead processes return over seconds.
    Source: Linux Documentation/filesystems/proc.rst, meminfo.
    """
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        rows = (line.split() for line in meminfo)
        return sum(int(row[1]) * 1024 for row in rows if row[0].rstrip(":") in KINDS)


def cpu_ticks(pids: Iterable[int]) -> int:
    """CPU time of these processes so far, in clock ticks; of those that have gone meanwhile, none."""
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total


async def wait_settled(before: set[int], count: int) -> set[int]:
    """Wait until at least `count` new descendants exist and all have come to rest; return them."""
    with anyio.fail_after(PATIENCE_S):
        last: tuple[set[int], int] | None = None
        while True:
            pids = descendants() - before
            now = (pids, cpu_ticks(pids))
            if len(pids) >= count and now == last:
                return pids
            last = now
            await anyio.sleep(SETTLED_S)


def raise_descriptor_limit() -> None:
    """Allow as many open files as this process may: every idle sandbox keeps a few."""
    if os.name != "posix":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
