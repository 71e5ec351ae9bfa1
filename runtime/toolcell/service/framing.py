"""Refuse requests that say twice where they end: a proxy may have taken the other one. Source: RFC 9112, 6.3."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from toolcell.service.problems import Problem


class OneFraming:
    """An ASGI application around another one."""

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
