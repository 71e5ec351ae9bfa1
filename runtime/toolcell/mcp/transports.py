"""How bytes reach an MCP server: the pipes of a process that the host starts, or HTTP. Both bounded.

What a server sends is not trusted: a message has a largest size, a connection a largest number of lines that are
no messages, and notifications a pace.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
from anyio.abc import Process
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from toolcell.errors import McpServerError
from toolcell.mcp.address_guard import LoginTransport
from toolcell.mcp.login import Login
from toolcell.mcp.pace import Pace
from toolcell.support.text import clean

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Of one message of a server: a whole page of its tools, or the result of one call."""
MAX_BAD_LINES = 100
"""Lines of one connection that are no JSON-RPC; servers print greetings there by mistake."""
STOP_S = 2.0
"""What a server may take to end after its input was closed, and its supervisor after it was told to."""
MAX_SAID_BYTES = 500
"""Of what a server writes to stderr, in a message about its end."""
MAX_KEPT_BYTES = 8 * 1024
"""Of what a server writes to stderr: a secret that is hidden in it is there whole."""
MAX_ID_DIGITS = 18
CONNECT_S = 30.0

Streams = tuple[MemoryObjectReceiveStream["SessionMessage | Exception"], MemoryObjectSendStream[SessionMessage]]


class ProcessTransport:
    """Starts a server as a process, and speaks with it over its stdin and stdout."""

    host = ""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str | None, hide: Callable[[str], str] = str
    ) -> None:
        """`hide` takes secrets out of what the server writes to stderr."""
        self._command, self._env, self._cwd, self._hide = list(command), dict(env), cwd, hide
        self.ended = anyio.Event()
        """It cannot be spoken with any more."""
        self._stderr = b""
        self._problem = ""
        self._has_spoken = False
        """It sent a message of the protocol."""
        self._process: Process | None = None

    @property
    def problem(self) -> str:
        """Why the server cannot be spoken with any more, with the last line that it wrote to stderr."""
        status = self._process.returncode if self._process is not None else None
        lines = self._hide(clean(self._stderr.decode("utf-8", "replace"))).strip().splitlines()
        said = lines[-1][-MAX_SAID_BYTES:].strip() if lines else ""
        ended = self._problem or ("its output ended" if status is None else f"it ended with exit status {status}")
        if not said and not self._problem and not self._has_spoken:
            said = "it sent no message of MCP; is it a server that speaks over stdin and stdout?"
        return f"{ended}: {said}" if said else ended

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Streams]:
        """Start the server; at the end of the block nothing of it is left.

        Raises:
            McpServerError: there is no such program.
        """
        env = get_default_environment() | self._env
        if shutil.which(self._command[0], path=env.get("PATH")) is None:
            raise McpServerError(f"there is no program {self._command[0]!r} on the PATH")
        supervisor = [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")), str(os.getpid())]
        try:
            process = await anyio.open_process(
                [*supervisor, *self._command], env=env, cwd=self._cwd, start_new_session=True
            )
        except OSError as exc:
            raise McpServerError(f"{self._command[0]!r} cannot be started: {exc}") from exc
        self._process = process
        to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        with to_session, from_server, to_server, from_session:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, process, to_session)
                tasks.start_soon(self._write, process, from_session)
                tasks.start_soon(self._read_stderr, process)
                try:
                    yield from_server, to_server
                finally:
                    with anyio.CancelScope(shield=True):
                        await _stop(process)
                    tasks.cancel_scope.cancel()

    async def _read(self, process: Process, to_session: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        assert process.stdout is not None
        buffer, bad, pace = bytearray(), 0, Pace(repr(self._command[0]))
        with to_session, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            try:
                async for chunk in process.stdout:
                    *lines, rest = chunk.split(b"\n")
                    for line in lines:
                        message = _message(bytes(buffer + line))
                        buffer.clear()
                        bad += isinstance(message, Exception)
                        self._has_spoken = self._has_spoken or isinstance(message, SessionMessage)
                        if bad > MAX_BAD_LINES:
                            self._problem = f"it sent more than {MAX_BAD_LINES} lines that are no JSON-RPC"
                            return
                        if message is not None:
                            await to_session.send(message)
                            await pace.wait(message)
                    buffer += rest
                    if len(buffer) > MAX_MESSAGE_BYTES:
                        self._problem = f"it sent a message of more than {MAX_MESSAGE_BYTES} bytes"
                        return
                with anyio.move_on_after(STOP_S):
                    await process.wait()
            finally:
                self.ended.set()

    async def _write(self, process: Process, from_session: MemoryObjectReceiveStream[SessionMessage]) -> None:
        assert process.stdin is not None
        try:
            async for each in from_session:
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.stdin.send(text.encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            self.ended.set()

    async def _read_stderr(self, process: Process) -> None:
        assert process.stderr is not None
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for chunk in process.stderr:
                self._stderr = (self._stderr + chunk)[-MAX_KEPT_BYTES:]


def _message(line: bytes) -> SessionMessage | Exception | None:
    if not line.strip():
        return None
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as exc:
        return _failed_answer(line) or exc


def _failed_answer(line: bytes) -> SessionMessage | None:
    """Return an error in place of an answer that is none, if it says which request it is about: nobody waits for it."""
    try:
        found = json.loads(line.decode("utf-8", "replace"), parse_int=lambda text: int(text[: MAX_ID_DIGITS + 1]))
    except (ValueError, RecursionError):
        return None
    ident = found.get("id") if isinstance(found, dict) and "method" not in found else None
    if not isinstance(ident, int | str) or isinstance(ident, bool):
        return None
    error = ErrorData(code=INTERNAL_ERROR, message="its answer is no message of JSON-RPC 2.0")
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=ident, error=error))


