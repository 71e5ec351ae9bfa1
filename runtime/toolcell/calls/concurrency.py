"""What calls wait for: a run's workers, a tool's own limit, exclusive groups; and the worker threads of blocking tools.

A call never waits for something that one of its callers holds: `_own_places` and `_workers` of the pipeline see to it.
A thread cannot be stopped: when its call is given up, the function runs on. Until it ends, the call keeps its places
(`Workers.release`), and the thread is listed in `AbandonedThreads`. Knows no call and no registry.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel

from toolcell.errors import ToolAbort, ToolError
from toolcell.results import AbandonedThread
from toolcell.support import daemon_threads, waiting_threads
from toolcell.support.event_loop import SteppedCoroutine, call_soon, is_asyncio
from toolcell.support.waiting_threads import WaitingThreads


class ToolThread:
    """One function on a worker thread. Decides exactly once whether its call was given up."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._is_running = False
        self._is_abandoned = False
        self._when_over: list[tuple[Any, Callable[[], None]]] = []
        self.is_over = False
        """The function has returned."""

    def __call__(self) -> Any:
        with self._lock:
            if self._is_abandoned:  # given up before a thread was free: nobody wants it run any more
                return None
            self._is_running = True
        try:
            return self._function()
        except GeneratorExit as exc:  # an event loop would take it for the closing of the coroutine that waits
            raise RuntimeError("the function raised GeneratorExit") from exc
        finally:
            with self._lock:
                self.is_over = True
                waiting, self._when_over = self._when_over, []
            for token, callback in waiting:
                call_soon(token, callback)

    def abandon(self) -> bool:
        """Stop waiting for the function; True when it runs on."""
        with self._lock:
            self._is_abandoned = True
            return self._is_running and not self.is_over

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` in this event loop when the function has returned; at once if it has."""
        token = anyio.lowlevel.current_token()
        with self._lock:
            if not self.is_over:
                self._when_over.append((token, callback))
                return
        callback()

    async def wait(self) -> None:
        """Wait until the function has returned."""
        over = anyio.Event()
        self.when_over(over.set)
        await over.wait()


def when_all_over(threads: Sequence[ToolThread], callback: Callable[[], None]) -> None:
    """Call `callback` in this event loop when the functions of all these threads have returned."""
    if running := [thread for thread in threads if not thread.is_over]:
        running[0].when_over(lambda: when_all_over(running[1:], callback))
    else:
        callback()


class AbandonedThreads:
    """Threads that still run although their calls were given up: of one run, of one runtime, or of the process."""

    def __init__(self, above: AbandonedThreads | None = None) -> None:
        self._above = above
        """Gets every thread too."""
        self._lock = threading.Lock()
        self._threads: dict[ToolThread, tuple[object, AbandonedThread]] = {}
        self._unclaimed: list[ToolThread] = []
        self.any = False
        """False when there surely is none: the quick answer."""

    def add(self, thread: ToolThread, owner: object, tool: str, call_id: str, run_id: str) -> None:
        """Take note of a thread. `owner` is the identity of its tool."""
        entry = owner, AbandonedThread(tool, call_id, run_id, time.time())
        group: AbandonedThreads | None = self
        while group is not None:
            group._put(thread, entry)
            group = group._above

    def _put(self, thread: ToolThread, entry: tuple[object, AbandonedThread]) -> None:
        with self._lock:
            self._forget_ended()
            self._threads[thread] = entry
            self.any = True
            self._unclaimed.append(thread)

    def _forget_ended(self) -> None:
        self._threads = {thread: entry for thread, entry in self._threads.items() if not thread.is_over}
        self._unclaimed = [thread for thread in self._unclaimed if not thread.is_over]
        self.any = bool(self._threads)

    def _entries(self) -> Iterator[tuple[object, AbandonedThread]]:
        with self._lock:
            self._forget_ended()
            return iter(self._threads.values())

    def list(self) -> tuple[AbandonedThread, ...]:
        """Return those that run, oldest first."""
        return tuple(entry for _, entry in self._entries()) if self.any else ()

    def of(self, owner: object) -> int:
        """How many of them run a function of this tool."""
        return sum(known is owner for known, _ in self._entries()) if self.any else 0

    async def wait(self) -> None:
        """Wait for each thread that nobody waits for."""
        while (thread := self._claim()) is not None:
            await thread.wait()

    def _claim(self) -> ToolThread | None:
        with self._lock:
            self._forget_ended()
            return self._unclaimed.pop() if self._unclaimed else None


OF_THIS_PROCESS = AbandonedThreads()


def abandoned_threads() -> tuple[AbandonedThread, ...]:
    """Return the threads of this process that still run tools whose calls timed out or were cancelled."""
    return OF_THIS_PROCESS.list()


MAX_THREADS = 64
"""Most threads of tools, per event loop. More than the calls a run makes at once: an abandoned thread keeps its
place."""


async def maybe_await(value: Any) -> Any:
    """Return `value`, awaited if it can be: hooks and callbacks may be either kind of function."""
    if isinstance(value, Coroutine):
        return await SteppedCoroutine(value)
    return await value if inspect.isawaitable(value) else value


def passes_on(exc: BaseException) -> bool:
    """Return true for what no call may keep: the end of a run, interrupts, cancellations, a coroutine being closed.

    Everything else that an author's code raises fails one call, whether it is an `Exception` or not: `sys.exit()`, a
    panic of an extension written in Rust, an exception class of their own.
    """
    return isinstance(exc, (ToolAbort, KeyboardInterrupt, GeneratorExit)) or _is_cancellation(exc)


def _is_cancellation(exc: BaseException) -> bool:
    if isinstance(exc, Exception):
        return False
    if isinstance(exc, BaseExceptionGroup):
        return any(map(passes_on, exc.exceptions))
    return isinstance(exc, anyio.get_cancelled_exc_class())


def first_leaf(exc: BaseException) -> BaseException:
    """Return what a task failed with first, without the groups around it."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc


# Limits


_KEPT = (
    "not started: after {:g} s its place is still taken by a synchronous tool whose call was given up and which still "
    "runs; try again later"
)


class Workers:
    """Bounds how many calls work at the same time; first come, first served. For one event loop.

    Most calls find a worker free, so `free` is a plain number and may be decremented without calling `take`.
    """

    __slots__ = ("_alone", "_kept", "_waiting", "count", "free")

    def __init__(self, count: int) -> None:
        self.count = count
        self._alone: Workers | None = None
        """Has one place, for who wants all of these: two who wait for all would wait for each other."""
        self.free = count
        """Invariant: zero while anybody waits."""
        self._kept = 0
        """Taken by calls that were given up and whose threads run on."""
        self._waiting: deque[anyio.Event] = deque()

    async def take(self, patience_s: float = math.inf) -> None:
        """Wait for a worker and take it.

        Raises:
            ToolError: after `patience_s`, a thread whose call was given up has one, and it may never come back.
        """
        if self.free:
            self.free -= 1
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            while not turn.is_set():
                with anyio.move_on_after(patience_s):
                    await turn.wait()
                if self._kept and not turn.is_set():
                    raise ToolError(_KEPT.format(patience_s), code="unavailable", retryable=True)
        except BaseException:
            if turn.is_set():  # it was handed over in the same moment
                self.give_back()
            else:
                self._waiting.remove(turn)
            raise

    async def take_all(self, patience_s: float = math.inf) -> None:
        """Wait until nobody works, and take every worker.

        Raises:
            ToolError: as from `take`.
        """
        if self._alone is None:
            self._alone = Workers(1)
        taken = 0
        await self._alone.take(patience_s)
        try:
            while taken < self.count:
                await self.take(patience_s)
                taken += 1
        finally:
            self._alone.give_back()
            for _ in range(taken if taken < self.count else 0):
                self.give_back()

    def release(self, threads: Sequence[ToolThread]) -> None:
        """Give the worker back when the functions of these threads have returned."""
        self._kept += 1

        def give_back() -> None:
            self._kept -= 1
            self.give_back()

        when_all_over(threads, give_back)

    def give_back(self) -> None:
        """Hand the worker to whoever waits longest, or free it."""
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self.free += 1


class ToolIdentity:
    """Identity of a tool under whatever names, for limits of its own."""

    __slots__ = ("__weakref__",)


class LoopLimits:
    """Groups, limits and threads of one event loop; they cannot be shared between loops."""

    def __init__(self) -> None:
        self.groups: dict[str, Workers] = {}
        """The one place of each exclusive group."""
        self.tools: WeakKeyDictionary[ToolIdentity, Workers] = WeakKeyDictionary()
        self.threads = Workers(MAX_THREADS)
        self.waiting_threads = WaitingThreads() if waiting_threads.IS_POSSIBLE and is_asyncio() else None
        self.no_limit = anyio.CapacityLimiter(math.inf)


_loop_limits: anyio.lowlevel.RunVar[LoopLimits] = anyio.lowlevel.RunVar("toolcell_limits")


def loop_limits() -> LoopLimits:
    """Return the limits of this event loop."""
    try:
        return _loop_limits.get()
    except LookupError:
        _loop_limits.set(limits := LoopLimits())
        return limits


# Threads


async def run_in_thread(function: Callable[[], Any], give_up: Callable[[ToolThread], None]) -> Any:
    """Run `function` on a worker thread.

    Cancellation: returns at once. A function that already runs goes on: its thread is given to `give_up` and keeps its
    place until the function returns.
    """
    limits = loop_limits()
    await limits.threads.take()
    thread, is_left = ToolThread(function), False
    try:
        if limits.waiting_threads is not None:
            return await limits.waiting_threads.run(thread)
        return await daemon_threads.run_sync(thread, abandon_on_cancel=True, limiter=limits.no_limit)
    except anyio.get_cancelled_exc_class():
        if is_left := thread.abandon():
            give_up(thread)
        raise
    finally:
        limits.threads.release((thread,)) if is_left else limits.threads.give_back()
