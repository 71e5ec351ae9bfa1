"""`RunMonitor`: one ticker that has every run under way measured a few times a second."""

from __future__ import annotations

import anyio

from toolcell.run.run import Run

TICK_S = 0.02
"""How often running sandboxes are measured. A run shorter than this is only measured at its end."""

LINGER_TICKS = 50
"""Ticks without a run after which the ticker sleeps: waking it costs a short run more than a tick does."""


class RunMonitor:
    """Calls `Run.check` of every run that was added, until it is discarded."""

    def __init__(self) -> None:
        self._runs: set[Run] = set()
        self._wake: anyio.Event | None = None
        self.discard = self._runs.discard

    def add(self, run: Run) -> None:
        """Begin to check a run."""
        self._runs.add(run)
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    async def tick(self) -> None:
        """Check the runs for ever."""
        idle = 0
        while True:
            await anyio.sleep(TICK_S)
            for run in tuple(self._runs):
                run.check()
            idle = 0 if self._runs else idle + 1
            if idle > LINGER_TICKS:
                self._wake = anyio.Event()
                await self._wake.wait()
                idle = 0
