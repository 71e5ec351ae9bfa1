"""`Connection`: one WebSocket as either end uses it: whole messages both ways, and bounds for both."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import anyio
from websockets.exceptions import ConnectionClosed
from websockets.frames import Close

from toolcell.service.receiving import Reservation
from toolcell.service.socket.messages import MESSAGES, Message
from toolcell.support import daemon_threads
from toolcell.support.event_loop import ChangeEvent
from toolcell_bridge.wire.errors import RemoteProtocolError

PART_BYTES: Final = 64 * 1024
"""Size of a WebSocket frame that another one follows. Of what is longer than it may be, no more than this is read."""

QUEUE_BYTES: Final = 1024 * 1024
"""What may wait to be sent before whoever sends is made to wait."""

ENDED, PROTOCOL_ERROR, REFUSED, RESTART = 1000, 1002, 1008, 1012
"""Codes with which an end closes the WebSocket for good: everything of the caller at the service ends."""

LOST: Final = (OSError, ConnectionClosed)
"""What a transport raises when its connection is lost."""


class Transport(Protocol):
    """One WebSocket. Its methods raise one of `LOST` when it is gone."""

    async def send(self, message: bytes, /) -> None:
        """Write one binary frame."""

    async def recv(self) -> str | bytes:
        """Return the next frame."""
        ...


@dataclass(frozen=True, slots=True)
class Received:
    message: Message
    size: int
    """Bytes that were counted for it. They are to be given back."""
    was_free: bool
    """True if it is large and its tenant did not have to wait when its decoding began."""


class Connection:
    """Use it with `async with`. What is queued is sent while it is open, in the order in which it was queued."""

    def __init__(
        self,
        transport: Transport,
        message_bytes: int,
        reservation: Reservation | None = None,
        is_free: Callable[[], bool] = lambda: False,
    ) -> None:
        """`message_bytes`: longest message that this end takes. `reservation`: counts what arrives. `is_free`: whether
        its tenant need not wait."""
        self._transport, self._message_bytes, self._reservation = transport, message_bytes, reservation
        self._is_free = is_free
        self._queue: deque[bytes] = deque()
        self.waiting_bytes = 0
        """Of what is queued."""
        self._unfinished = 0
        """Bytes of the message that is not whole yet."""
        self._is_open = True
        self._changed = ChangeEvent()
        self.farewell: Close | None = None
        """Why this end has ended it."""
        self._scope = anyio.CancelScope()

    async def __aenter__(self) -> Connection:
        self._writing = asyncio.create_task(self._write())
        self._scope.__enter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> bool:
        self._is_open = False
        self._writing.cancel()
        self.give_back(self._unfinished)
        self._changed.notify()
        return bool(self._scope.__exit__(*exc_info))

    def end(self, code: int, reason: str) -> None:
        """End the block of this connection; whoever opened it tells the other end why."""
        self.farewell = Close(code, reason)
        self._scope.cancel()

    # Out

    def post(self, message: Message) -> None:
        """Queue a message. Nothing happens when the connection is over.

        Raises:
            UnsendableValue, ValueTooLarge: a value in it has no form on the wire.
        """
        self.post_body(MESSAGES.encode_body(message))

    def post_body(self, body: bytes) -> None:
        if self._is_open:
            self._queue.append(body)
            self.waiting_bytes += len(body)
            self._changed.notify()

    async def send(self, message: Message) -> None:
        """Queue a message when there is room; raises what `post` does."""
        await self.send_body(MESSAGES.encode_body(message))

    async def send_body(self, body: bytes) -> None:
        """Queue a message that is encoded, when there is room."""
        while self._is_open and self.waiting_bytes > QUEUE_BYTES:
            await self._changed.wait()
        self.post_body(body)

    async def _write(self) -> None:
        try:
            while True:
                while not self._queue:
                    await self._changed.wait()
                body = self._queue.popleft()
                for start in range(0, len(body) + 1, PART_BYTES):
                    await self._transport.send(body[start : start + PART_BYTES])
                self.waiting_bytes -= len(body)
                self._changed.notify()
        except LOST:
            return  # whoever reads finds out too

    # In

    async def receive(self) -> Received:
        """Return the next message.

        Raises:
            RemoteProtocolError: what came is not a message, or longer than it may be.
        """
        parts: list[bytes] = []
        while not parts or len(parts[-1]) == PART_BYTES:
            part = await self._transport.recv()
            if not isinstance(part, bytes) or len(part) > PART_BYTES:
                raise RemoteProtocolError(f"a frame is binary and has at most {PART_BYTES} bytes")
            if self._unfinished + len(part) > self._message_bytes:
                raise RemoteProtocolError(f"a message of more than {self._message_bytes} bytes (message_bytes)")
            if self._reservation is not None and (why := self._reservation.take(len(part))):
                raise RemoteProtocolError(why)
            self._unfinished += len(part)
            parts.append(part)
        if len(parts) == 1:
            message, was_free = MESSAGES.decode(parts[0]), False
        else:
            async with daemon_threads.account.get().one:
                was_free = self._is_free()
                message = await daemon_threads.run_piece(MESSAGES.decode, b"".join(parts))
        size, self._unfinished = self._unfinished, 0
        return Received(message, size, was_free)

    def give_back(self, size: int) -> None:
        """Note that so many bytes do not count any more as being received."""
        if self._reservation is not None:
            self._reservation.give_back(size)
