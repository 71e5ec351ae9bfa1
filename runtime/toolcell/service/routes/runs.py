"""/v1/runs: what has run, from the audit log: lists, one run, its input files, and replays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from toolcell.audit import Filter
from toolcell.service.endpoints import BYTES, ApiRequest, Endpoint
from toolcell.service.principal import Scope
from toolcell.service.problems import Problem
from toolcell.service.routes.models import RecordedRunAnswer, ReplayAnswer, ReplayRequest, RunList, RunsQuery
from toolcell.service.routes.sessions import download
from toolcell.service.run_arguments import replay_context
from toolcell.service.running import run_for
from toolcell.service.runs_under_way import RunUnderWay


async def list_runs(request: ApiRequest) -> Mapping[str, Any]:
    """List runs, the newest first."""
    given: RunsQuery = request.query
    same = ("outcome", "tool", "sha256", "session", "user", "decided_by", "host", "secret", "trust", "limit")
    wanted = Filter(
        since_ns=_nanoseconds(given.since),
        until_ns=_nanoseconds(given.until),
        **{name: getattr(given, name) for name in same},
    )
    found, following = await request.tenant.recorded.page(wanted, given.cursor)
    return {"runs": [each.to_dict() for each in found], "next": following}


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)


async def show(request: ApiRequest) -> Mapping[str, Any]:
    """Return everything recorded of a run."""
    return await request.tenant.recorded.detail(request.path["run_id"])


async def read_file(request: ApiRequest) -> Response:
    """Return a file that a run has returned, while it is kept, or was given, where the log has its content."""
    ident, name = request.path["run_id"], request.path["path"]
    if (kept := await request.tenant.files.find(ident, name)) is not None:
        return download(name, kept)
    run = await request.tenant.recorded.load(ident)
    for given, _, _, content in run.start.get("files") or ():
        if given == name and isinstance(content, bytes):
            return download(name, content)
    config = request.tenant.config
    detail = (
        f"no file {name!r:.80} of the run is kept: returned ones are for {config.files_s:g} s, and up to "
        f"{config.files_bytes} bytes together; given ones where the log has their content"
    )
    raise Problem(404, "no_such_file", "No such file", detail)


async def repeat(request: ApiRequest) -> Mapping[str, Any]:
    """Run a recorded script again with the answers that it got. No tool is called."""
    given: ReplayRequest = request.body
    run, trust = await request.tenant.recorded.load_trusted(request.path["run_id"])
    replays, context = request.tenant.replays, replay_context(request, run)

    async def work(_: RunUnderWay) -> Mapping[str, Any]:
        return (await replays.make(run, trust, context, source=given.code, until=given.until)).to_dict()

    return await run_for(request, work, end_s=0.0)


ONE = "/v1/runs/{run_id}"

ENDPOINTS = (
    Endpoint(
        method="GET", path="/v1/runs", scope=Scope.READ, handler=list_runs, summary="List runs, the newest first",
        query=RunsQuery, answer=RunList,
    ),
    Endpoint(
        method="GET", path=ONE, scope=Scope.READ, handler=show, summary="Show everything recorded of a run",
        answer=RecordedRunAnswer,
    ),
    Endpoint(
        method="GET", path=f"{ONE}/files/{{path:path}}", scope=Scope.READ, handler=read_file,
        summary="Read a file that a run has returned or was given", gives=BYTES,
    ),
    Endpoint(
        method="POST", path=f"{ONE}/replay", scope=Scope.EXECUTE, reads_runs=True, handler=repeat,
        summary="Run a recorded script again with the answers that it got", body=ReplayRequest, answer=ReplayAnswer,
    ),
)  # fmt: skip
