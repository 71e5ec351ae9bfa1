"""`create_app`: the service as an ASGI application, for `toolcell serve` or for any ASGI server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from toolcell.errors import ToolcellError
from toolcell.service.config import ServiceConfig
from toolcell.service.endpoints import Endpoint, json_response
from toolcell.service.openapi import OPENAPI, document
from toolcell.service.problems import Problem, answer_problem
from toolcell.service.request_log import RequestLog
from toolcell.service.routes import health, runs, sessions, tools
from toolcell.service.service import Service
from toolcell.service.socket import callers
from toolcell.service.viewer.mounted import PagesRoute, viewer_of
from toolcell.tools import ToolRegistry

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *runs.RUNNING,
    *sessions.ENDPOINTS,
    *runs.DECIDING,
    *runs.RECORDED,
    *tools.ENDPOINTS,
)
"""Everything under /v1, in the order of the documentation."""


class OneFraming:
    """Refuses requests that say twice where they end: a proxy may have taken the other one. Source: RFC 9112, 6.3."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on that says once where it ends."""
        if scope["type"] == "http":
            names = [name for name, _ in scope["headers"] if name in (b"content-length", b"transfer-encoding")]
            if len(names) > 1:
                detail = "Content-Length and Transfer-Encoding say where it ends; send one of them, once"
                problem = Problem(
                    400, "ambiguous_framing", "The request has two ends", detail, headers={"Connection": "close"}
                )
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_app(config: ServiceConfig | Service | None = None, *, registry: ToolRegistry | None = None) -> Starlette:
    """Return the application. It opens the service when the ASGI server starts it, and closes it at the end.

    `registry`: tools that every tenant has; a `Service` has its own.
    """
    service = config if isinstance(config, Service) else Service(config, registry)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with service:
            yield

    handlers = dict.fromkeys((Problem, ToolcellError, HTTPException, Exception), answer_problem)
    routes: list[BaseRoute] = [each.route() for each in ENDPOINTS]
    routes += [Route(OPENAPI, _openapi), *health.ROUTES, *callers.ROUTES, viewer_of(service)]
    outermost = [Middleware(RequestLog, route_of=partial(_route_of, routes)), Middleware(OneFraming)]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=outermost)
    app.state.service = service
    if service.config.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=[*service.config.trusted_proxies])
    return app


def _route_of(routes: Sequence[BaseRoute], scope: Scope) -> str | None:
    """Return the template of the path, of the viewer's pages too; None for what is no route."""
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            return _route_of(route.routes, scope) if isinstance(route, PagesRoute) else getattr(route, "path", None)
    return None


async def _openapi(request: Request) -> Response:
    return json_response(document(ENDPOINTS))
