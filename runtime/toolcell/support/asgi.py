"""Serve an ASGI application with uvicorn on a socket of one's own. Shared by everything over HTTP."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import anyio
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolcell.errors import UsageError
from toolcell.support.log import quiet_from_here, quiet_loggers

ACCEPTED: Final = 64
"""Connections that are accepted before those of them that are too many end: each has a descriptor until then."""
ENDING: Final = "the server ends; what was asked for may have been carried out"
BACKLOG: Final = 2048
"""Connections that the kernel keeps until they are accepted."""


class HttpServer(uvicorn.Server):
    """Leaves signals to whoever runs it, and accepts many connections a few at a time."""

    def __init__(self, config: uvicorn.Config) -> None:
        config.app = _cancelled_quietly(config.app)
        super().__init__(config)
        config.backlog = ACCEPTED  # asyncio accepts that many at once, and listens with it

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with room for bursts."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End. Requests that do not end by themselves are cancelled, which uvicorn logs as an error."""
        with quiet_loggers("uvicorn.error"):
            await super().shutdown(sockets)

    async def serve_until_cancelled(self, listener: socket.socket, on_ready: Callable[[], object]) -> None:
        """Serve until this is cancelled, or until somebody sets `should_exit`; then end the connections."""
        ended = anyio.Event()

        async def serve() -> None:
            with anyio.CancelScope(shield=True):
                await self.serve([listener])
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            try:
                on_ready()
                await ended.wait()
            finally:
                self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _cancelled_quietly(app: Any) -> ASGIApp:
    """Answer 503 to requests that the end of the server cancels. To uvicorn, each is a failure with a traceback."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        is_answered = False

        async def sent(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        try:
            await app(scope, receive, sent)
        except asyncio.CancelledError:
            quiet_from_here("uvicorn.error")
            if scope["type"] == "http" and not is_answered:
                await PlainTextResponse(ENDING, 503, {"Retry-After": "1"})(scope, receive, send)
            raise

    return answering


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine reaches."""
    if host.rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """Return a host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Port 0 is any free one.

    Raises:
        UsageError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as exc:
        reason = (exc.strerror or str(exc)).partition(" (while")[0]
        cure = "; choose another port, or 0 for any free one" if exc.errno == errno.EADDRINUSE else ""
        raise UsageError(f"cannot listen on {bracketed(host)}:{port}: {reason}{cure}") from exc
    # Connections inherit it. asyncio sets it only where a socket names its protocol, and this one does not: the second
    # of two short messages would wait 40 ms for the acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket, path: str = "") -> str:
    """Return the URL of a path on a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://{bracketed(host)}:{port}{path}"


def allow_connections() -> None:
    """Let this process open as many descriptors as it may: each connection is one. For commands that serve."""
    try:
        import resource
    except ImportError:  # pragma: no cover  # not on Windows
        return
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if least != most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
