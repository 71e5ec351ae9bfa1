"""Serve MCP over streamable HTTP. Away from loopback there is a bearer token; Host and Origin are checked."""

from __future__ import annotations

import hmac
import re
import socket
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import uvicorn
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.auth.settings import AuthSettings
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import jsonrpc_message_adapter
from pydantic import AnyHttpUrl
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolcell.errors import UsageError
from toolcell.mcp.server import GONE, McpServer
from toolcell.mcp.structure import (
    MAX_CHECKED,
    MAX_ELEMENTS,
    TOO_MANY,
    TOO_MANY_CHECKED,
    elements,
    has_too_many,
)
from toolcell.support.asgi import HttpServer, bracketed, is_loopback, url_of
from toolcell.support.http_protocol import HttpLimits, bounded_protocol

PATH = "/mcp"
RECEIVING_BYTES = 32 << 20
"""Most bytes of bodies that are not whole, of all clients together. Each has at most four megabytes."""
BUSY_TEXT = "too much is on its way; try again"
BUSY = {"Retry-After": "1", "Connection": "close"}
SMALL_BYTES: Final = 1 << 16
MIN_TOKEN_CHARS = 16
END_S = 1
"""What connections may take to end when the server does."""


class StaticToken:
    """A `TokenVerifier` that knows one token. Whoever has it is the same principal."""

    def __init__(self, token: str) -> None:
        if len(token) < MIN_TOKEN_CHARS:
            raise UsageError(f"the bearer token has {len(token)} characters, and {MIN_TOKEN_CHARS} are the least")
        self._token = token.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        is_right = hmac.compare_digest(token.encode(), self._token)
        return AccessToken(token=token, client_id="toolcell", scopes=[]) if is_right else None


def http_app(
    server: McpServer,
    host: str,
    *,
    verifier: TokenVerifier | None = None,
    auth: AuthSettings | None = None,
    hosts: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
) -> ASGIApp:
    """Return the ASGI application. It must see the lifespan events of its ASGI server.

    `verifier` checks bearer tokens. `auth` says who issues them: with its `resource_server_url`, clients find that as
    OAuth protected resource metadata. `hosts` and `origins`: what these headers may be besides the address itself.

    Raises:
        UsageError: there is no verifier, and `host` is not loopback.
    """
    if verifier is None and not is_loopback(host):
        given = "--token-file FILE, $TOOLCELL_MCP_TOKEN, or verifier=..."
        raise UsageError(f"whoever reaches {host} could run code: a bearer token is needed there: {given}")
    if verifier is not None and auth is None:
        auth = AuthSettings(issuer_url=AnyHttpUrl("http://localhost"), resource_server_url=None)
    other = () if host in ("0.0.0.0", "::", "") else (bracketed(host),)
    own = ("127.0.0.1", "localhost", "[::1]") if is_loopback(host) else other
    security = TransportSecuritySettings(
        allowed_hosts=[form for each in (*own, *hosts) for form in (each, f"{each}:*")],
        allowed_origins=[*origins, *(form for each in own for form in (f"http://{each}", f"http://{each}:*"))],
    )
    app = server.server.streamable_http_app(
        streamable_http_path=PATH, transport_security=security, auth=auth, token_verifier=verifier, host=host
    )
    return _for_browsers(_noticing_departures(app), origins) if origins else _noticing_departures(app)


