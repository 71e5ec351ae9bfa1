"""Synchronous tools on worker threads, and the count of those that outlived their call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

MAX_THREADS = 64
"""Of tools, per event loop. More than the calls a run makes at once: an abandoned thread keeps its place."""

_limiter: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("toolcell_threads")


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


class _Job:
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

    def abandon(self) -> bool:
        """Give up on it; True when a thread is left running."""
        with self._lock:
            self._is_abandoned = True
            if not self._is_running or self._is_done:
                return False
            self._abandoned.add(1)
            return True


async def run_in_thread(function: Callable[[], Any], abandoned: AbandonedThreads) -> Any:
    """Run `function` on a worker thread.

    Cancellation: returns at once; a function already running goes on unheard and is counted in `abandoned`.
    """
    job = _Job(function, abandoned)
    try:
        return await anyio.to_thread.run_sync(job, abandon_on_cancel=True, limiter=_thread_limiter())
    except anyio.get_cancelled_exc_class():
        job.abandon()
        raise


def _thread_limiter() -> anyio.CapacityLimiter:
    try:
        return _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(MAX_THREADS)
        _limiter.set(limiter)
        return limiter


ABANDONED = AbandonedThreads()
"""Of this process."""


def abandoned_threads() -> int:
    """Threads still running tools whose calls timed out or were cancelled."""
    return int(ABANDONED)
