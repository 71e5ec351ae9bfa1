"""Measure the sandboxes of the profile `container` by their process trees: no cgroup can be had there."""

from __future__ import annotations

import threading
import time

from toolcell_bridge.entry.process_usage import ProcessUsage, held_bytes

FRESH_S = 0.02
"""A measurement of all sandboxes is used again for this long: it reads every process of the container."""


class ContainedUsage:
    """The latest measurement of every sandbox of one backend. Any thread may ask for it."""

    def __init__(self) -> None:
        self.process_usage = ProcessUsage(held_bytes)
        self._supervisors: dict[int, int] = {}
        self._rows: dict[int, tuple[float, int, int]] = {}
        self._measured_at_s = 0.0
        self._lock = threading.Lock()

    def measure(self, number: int, supervisor: int) -> tuple[float, int, int] | None:
        """Return (CPU seconds, bytes, processes and threads) of a sandbox; None when it has ended.

        `supervisor`: the process id of its supervisor; 0 when that has ended.
        """
        with self._lock:
            if not supervisor:
                return None
            is_known = self._supervisors.get(supervisor) == number
            self._supervisors[supervisor] = number
            if not is_known or time.monotonic() - self._measured_at_s >= FRESH_S:
                self._rows = self.process_usage.measure(self._supervisors)
                self._measured_at_s = time.monotonic()
            return self._rows.get(number)

    def forget(self, number: int) -> None:
        """Measure it no more."""
        with self._lock:
            self._supervisors = {pid: each for pid, each in self._supervisors.items() if each != number}
