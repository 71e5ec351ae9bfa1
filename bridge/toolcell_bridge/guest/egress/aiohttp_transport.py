"""`AiohttpTransport`: what aiohttp takes for the transport of a connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from toolcell_bridge.guest.egress.connection import EgressFailed, HttpConnection
from toolcell_bridge.guest.egress.host_calls import HostCalls
from toolcell_bridge.guest.placeholder import DraftEnded
from toolcell_bridge.wire.messages import PART_BYTES

MOST_QUEUED_BYTES: Final = 2 * PART_BYTES
"""Written bytes that wait. With more, the library is told to pause."""

READ_BYTES: Final = 64 * 1024


class AiohttpTransport(asyncio.Transport):
    """A connection to a host and a port. A task sends what is written, and hands answers to `protocol`."""

    def __init__(
        self,
        calls: HostCalls,
        peer: tuple[str, int],
        scheme: str,
        protocol: Any,
        on_failure: Callable[[EgressFailed], None],
    ) -> None:
        """`on_failure`: tells the protocol that the connection is lost, and why."""
        super().__init__({"peername": peer})
        self._calls, self._protocol, self._on_failure = calls, protocol, on_failure
        self._http = HttpConnection(*peer)
        self._http.scheme = scheme
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._is_paused = False
        self._is_closing = False
        self._readable = asyncio.Event()
        self._readable.set()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        """Runs while there is something to send or to read."""

    async def _serve(self) -> None:
        try:
            while self._queue or self._http.has_answer:
                while self._queue:
                    await self._calls.run_async(self._http.write(self._next_written()))
                while self._http.has_answer:
                    await self._readable.wait()
                    data = self._http.take(READ_BYTES) or await self._calls.run_async(self._http.read(READ_BYTES))
                    if data:
                        self._protocol.data_received(data)
        except EgressFailed as exc:
            self._is_closing = True
            self._on_failure(exc)
        except DraftEnded as exc:
            self._is_closing = True
            self._protocol.set_exception(exc)
        else:
            self._task = None
            if self._http.is_ended and not self._is_closing:
                self._is_closing = True
                self._protocol.connection_lost(None)

    def _next_written(self) -> bytes:
        data = self._queue.popleft()
        self._queued -= len(data)
        if self._is_paused and self._queued <= MOST_QUEUED_BYTES // 2:
            self._is_paused = False
            self._protocol.resume_writing()
        return data

    def write(self, data: Any) -> None:
        """Take bytes of a request."""
        if self._is_closing or not data:
            return
        self._queue.append(bytes(data))
        self._queued += len(self._queue[-1])
        if self._task is None:
            self._task = self._loop.create_task(self._serve())
        if self._queued > MOST_QUEUED_BYTES and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Take bytes of a request."""
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        """Close the connection. A request whose answer is not there yet is cancelled."""
        if not self._is_closing:
            self._is_closing = True
            if self._task is not None:
                self._task.cancel()
            self._calls.drop(self._http.close())
            if not self._loop.is_closed():
                self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        """Return whether it is closed."""
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        """Return how many written bytes wait."""
        return self._queued

    def pause_reading(self) -> None:
        """Keep the answer back."""
        self._readable.clear()

    def resume_reading(self) -> None:
        """Go on with it."""
        self._readable.set()
