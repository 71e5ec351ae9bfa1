"""`ChangeEvent`: an event that happens again and again. Each time, everybody who waits then goes on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import anyio


class ChangeEvent:
    """What some tasks wait for and others report, in one event loop. Look at what may have changed, then wait."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []
        """Wakes each of those who wait now. Without any, a report costs nothing and needs no event loop."""

    def notify(self) -> None:
        """Wake everybody who waits now."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for wake in waiting:
                wake()

    async def wait(self, within_s: float = math.inf) -> bool:
        """Wait for the next `notify`, at most so long; False when there was none."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return await self._wait_in_trio(within_s)
        # A future and a timer: a quarter of the calls of an event and a cancel scope.
        future: asyncio.Future[bool] = loop.create_future()

        def wake(is_reported: bool = True) -> None:
            if not future.done():
                future.set_result(is_reported)

        self._waiting.append(wake)
        timer = loop.call_later(within_s, wake, False) if within_s != math.inf else None
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            if wake in self._waiting:
                self._waiting.remove(wake)

    async def _wait_in_trio(self, within_s: float) -> bool:
        event = anyio.Event()
        self._waiting.append(event.set)
        try:
            with anyio.move_on_after(within_s):
                await event.wait()
        finally:
            if event.set in self._waiting:
                self._waiting.remove(event.set)
        return event.is_set()
