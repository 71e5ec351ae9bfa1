"""Worker threads of synchronous tools. A thread cannot be stopped: when its call is given up, the function runs on.

Until then the call keeps its places (`concurrency.Workers.release`), and the thread is listed in `AbandonedThreads`.
Knows no call and no registry.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from toolcell.results import AbandonedThread


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


def call_soon(token: Any, callback: Callable[[], None]) -> None:
    """Have an event loop call `callback`, without waiting for it: the loop may be about to end."""
    loop = getattr(token, "native_token", token)
    schedule = loop.run_sync_soon if hasattr(loop, "run_sync_soon") else loop.call_soon_threadsafe
    try:
        schedule(callback)
    except RuntimeError:  # the loop has ended, and with it whoever waited
        pass


def when_all_over(threads: Sequence[ToolThread], callback: Callable[[], None]) -> None:
    """Call `callback` in this event loop when the functions of all these threads have returned."""
    running = [thread for thread in threads if not thread.is_over]
    if running:
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
