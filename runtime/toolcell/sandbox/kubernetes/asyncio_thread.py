"""`AsyncioThread`: an asyncio event loop in a thread of its own. The client libraries of Kubernetes need asyncio.

A Runtime may run under trio, and its event loop may stand still while a tool blocks; connections go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import anyio
import anyio.lowlevel

from toolcell.support import daemon_threads
from toolcell.support.event_loop import call_soon

Returned = TypeVar("Returned")

END_S: Final = 30.0


class AsyncioThread:
    """Runs coroutine functions in its event loop, for callers of any other."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = daemon_threads.start(self._main, name=name)

    def _main(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def call(self, function: Callable[..., Awaitable[Returned]], *args: Any) -> Returned:
        """Return what it returns there.

        Cancellation: it is cancelled there, and its end is waited for.
        """

        async def run() -> Returned:
            return await function(*args)

        done = anyio.Event()
        token = anyio.lowlevel.current_token()

        def wake(_: object) -> None:
            call_soon(token, done.set)

        task = asyncio.run_coroutine_threadsafe(run(), self._loop)
        ended: asyncio.Future[Any] | Any = task
        ended.add_done_callback(wake)
        try:
            await done.wait()
        except BaseException:
            task.cancel()
            with anyio.move_on_after(END_S, shield=True):
                await done.wait()
            raise
        return task.result()

    def spawn(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Start it there, and let it run. Any thread may call it."""

        async def run() -> None:
            await function(*args)

        asyncio.run_coroutine_threadsafe(run(), self._loop)

    async def aclose(self) -> None:
        """Cancel what runs there, and end the thread."""

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._loop.shutdown_asyncgens()
            await self._loop.shutdown_default_executor()

        with anyio.CancelScope(shield=True):
            await self.call(cancel_all)
            self._loop.call_soon_threadsafe(self._loop.stop)
            await daemon_threads.run_sync(self._thread.join, END_S)
