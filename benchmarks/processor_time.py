"""Processor time of this process and of all below it, those that have ended included."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from benchmarks import memory

FIRST, LAST = 11, 15
"""Fields of /proc/PID/stat, counted after the name: utime, stime, cutime and cstime."""


def seconds() -> float:
    """Return the CPU seconds so far. Of other processes, the kernel tells them in clock ticks of 10 ms.

    Source: Linux Documentation/filesystems/proc.rst. What has ended counts once its parent has waited for it.
    """
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = 0
    for pid in memory.descendants():
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat", "rb") as stat:
            ticks += sum(map(int, stat.read().rpartition(b")")[2].split()[FIRST:LAST]))
    return sum(each.ru_utime + each.ru_stime for each in own) + ticks / os.sysconf("SC_CLK_TCK")
