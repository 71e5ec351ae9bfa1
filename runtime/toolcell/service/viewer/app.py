"""`create_viewer`: the pages as an application of its own, for `toolcell ui` or below another application's routes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from toolcell.service.viewer import (
    overview_page,
    replay_page,
    run_pages,
    runs_pages,
    tools_page,
    verification_page,
)
from toolcell.service.viewer.protection import ProtectedPages
from toolcell.service.viewer.visitors import ViewerHost

STATIC: Final = Path(__file__).parent / "static"
ROUTES: Final[tuple[BaseRoute, ...]] = (
    *overview_page.ROUTES,
    *runs_pages.ROUTES,
    *run_pages.ROUTES,
    *replay_page.ROUTES,
    *tools_page.ROUTES,
    *verification_page.ROUTES,
)


def create_viewer(host: ViewerHost, hosts: Iterable[str] = ()) -> ASGIApp:
    """Return the application. It answers only to the names in `hosts`, if any are given."""
    return protected(pages_of(host), hosts)


def pages_of(host: ViewerHost, more: Iterable[BaseRoute] = ()) -> Starlette:
    """Return the pages, without what protects them. `more` are those that only this host has."""
    app = Starlette(
        routes=[Mount("/static", StaticFiles(directory=STATIC)), *ROUTES, *more],
        exception_handlers={HTTPException: _error_page},
    )
    app.state.viewer_host = host
    return app


def protected(app: ASGIApp, hosts: Iterable[str] = ()) -> ASGIApp:
    """Return an application with the protection around all it answers, also around its errors."""
    return ProtectedPages(app, hosts)


async def _error_page(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return PlainTextResponse(f"{exc.detail}\n", exc.status_code, exc.headers)
