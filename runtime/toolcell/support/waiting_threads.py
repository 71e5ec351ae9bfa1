"""`WaitingThreads`: daemon threads that wait for functions of one asyncio loop, and hand back what they return.

`anyio.to_thread.run_sync` takes three turns of the loop and a wake-up for each function. Here a quick function needs
no turn, and others one turn and one wake-up for all that have returned meanwhile. `anyio.from_thread` works in a
function as in a thread of anyio's.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from toolcell.support import daemon_threads, event_loop

try:
    from anyio._core._eventloop import claim_worker_thread, set_current_async_library, threadlocals
except ImportError:  # another anyio, whose threads say otherwise where they belong
    IS_POSSIBLE = False
else:
    IS_POSSIBLE = True

IDLE_S = 1.0
"""A thread that has waited for so long ends. Starting another takes less than a millisecond."""

QUICK_S = 100e-6
"""How long the loop waits for a function, as long as functions return about as fast as this. Handing one over and
being woken for it takes several times longer than most of them do."""

MISSES = 4
"""Functions in a row that were not so quick, after which the loop waits no more but for one in `RETRY`."""

RETRY = 16


class _Work:
    """A function, and later what it returned or raised."""

    __slots__ = ("context", "error", "function", "is_over", "returned", "scope", "signal", "waiter")

    def __init__(self, function: Callable[[], Any], scope: anyio.CancelScope) -> None:
        self.function, self.scope = function, scope
        self.context = contextvars.copy_context()
        self.signal = threading.Lock()
        """Released when it is over and there is no waiter."""
        self.signal.acquire()
        self.is_over = False
        self.waiter: asyncio.Future[None] | None = None
        self.returned: Any = None
        self.error: BaseException | None = None

    def do(self) -> None:
        """Call the function, in the thread of the caller and in the context of whoever waits."""
        threadlocals.current_cancel_scope = self.scope
        try:
            self.returned = self.context.run(_call, self.function)
        except BaseException as exc:
            self.error = exc
        finally:
            del threadlocals.current_cancel_scope


def _call(function: Callable[[], Any]) -> Any:
    set_current_async_library(None)
    return function()


class WaitingThreads:
    """Threads of the running asyncio loop, as many as there are functions at once. Whoever calls bounds these."""

    def __init__(self) -> None:
        self._backend, self._loop = anyio.lowlevel.current_token().backend_class, asyncio.get_running_loop()
        self._scope_type = event_loop.scope_type()
        self._queue = queue.SimpleQueue[_Work]()
        """A thread that has returned from a function takes the next one without being woken."""
        self._lock = threading.Lock()
        self._threads = self._functions = 0
        """Invariant: there are at least as many threads as functions that have not been handed back."""
        self._done: deque[_Work] = deque()
        self._misses = 0
        self._is_woken = False
        """The loop will take what is done. It is reset before the loop looks, so that nothing is left."""

    async def run(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns in one of the threads.

        Raises:
            MemoryError, RuntimeError: there can be no more threads.

        Cancellation: returns at once; the function goes on.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        with self._scope_type() as scope:
            work = _Work(function, scope)
            self._hand_over(work)
            if not self._is_quick(work):
                assert work.waiter is not None
                await work.waiter
        if work.error is not None:
            try:
                raise work.error
            finally:
                work.error = None  # no cycle with its traceback
        return work.returned

    def _hand_over(self, work: _Work) -> None:
        with self._lock:
            if self._functions == self._threads:
                daemon_threads.start(self._work, name="toolcell worker")
                self._threads += 1
            self._functions += 1
        self._queue.put(work)

    def _is_quick(self, work: _Work) -> bool:
        """Wait for the function if it is worth it; False when there is a waiter to await."""
        if self._misses < MISSES or not self._misses % RETRY:
            work.signal.acquire(timeout=QUICK_S)
        with self._lock:
            if not work.is_over:
                self._misses += 1
                work.waiter = self._loop.create_future()
                return False
            self._functions -= 1
        self._misses = 0
        return True

    def _work(self) -> None:
        with claim_worker_thread(self._backend, self._loop):
            while (work := self._next()) is not None:
                work.do()
                with self._lock:
                    work.is_over, is_awaited = True, work.waiter is not None
                if is_awaited:
                    self._done.append(work)
                else:
                    work.signal.release()
                del work
                if is_awaited and not self._is_woken:
                    self._is_woken = True
                    try:
                        self._loop.call_soon_threadsafe(self._take_done)
                    except RuntimeError:  # the loop has ended, and with it whoever waited
                        return

    def _next(self) -> _Work | None:
        while True:
            try:
                return self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._threads > self._functions:
                        self._threads -= 1
                        return None

    def _take_done(self) -> None:
        self._is_woken = False
        while self._done:
            work = self._done.popleft()
            with self._lock:
                self._functions -= 1
            if work.waiter is not None and not work.waiter.done():
                work.waiter.set_result(None)
