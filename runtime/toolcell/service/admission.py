"""Admit requests: so many at once in total and of each tenant, the others wait in a bounded queue with a deadline.

Tenants take turns: a free place goes to the first of those that wait and may run more, and that tenant goes to the end.
A full queue loses the newest of the longest line, so that one tenant cannot keep the others out of it.
`FairQueue` decides and is plain data; `Admission` waits and wakes.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import anyio

from toolcell.errors import UsageError
from toolcell.service.problems import Problem

LONGEST_RETRY_S: Final = 60
WEIGHT: Final = 0.2
"""Weight of the newest time in the mean of how long places are held."""


class Ticket(Enum):
    """What has become of a request."""

    WAITS = "waits"
    RUNS = "runs"
    REFUSED = "refused"
    """The queue was full, and another tenant's line was shorter."""
    GONE = "gone"
    """It ended, gave up or ran out of time."""


@dataclass(eq=False, slots=True)
class Waiter:
    """A request for a place. `tell` is called when somebody else's call decides about it."""

    tenant: str
    tell: Callable[[], None]
    ticket: Ticket = Ticket.WAITS
    began_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """What one tenant may have at once."""

    places: int
    waiting: int


@dataclass(slots=True)
class _Line:
    """What one tenant has."""

    running: int = 0
    waiting: deque[Waiter] = field(default_factory=deque)


class FairQueue:
    """Places, and lines of tenants before them.

    Invariants: never more than `places` run and `capacity` wait, nor more of one tenant than its share. While a place
    is free, nobody waits who may have it.
    """

    def __init__(self, places: int, capacity: int, share: Callable[[str], Share]) -> None:
        self.places, self.capacity, self._share = places, capacity, share
        self.running = self.waiting = 0
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        """Queues of the tenants that run or wait, in the order of their turns."""
        self._held_s: float | None = None

    def join(self, waiter: Waiter, now: float) -> None:
        """Give a request a place, a position in its line, or a refusal: its `ticket` says which."""
        line, share = self._lines.setdefault(waiter.tenant, _Line()), self._share(waiter.tenant)
        if not line.waiting and self.running < self.places and line.running < share.places:
            self._start(line, waiter, now)
            return
        is_full = self.waiting >= self.capacity
        if len(line.waiting) >= share.waiting or (is_full and not self._make_room(line)):
            waiter.ticket = Ticket.REFUSED
            self._forget(waiter.tenant)
            return
        line.waiting.append(waiter)
        self.waiting += 1

    def leave(self, waiter: Waiter, now: float) -> None:
        """Take back the place or the position of a request. Safe to call twice."""
        was, waiter.ticket = waiter.ticket, Ticket.GONE
        if was is Ticket.RUNS:
            self._lines[waiter.tenant].running -= 1
            self.running -= 1
            held = now - waiter.began_at
            self._held_s = held if self._held_s is None else (1 - WEIGHT) * self._held_s + WEIGHT * held
        elif was is Ticket.WAITS:
            self._lines[waiter.tenant].waiting.remove(waiter)
            self.waiting -= 1
        self._forget(waiter.tenant)
        self._hand_out(now)

    def retry_after_s(self, tenant: str) -> int:
        """Estimate when a place may be free for a tenant: what is before it, and how long places were held lately."""
        line = self._lines.get(tenant, _Line())
        share = max(1, min(self.places, self._share(tenant).places))
        own = (line.running + len(line.waiting)) / share
        all_of_them = (self.running + self.waiting) / self.places
        wait_s = (self._held_s or 0.0) * max(own, all_of_them)
        return max(1, min(LONGEST_RETRY_S, math.ceil(wait_s)))

    def counts(self, tenant: str) -> tuple[int, int]:
        """Return how many requests of a tenant run and wait."""
        line = self._lines.get(tenant, _Line())
        return line.running, len(line.waiting)

    def _start(self, line: _Line, waiter: Waiter, now: float) -> None:
        line.running += 1
        self.running += 1
        waiter.ticket, waiter.began_at = Ticket.RUNS, now

    def _make_room(self, line: _Line) -> bool:
        """Refuse the newest request of the longest line, if that line stays at least as long as `line` becomes."""
        longest = max(self._lines.values(), key=lambda each: len(each.waiting), default=line)
        if len(longest.waiting) <= len(line.waiting) + 1:
            return False
        loser = longest.waiting.pop()
        self.waiting -= 1
        loser.ticket = Ticket.REFUSED
        loser.tell()
        return True

    def _hand_out(self, now: float) -> None:
        """Give free places to those that wait, in turns."""
        while self.running < self.places and self.waiting:
            name = next((name for name, line in self._lines.items() if self._may_start(name, line)), None)
            if name is None:
                return
            line = self._lines[name]
            waiter = line.waiting.popleft()
            self.waiting -= 1
            self._start(line, waiter, now)
            self._lines.move_to_end(name)
            waiter.tell()

    def _may_start(self, name: str, line: _Line) -> bool:
        return bool(line.waiting) and line.running < self._share(name).places

    def _forget(self, name: str) -> None:
        line = self._lines.get(name)
        if line is not None and not line.running and not line.waiting:
            del self._lines[name]


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
        self.queue = FairQueue(places, queue, share)

    @asynccontextmanager
    async def slot(self, tenant: str, deadline: float = math.inf) -> AsyncIterator[None]:
        """Hold a place for the length of the block. `deadline` is a time of `anyio.current_time()`.

        Raises:
            Problem: 503 with Retry-After: the queue is full, or the deadline passed.

        Cancellation: the place, or the position in the queue, is given back.
        """
        decided = anyio.Event()
        waiter = Waiter(tenant, decided.set)
        self.queue.join(waiter, time.monotonic())
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
            self.queue.leave(waiter, time.monotonic())

    def _busy(self, why: str, tenant: str) -> Problem:
        retry = self.queue.retry_after_s(tenant)
        detail = f"{why}; try again in {retry} s"
        return Problem(503, "busy", "The service is busy", detail, headers={"Retry-After": f"{retry}"})
