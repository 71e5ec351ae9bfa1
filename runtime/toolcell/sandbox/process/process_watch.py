"""Measures a sandbox's process tree from outside where no cgroup does it.

Resident memory counts pages that a fork shares with its zygote, so what the tree holds before any script runs is
taken off, and a sum that passes the limit is checked again by proportional size, which counts a shared page once.
"""

from __future__ import annotations

import psutil

from toolcell.sandbox.backend import Sample

SCAN_EVERY = 4
"""Looking for children means looking at every process of the machine; done on every so many measurements."""


class TreeWatch:
    """Peaks of one sandbox's processes, as far as looking now and then can see them."""

    def __init__(self, pid: int, memory_bytes: int) -> None:
        self._root = psutil.Process(pid)
        self.memory_bytes = memory_bytes
        self._base_bytes = self._root.memory_info().rss
        self._children: list[psutil.Process] = []
        self._looks = 0
        self._gone_cpu_s = 0.0
        self._last_cpu_s: dict[int, float] = {}
        self._sample = Sample()

    def look(self, *, everything: bool = False) -> Sample:
        """Measure now; `everything`: look for new children whatever it costs."""
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
        """(resident bytes, CPU seconds, threads), or None when it has ended."""
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
