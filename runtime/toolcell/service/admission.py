"""Admit requests: so many at once in total and of each tenant, the others wait in a bounded queue with a deadline.

Tenants take turns: a free place goes to the first of those that wait and may run more, and that tenant goes to the end.
A full queue loses the newest of the longest line, so that one tenant cannot keep the others out of it.
Large data takes processor time of the one interpreter that serves all. A tenant that has spent its allowance of it
waits while others, who have not, are served.
`FairQueue` decides and is plain data; `Admission` waits and wakes.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeVar
from weakref import WeakValueDictionary

import anyio
from starlette.requests import Request

from toolcell.errors import UsageError
from toolcell.service.problems import Problem
from toolcell.support import daemon_threads
from toolcell.support.http_protocol import CONNECTION
from toolcell.support.token_bucket import TokenBucket

T = TypeVar("T")

LONGEST_RETRY_S: Final = 60
WEIGHT: Final = 0.2
"""Weight of the newest time in the mean of how long places are held."""

# While other tenants are served, the large data of one is worked on for so long, and then for this share of the time.
LARGE_BURST_S: Final = 5.0
LARGE_SHARE: Final = 0.04
QUIET_S: Final = 5.0  # for which a tenant counts as served after its latest request began or ended
LOOK_S: Final = 0.5  # between two looks whether time has brought a turn


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
    was_served: bool = False
    """It had a place before, while its body was read: it comes before those of its tenant that had none."""
    ignores_debt: bool = False
    """What its tenant's large data took does not make it wait."""
    ticket: Ticket = Ticket.WAITS
    began_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """What one tenant may have at once."""

    places: int
    waiting: int
    queue_s: float = math.inf  # that a request waits at most


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
        # What each tenant's large data took that is not forgiven yet; when its latest request began or ended.
        self.large, self._charging = dict[str, TokenBucket](), threading.Lock()
        self._seen = OrderedDict[str, float]()

    def join(self, waiter: Waiter, now: float) -> None:
        """Give a request a place, a position in its line, or a refusal: its `ticket` says which."""
        line, share = self._lines.setdefault(waiter.tenant, _Line()), self._share(waiter.tenant)
        must_pay = not waiter.ignores_debt and self.has_overspent(waiter.tenant, now)
        may_run = not must_pay and (waiter.was_served or not line.waiting)
        if may_run and line.running < share.places and self.running < self.places:
            self._start(line, waiter, now)
            return
        is_full = self.waiting >= self.capacity
        if len(line.waiting) >= share.waiting or (is_full and not self._make_room(line)):
            waiter.ticket = Ticket.REFUSED
            self._forget(waiter.tenant)
            return
        line.waiting.insert(0 if waiter.was_served else len(line.waiting), waiter)
        self.waiting += 1

    def leave(self, waiter: Waiter, now: float) -> None:
        """Take back the place or the position of a request. Safe to call twice."""
        was, waiter.ticket = waiter.ticket, Ticket.GONE
        if was is Ticket.RUNS:
            self._note_served(waiter.tenant, now)
            self._lines[waiter.tenant].running -= 1
            self.running -= 1
            held = now - waiter.began_at
            self._held_s = held if self._held_s is None else (1 - WEIGHT) * self._held_s + WEIGHT * held
        elif was is Ticket.WAITS:
            self._lines[waiter.tenant].waiting.remove(waiter)
            self.waiting -= 1
        self._forget(waiter.tenant)
        self.hand_out(now)

    def retry_after_s(self, tenant: str, now: float) -> int:
        """Estimate when a place may be free for a tenant: what is before it, and how long places were held lately."""
        line = self._lines.get(tenant, _Line())
        share = max(1, min(self.places, self._share(tenant).places))
        own = (line.running + len(line.waiting)) / share
        all_of_them = (self.running + self.waiting) / self.places
        wait_s = max((self._held_s or 0.0) * max(own, all_of_them), self._owes_s(tenant, now))
        return max(1, min(LONGEST_RETRY_S, math.ceil(wait_s)))

    def counts(self, tenant: str) -> tuple[int, int]:
        """Return how many requests of a tenant run and wait."""
        line = self._lines.get(tenant, _Line())
        return line.running, len(line.waiting)

    def _start(self, line: _Line, waiter: Waiter, now: float) -> None:
        line.running += 1
        self.running += 1
        waiter.ticket, waiter.began_at = Ticket.RUNS, now
        self._note_served(waiter.tenant, now)

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

    def hand_out(self, now: float) -> None:
        """Give free places to those that wait, in turns."""
        while self.running < self.places and self.waiting:
            may_owe = not self._others_are_served(now)
            for name, line in self._lines.items():
                if (
                    line.waiting
                    and line.running < self._share(name).places
                    and (may_owe or line.waiting[0].ignores_debt or not self._owes_s(name, now))
                ):
                    break
            else:
                return
            waiter = line.waiting.popleft()
            self.waiting -= 1
            self._start(line, waiter, now)
            self._lines.move_to_end(name)
            waiter.tell()

    def charge(self, name: str, cpu_s: float, now: float) -> None:
        """Note what a tenant's large data took; any thread may. Who owes nothing any more is forgotten."""
        with self._charging:
            if name not in self.large:
                self.large = {each: bucket for each, bucket in self.large.items() if bucket.wait_s(now, LARGE_BURST_S)}
                self.large[name] = TokenBucket(1 / LARGE_SHARE, LARGE_BURST_S)
            self.large[name].take(now, cpu_s)

    def has_overspent(self, name: str, now: float) -> bool:
        """Return whether a tenant waits because of its large data."""
        return self._owes_s(name, now) > 0 and self._others_are_served(now)

    def _owes_s(self, name: str, now: float) -> float:
        bucket = self.large.get(name)
        return 0.0 if bucket is None else bucket.wait_s(now, 0)

    def _others_are_served(self, now: float) -> bool:
        """Return whether a tenant that owes nothing is served, or was just now: the others wait for it, not for each
        other."""
        return any(
            (now - at < QUIET_S or self.counts(name)[0]) and not self._owes_s(name, now)
            for name, at in self._seen.items()
        )

    def _note_served(self, name: str, now: float) -> None:
        self._seen[name] = now
        self._seen.move_to_end(name)
        while (oldest := next(iter(self._seen))) not in self._lines and now - self._seen[oldest] >= QUIET_S:
            del self._seen[oldest]

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
        self.queue, self._share = FairQueue(places, queue, share), share
        self._is_looking = False
        self._accounts = WeakValueDictionary[str, daemon_threads.Account]()

    def account(self, tenant: str) -> daemon_threads.Account:
        """Return what charges large data to a tenant, and lets others in between the pieces of it."""
        if (found := self._accounts.get(tenant)) is None:
            charge = lambda cpu_s: self.queue.charge(tenant, cpu_s, time.monotonic())  # noqa: E731
            found = self._accounts[tenant] = daemon_threads.Account(charge, anyio.Lock())
        return found

    def is_free(self, tenant: str) -> bool:
        """Return whether a tenant need not wait because of its large data."""
        return not self.queue.has_overspent(tenant, time.monotonic())

    def deadline(self, tenant: str) -> float:
        """Return until when a request that comes now waits."""
        return anyio.current_time() + self._share(tenant).queue_s

    async def wait_until_free(self, tenant: str) -> None:
        """Wait until a tenant's large data may be worked on.

        Raises:
            Problem: 503 with Retry-After: it took too long.
        """
        with anyio.CancelScope(deadline=self.deadline(tenant)):
            while not self.is_free(tenant):  # noqa: ASYNC110 - time ends it
                await anyio.sleep(LOOK_S)
        if not self.is_free(tenant):
            raise self._busy("its turn did not come before the deadline", tenant)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Do the same before the block, which needs no place."""
        await self.wait_until_free(tenant)
        yield

    @asynccontextmanager
    async def slot(self, tenant: str, until: float = math.inf, *, ignores_debt: bool = False) -> AsyncIterator[None]:
        """Hold a place for the length of the block.

        `until`: the deadline of a request that had a place before, while its body was read; it ignores debt too.
        `ignores_debt`: what its tenant's large data took does not make it wait.

        Raises:
            Problem: 503 with Retry-After: the queue is full, or it took too long.

        Cancellation: the place, or the position in the queue, is given back.
        """
        decided = anyio.Event()
        was_served = until < math.inf
        waiter = Waiter(tenant, decided.set, was_served, ignores_debt or was_served)
        self.queue.join(waiter, time.monotonic())
        try:
            if waiter.ticket is Ticket.WAITS:
                if not self._is_looking:
                    self._look()
                with anyio.CancelScope(deadline=min(until, self.deadline(tenant))):
                    await decided.wait()
            if waiter.ticket is Ticket.REFUSED:
                raise self._busy("the queue is full", tenant)
            if waiter.ticket is Ticket.WAITS:
                raise self._busy("no place became free before the deadline", tenant)
            yield
        finally:
            self.queue.leave(waiter, time.monotonic())

    def _look(self) -> None:
        """Look for all that wait whether time has brought a turn, now and again as long as anybody waits."""
        self._is_looking = False
        self.queue.hand_out(time.monotonic())
        if self.queue.waiting:
            asyncio.get_running_loop().call_later(LOOK_S, self._look)
            self._is_looking = True

    def _busy(self, why: str, tenant: str) -> Problem:
        now = time.monotonic()
        if self.queue.has_overspent(tenant, now):
            share = f"{LARGE_BURST_S:g} s of processor time, and {LARGE_SHARE:.0%} of the time after that"
            why += f" (while others are served, the large data of one tenant may take {share})"
        retry = self.queue.retry_after_s(tenant, now)
        detail = f"{why}; try again in {retry} s"
        return Problem(503, "busy", "The service is busy", detail, headers={"Retry-After": f"{retry}"})


@asynccontextmanager
async def place(http: Request, slot: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
    """Hold a place for the length of the block. It waits for it as long as the client does.

    Raises:
        Problem: the client has gone (503); or as from `slot`.
    """
    scope = anyio.CancelScope()

    async def wait() -> None:
        with scope:
            await stack.enter_async_context(slot)
            return
        raise Problem(503, "cancelled", "The request was cancelled", "its client has gone")

    async with AsyncExitStack() as stack:
        await unless_gone(http, scope.cancel, wait)
        yield


async def unless_gone(http: Request, when_gone: Callable[[], None], work: Callable[[], Awaitable[T]]) -> T:
    """Do some work; when the client goes meanwhile, call `when_gone`."""
    connection = http.scope.get(CONNECTION)
    if connection is None:
        return await _watched(http, when_gone, work)
    connection.on_gone = when_gone
    if connection.transport.is_closing():
        when_gone()
    try:
        return await work()
    finally:
        connection.on_gone = None


async def _watched(http: Request, when_gone: Callable[[], None], work: Callable[[], Awaitable[T]]) -> T:
    """Do the work where another ASGI server tells of clients that go: only a task can wait for that."""

    async def watch() -> None:
        await wait_gone(http)
        when_gone()

    watching = asyncio.create_task(watch())
    try:
        return await work()
    finally:
        watching.cancel()


async def wait_gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
