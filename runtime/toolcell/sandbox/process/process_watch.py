"""Measure a sandbox's process tree from outside, where there is no cgroup.

Resident memory includes pages that a fork shares with its zygote, so the memory before any script runs is subtracted.
A sum above the limit is checked again by proportional size, which counts a shared page once.
"""

from __future__ import annotations

import psutil

from toolcell.sandbox.backend import Sample

SCAN_EVERY = 4
"""Search for children at every so many measurements: a search reads every process of the machine."""


class TreeWatch:
    """Measures one sandbox's processes from time to time and keeps the peaks."""

    def __init__(self, pid: int, memory_bytes: int) -> None:
        self._root = psutil.Process(pid)
        self.memory_bytes = memory_bytes
        self._base_bytes = self._root.memory_info().rss
        self._children: list[psutil.Process] = []
        self._looks = 0
        self._last_cpu_s: dict[int, float] = {}
        self._sample = Sample()

    def look(self, *, everything: bool = False) -> Sample:
        """Measure now. `everything`: search for new children this time."""
        try:
            if everything or self._looks % SCAN_EVERY == 0:
                self._children = self._root.children(recursive=True)
            self._looks += 1
            processes = [self._root, *self._children]
            seen = [each for each in map(self._measure, processes) if each is not None]
        except psutil.NoSuchProcess:
            return self._sample
        before = self._sample
        count = sum(threads for _, _, threads in seen)
        memory = sum(max(0, resident - self._base_bytes) for resident, _, _ in seen)
        if memory > self.memory_bytes:
            memory = sum(map(_proportional, processes))
        self._sample = Sample(
            cpu_s=max(before.cpu_s, sum(self._last_cpu_s.values())),
            peak_memory_bytes=max(before.peak_memory_bytes, memory),
            processes=count,
            peak_processes=max(before.peak_processes, count),
        )
        return self._sample

    def _measure(self, process: psutil.Process) -> tuple[int, float, int] | None:
        """Return (resident bytes, CPU seconds, threads); None when it has ended."""
        try:
            with process.oneshot():
                times = process.cpu_times()
                self._last_cpu_s[process.pid] = cpu_s = times.user + times.system
                return process.memory_info().rss, cpu_s, process.num_threads()
        except psutil.Error:
            return None


def _proportional(process: psutil.Process) -> int:
    try:
        size: int = process.memory_full_info().pss
    except psutil.Error:
        return 0
    return size
