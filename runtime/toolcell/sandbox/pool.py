"""`Pool`: keeps a few items started ahead of need, hands each out once, and ends what comes back.

`plan` and `quiet_from`, pure functions, decide; the rest carries it out. Knows only how to start and end its items.

`StartClock` gives up starts when none of them has succeeded for a while. Many starts at once share the machine, and
each takes longer the more there are. So the clock begins anew whenever one has succeeded: what it finds is that starts
are stuck, not that they are many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from toolcell.errors import SandboxUnavailable
from toolcell.support import event_loop
from toolcell.support.event_loop import ChangeEvent
from toolcell.support.log import logger_of
from toolcell_bridge.wire.frozen import frozen

logger = logger_of(__name__)

T = TypeVar("T")

TRIES = 3
"""Failed starts in a row after which whoever waits gets the error."""

BACKOFF_S = (0.05, 0.2, 1.0, 5.0)
"""Pause after the n-th failed start in a row; the last one repeats."""

QUIET_S = 0.001
"""So long after an item was given back and nobody has asked for another, nobody is in a hurry."""

LONG_RUN_S = 0.01
"""What was taken so long ago is used for something long. Most is given back within 2 ms."""

FROZEN_S = 0.05
"""However long a burst is, nothing stays frozen for longer."""

CLOSE_S = 10.0
"""How long a closing pool waits for its busy items. Whoever holds one was told to give it back."""


@frozen
class PoolPlan:
    """What to do next: end these many of the oldest idle items, then start so many."""

    expire: int
    start: int


def plan(
    ages_s: list[float],
    busy: int,
    starting: int,
    warm: int,
    cap: int,
    idle_s: float,
    waiting: int,
    *,
    is_quiet: bool = True,
) -> PoolPlan:
    """Choose how many idle items to end and how many to start.

    Invariants: idle + busy + starting never passes `cap`; only items as old as `idle_s` are ended; whoever waits is
    served before spares are made. Unless it is quiet or somebody waits, half of the warm items are enough.
    """
    expire = sum(age >= idle_s for age in ages_s)
    idle = len(ages_s) - expire
    room = cap - busy - starting - idle
    wanted = max(warm if is_quiet or waiting else (warm + 1) // 2, waiting) - idle - starting
    return PoolPlan(expire, max(0, min(wanted, room)))


def quiet_from(taken_at: float, returned_at: float, in_use: int) -> float:
    """Return when used items may be ended and spares made. Both take processor time that a burst of runs needs.

    Measured on two cores, two warm sandboxes: with 10 ms after each take, spares of runs that come every 5 ms were made
    two at a time, and p95 of such a run was 4.0 times p50; with this rule it is 2.7 times. Of bursts of 5, a run takes
    2.0 ms; with used sandboxes ended at once 2.5, killed at once and removed later 2.4.
    """
    return taken_at + LONG_RUN_S if in_use else returned_at + QUIET_S


class Pool(Generic[T]):
    """Single-use items, some of them warm."""

    def __init__(
        self,
        start: Callable[[], Awaitable[T]],
        end: Callable[[T], Coroutine[Any, Any, None]],
        is_alive: Callable[[T], bool],
        freeze: Callable[[T], bool],
        *,
        warm: int,
        cap: int,
        idle_s: float,
        clock: StartClock,
    ) -> None:
        """`freeze` stops all that a used item does, or returns False."""
        self._start, self._end, self._is_alive, self._freeze = start, end, is_alive, freeze
        self._warm, self._cap, self._idle_s, self._clock = warm, cap, idle_s, clock
        self._idle: deque[tuple[float, T]] = deque()
        self._refused: deque[T] = deque()
        """What was idle when the pool began to close."""
        self._returned: deque[T] = deque()
        """What was given back a moment ago."""
        self._frozen: deque[tuple[float, T]] = deque()
        """What was given back, does nothing any more and has to be ended, oldest first."""
        self._busy = self._in_use = 0
        """Handed out and not ended; and of these, not given back."""
        self._starting = 0
        self._waiting = 0
        self._sleeping: deque[anyio.Event] = deque()
        """One for each waiting task that nobody has woken, in the order in which they came."""
        self._failures = 0
        self._problem: Exception | None = None
        """What whoever waits gets."""
        self._last_failure: Exception | None = None
        self._is_over = anyio.Event()
        """Closing, and nobody has or wants an item any more."""
        self._tasks: TaskGroup | None = None
        self._closing = anyio.Event()
        self._changed = ChangeEvent()
        self._is_tended = False
        """A task waits for what is given back. It ends before its pool when it is cancelled from further up."""
        self._is_quiet = True
        """Nothing was taken since all that was to be done was done."""
        self._taken_at = self._returned_at = 0.0
        self._now, self._scope_type = anyio.current_time, anyio.CancelScope
        """Clock and scopes of the event loop once the pool is open: anyio looks for it each time."""

    def __repr__(self) -> str:
        return f"<Pool idle={len(self._idle)} busy={self._busy} starting={self._starting} cap={self._cap}>"

    @property
    def idle(self) -> tuple[T, ...]:
        """Items that are ready, oldest first."""
        return tuple(item for _, item in self._idle)

    @property
    def busy(self) -> int:
        """Items that were handed out and have not ended yet."""
        return self._busy

    @property
    def is_full(self) -> bool:
        """True while every place is busy: whoever asks has to wait until an item is given back."""
        return not self._idle and not self._starting and self._busy >= self._cap

    @property
    def starting(self) -> int:
        """Items that are being started."""
        return self._starting

    async def open(self, tasks: TaskGroup) -> None:
        self._tasks, self._now, self._scope_type = tasks, event_loop.clock(), event_loop.scope_type()
        tasks.start_soon(self._tend)
        self._fill()

    async def acquire(self) -> T:
        """Take an item that nobody had before. Give it back with `release` exactly once.

        While all places are busy this waits until one is free, however long that takes.

        Raises:
            SandboxUnavailable: none could be started, or not within the clock's time.
            Exception: whatever else the start raised.
            Cancellation: nothing is held.
        """
        if (item := self._take()) is not None:
            return item
        self._waiting += 1
        self._problem = None
        if self._busy + self._starting >= self._cap:
            self._end_frozen()
        try:
            return await self._wait_for_item(self._now())
        finally:
            self._waiting -= 1
            if self._idle:  # this task was cancelled when it had been woken, or there is one for another, too
                self._wake_first()
            self._note_end()

    async def _wait_for_item(self, since: float) -> T:
        while not self._closing.is_set():
            self._fill()
            left_s = self._clock.start_s if self._busy >= self._cap else self._clock.left_s(since)
            with anyio.move_on_after(max(0.0, left_s)):
                await self._sleep()
            if (item := self._take()) is not None:
                return item
            if self._problem is not None:
                raise self._problem
            if self._busy < self._cap and self._clock.left_s(since) <= 0:
                raise self._clock.overdue(self._last_failure or "whatever starts them is stuck")
        raise SandboxUnavailable("the pool is closed")

    async def _sleep(self) -> None:
        """Wait until there is an item, or a reason why there will be none."""
        was_woken = False
        while not (self._idle or self._problem or self._closing.is_set()):
            turn = anyio.Event()
            if was_woken:  # it was woken for an item that somebody else has taken
                self._sleeping.appendleft(turn)
                self._fill()
            else:
                self._sleeping.append(turn)
            was_woken = True
            try:
                await turn.wait()
            finally:
                if not turn.is_set():
                    self._sleeping.remove(turn)

    def _take(self) -> T | None:
        while self._idle:
            _, item = self._idle.popleft()
            if self._is_alive(item):
                self._busy += 1
                self._in_use += 1
                self._taken_at, self._is_quiet = self._now(), False
                return item
            self._spawn(self._end_quietly, item)
        return None

    def release(self, item: T) -> bool:
        """Give back an item; it is ended, never reused. Returns at once: its run is waited for, and this is not.

        Returns False when the pool was closed meanwhile: then whoever has the item ends it.
        """
        self._in_use -= 1
        if self._tasks is None:
            self._busy -= 1
            return False
        self._returned_at = self._now()
        self._returned.append(item)
        if self._is_tended:
            self._changed.notify()
        else:
            self._retire_returned()
        return True

    def tend(self) -> None:
        """Look whether spares are to be made: something that was taken is used for long. Nobody else says so."""
        if not self._is_quiet:
            self._changed.notify()

    async def _tend(self) -> None:
        """Freeze or end what is given back. When it is quiet, end what was frozen and make spares."""
        self._is_tended = True
        try:
            while not self._closing.is_set():
                if self._returned:
                    self._retire_returned()
                left_s = self._left_s()
                if left_s <= 0:
                    self._is_quiet = True
                    self._end_frozen()
                    self._fill()
                    left_s = self._left_s()
                await self._changed.wait(left_s)
        finally:
            self._is_tended = False
            self._retire_returned()
            self._end_frozen()

    def _left_s(self) -> float:
        """Return how long to wait before used items are ended and spares made; when it is quiet, old items replaced."""
        if self._is_quiet:
            return self._idle[0][0] + self._idle_s - self._now() if self._idle else self._idle_s
        at = quiet_from(self._taken_at, self._returned_at, self._in_use)
        return (min(at, self._frozen[0][0] + FROZEN_S) if self._frozen else at) - self._now()

    def _retire_returned(self) -> None:
        is_hurried = self._is_tended and not self._waiting and not self._closing.is_set()
        while self._returned:
            item = self._returned.popleft()
            if is_hurried and self._freeze(item):
                self._is_quiet = False
                self._frozen.append((self._now(), item))
            else:
                self._spawn(self._end_busy, item)
        self._fill()

    def _end_frozen(self) -> None:
        while self._frozen:
            self._spawn(self._end_busy, self._frozen.popleft()[1])

    async def _end_busy(self, item: T) -> None:
        with self._scope_type(shield=True):
            try:
                await self._end_logged(item)
            finally:
                if self._busy >= self._cap:
                    self._clock.note_progress()
                self._busy -= 1
                self._fill()
                self._note_end()

    async def _end_quietly(self, item: T) -> None:
        with anyio.CancelScope(shield=True):
            await self._end_logged(item)

    async def _end_logged(self, item: T) -> None:
        """End an item. What goes wrong there, for want of memory for example, must not take the others with it."""
        try:
            await self._end(item)
        except Exception:
            logger.exception("%r could not be ended; the backend removes what is left of it when it closes", item)

    def _spawn(self, function: Callable[[T], Coroutine[Any, Any, None]], item: T) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(function, item)

    def _fill(self) -> None:
        if self._closing.is_set() or self._tasks is None:
            return
        now = self._now()
        todo = plan(
            [now - since for since, _ in self._idle],
            self._busy,
            self._starting,
            self._warm,
            self._cap,
            self._idle_s,
            self._waiting,
            is_quiet=self._is_quiet,
        )
        for _ in range(todo.expire):
            self._spawn(self._end_quietly, self._idle.popleft()[1])
        for _ in range(todo.start):
            self._starting += 1
            self._tasks.start_soon(self._start_one)

    async def _start_one(self) -> None:
        item: T | None = None
        try:
            if self._failures:
                await anyio.sleep(min(BACKOFF_S[min(self._failures, len(BACKOFF_S)) - 1], self._clock.start_s / 2))
            item = await self._clock.run(self._start)
        except Exception as exc:
            self._failures += 1
            self._last_failure = exc
            # Once or twice may be a parent that died under its children; the next start gets a new one.
            if self._failures >= TRIES or not isinstance(exc, SandboxUnavailable):
                self._problem = exc
        finally:
            self._starting -= 1
        if item is not None:
            self._failures = 0
            self._last_failure = None
            if self._closing.is_set():
                await self._end_quietly(item)
                return
            self._idle.append((self._now(), item))
            self._wake_first()
        elif self._problem is not None:
            self._wake_all()
        if item is not None or self._waiting:
            self._fill()

    def _wake_first(self) -> None:
        """Wake whoever has waited longest: waking everybody for each item would cost more than the items do."""
        if self._sleeping:
            self._sleeping.popleft().set()

    def _wake_all(self) -> None:
        while self._sleeping:
            self._sleeping.popleft().set()

    def _note_end(self) -> None:
        if self._closing.is_set() and not self._busy and not self._waiting:
            self._is_over.set()

    def refuse(self) -> None:
        """Hand out nothing more: the first step of `close`. Whoever waits gets an error at once."""
        self._closing.set()
        while self._idle:
            self._refused.append(self._idle.popleft()[1])
        self._changed.notify()
        self._wake_all()

    async def close(self) -> None:
        """End every idle item, and wait for the end of the busy ones, which their holders have to give back."""
        self.refuse()
        while self._refused:
            await self._end_quietly(self._refused.popleft())
        self._note_end()
        with anyio.move_on_after(CLOSE_S):
            await self._is_over.wait()
        self._tasks = None


STEP = 0.01
"""Share of `start_s`: deadlines are moved no more often than this, because each is a timer of the event loop."""


class StartClock:
    """Times the starts of one runtime."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self._scopes: set[anyio.CancelScope] = set()
        self._progress_at = self._moved_at = 0.0
        self._now, self._scope_type = anyio.current_time, anyio.CancelScope

    async def run(self, start: Callable[[], Awaitable[T]]) -> T:
        """Start something.

        Raises:
            SandboxUnavailable: it did not start, and nothing else did, within `start_s`.
        """
        if self._scope_type is anyio.CancelScope:
            self._scope_type, self._now = event_loop.scope_type(), event_loop.clock()
        with self._scope_type(deadline=self._now() + self.start_s) as scope:
            self._scopes.add(scope)
            try:
                started = await start()
            finally:
                self._scopes.discard(scope)
            self.note_progress()
            return started
        raise self.overdue("the machine is too slow, or whatever starts sandboxes is stuck")

    def note_progress(self) -> None:
        """Begin anew: something has started, or a place has become free for a start."""
        self._progress_at = now = self._now()
        if now - self._moved_at > STEP * self.start_s:
            self._moved_at = now
            for scope in self._scopes:
                scope.deadline = now + self.start_s

    def left_s(self, since: float) -> float:
        """How long somebody who waits since then still waits for a start."""
        return max(since, self._progress_at) + self.start_s - self._now()

    def overdue(self, why: object) -> SandboxUnavailable:
        """Return the error for whoever has waited long enough."""
        return SandboxUnavailable(f"no sandbox came up within {self.start_s:g} s (PoolConfig.start_s): {why}")
