"""`CallbackDispatch`: answers the tool calls that a service makes for the scripts of this process, over HTTP."""

from __future__ import annotations

import hmac
import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toolcell.config import MIB
from toolcell.errors import ToolAbort
from toolcell.service.bodies import read_body
from toolcell.service.problems import Problem
from toolcell.tools.call import CallableTools, RunContext
from toolcell.tools.options import Origin
from toolcell.tools.result import ErrorCode, ToolResult

PATH: Final = "/_oasis/dispatch"
CALL_BYTES: Final = 32 * MIB
CALL_BODY_S: Final = 60.0
REMEMBERED: Final = 1000
"""Executions that are over and whose late calls are told so. Calls of older ones get 404."""

NO_RECURSION: Final = "execute_code cannot call execute_code (no recursion)"


@dataclass(eq=False)
class CallingRun:
    """One execution whose calls are answered."""

    execution_id: str
    tools: CallableTools
    context: RunContext
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    ended: str = ""
    """How it ended; empty while it runs."""
    scopes: set[anyio.CancelScope] = field(default_factory=set)
    answers: dict[str, _Call] = field(default_factory=dict)
    """By the id of the call."""

    def told(self) -> str:
        """Return what a call that was cancelled is told."""
        return self.ended or "call cancelled"


class _Call:
    """A call that is being answered, or was."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.result: ToolResult | None = None


class CallbackDispatch:
    """The executions of one runner, and the ASGI application that answers their calls."""

    def __init__(self, *, checks_tokens: bool = True) -> None:
        self._checks_tokens = checks_tokens
        self._runs: dict[str, CallingRun] = {}
        self._over: OrderedDict[str, CallingRun] = OrderedDict()
        handlers = dict.fromkeys((HTTPException, Problem), _on_error)
        route = Route(PATH, self._dispatch, methods=["POST"])
        self.app = Starlette(routes=[route], exception_handlers=handlers)
        """Serve it where `callback_external` leads."""

    def begin(self, run: CallingRun) -> None:
        """Answer the calls of an execution from now on."""
        self._over.pop(run.execution_id, None)
        self._runs[run.execution_id] = run

    def end(self, run: CallingRun, how: str) -> None:
        """Answer its calls no longer. Calls under way are cancelled; later ones are told `how` it ended."""
        run.ended = how
        for scope in run.scopes:
            scope.cancel()
        run.answers.clear()
        if self._runs.pop(run.execution_id, None) is not None:
            self._over[run.execution_id] = run
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    async def _dispatch(self, request: Request) -> Response:
        try:
            given = json.loads(await read_body(request, CALL_BYTES, CALL_BODY_S))
            asked = _Asked.of(given)
        except (ValueError, RecursionError) as exc:
            return _said(400, f"invalid JSON: {exc}")
        run = self._runs.get(asked.execution_id, self._over.get(asked.execution_id))
        if run is None:
            return _said(404, "unknown execution_id")
        if self._checks_tokens and not _is_token(request, run.token):
            return _said(401, "the token of this execution is required: Authorization: Bearer")
        if run.ended:
            return _said(200, run.ended)
        result = await self._answered(run, asked)
        return _said(504, run.told()) if result is None else JSONResponse(shown(result))

    async def _answered(self, run: CallingRun, asked: _Asked) -> ToolResult | None:
        """Make a call, or wait for the one with the same id. None: it was cancelled."""
        if not asked.call_id:
            return await self._made(run, asked)
        known = run.answers.get(asked.call_id)
        if known is None:
            known = run.answers[asked.call_id] = _Call()
            try:
                known.result = await self._made(run, asked)
            finally:
                known.done.set()
        await known.done.wait()
        return known.result

    async def _made(self, run: CallingRun, asked: _Asked) -> ToolResult | None:
        if asked.name == "execute_code":
            return ToolResult.fail(NO_RECURSION, code=ErrorCode.NOT_PERMITTED)
        with anyio.CancelScope() as scope:
            run.scopes.add(scope)
            try:
                return await run.tools.dispatch(
                    asked.name, asked.args, call_id=asked.call_id, origin=Origin.CODE, context=run.context
                )
            except ToolAbort as exc:
                return ToolResult.fail(str(exc), code=ErrorCode.CANCELLED)
            finally:
                run.scopes.discard(scope)
        return None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call as it came."""

    execution_id: str
    call_id: str
    name: str
    args: Mapping[str, Any]

    @classmethod
    def of(cls, given: Any) -> _Asked:
        if not isinstance(given, dict):
            raise ValueError("a call is an object with execution_id, name and args")
        args = given.get("args") if given.get("args") is not None else {}
        found = (given.get("execution_id", ""), given.get("call_id", ""), given.get("name", ""))
        if not all(isinstance(each, str) for each in found) or not found[2] or not isinstance(args, dict):
            raise ValueError("execution_id and name are texts, and args is an object")
        return cls(*found, args)


def shown(result: ToolResult) -> dict[str, Any]:
    """Return a result as a service passes it to a script: text for any service, the value for ours."""
    if result.error is not None:
        return {"error": result.text, "code": result.error.code}
    return {"data": result.text, "value": result.guest_value()}


def _is_token(request: Request, token: str) -> bool:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def _said(status: int, error: str) -> Response:
    return JSONResponse({"error": error}, status)


def _on_error(_request: Request, exc: Exception) -> Response:
    match exc:
        case Problem(status=status, headers=headers):
            return JSONResponse({"error": exc.detail or exc.title}, status, headers)
        case HTTPException(status_code=status, detail=detail, headers=headers):
            said = {404: "not found", 405: "method not allowed"}.get(status, detail)
            return JSONResponse({"error": said}, status, headers)
    return _said(500, "internal error")
