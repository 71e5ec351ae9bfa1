"""/v1/execute: run a script in a sandbox of its own; /v1/plan: independent tool calls at once, without a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from toolcell.results import ExecutionResult, Outcome
from toolcell.service.endpoints import ApiRequest, Endpoint
from toolcell.service.principal import Scope
from toolcell.service.routes.models import ExecuteRequest, PlanRequest, PlanResult, RunResult
from toolcell.service.run_arguments import chosen_tools, context_of, script_options
from toolcell.service.running import RunEventStream, result_members, run_for, wants_events
from toolcell.service.runs_under_way import RunUnderWay


async def execute(request: ApiRequest) -> Response | Mapping[str, Any]:
    """Run a script. `Accept: text/event-stream` gets its events as they happen, and the result as the last one."""
    given: ExecuteRequest = request.body
    runtime = request.tenant.runtime
    options = script_options(request)
    if wants_events(request.http):
        return RunEventStream(request, lambda cancel: runtime.stream(given.code, **options, cancel=cancel))

    async def work(run: RunUnderWay) -> Mapping[str, Any]:
        return result_members(await runtime.execute_code(given.code, **options, cancel=run.cancel))

    return await run_for(request, work)


async def execute_plan(request: ApiRequest) -> Mapping[str, Any]:
    """Run a plan. When the client goes, its calls are cancelled."""
    given: PlanRequest = request.body
    tools = chosen_tools(given.tools, request.tenant)
    options: dict[str, Any] = {
        "tools": tools,
        "context": context_of(request),
        "on_approval": given.on_approval,
    }
    runtime, steps = request.tenant.runtime, given.steps
    rows = await run_for(request, lambda run: runtime.execute_plan(steps, **options), end_s=0.0)
    about = ExecutionResult(
        rows.run_id,
        Outcome.OK,
        list(rows),
        True,
        files=rows.files,
        suspension=rows.suspension,
        journal_id=rows.journal_id,
    )
    members = result_members(about)
    return {"rows": members["value"], **{name: members[name] for name in PlanResult.model_fields if name != "rows"}}


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/execute",
        scope=Scope.EXECUTE,
        handler=execute,
        summary="Run a script in a sandbox of its own",
        body=ExecuteRequest,
        answer=RunResult,
        streams=True,
        is_keyed=True,
    ),
    Endpoint(
        method="POST",
        path="/v1/plan",
        scope=Scope.EXECUTE,
        handler=execute_plan,
        summary="Run independent tool calls at once",
        body=PlanRequest,
        answer=PlanResult,
        is_keyed=True,
    ),
)
