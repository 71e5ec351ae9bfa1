"""Serve the pages of one log on this machine, for `toolcell ui`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import uvicorn

from toolcell.audit import Verifier
from toolcell.service.log_reader import LogReader
from toolcell.service.viewer.app import create_viewer
from toolcell.service.viewer.visitors import OneLog
from toolcell.support.asgi import HttpServer, url_of
from toolcell.support.http_protocol import HttpLimits, bounded_protocol

MAX_CONNECTIONS = 200


async def serve_log(
    directory: Path,
    keys: Iterable[Verifier],
    listener: socket.socket,
    *,
    backend: str = "process",
    on_address: Callable[[str], object] = print,
) -> None:
    """Serve until cancelled. `on_address` is given the address with its token."""
    log = LogReader(directory, keys)
    port = listener.getsockname()[1]
    host = OneLog(log, port, backend)
    app = create_viewer(host, [f"{name}:{port}" for name in ("127.0.0.1", "localhost")])
    settings = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=bounded_protocol(HttpLimits(connections=MAX_CONNECTIONS)),
        timeout_graceful_shutdown=1,
    )
    try:
        on_address(f"{url_of(listener)}/?token={host.token}")
        await HttpServer(settings).serve([listener])
    finally:
        log.close_now()
