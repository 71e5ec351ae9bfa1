"""Serve MCP over this process's stdin and stdout. Nothing else may write there: `ProtocolStreams` takes them away.

A line that is not a JSON-RPC message is answered with an error here: the SDK would drop it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Self

import anyio
import anyio.from_thread
import anyio.lowlevel
import mcp_types as types
from mcp.server.stdio import stdio_server
from pydantic import ValidationError

from toolcell.mcp.server import McpServer
from toolcell.support import daemon_threads
from toolcell.support.event_loop import ChangeEvent

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Most bytes of one message. A longer line is answered with an error, and its rest is skipped."""

SKIPPED_BYTES = 1024 * 1024
"""Bytes of the rest of such a line, at once."""
_TOO_LONG = b"(a line that is too long)"
_SAID_OF_LONG = f"this line has more than {MAX_LINE_BYTES} bytes"


@contextmanager
def protocol_streams() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Give the standard streams to the protocol alone: what others print goes to stderr, and they read nothing."""
    sys.stdout.flush()
    ours = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # The reader's thread may still wait for a line at the end, so its descriptor stays open until the process ends.
    reader = os.fdopen(ours[0], "rb", closefd=False)
    with os.fdopen(ours[1], "wb") as writer:
        try:
            yield reader, writer
        finally:
            sys.stdout.flush()
            os.dup2(ours[0], 0)
            os.dup2(ours[1], 1)


class _Lines:
    """Both streams, as the SDK's transport uses them: lines that are messages, and text to write."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader, self._writer = reader, writer
        self._lines: deque[bytes | None] = deque()
        self._arrived = ChangeEvent()
        self._room = threading.Semaphore(1)
        self._token: Any = None

    def _read(self) -> None:
        line: bytes | None = b""
        while line is not None:
            self._room.acquire()
            try:
                line = self._reader.readline(MAX_LINE_BYTES) or None
                if line is not None and len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    line = _TOO_LONG
                    while (rest := self._reader.readline(SKIPPED_BYTES)) and not rest.endswith(b"\n"):
                        pass
            except (OSError, ValueError):
                line = None
            try:
                anyio.from_thread.run_sync(self._put, line, token=self._token)
            except RuntimeError:  # the event loop is over
                return

    def _put(self, line: bytes | None) -> None:
        self._lines.append(line)
        self._arrived.notify()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if self._token is None:
            self._token = anyio.lowlevel.current_token()
            daemon_threads.start(self._read, name="toolcell-mcp-stdin")
        while True:
            while not self._lines:
                await self._arrived.wait()
            line = self._lines[0]
            if line is None:
                raise StopAsyncIteration
            self._lines.popleft()
            self._room.release()
            text = line.decode("utf-8-sig", "replace")  # a byte order mark before the first line does no harm
            problem = _problem(text) if line is not _TOO_LONG else _error(None, types.INVALID_REQUEST, _SAID_OF_LONG)
            if problem is None:
                return text
            if problem:
                await self.write(problem + "\n")

    async def write(self, text: str) -> None:
        await daemon_threads.run_sync(self._write, text.encode("utf-8", "replace"), abandon_on_cancel=True)

    def _write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            self._writer.flush()
        except (BrokenPipeError, ValueError):
            pass  # the client is gone: the end of its stdin ends the server

    async def flush(self) -> None:
        """Do nothing: each message is flushed."""


def _problem(line: str) -> str | None:
    """Return the answer to a line that is not a message; "" for an empty line, None for a message."""
    if not line.strip():
        return ""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as exc:
        return _error(None, types.PARSE_ERROR, f"this line is not JSON: {type(exc).__name__}")
    is_request = isinstance(found, dict) and "method" in found and "id" in found
    if is_request and (not isinstance(found["id"], str | int) or isinstance(found["id"], bool)):
        return _error(None, types.INVALID_REQUEST, "the id of a request is a text or a whole number")
    try:
        types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except (ValidationError, ValueError):
        ident = found.get("id") if isinstance(found, dict) else None
        ident = ident if isinstance(ident, str | int) and not isinstance(ident, bool) else None
        return _error(ident, types.INVALID_REQUEST, "this is not a JSON-RPC 2.0 message")
    return None


def _error(ident: str | int | None, code: int, message: str) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": ident, "error": {"code": code, "message": message}})


async def serve_stdio(server: McpServer, reader: BinaryIO, writer: BinaryIO) -> None:
    """Serve the client behind two streams, until it closes the first."""
    lines: Any = _Lines(reader, writer)
    async with server, stdio_server(lines, lines) as (incoming, outgoing):
        await server.server.run(incoming, outgoing, server.server.create_initialization_options())
