"""An MCP server over HTTP without the SDK or a framework, in this event loop: each request is answered by a function."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

Answer = tuple[int, dict[str, str], bytes]


def as_json(status: int, message: object, **headers: str) -> Answer:
    return status, {"content-type": "application/json", **headers}, json.dumps(message).encode()


def result(message: dict[str, Any], value: object, **headers: str) -> Answer:
    return as_json(200, {"jsonrpc": "2.0", "id": message["id"], "result": value}, **headers)


class PlainServer:
    """Answers as a server with sessions does. `refuse(method, headers, message)` may answer in its place."""

    def __init__(self, refuse: Callable[[str, dict[str, str], Any], Answer | None] = lambda *_: None) -> None:
        self.refuse = refuse
        self.session = "one"
        self.gone = (404, "Session not found")
        self.calls: list[str] = []
        self.lines: list[str] = []

    def answer(self, method: str, headers: dict[str, str], message: Any) -> Answer:
        if (refused := self.refuse(method, headers, message)) is not None:
            return refused
        if method != "POST":
            return 405, {}, b""
        match message.get("method"):
            case "initialize":
                value = {
                    "protocolVersion": message["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "plain", "version": "1"},
                }
                return result(message, value, **{"mcp-session-id": self.session})
            case _ if "id" not in message:
                return 202, {}, b""
            case _ if headers.get("mcp-session-id") not in (None, self.session):
                status, said = self.gone
                return as_json(status, {"jsonrpc": "2.0", "id": None, "error": {"code": -32001, "message": said}})
            case "tools/list":
                tool = {"name": "t", "description": "What it does", "inputSchema": {"type": "object"}}
                return result(message, {"tools": [tool]})
            case "tools/call":
                self.calls.append(headers.get("mcp-session-id", ""))
                return result(message, {"content": [{"type": "text", "text": "done"}]})
            case _:
                error = {"code": -32601, "message": "no such method"}
                return as_json(200, {"jsonrpc": "2.0", "id": message["id"], "error": error})

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve_one, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line, *rows = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rows if row)}
            self.lines.append(line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            status, more, content = self.answer(line.split()[0], headers, json.loads(body) if body else None)
            head = [f"HTTP/1.1 {status} x", "connection: close"]
            head += [] if "transfer-encoding" in more else [f"content-length: {len(content)}"]
            head += [f"{name}: {value}" for name, value in more.items()]
            writer.write(("\r\n".join(head) + "\r\n\r\n").encode() + content)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
