"""/v1/runs: what has run, from the audit log: lists, one run, and replays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolcell.audit import Filter
from toolcell.service.endpoints import ApiRequest, Endpoint
from toolcell.service.principal import Scope
from toolcell.service.routes.models import RecordedRunAnswer, ReplayAnswer, ReplayRequest, RunList, RunsQuery
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
        method="POST", path=f"{ONE}/replay", scope=Scope.EXECUTE, reads_runs=True, handler=repeat,
        summary="Run a recorded script again with the answers that it got", body=ReplayRequest, answer=ReplayAnswer,
    ),
)  # fmt: skip
