"""What an MCP server answers over HTTP: bounded, parsed here, and handed on past the SDK.

The SDK would parse a message once for each kind that it may be of, in one step. It gets a stand-in, by which it knows
that its request is answered; whoever reads from the SDK drops it.
"""

from __future__ import annotations

import codecs
import re
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import anyio
import httpx2
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCResponse

from toolcell.mcp.address_guard import OF_LOGIN
from toolcell.mcp.http_refusals import error_body, explained, message_of
from toolcell.mcp.pace import LINE_BURST, LINES_PER_S, Pace
from toolcell.support.event_loop import TimeSlice

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Most bytes of one message of a server: a whole page of its tools, or the result of one call."""
MAX_EVENT_LINES = 2**15
MAX_FIELD_BYTES = 1024
"""Of the id of an event, which is sent back to the server."""
END_OF_SESSION_S = 2.0
"""What a server may take to say that its session is over."""
REOPENED_S = 0.5
"""Between two requests for the same stream of events. A server that ends it at once could have it asked for without
end."""

_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")

_OURS: Final = f"toolcell/{secrets.token_hex(16)}"
"""The name of stand-ins. It differs in each process: no server can have its own messages dropped."""
_ANSWERED: Final = error_body(0, 0, _OURS)

_TOO_LONG: Final = f"the server sent a message of more than {MAX_MESSAGE_BYTES} bytes"

Taken = Awaitable[SessionMessage | Exception | None]
Take = Callable[[bytes], Taken]
"""Reads a message and hands it on."""
GivenUp = Callable[[str], httpx2.ReadError]

_REQUEST: ContextVar[Any] = ContextVar("_REQUEST", default=None)
"""The id of the request that a task of the SDK has sent: if its stream ends, the same task asks for the rest of it."""


def is_stand_in(item: SessionMessage | Exception) -> bool:
    """Return whether the SDK has read what stands for a message that was handed on."""
    answer = item.message if isinstance(item, SessionMessage) else None
    return isinstance(answer, JSONRPCError) and answer.error.message == _OURS


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Ends answers that are longer than a message may be, and hands on the messages in all others."""

    def __init__(
        self,
        inner: httpx2.AsyncBaseTransport,
        name: str,
        note: Callable[[str], None],
        take: Callable[[Any, bytes], Taken],
    ) -> None:
        """`take` reads a message and hands it on: it gets the id of the request that is answered, and the bytes.

        `note` is told why an answer is given up that somebody waits for: calls that end with it say so.
        """
        self._inner, self._note, self._take = inner, note, take
        self._lines = Pace(name, "lines of events a second", (LINES_PER_S, LINE_BURST))
        self._next_stream = 0.0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "DELETE":
            request.extensions = {**request.extensions, "timeout": httpx2.Timeout(END_OF_SESSION_S).as_dict()}
        elif request.method == "GET":
            now = anyio.current_time()
            due, self._next_stream = self._next_stream, max(now, self._next_stream) + REOPENED_S
            await anyio.sleep(max(0.0, due - now))
        asked = message_of(request)
        ident = _REQUEST.get() if "last-event-id" in request.headers else None
        if isinstance(asked, dict) and (ident := asked.get("id")) is not None:
            _REQUEST.set(ident)
        given_up = partial(self._given_up, ident)
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise given_up("the server compresses what it sends; a bound would not hold for it")
        response = await explained(request, response, self._inner)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        pieces = _in_turns(response.stream)
        if OF_LOGIN in request.extensions or response.status_code >= 400:
            messages = _bounded(pieces, given_up)
        elif response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            messages = _events(pieces, self._lines, given_up, partial(self._take, ident))
        else:
            messages = _body(_bounded(pieces, given_up), self._take, ident)
        response.stream = ReplacedStream(messages, response.stream)
        return response

    def _given_up(self, ident: Any, problem: str) -> httpx2.ReadError:
        if ident is not None:
            self._note(problem)
        return httpx2.ReadError(problem)

    async def aclose(self) -> None:
        await self._inner.aclose()


class ReplacedStream(httpx2.AsyncByteStream):
    """The body of an answer with other pieces than the server sent."""

    def __init__(self, pieces: AsyncIterator[bytes], inner: httpx2.AsyncByteStream) -> None:
        self._pieces, self._inner = pieces, inner

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _in_turns(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield what was received. A server may send it byte by byte, and each takes 70 microseconds."""
    turn = TimeSlice()
    async for piece in pieces:
        await turn.give_way()
        yield piece


async def _bounded(pieces: AsyncIterable[bytes], given_up: GivenUp) -> AsyncIterator[bytes]:
    size = 0
    async for piece in pieces:
        if (size := size + len(piece)) > MAX_MESSAGE_BYTES:
            raise given_up(_TOO_LONG)
        yield piece


def _is_answer(item: SessionMessage | Exception | None) -> bool:
    return isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCResponse | JSONRPCError)


async def _body(pieces: AsyncIterable[bytes], take: Callable[[Any, bytes], Taken], ident: Any) -> AsyncIterator[bytes]:
    """Yield the stand-in for one message, when it is there whole."""
    item = await take(ident, b"".join([piece async for piece in pieces]))
    if ident is not None and not _is_answer(item):
        await take(ident, b"{}")  # no message: a server that asks in place of an answer sends none any more
    yield _ANSWERED


async def _events(pieces: AsyncIterable[bytes], lines: Pace, given_up: GivenUp, take: Take) -> AsyncIterator[bytes]:
    """Yield a stream of events with stand-ins for answers, and without all other messages."""
    rest, mark = bytearray(), codecs.BOM_UTF8
    async for piece in pieces:
        await lines.wait(piece.count(b"\n") + piece.count(b"\r"))
        seen, start = max(0, len(rest) - 3), 0
        rest += piece
        for end in [each.end() for each in _BLANK_LINE.finditer(rest, seen)]:
            event, start, mark = bytes(rest[start:end]).removeprefix(mark), end, b""
            if event.count(b"\n") + event.count(b"\r") > MAX_EVENT_LINES:
                raise given_up(f"the server sent an event of more than {MAX_EVENT_LINES} lines")
            yield await _event(event, take)
        del rest[:start]
        if len(rest) > MAX_MESSAGE_BYTES:
            raise given_up(_TOO_LONG)


async def _event(event: bytes, take: Take) -> bytes:
    name, data, kept = b"", list[bytes](), list[bytes]()
    for line in event.splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.strip()
        elif field in (b"id", b"retry") and len(line) <= MAX_FIELD_BYTES:
            kept.append(line)
    if name in (b"", b"message") and data:
        message = b"\n".join(data)
        item = await take(message) if message else None
        kept.append(b"data: " + (_ANSWERED if _is_answer(item) else b""))
    return b"\n".join([*kept, b"", b""])