async def _stop(process: Process) -> None:
    """Let the server end by itself, then have its supervisor end it."""
    assert process.stdin is not None
    with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdin.aclose()
    for end in (None, process.terminate, process.kill):
        if end is not None:
            with contextlib.suppress(ProcessLookupError):
                end()
        with anyio.move_on_after(STOP_S):
            await process.wait()
            break
    with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.aclose()


class HttpTransport:
    """Speaks with a server over streamable HTTP."""

    def __init__(self, url: str, headers: Mapping[str, str], login: Login | None = None) -> None:
        """`login` gives requests their token."""
        self._url, self._headers, self._login = url, dict(headers), login
        place = httpx2.URL(url)
        self.host = f"{place.host}:{place.port}" if place.port else place.host
        """Without the rest of the URL, which may hold a token."""
        self.ended = anyio.Event()
        self.problem = "the connection was lost"

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Any]:
        """Connect; at the end of the block the server's session is closed."""
        timeout = httpx2.Timeout(CONNECT_S, read=None)
        transport: httpx2.AsyncBaseTransport = _BoundedTransport(httpx2.AsyncHTTPTransport())
        if self._login is not None:
            self._login.begin_connection()
            transport = LoginTransport(transport, self._login.guard)
        headers = self._headers | {"accept-encoding": "identity"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout, transport=transport, auth=self._login) as http,
            streamable_http_client(self._url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES) as (read, write),
            _paced(read, Pace(self.host)) as slow,
        ):
            yield slow, write


@asynccontextmanager
async def _paced(read: Any, pace: Pace) -> AsyncIterator[MemoryObjectReceiveStream[Any]]:
    """Yield a stream of the same messages, in which notifications come at a pace."""
    to_session, from_server = anyio.create_memory_object_stream[Any](0)

    async def relay() -> None:
        with to_session, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for message in read:
                await to_session.send(message)
                await pace.wait(message)

    with to_session, from_server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(relay)
            try:
                yield from_server
            finally:
                tasks.cancel_scope.cancel()


class _BoundedTransport(httpx2.AsyncBaseTransport):
    """Ends answers that are longer than a message may be. Streams of events are bounded event by event elsewhere."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.ReadError("the server compresses what it sends; a bound would not hold for it")
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream, math.inf if is_stream else MAX_MESSAGE_BYTES)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, limit: float) -> None:
        self._inner, self._limit = inner, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._inner:
            size += len(chunk)
            if size > self._limit:
                raise httpx2.ReadError(f"the server sent a message of more than {self._limit} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()
