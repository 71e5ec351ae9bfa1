"""Bounds on what an MCP server answers over HTTP, before the SDK parses it: bytes, structure, lines and requests."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio
import httpx2
from mcp_types import INTERNAL_ERROR
from pydantic_core import from_json

from toolcell.mcp.http_refusals import ANSWER_LOST, error_body, explained, message_of
from toolcell.mcp.pace import LINE_BURST, LINES_PER_S, Pace
from toolcell.mcp.structure import MAX_ELEMENTS, TOO_MANY, at_most, elements, let_others_run, with_whole_characters

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Most bytes of one message of a server: a whole page of its tools, or the result of one call."""
MEMBERS = frozenset({"result", "error", "method"})  # a message of JSON-RPC has one of them
END_OF_SESSION_S = 2.0
"""What a server may take to say that its session is over."""
REOPENED_S = 0.5
"""Between two requests for the same stream of events. A server that ends it at once could have it asked for without
end."""

_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Ends answers that are longer than a message may be, and replaces those with too much structure by an error."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, name: str, note: Callable[[str], None]) -> None:
        """`note` is told why an answer is given up that somebody waits for: calls that end with it say so."""
        self._inner, self._note = inner, note
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
        ident = asked.get("id") if isinstance(asked, dict) else None
        given_up = partial(self._given_up, ident)
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise given_up("the server compresses what it sends; a bound would not hold for it")
        response = await explained(request, response, self._inner)
        is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        kind = _Events if is_stream else _Body
        response.stream = kind(response.stream, ident, self._lines, given_up)
        return response

    def _given_up(self, ident: Any, problem: str) -> httpx2.ReadError:
        if ident is not None:
            self._note(problem)
        return httpx2.ReadError(problem)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Bounded(httpx2.AsyncByteStream):
    def __init__(
        self, inner: httpx2.AsyncByteStream, ident: Any, lines: Pace, given_up: Callable[[str], httpx2.ReadError]
    ) -> None:
        """`ident`: id of the request that this answers; None when nobody waits for an answer."""
        self._inner, self._ident, self._lines, self._given_up = inner, ident, lines, given_up

    def _error(self, code: int, problem: str) -> bytes | None:
        """Return what stands in the place of an answer that cannot be used."""
        return None if self._ident is None else error_body(self._ident, code, f"its answer {problem}")

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Body(_Bounded):
    """One message, handed on when it is there whole."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        body = bytearray()
        async for chunk in self._inner:
            body += chunk
            if len(body) > MAX_MESSAGE_BYTES:
                raise self._given_up(f"the server sent a message of more than {MAX_MESSAGE_BYTES} bytes")
        whole: Any = bytes(body)
        if await elements(whole) > MAX_ELEMENTS:
            whole = self._error(INTERNAL_ERROR, f"cannot be used: {TOO_MANY}")
        elif not whole.strip():
            whole = self._error(ANSWER_LOST, "is empty")
        else:
            whole = await with_whole_characters(whole)
            if self._ident is not None and not _is_message(whole):
                # The SDK would show a model what its validator says of it.
                whole = self._error(ANSWER_LOST, "is not a message of JSON-RPC 2.0")
        if whole:
            await let_others_run()  # before the SDK parses it again
            yield whole


def _is_message(body: bytes) -> bool:
    try:
        found = from_json(body, cache_strings="none")
    except ValueError:
        return False
    return isinstance(found, dict) and not MEMBERS.isdisjoint(found)


class _Events(_Bounded):
    """A stream of events: those with too much structure are replaced, or left out where nobody waits for them."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        rest = bytearray()
        async for chunk in self._inner:
            await self._lines.wait(chunk.count(b"\n") + chunk.count(b"\r"))
            seen = max(0, len(rest) - 3)
            rest += chunk
            ends = [each.end() for each in _BLANK_LINE.finditer(rest, seen)]
            whole = bytes(rest[: ends[-1]]) if ends else b""
            del rest[: len(whole)]
            if len(rest) > MAX_MESSAGE_BYTES:  # the SDK has the same bound, and says so
                whole, rest = whole + bytes(rest), bytearray()
                yield whole
            elif at_most(whole) <= MAX_ELEMENTS:
                if whole:
                    yield await with_whole_characters(whole)
            else:
                for start, end in zip([0, *ends], ends, strict=False):
                    yield await self._fitting(whole[start:end])
        if rest:
            yield await self._fitting(bytes(rest))

    async def _fitting(self, event: bytes) -> bytes:
        if await elements(event) <= MAX_ELEMENTS:
            return await with_whole_characters(event)
        error = self._error(INTERNAL_ERROR, f"cannot be used: {TOO_MANY}")
        return b"event: message\ndata: " + error + b"\n\n" if error is not None else b"\n"
