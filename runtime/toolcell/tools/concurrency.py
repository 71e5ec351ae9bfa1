"""What calls wait for: a run's workers, a tool's own limit, exclusive groups; and the worker threads of blocking tools.

Knows no call and no registry. A call never waits for something that one of its callers holds: `execution` sees to it.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Container
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
import anyio.to_thread

from toolcell.tools.options import ToolOptions

MAX_THREADS = 64
"""Of tools, per event loop. More than the calls a run makes at once: an abandoned thread keeps its place."""


async def maybe_await(value: Any) -> Any:
    """Return `value`, awaited if it can be: hooks and callbacks may be either kind of function."""
    return await value if inspect.isawaitable(value) else value


# Limits


class Workers:
    """Bounds how many calls work at the same time; first come, first served. For one event loop.

    Most calls find a worker free, so `free` is a plain number and may be decremented without calling `take`.
    """

    __slots__ = ("_waiting", "free")

    def __init__(self, count: int) -> None:
        self.free = count
        """Invariant: zero while anybody waits."""
        self._waiting: deque[anyio.Event] = deque()

    async def take(self) -> None:
        """Wait for a worker and take it."""
        if self.free:
            self.free -= 1
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # it was handed over in the same moment
                self.give_back()
            else:
                self._waiting.remove(turn)
            raise

    def give_back(self) -> None:
        """Hand the worker to whoever waits longest, or free it."""
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self.free += 1


class ToolIdentity:
    """Identity of a tool under whatever names, for limits of its own."""

    __slots__ = ("__weakref__",)


class _LoopLimits:
    """Locks and limits of one event loop; they cannot be shared between loops."""

    def __init__(self) -> None:
        self.groups: dict[str, anyio.Lock] = {}
        self.tools: WeakKeyDictionary[ToolIdentity, Workers] = WeakKeyDictionary()


_loop_limits: anyio.lowlevel.RunVar[_LoopLimits] = anyio.lowlevel.RunVar("toolcell_limits")
_thread_limiter: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("toolcell_threads")


def _limits() -> _LoopLimits:
    try:
        return _loop_limits.get()
    except LookupError:
        _loop_limits.set(limits := _LoopLimits())
        return limits


def has_own_limits(options: ToolOptions) -> bool:
    """Return true for the few tools whose calls wait for more than a worker."""
    return options.exclusive_group is not None or options.max_concurrency is not None


@asynccontextmanager
async def own_turn(
    options: ToolOptions, identity: ToolIdentity, held_groups: Container[str], is_held: bool
) -> AsyncIterator[None]:
    """Wait for the tool's exclusive group and for its own limit.

    This comes before any worker is taken: a call that waits for a group keeps no worker from others. `held_groups` are
    held by callers; `is_held`: a caller is a call of the same tool.
    """
    async with AsyncExitStack() as held:
        group = options.exclusive_group
        if group is not None and group not in held_groups:
            await held.enter_async_context(_limits().groups.setdefault(group, anyio.Lock()))
        if options.max_concurrency is not None and not is_held:
            workers = _own_workers(identity, options.max_concurrency)
            await workers.take()
            held.callback(workers.give_back)
        yield


def _own_workers(identity: ToolIdentity, count: int) -> Workers:
    known = _limits().tools
    if (workers := known.get(identity)) is None:
        known[identity] = workers = Workers(count)
    return workers


# Threads


class AbandonedThreads:
    """Counts threads whose call was cancelled and whose function is still running."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def __int__(self) -> int:
        return self._count

    def add(self, amount: int) -> None:
        """Change the count."""
        with self._lock:
            self._count += amount


class _ThreadCall:
    """One function on one thread; decides exactly once whether it was abandoned."""

    def __init__(self, function: Callable[[], Any], abandoned: AbandonedThreads) -> None:
        self._function = function
        self._abandoned = abandoned
        self._lock = threading.Lock()
        self._is_running = False
        self._is_done = False
        self._is_abandoned = False

    def __call__(self) -> Any:
        with self._lock:
            if self._is_abandoned:  # cancelled before a thread was free: nobody wants it run any more
                return None
            self._is_running = True
        try:
            return self._function()
        finally:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._is_done = True
            if self._is_abandoned:
                self._abandoned.add(-1)

    def abandon(self) -> None:
        """Stop waiting for the function; count its thread if it is running."""
        with self._lock:
            self._is_abandoned = True
            if self._is_running and not self._is_done:
                self._abandoned.add(1)


ABANDONED = AbandonedThreads()
"""Of this process."""


async def run_in_thread(function: Callable[[], Any], abandoned: AbandonedThreads = ABANDONED) -> Any:
    """Run `function` on a worker thread.

    Cancellation: returns at once; a function that already runs goes on, and its thread is counted in `abandoned`.
    """
    call = _ThreadCall(function, abandoned)
    try:
        limiter = _thread_limiter.get()
    except LookupError:
        _thread_limiter.set(limiter := anyio.CapacityLimiter(MAX_THREADS))
    try:
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)
    except anyio.get_cancelled_exc_class():
        call.abandon()
        raise


def abandoned_threads() -> int:
    """Return how many threads still run tools whose calls timed out or were cancelled."""
    return int(ABANDONED)
