"""/v1/connect: the WebSocket of `toolcell.service.Client`. Who connects is asked before anything is accepted."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from toolcell.errors import ToolcellError
from toolcell.service.authentication import principal_of
from toolcell.service.principal import Scope
from toolcell.service.problems import Problem, problem_of
from toolcell.service.socket.messages import FRAMES, SOCKET_VERSION, CallerHello, Goodbye
from toolcell.service.socket.streams import LOST, read_frame
from toolcell.support.quiet import quiet_from_here
from toolcell.support.token_bucket import TokenBucket
from toolcell_bridge.wire.errors import RemoteProtocolError

HELLO_S: Final = 10.0
"""In which a connection says hello."""
FRAMES_PER_S: Final = 4_000.0
"""Frames a second of one connection. Past it, the service reads more slowly."""
BURST: Final = 4_000.0

PROTOCOL_ERROR: Final = 1002
SUBPROTOCOL: Final = "toolcell.v2"


class ServerTransport:
    """A Starlette WebSocket as a `Transport`, which reads no faster than it may."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._bucket = TokenBucket(1 / FRAMES_PER_S, BURST)

    async def send(self, message: bytes, /) -> None:
        """Write one binary message."""
        try:
            await self._websocket.send_bytes(message)
        except (WebSocketDisconnect, RuntimeError, OSError) as exc:
            raise ConnectionError("the caller is gone") from exc

    async def recv(self) -> str | bytes:
        """Return the next message."""
        if pause_s := self._bucket.take(asyncio.get_running_loop().time()):
            await asyncio.sleep(pause_s)
        try:
            message = await self._websocket.receive()
        except (RuntimeError, OSError) as exc:
            raise ConnectionError("the caller is gone") from exc
        if message["type"] == "websocket.disconnect":
            raise ConnectionError(f"the caller closed it ({message.get('code', 1005)})")
        data: str | bytes | None = message.get("bytes")
        return data if data is not None else str(message.get("text", ""))

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """End it."""
        try:
            await self._websocket.close(code, reason[:120])
        except (RuntimeError, OSError, WebSocketDisconnect):
            return


def check_origin(websocket: WebSocket) -> None:
    """Refuse what a page of another site opened in somebody's browser: browsers say so, and programs say nothing.

    Raises:
        Problem: it is such a page (403).
    """
    origin = websocket.headers.get("origin")
    if origin is None:
        return
    try:
        place = urlsplit(origin).netloc
    except ValueError:
        place = ""
    if not place or place != websocket.headers.get("host", ""):
        raise Problem(403, "forbidden", "Not allowed", f"a web page of {origin!r:.80} opened this connection")


async def connect(websocket: WebSocket) -> None:
    """Serve one connection."""
    service: Any = websocket.app.state.service
    try:
        check_origin(websocket)
        ask_who = partial(principal_of, websocket, Scope.EXECUTE)
        principal = await ask_who()
        tenant = await service.tenants.get(principal.tenant)
    except (Problem, ToolcellError) as exc:
        problem = exc if isinstance(exc, Problem) else problem_of(exc)
        await websocket.send_denial_response(problem.response())
        quiet_from_here("uvicorn.error")  # to it, each refusal is a handshake that was not completed
        return
    offered = websocket.scope.get("subprotocols", [])
    await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
    transport = ServerTransport(websocket)
    code, reason = PROTOCOL_ERROR, ""
    try:
        hello = await _hello(transport)
        reason = await service.callers.carry(hello, principal, tenant, transport, ask_who)
        code = 1000
    except (RemoteProtocolError, Problem) as exc:
        reason = str(exc)
        await _say_goodbye(transport, exc)
    except LOST:
        return
    await transport.close(code, reason)


async def _hello(transport: ServerTransport) -> CallerHello:
    try:
        hello = read_frame(await asyncio.wait_for(transport.recv(), HELLO_S))
    except TimeoutError as exc:
        raise RemoteProtocolError(f"no hello came in {HELLO_S:g} s") from exc
    if not isinstance(hello, CallerHello):
        raise RemoteProtocolError(f"the first frame is a hello, not {type(hello).__name__}")
    if hello.version != SOCKET_VERSION:
        raise RemoteProtocolError(f"the caller speaks version {hello.version}, and this service {SOCKET_VERSION}")
    return hello


async def _say_goodbye(transport: ServerTransport, exc: Exception) -> None:
    code = exc.code if isinstance(exc, Problem) else "protocol"
    try:
        await transport.send(FRAMES.encode_body(Goodbye(code, str(exc)[:1000])))
    except LOST:
        return


ROUTES: Final = (WebSocketRoute("/v1/connect", connect),)
