"""Measure a sandbox's process tree from outside, where there is no cgroup.

Resident memory includes pages that a fork shares with its zygote, so the memory before any script runs is subtracted.
A sum above the limit is checked again by proportional size, which counts a shared page once.

However short the life of a process: the kernel adds its CPU time to that of whoever waits for it, and until then it can
be measured. Where SIGCHLD is ignored nobody has to wait and the time is lost, so scripts may not change that signal.
"""

from __future__ import annotations

import threading

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
        self._sample = Sample()
        self._looking = threading.Lock()

    def look(self, *, everything: bool = False) -> Sample:
        """Measure now. `everything`: search for new children this time. Any thread may call it."""
        with self._looking:
            return self._look(everything)

    def _look(self, everything: bool) -> Sample:
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
            cpu_s=max(before.cpu_s, sum(cpu_s for _, cpu_s, _ in seen)),
            peak_memory_bytes=max(before.peak_memory_bytes, memory),
            processes=count,
            peak_processes=max(before.peak_processes, count),
        )
        return self._sample

    def _measure(self, process: psutil.Process) -> tuple[int, float, int] | None:
        """Return (resident bytes, CPU seconds, threads); None when it has ended and was waited for.

        The CPU seconds include those of ended children that were waited for. Parents are measured before their
        children, so that a child that is waited for meanwhile is missed once, and not counted twice.
        """
        try:
            with process.oneshot():
                times = process.cpu_times()
                cpu_s = times.user + times.system + times.children_user + times.children_system
                return process.memory_info().rss, cpu_s, process.num_threads()
        except psutil.Error:
            return None


def _proportional(process: psutil.Process) -> int:
    try:
        size: int = process.memory_full_info().pss
    except psutil.Error:
        return 0
    return size
