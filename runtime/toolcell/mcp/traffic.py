"""The messages of one connection with an MCP server, both ways: what is read of it when, and what waits to be written.

Nothing that a server sends without a request of ours is free for it. Whoever sends to a server never waits for it: a
call ends at its time also when the server has stopped reading.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import anyio
import anyio.lowlevel
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from toolcell.mcp.broken_tools import METHOD, ToolPages
from toolcell.mcp.pace import Pace
from toolcell.support.event_loop import ChangeEvent

MAX_OPEN_REQUESTS = 16
"""Requests of a server that are not answered. A server that answers nobody's pings has them soon."""
ANSWERED_S = 2.0
"""How long one more waits for an answer to one of them, before the connection is ended."""
COUNTS_FOR_BYTES = 8192
"""So many bytes that answer no request count as one more message."""
MAX_BAD_MESSAGES = 100
"""Most messages of one connection, that are not JSON-RPC; servers print greetings there by mistake."""
MAX_WAITING = 256
"""Messages to a server that does not read them."""
MAX_WAITING_BYTES = 32 << 20
WRITE_S = 30.0
"""What the writing of one message may take."""


class Flooded(Exception):
    """A server sent more than is borne. The text says what."""


class Traffic:
    """Which messages have been sent and received, as far as somebody waits for an answer."""

    def __init__(self, name: str, listing: ToolPages) -> None:
        """`name`: what is connected with, for the log. `listing` mends pages of the server's list."""
        self._pace, self._listing = Pace(name), listing
        self._awaited = set[int | str]()
        """Requests of ours."""
        self._listings = set[int | str]()
        """Those of them that ask for a page of the server's list."""
        self._open = Counter[int | str]()
        """Requests of the server's, by its own ids, which need not differ."""
        self._bad = 0
        self._answered = ChangeEvent()

    def note_sending(self, message: SessionMessage) -> None:
        """Take note of a message before it is written: its answer may come at once."""
        match message.message:
            case JSONRPCRequest(id=ident, method=method):
                self._awaited.add(coerce_request_id(ident))
                if method == METHOD:
                    self._listings.add(coerce_request_id(ident))
            case JSONRPCNotification(method="notifications/cancelled", params=params):
                if (cancelled := cancelled_request_id_from_params(params)) is not None:
                    self._awaited.discard(coerce_request_id(cancelled))
                    self._listings.discard(coerce_request_id(cancelled))

    def note_written(self, message: SessionMessage) -> None:
        """Take note of a message after the server took it."""
        match message.message:
            case JSONRPCResponse(id=ident) | JSONRPCError(id=int() | str() as ident):
                self._settle(ident)

    async def admit(self, item: SessionMessage | Exception | None, size: int = 0) -> None:
        """Wait until one more message may be handed on, a page of the list mended; None is a line without a message.

        `size`: its bytes, if known.

        Raises:
            Flooded: the connection has to be ended.
        """
        match item.message if isinstance(item, SessionMessage) else item:
            case JSONRPCResponse(id=ident) | JSONRPCError(id=int() | str() as ident):
                if (key := coerce_request_id(ident)) in self._awaited:
                    self._awaited.remove(key)
                    if key in self._listings:
                        self._listings.remove(key)
                        if isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCResponse):
                            await self._listing.mend(item.message.result)
                    return
            case JSONRPCRequest(id=ident):
                await self._open_request(ident)
            case JSONRPCNotification(method="notifications/cancelled", params=params):
                if (cancelled := cancelled_request_id_from_params(params)) is not None:
                    self._settle(cancelled)
            case Exception():
                self._bad += 1
                if self._bad > MAX_BAD_MESSAGES:
                    raise Flooded(f"it sent more than {MAX_BAD_MESSAGES} lines that are not JSON-RPC")
        await self._pace.wait(1 + size // COUNTS_FOR_BYTES)

    async def _open_request(self, ident: int | str) -> None:
        with anyio.move_on_after(ANSWERED_S):
            while self._open.total() >= MAX_OPEN_REQUESTS:
                await self._answered.wait()
        if self._open.total() >= MAX_OPEN_REQUESTS:
            raise Flooded(f"it made more requests while {MAX_OPEN_REQUESTS} of its own had no answer that it has read")
        self._open[coerce_request_id(ident)] += 1

    def _settle(self, ident: int | str) -> None:
        """Take note that a request of the server's is answered, or will never be."""
        if (key := coerce_request_id(ident)) in self._open:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
            self._answered.notify()


class Outbox:
    """What waits to be written to a server, as the stream that the SDK sends to. Sending never waits."""

    def __init__(self, give_up: Callable[[str], None], pack: Callable[[SessionMessage], bytes | None]) -> None:
        """`give_up` is told why the server cannot be written to. `pack` returns the bytes of a message, if they are
        to be known."""
        self._give_up, self._pack = give_up, pack
        self._waiting = deque[tuple[SessionMessage, bytes | None]]()
        self._size = 0
        self._arrived = ChangeEvent()
        self._is_closed = False

    async def send(self, message: SessionMessage) -> None:
        """Have a message written. Errors: those of a stream of anyio that is closed."""
        if self._is_closed:
            raise anyio.ClosedResourceError
        packed = self._pack(message)
        size = len(packed or b"")
        if len(self._waiting) >= MAX_WAITING or (self._waiting and self._size + size > MAX_WAITING_BYTES):
            self._give_up(f"it does not read what it is sent: {len(self._waiting)} messages wait")
            self.close()
            raise anyio.BrokenResourceError
        self._waiting.append((message, packed))
        self._size += size
        self._arrived.notify()
        await anyio.lowlevel.checkpoint()

    async def messages(self) -> AsyncIterator[tuple[SessionMessage, bytes | None]]:
        """Yield what is sent, each message with its bytes, until this is closed."""
        while True:
            while self._waiting:
                message, packed = self._waiting.popleft()
                yield message, packed
                self._size -= len(packed or b"")
            if self._is_closed:
                return
            await self._arrived.wait()

    def close(self) -> None:
        self._is_closed = True
        self._arrived.notify()

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self.close()
