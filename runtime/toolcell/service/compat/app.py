"""`create_compat_app`: the routes of the compatible front as an ASGI application, before a `Service`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toolcell import daemon_threads
from toolcell.errors import ToolcellError
from toolcell.service.bodies import read_body
from toolcell.service.compat.executions import BUSY
from toolcell.service.compat.front import CompatFront
from toolcell.service.compat.messages import Answer, checked_session, error, json_bytes, read_request
from toolcell.service.compat.settings import BODY_BYTES, BODY_S, CompatSettings
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem
from toolcell.service.service import Service

BODIES: Final = 4
"""Requests that may be on their way in for each run that is allowed. Each holds its body in memory."""

IDEMPOTENT: Final = "toolcell-idempotent"
"""Header of every answer: a request that is sent again with its execution_id runs once."""

RETRY_AFTER_S: Final = 1


def create_compat_app(settings: CompatSettings, service: Service | None = None) -> Starlette:
    """Return the application. Its lifespan opens and closes `service` and what is in front of it."""
    front = CompatFront(settings, service)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with front.service, front:
            yield
            await front.service.drain(front.service.config.drain_s)

    return app_of(front, lifespan)


def app_of(
    front: CompatFront, lifespan: Callable[[Starlette], object] | None = None, body_s: float = BODY_S
) -> Starlette:
    """Return the application of a front. Without a `lifespan`, its caller opens service and front."""
    routes = _Routes(front, body_s)
    app = Starlette(
        routes=[
            Route("/execute", routes.execute, methods=["POST"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/workspace/{session_id:path}", routes.delete_workspace, methods=["DELETE"]),
            Route("/workspace", routes.delete_workspace, methods=["DELETE"]),
        ],
        lifespan=lifespan,  # type: ignore[arg-type]
        exception_handlers=dict.fromkeys((Problem, ToolcellError, HTTPException, Exception), _on_error),
    )
    app.router.redirect_slashes = False
    app.state.service = front.service
    return app


class _Routes:
    """The handlers."""

    def __init__(self, front: CompatFront, body_s: float) -> None:
        self._front, self._settings, self._body_s = front, front.settings, body_s
        self._bodies = 0

    async def health(self, _request: Request) -> Response:
        """Say whether requests are taken."""
        is_ready = self._front.service.is_ready
        return _response(Answer(200 if is_ready else 503, json_bytes({"status": "ready" if is_ready else "stopping"})))

    async def execute(self, request: Request) -> Response:
        """Run a script."""
        principal = await self._principal(request)
        body = await self._body(request)
        checked = await daemon_threads.run_sync(read_request, body, self._settings)
        executions = self._front.executions
        answer = executions.answer(principal.tenant, principal.subject, checked)
        return _response(await _unless_gone(request, answer))

    async def delete_workspace(self, request: Request) -> Response:
        """Delete the workspace of a session."""
        principal = await self._principal(request)
        session = checked_session(request.path_params.get("session_id", ""))
        await self._front.workspaces_of(principal.tenant).delete(session)
        return Response(status_code=204, headers={IDEMPOTENT: "1"})

    async def _principal(self, request: Request) -> Principal:
        client = request.client.host if request.client is not None else ""
        authenticator = self._front.service.authenticator
        principal = await authenticator.principal(_with_bearer(request), client)
        if not principal.may(Scope.EXECUTE):
            raise Problem(403, "forbidden", "Not allowed", f"this needs the scope {Scope.EXECUTE}")
        return principal

    async def _body(self, request: Request) -> bytes:
        if self._bodies >= self._settings.max_concurrent * BODIES:
            raise Problem(503, "busy", BUSY)
        self._bodies += 1
        try:
            return await read_body(request, BODY_BYTES, self._body_s)
        finally:
            self._bodies -= 1


def _with_bearer(request: Request) -> Mapping[str, str]:
    """Return the headers, with the password of `http://user:token@host` as the token that it is."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic" or len(request.headers.getlist("authorization")) > 1:
        return request.headers
    try:
        token = base64.b64decode(given.strip(), validate=True).decode("ascii").partition(":")[2]
    except (binascii.Error, ValueError):
        return request.headers
    return {**request.headers, "authorization": f"Bearer {token}"}


async def _unless_gone(request: Request, waiting: Awaitable[Answer]) -> Answer:
    """Wait for an answer as long as the client does."""
    answer = error(499, "the client is gone")

    async def leave_with_the_client() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        both.cancel_scope.cancel()

    async with anyio.create_task_group() as both:
        both.start_soon(leave_with_the_client)
        answer = await waiting
        both.cancel_scope.cancel()
    return answer


def _response(answer: Answer, headers: Mapping[str, str] | None = None) -> Response:
    own = {IDEMPOTENT: "1", "x-content-type-options": "nosniff", "cache-control": "no-store"}
    if answer.status == 503:
        own["retry-after"] = str(RETRY_AFTER_S)
    return Response(answer.body, answer.status, {**own, **(headers or {})}, media_type="application/json")


def _on_error(_request: Request, exc: Exception) -> Response:
    match exc:
        case Problem(status=status, headers=headers):
            return _response(error(status, exc.detail or exc.title), {k.lower(): v for k, v in headers.items()})
        case HTTPException(status_code=status, detail=detail, headers=headers):
            said = {404: "not found", 405: "method not allowed"}.get(status, str(detail))
            return _response(error(status, said), {k.lower(): v for k, v in (headers or {}).items()})
        case ToolcellError():
            return _response(error(500, str(exc)))
    return _response(error(500, "internal error"))
