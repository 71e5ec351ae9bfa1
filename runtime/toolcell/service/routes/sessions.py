"""/v1/sessions: sandboxes that stay. Scripts of one session share names, imports and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from toolcell.results import Suspension
from toolcell.service.bodies import read_body
from toolcell.service.endpoints import BYTES, ApiRequest, Endpoint
from toolcell.service.principal import Scope
from toolcell.service.problems import Problem
from toolcell.service.routes.models import (
    FilesRequest,
    ForkRequest,
    InterruptAnswer,
    RunResult,
    ScriptRequest,
    SessionFiles,
    SessionInfo,
    SessionList,
    SessionRequest,
)
from toolcell.service.run_arguments import context_of, files_of
from toolcell.service.running import answer_script, run_for
from toolcell.service.tenant_limits import allowed_limits
from toolcell.sessions import Session


def session_members(name: str, session: Session | None) -> dict[str, Any]:
    """Return what is told of a session."""
    waiting = session.waiting if session is not None else ""
    return {
        "name": name,
        "state": "open" if session is not None else "kept",
        "is_live": session is not None and session.is_live,
        "waiting": waiting.run_id if isinstance(waiting, Suspension) else waiting,
        "used_cpu_s": session.used_cpu_s if session is not None else 0.0,
        "used_calls": session.used_calls if session is not None else 0,
    }


async def create(request: ApiRequest) -> Mapping[str, Any]:
    """Open a session."""
    given: SessionRequest = request.body
    options = {name: getattr(given, name) for name in ("idle_s", "cpu_s", "tool_calls", "restore")}
    options["limits"] = allowed_limits(given.limits, request.tenant.config.limits)
    options["context"] = context_of(request)
    session = await run_for(request, lambda run: request.tenant.sessions.create(given.name, options))
    return session_members(session.id, session)


async def list_sessions(request: ApiRequest) -> Mapping[str, Any]:
    """List the sessions of the tenant."""
    return {"sessions": [session_members(*each) for each in await request.tenant.sessions.list()]}


async def show(request: ApiRequest) -> Mapping[str, Any]:
    """Say how a session is."""
    name = request.path["name"]
    found = [each for each in await request.tenant.sessions.list() if each[0] == name]
    return session_members(*found[0]) if found else session_members(name, await _session(request))


async def forget(request: ApiRequest) -> Response:
    """Close a session and forget its state."""
    await request.tenant.sessions.forget(request.path["name"])
    return Response(status_code=204)


async def execute(request: ApiRequest) -> Response | Mapping[str, Any]:
    """Run a script in the session's sandbox."""
    return await answer_script(request, await _session(request))


async def put_files(request: ApiRequest) -> Response:
    """Write files to the workspace, replacing those of the same name."""
    given: FilesRequest = request.body
    session = await _session(request)
    await run_for(request, lambda run: session.put_files(files_of(given.files)))
    return Response(status_code=204)


async def put_file(request: ApiRequest) -> Response:
    """Write one file to the workspace: the body is its content."""
    session, config = await _session(request), request.service.config
    assert request.reservation is not None
    content = await read_body(request.http, config.body_bytes, config.body_s, request.reservation)
    await run_for(request, lambda run: session.put_files([(request.path["path"], content)]))
    return Response(status_code=204)


async def list_files(request: ApiRequest) -> Mapping[str, Any]:
    """List the files in the workspace."""
    session = await _session(request)
    files = await run_for(request, lambda run: session.files())
    return {"files": [{"name": each.name, "size": each.size} for each in files]}


async def read_file(request: ApiRequest) -> Response:
    """Return the content of a file in the workspace."""
    session, name = await _session(request), request.path["path"]
    listed = await run_for(request, lambda run: session.files())
    if name not in {each.name for each in listed}:
        detail = f"there is no file {name!r:.80} in the workspace of the session"
        raise Problem(404, "no_such_file", "No such file", detail)
    return download(name, await run_for(request, lambda run: session.read_file(name)))


