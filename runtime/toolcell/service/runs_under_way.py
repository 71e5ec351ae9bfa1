"""Runs under way: how many there are, how each is cancelled, and how the service waits for them at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from toolcell.service.problems import Problem
from toolcell.support.event_loop import ChangeEvent

RETRY_S = 5
"""What a client should wait while this service ends and another one starts."""


@dataclass(slots=True, eq=False)
class RunUnderWay:
    """One request that runs something in a tenant."""

    tenant: str
    subject: str
    started: float
    """On the event loop's clock."""
    cancel: anyio.Event = field(default_factory=anyio.Event)
    """Set when the run is to end."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Cancelled when it has not ended by then."""
    end_s: float = 0.0
    """What it may take to end."""
    refusal: Problem | None = None
    """Why it ends: whoever asked for it may not any more, and is told this in the place of what it did."""
    _timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Tell it to end, and cancel it if it does not."""
        self.cancel.set()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.end_s, self.scope.cancel)

    def refuse(self, problem: Problem) -> None:
        """End it: whoever asked for it may not any more."""
        self.refusal = problem
        self.stop()

    def check_allowed(self) -> None:
        """Raise why whoever asked for it may not any more, if that is so.

        Raises:
            Problem: says why (401, 403).
        """
        if self.refusal is not None:
            raise self.refusal

    def over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class RunsUnderWay:
    """What runs now. While it drains, nothing new begins."""

    def __init__(self) -> None:
        self._runs: set[RunUnderWay] = set()
        self._changed = ChangeEvent()
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[RunUnderWay]:
        return iter(list(self._runs))

    @contextmanager
    def one(self, tenant: str, subject: str) -> Iterator[RunUnderWay]:
        """Count a run until the end of the block.

        Raises:
            Problem: the service is about to end (503).
        """
        if self.is_draining:
            detail = "runs under way are finished, and no new ones begin"
            raise Problem(503, "draining", "The service is about to end", detail, headers={"Retry-After": str(RETRY_S)})
        run = RunUnderWay(tenant, subject, anyio.current_time())
        self._runs.add(run)
        try:
            yield run
        finally:
            run.over()
            self._runs.discard(run)
            self._changed.notify()

    async def wait_for_none(self) -> None:
        while self._runs:
            await self._changed.wait()
