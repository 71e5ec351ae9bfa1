"""Processor time and page faults of this process and of all below it, those that have ended included."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from benchmarks import memory

TIMES = slice(11, 15)
"""Fields of /proc/PID/stat, counted after the name: utime, stime, cutime and cstime."""
FAULTS = slice(7, 9)
"""minflt and cminflt: faults that no disk was read for, of a process and of those that it has waited for."""

_OWN = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def seconds() -> float:
    """Return the CPU seconds so far. Of other processes, the kernel tells them in clock ticks of 10 ms.

    Source: Linux Documentation/filesystems/proc.rst. What has ended counts once its parent has waited for it.
    """
    own = sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, _OWN))
    return own + _of_descendants(TIMES) / os.sysconf("SC_CLK_TCK")


def faults() -> int:
    """Return the page faults so far, of the kind that copies or maps memory."""
    return sum(resource.getrusage(who).ru_minflt for who in _OWN) + _of_descendants(FAULTS)


def of_ended_children() -> float:
    """Return the CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _of_descendants(fields: slice) -> int:
    total = 0
    for pid in memory.descendants():
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat", "rb") as stat:
            total += sum(map(int, stat.read().rpartition(b")")[2].split()[fields]))
    return total
