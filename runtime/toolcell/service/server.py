"""Run the service on a socket until it is told to end: first it drains, and at the second signal it ends at once."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

import anyio
import uvicorn
from starlette.applications import Starlette

from toolcell.errors import UsageError
from toolcell.service.authentication import LoopbackAuthenticator
from toolcell.service.problems import Problem
from toolcell.service.service import Service
from toolcell.service.socket.connection import PART_BYTES
from toolcell.support.asgi import HttpServer, is_loopback, url_of
from toolcell.support.event_loop import end_signals
from toolcell.support.exact_json import json_text
from toolcell.support.http_protocol import HttpLimits, bounded_protocol

END_S: Final = 1
"""What connections may take to end when nothing runs any more."""

PING_S: Final = 5.0
SILENT_S: Final = 15.0
"""How long a WebSocket's client may leave a ping unanswered before the connection counts as lost."""

KEEP_ALIVE_S: Final = 30
"""How long a connection without a request stays open."""


def check_host(service: Service, host: str) -> None:
    """Check that whoever reaches this address has to say who they are.

    Raises:
        UsageError: they have not.
    """
    if isinstance(service.authenticator, LoopbackAuthenticator) and not is_loopback(host):
        raise UsageError(
            f"whoever reaches {host} could run code: make a token with `toolcell tokens create` and name its store "
            "with --tokens FILE, or name an issuer of JWTs in the configuration; or listen on 127.0.0.1"
        )


def check_tls(service: Service) -> None:
    """Check that certificate and key can be used.

    Raises:
        UsageError: they cannot.
    """
    cert, key = service.config.tls_cert, service.config.tls_key
    if cert is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
        except (OSError, ValueError) as exc:
            raise UsageError(f"TLS: the certificate {cert} and the key {key} cannot be used: {exc}") from exc


async def serve(app: Starlette, listener: socket.socket, on_event: Callable[[str], Any]) -> None:
    """Serve until SIGTERM or SIGINT, or until cancelled. `on_event` gets a line for each step.

    Raises:
        ToolcellError: the service could not be opened.
    """
    service: Service = app.state.service
    check_host(service, listener.getsockname()[0])
    check_tls(service)
    http = HttpServer(_uvicorn_config(app, service))
    async with service, anyio.create_task_group() as tasks:

        async def end_at_signal() -> None:
            async for _ in end_signals():
                if http.should_exit or service.runs.is_draining:
                    tasks.cancel_scope.cancel()
                    return
                tasks.start_soon(drain)

        async def drain() -> None:
            on_event(f"draining: {len(service.runs)} runs under way")
            await service.drain(service.config.drain_s)
            http.should_exit = True

        tasks.start_soon(end_at_signal)
        url = url_of(listener)
        url = url if service.config.tls_cert is None else url.replace("http:", "https:", 1)
        await http.serve_until_cancelled(listener, lambda: on_event(f"serving {url}"))
        tasks.cancel_scope.cancel()


def _uvicorn_config(app: Starlette, service: Service) -> uvicorn.Config:
    config = service.config
    limits = HttpLimits(
        head_s=config.head_s,
        body_s=None,  # whoever reads it answers 408
        write_s=config.write_s,
        connections=config.connections,
        refusal=json_text(Problem(503, "too_many_connections", "Too many connections").to_dict()).encode(),
        refusal_type=b"application/problem+json",
    )
    return uvicorn.Config(
        app,
        http=bounded_protocol(limits),
        lifespan="off",  # opened and closed here, so that its errors are ours
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a header must not make a stranger local
        ws_max_size=PART_BYTES,
        ws_ping_interval=PING_S,
        ws_ping_timeout=SILENT_S,
        ws_per_message_deflate=False,  # a kilobyte would become a megabyte before anything is checked
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=END_S,
    )
