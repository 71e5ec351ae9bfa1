"""Admit requests: so many at once in total and of each tenant, the others wait in a bounded queue with a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from toolcell.errors import UsageError
from toolcell.service.fair_queue import FairQueue, Share, Ticket, Waiter
from toolcell.service.problems import Problem


class Admission:
    """Places for requests. `share` says how much of them and of the queue a tenant may have."""

    def __init__(
        self,
        places: int,
        queue: int,
        share: Callable[[str], Share],
    ) -> None:
        if places < 1 or queue < 0:
            raise UsageError(f"admission needs at least one place and a queue of 0 or more, not {places} and {queue}")
        self._queue = FairQueue(places, queue, share)
        self._is_closed = False

    @property
    def running(self) -> int:
        """How many places are taken."""
        return self._queue.running

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._queue.waiting

    def counts(self, tenant: str) -> tuple[int, int]:
        """Return how many requests of a tenant run and wait."""
        return self._queue.counts(tenant)

    def close(self) -> None:
        """Refuse what comes from now on. What waits goes on waiting, until its deadline."""
        self._is_closed = True

    @asynccontextmanager
    async def slot(self, tenant: str, deadline: float = math.inf) -> AsyncIterator[None]:
        """Hold a place for the length of the block. `deadline` is a time of `anyio.current_time()`.

        Raises:
            Problem: 503 with Retry-After: the queue is full, the deadline passed, or the service is closing.

        Cancellation: the place, or the position in the queue, is given back.
        """
        if self._is_closed:
            raise self._busy("the service is closing", tenant)
        decided = anyio.Event()
        waiter = Waiter(tenant, decided.set)
        self._queue.join(waiter, time.monotonic())
        try:
            if waiter.ticket is Ticket.WAITS:
                with anyio.move_on_after(deadline - anyio.current_time()):
                    await decided.wait()
            if waiter.ticket is Ticket.REFUSED:
                raise self._busy("the queue is full", tenant)
            if waiter.ticket is Ticket.WAITS:
                raise self._busy("no place became free before the deadline", tenant)
            yield
        finally:
            self._queue.leave(waiter, time.monotonic())

    def _busy(self, why: str, tenant: str) -> Problem:
        retry = self._queue.retry_after_s(tenant)
        detail = f"{why}; try again in {retry} s"
        return Problem(503, "busy", "The service is busy", detail, headers={"Retry-After": f"{retry}"})