async def interrupt(request: ApiRequest) -> Mapping[str, Any]:
    """Interrupt the script under way."""
    return {"interrupted": await (await _session(request)).interrupt()}


async def reset(request: ApiRequest) -> Response:
    """Forget names and files: the next script begins in a new sandbox."""
    session = await _session(request)
    await run_for(request, lambda run: session.reset())
    return Response(status_code=204)


async def abandon(request: ApiRequest) -> Response:
    """Give up the script that waits for a decision."""
    session = await _session(request)
    await run_for(request, lambda run: session.abandon())
    return Response(status_code=204)


async def fork(request: ApiRequest) -> Mapping[str, Any]:
    """Open another session with the state of this one."""
    name, given = request.path["name"], request.body
    copy = await run_for(request, lambda run: request.tenant.sessions.fork(name, given.name))
    return session_members(copy.id, copy)


async def _session(request: ApiRequest) -> Session:
    return await request.tenant.sessions.get(request.path["name"])


def download(name: str, content: bytes) -> Response:
    """Return a file that a script made. A browser saves it and shows nothing of it."""
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name.rpartition('/')[2], safe='')}",
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'none'; sandbox",
    }
    return Response(content, media_type=BYTES, headers=headers)


ONE = "/v1/sessions/{name}"
FILE = f"{ONE}/files/{{path:path}}"

ENDPOINTS = (
    Endpoint(
        method="POST", path="/v1/sessions", scope=Scope.EXECUTE, handler=create, status=201,
        summary="Open a session", body=SessionRequest, answer=SessionInfo,
    ),
    Endpoint(
        method="GET", path="/v1/sessions", scope=Scope.READ, handler=list_sessions,
        summary="List the sessions", answer=SessionList,
    ),
    Endpoint(
        method="GET", path=ONE, scope=Scope.READ, handler=show, summary="Say how a session is", answer=SessionInfo,
    ),
    Endpoint(
        method="DELETE", path=ONE, scope=Scope.EXECUTE, handler=forget, status=204,
        summary="Close a session and forget its state",
    ),
    Endpoint(
        method="POST", path=f"{ONE}/execute", scope=Scope.EXECUTE, handler=execute,
        summary="Run a script in a session", body=ScriptRequest, answer=RunResult, streams=True, is_keyed=True,
    ),
    Endpoint(
        method="POST", path=f"{ONE}/files", scope=Scope.EXECUTE, handler=put_files, status=204,
        summary="Write files to the workspace of a session", body=FilesRequest,
    ),
    Endpoint(
        method="GET", path=f"{ONE}/files", scope=Scope.EXECUTE, handler=list_files,
        summary="List the files in the workspace of a session", answer=SessionFiles,
    ),
    Endpoint(
        method="PUT", path=FILE, scope=Scope.EXECUTE, handler=put_file, status=204,
        summary="Write one file to the workspace of a session", takes=BYTES,
    ),
    Endpoint(
        method="GET", path=FILE, scope=Scope.EXECUTE, handler=read_file,
        summary="Read a file from the workspace of a session", gives=BYTES,
    ),
    Endpoint(
        method="POST", path=f"{ONE}/interrupt", scope=Scope.EXECUTE, handler=interrupt,
        summary="Interrupt the script of a session", answer=InterruptAnswer,
    ),
    Endpoint(
        method="POST", path=f"{ONE}/reset", scope=Scope.EXECUTE, handler=reset, status=204,
        summary="Begin a session anew",
    ),
    Endpoint(
        method="POST", path=f"{ONE}/abandon", scope=Scope.EXECUTE, handler=abandon, status=204,
        summary="Give up the script of a session that waits",
    ),
    Endpoint(
        method="POST", path=f"{ONE}/fork", scope=Scope.EXECUTE, handler=fork, status=201,
        summary="Copy a session", body=ForkRequest, answer=SessionInfo,
    ),
)  # fmt: skip
