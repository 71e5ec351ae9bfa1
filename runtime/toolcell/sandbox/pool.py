"""`Pool`: keeps a few items started ahead of need, hands each out once, and ends what comes back.

`plan`, a pure function, decides; the rest carries it out. Knows only how to start and end its items.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from toolcell.errors import SandboxUnavailable

T = TypeVar("T")

TRIES = 3
"""Failed starts in a row after which whoever waits gets the error."""

BACKOFF_S = (0.05, 0.2, 1.0, 5.0)
"""Pause after the n-th failed start in a row; the last one repeats."""

QUIET_S = 0.01
"""Items taken in quicker succession than this are a burst. Meanwhile spares are not made, and what was used is frozen
instead of ended: both take processor time that the runs of the burst need. Spares are made all the same when half of
the warm items are gone, and both are done when somebody waits."""

FROZEN_S = 0.05
"""However long a burst is, nothing stays frozen for longer."""

LINGER_S = 0.5
"""How long the task that notices the end of bursts stays after the last one: starting it costs a short run much."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What to do next: end these many of the oldest idle items, then start so many."""

    expire: int
    start: int


def plan(ages_s: list[float], busy: int, starting: int, warm: int, cap: int, idle_s: float, waiting: int) -> PoolPlan:
    """Choose how many idle items to end and how many to start.

    Invariants: idle + busy + starting never passes `cap`; only items older than `idle_s` are ended; whoever waits is
    served before spares are made.
    """
    expire = sum(age > idle_s for age in ages_s)
    idle = len(ages_s) - expire
    room = cap - busy - starting - idle
    wanted = max(warm, waiting) - idle - starting
    return PoolPlan(expire, max(0, min(wanted, room)))


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
    ) -> None:
        self._start, self._end, self._is_alive, self._freeze = start, end, is_alive, freeze
        self._warm, self._cap, self._idle_s = warm, cap, idle_s
        self._idle: deque[tuple[float, T]] = deque()
        self._busy = 0
        self._starting = 0
        self._waiting = 0
        self._failures = 0
        self._problem: SandboxUnavailable | None = None
        self._changed = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._closing = anyio.Event()
        self._returned: deque[T] = deque()
        self._has_returned = anyio.Event()
        self._is_attended = False
        """A task waits for what is given back. It ends before its pool when it is cancelled from further up."""
        self._frozen: deque[tuple[float, T]] = deque()
        self._quiet_from = 0.0
        self._is_burst = False
        self._is_watched = False
        """A task waits for the end of the burst."""

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
    def starting(self) -> int:
        """Items that are being started."""
        return self._starting

    async def open(self, tasks: TaskGroup) -> None:
        """Begin to keep items warm, in `tasks`."""
        self._tasks = tasks
        tasks.start_soon(self._attend)
        self._fill()

    async def acquire(self) -> T:
        """Take an item that nobody had before. Give it back with `release` exactly once.

        Raises:
            SandboxUnavailable: none could be started.
            Cancellation: nothing is held.
        """
        item = self._take()
        if item is not None:
            self._fill_when_quiet()
            return item
        self._waiting += 1
        self._problem = None
        if self._busy + self._starting >= self._cap:
            self._retire_frozen()
        try:
            while not self._closing.is_set():
                self._fill()
                await self._changed.wait()
                item = self._take()
                if item is not None:
                    return item
                if self._problem is not None:
                    raise self._problem
            raise SandboxUnavailable("the pool is closed")
        finally:
            self._waiting -= 1

    def _take(self) -> T | None:
        while self._idle:
            _, item = self._idle.popleft()
            if self._is_alive(item):
                self._busy += 1
                return item
            self._spawn(self._end_quietly, item)
        return None

    def release(self, item: T) -> None:
        """Give back an item; it is ended, never reused. Returns at once: its run is waited for, and this is not."""
        self._returned.append(item)
        if self._is_attended:
            self._has_returned.set()
        else:
            self._retire_returned()

    async def _attend(self) -> None:
        self._is_attended = True
        try:
            while not self._closing.is_set():
                await self._has_returned.wait()
                self._has_returned = anyio.Event()
                self._retire_returned()
        finally:
            self._is_attended = False
            self._retire_returned()

    def _retire_returned(self) -> None:
        while self._returned:
            item = self._returned.popleft()
            if self._waiting == 0 and not self._closing.is_set() and self._freeze(item):
                self._frozen.append((anyio.current_time(), item))
                self._fill_when_few()
            else:
                self._spawn(self._end_busy, item)

    async def _end_busy(self, item: T) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._end(item)
            finally:
                self._busy -= 1
                self._fill_when_few()

    def _retire_frozen(self) -> None:
        while self._frozen:
            self._spawn(self._end_busy, self._frozen.popleft()[1])

    async def _clear_frozen(self) -> None:
        """End what is frozen, all at once, and wait for it: its places are needed for what comes next."""
        async with anyio.create_task_group() as ends:
            while self._frozen:
                ends.start_soon(self._end_busy, self._frozen.popleft()[1])

    async def _end_quietly(self, item: T) -> None:
        with anyio.CancelScope(shield=True):
            await self._end(item)

    def _spawn(self, function: Callable[[T], Coroutine[Any, Any, None]], item: T) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(function, item)

    def _fill_when_few(self) -> None:
        """Make spares at once when half of them are gone, or else at the end of a burst."""
        if self._waiting or 2 * (len(self._idle) + self._starting) < self._warm:
            self._fill()
        self._fill_when_quiet()

    def _fill_when_quiet(self) -> None:
        """Make spares at the end of a burst."""
        self._quiet_from = anyio.current_time() + QUIET_S
        self._is_burst = True
        if not self._is_watched and self._tasks is not None:
            self._is_watched = True
            self._tasks.start_soon(self._watch_bursts)

    async def _watch_bursts(self) -> None:
        """At the end of each burst, end what is frozen and make spares."""
        try:
            while not self._closing.is_set():
                now = anyio.current_time()
                if self._is_burst and (left_s := self._burst_end() - now) <= 0:
                    self._is_burst = False
                    await self._clear_frozen()
                    self._fill()
                if not self._is_burst:
                    if now > self._quiet_from + LINGER_S:
                        break
                    left_s = QUIET_S
                with anyio.move_on_after(min(left_s, FROZEN_S)):
                    await self._closing.wait()
        finally:
            self._is_watched = self._is_burst = False
            self._retire_frozen()

    def _burst_end(self) -> float:
        return min(self._quiet_from, self._frozen[0][0] + FROZEN_S) if self._frozen else self._quiet_from

    def _fill(self) -> None:
        """Bring the pool towards its plan."""
        if self._closing.is_set() or self._tasks is None:
            return
        now = anyio.current_time()
        ages = [now - since for since, _ in self._idle]
        todo = plan(ages, self._busy, self._starting, self._warm, self._cap, self._idle_s, self._waiting)
        for _ in range(todo.expire):
            self._spawn(self._end_quietly, self._idle.popleft()[1])
        for _ in range(todo.start):
            self._starting += 1
            self._tasks.start_soon(self._start_one)

    async def _start_one(self) -> None:
        item: T | None = None
        try:
            if self._failures:
                await anyio.sleep(BACKOFF_S[min(self._failures, len(BACKOFF_S)) - 1])
            item = await self._start()
        except SandboxUnavailable as exc:
            self._failures += 1
            # Once or twice may be a parent that died under its children; the next start gets a new one.
            if self._failures >= TRIES:
                self._problem = exc
        finally:
            self._starting -= 1
        if item is not None:
            self._failures = 0
            if self._closing.is_set():
                await self._end_quietly(item)
                return
            self._idle.append((anyio.current_time(), item))
        self._notify()
        if item is not None or self._waiting:
            self._fill()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def close(self) -> None:
        """End every idle item. Busy ones are ended as they are released."""
        self._closing.set()
        self._notify()
        self._has_returned.set()
        self._retire_frozen()
        while self._idle:
            await self._end_quietly(self._idle.popleft()[1])
