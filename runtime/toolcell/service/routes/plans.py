"""/v1/plan: independent tool calls at once, without a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolcell.results import ExecutionResult, Outcome
from toolcell.service.endpoints import ApiRequest, Endpoint
from toolcell.service.principal import Scope
from toolcell.service.results import kept_result
from toolcell.service.routes.answers import PlanResult
from toolcell.service.routes.models import PlanRequest
from toolcell.service.run_arguments import chosen_tools, context_of
from toolcell.service.running import run_for


async def execute(request: ApiRequest) -> Mapping[str, Any]:
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
    members = await kept_result(request.tenant, about)
    return {"rows": members["value"], **{name: members[name] for name in PlanResult.model_fields if name != "rows"}}


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/plan",
        scope=Scope.EXECUTE,
        handler=execute,
        summary="Run independent tool calls at once",
        body=PlanRequest,
        answer=PlanResult,
        is_keyed=True,
    ),
)
