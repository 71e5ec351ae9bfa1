"""`create_viewer`: the pages as an application of its own, for `toolcell ui` or below another application's routes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from toolcell.audit import RecordDatabase, Verifier
from toolcell.service.log_reader import LogReader
from toolcell.service.viewer import figures, run_pages, runs_pages
from toolcell.service.viewer.protection import ProtectedPages
from toolcell.service.viewer.visitors import OneLog, ViewerHost
from toolcell.support.asgi import HttpServer, url_of
from toolcell.support.http_protocol import HttpLimits, bounded_protocol

STATIC: Final = Path(__file__).parent / "static"
ROUTES: Final[tuple[BaseRoute, ...]] = (*figures.ROUTES, *runs_pages.ROUTES, *run_pages.ROUTES)


def create_viewer(host: ViewerHost, hosts: Iterable[str] = ()) -> ASGIApp:
    """Return the application. It answers only to the names in `hosts`, if any are given."""
    return ProtectedPages(pages_of(host), hosts)


def pages_of(host: ViewerHost, more: Iterable[BaseRoute] = ()) -> Starlette:
    app = Starlette(
        routes=[Mount("/static", StaticFiles(directory=STATIC)), *ROUTES, *more],
        exception_handlers={HTTPException: _error_page},
    )
    app.state.viewer_host = host
    return app


async def _error_page(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return PlainTextResponse(f"{exc.detail}\n", exc.status_code, exc.headers)


MAX_CONNECTIONS = 200


async def serve_log(
    directory: RecordDatabase,
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