def _for_browsers(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Let pages of these origins read the answers. A port may be `*`."""
    patterns = [re.escape(each.removesuffix(":*")) + (r":\d+" if each.endswith(":*") else "") for each in origins]
    return CORSMiddleware(
        app,
        allow_origin_regex="|".join(patterns),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["authorization", "content-type", "last-event-id", "mcp-protocol-version", "mcp-session-id"],
        expose_headers=["mcp-session-id", "www-authenticate"],
    )


def _refusal(body: bytes) -> str:
    """Return why a body is no message. The SDK puts a body that it refuses into its error, once for each reason."""
    try:
        found = from_json(body, cache_strings="none")
    except ValueError as exc:
        return f"the body is not JSON: {exc}"
    try:  # not `validate_json`, which makes what is wrong anew for each reason
        jsonrpc_message_adapter.validate_python(found, by_name=False)
    except ValueError:
        return "the body is not a message of JSON-RPC 2.0"
    return f"{_UNREAD}{TOO_MANY_CHECKED}" if has_too_many(found) else ""


_UNREAD: Final = "the message cannot be read: "
_HOST: Final = re.compile(rb"(\[[^\]]*\]|[^:@]*)(:[0-9]+)?")


def _noticing_departures(app: ASGIApp) -> ASGIApp:
    """Put an event into the scope of each request, and set it when the client is gone. Refuse bodies that are on their
    way when there is too much of them, and those whose structure would keep everybody else waiting."""
    on_their_way = 0

    async def noticing(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal on_their_way
        encoding = Headers(scope=scope).get("content-encoding", "identity") if scope["type"] == "http" else "identity"
        if encoding.lower() != "identity":
            text = f"a body with the Content-Encoding {encoding[:40]!r} is not read here; send it as it is"
            await PlainTextResponse(text, 415, {"Accept-Encoding": "identity"})(scope, receive, send)
            return
        if scope["type"] == "http":
            # `last-event-id` is of streams that can be resumed, which are not kept here: the SDK would answer nothing.
            # Of hosts the SDK compares the beginnings, and it refuses a request without one.
            scope["headers"] = [
                (name, value)
                for name, value in scope["headers"]
                if name != b"last-event-id" and (name != b"host" or _HOST.fullmatch(value))
            ]
        gone = scope[GONE] = anyio.Event()
        body, refusal = bytearray(), ""

        async def received() -> Message:
            nonlocal on_their_way, refusal
            message = await receive()
            if message["type"] == "http.disconnect":
                gone.set()
            elif message["type"] == "http.request":
                chunk = message.get("body", b"")
                body.extend(chunk)
                on_their_way += len(chunk)
                if on_their_way > RECEIVING_BYTES:
                    refusal = BUSY_TEXT
                elif not message.get("more_body"):
                    whole = bytes(body)
                    if (bound := await elements(whole)) > MAX_ELEMENTS:
                        refusal = f"{_UNREAD}{TOO_MANY}"
                    elif len(whole) > SMALL_BYTES or bound > MAX_CHECKED:
                        refusal = _refusal(whole)
                    on_their_way -= len(body)
                    body.clear()
                if refusal:
                    return {"type": "http.disconnect"}  # for the application, the client is gone
            return message

        async def sent(message: Message) -> None:
            if not refusal:
                await send(message)

        try:
            await app(scope, received, sent)
        except Exception:
            if not refusal:
                raise
        finally:
            on_their_way -= len(body)
        if refusal:
            status = 503 if refusal == BUSY_TEXT else 413 if refusal.startswith(_UNREAD) else 400
            await PlainTextResponse(refusal, status, BUSY if status == 503 else None)(scope, receive, send)

    return noticing


def parse_address(text: str) -> tuple[str, int]:
    """Read HOST:PORT; an IPv6 address is in brackets.

    Raises:
        UsageError: it is none.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or parts.path or parts.query or parts.username is not None:
        raise UsageError(f"--http {text!r:.80}: want HOST:PORT, such as 127.0.0.1:8000")
    return host, port


async def serve_http(
    server: McpServer,
    app: ASGIApp,
    listener: socket.socket,
    on_ready: Callable[[str], Any] = lambda url: None,
    limits: HttpLimits | None = None,
) -> None:
    """Serve until cancelled; then end the connections. `on_ready` gets the URL. `limits`: what clients may take. Needs
    asyncio."""
    config = uvicorn.Config(
        app,
        http=bounded_protocol(limits or HttpLimits()),
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=END_S,
    )
    async with server:
        await HttpServer(config).serve_until_cancelled(listener, lambda: on_ready(url_of(listener, PATH)))
