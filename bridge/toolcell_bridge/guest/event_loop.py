"""An event loop that stays: a client, a lock or a generator of one script or cell works in the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from toolcell_bridge.guest.interrupts import Interrupts

NAME_CHARS: Final = 100
"""Of a task that is named to the host."""

IDLE_THREADS_S: Final = 0.1
"""For threads without work to end before they would be said to have run on."""

CLEAN_UP_S: Final = 2.0
MOST_CANCELS: Final = 3
"""For what was interrupted while it waited. Together less than the time that the host gives it."""


class SessionLoop:
    """The loop of the scripts of a session."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a script that awaits."""
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        return run(self._loop, work, self._interrupts)

    def end_tasks(self) -> list[str]:
        """Cancel what a script has left, as `asyncio.run` does, and return its names."""
        if self._loop is None or self._loop.is_closed() or not (left := asyncio.all_tasks(self._loop)):
            return []
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        return sorted(f"task {getattr(task.get_coro(), '__name__', task.get_name())[:NAME_CHARS]!r}" for task in left)

    def close(self) -> None:
        """End the generators that are left, and the loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


def run(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, Any],
    interrupts: Interrupts,
    note: Callable[[KeyboardInterrupt], object] = id,
) -> Any:
    """Run a script or a cell to its end. Threads end with it, so it begins with a new pool.

    `note` is told of an interrupt for which it is cancelled. It may end well all the same.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    pool = ThreadPoolExecutor(thread_name_prefix="asyncio")
    loop.set_default_executor(pool)
    task = loop.create_task(work)
    try:
        return loop.run_until_complete(task)
    except KeyboardInterrupt as exc:
        if task.done():
            raise
        interrupts.is_allowed = False  # it is cleaning up
        note(exc)
        _cancel(loop, task)
        try:
            return task.result()
        except asyncio.CancelledError as cancelled:
            raise exc.with_traceback(cancelled.__traceback__) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        until = time.monotonic() + IDLE_THREADS_S
        for thread in pool._threads:
            thread.join(max(0.0, until - time.monotonic()))


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    """Cancel what was interrupted while it waited, and let it clean up.

    Raises:
        KeyboardInterrupt: it does not end.
    """
    for _ in range(MOST_CANCELS):
        task.cancel()
        loop.run_until_complete(asyncio.wait([task], timeout=CLEAN_UP_S))
        if task.done():
            return
    loop.close()  # so that it does not go on inside the next one
    raise KeyboardInterrupt
