"""/v1/execute: run a script in a sandbox of its own, and answer with everything that it left behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from toolcell.service.endpoints import ApiRequest, Endpoint
from toolcell.service.event_stream import RunEventStream, wants_events
from toolcell.service.principal import Scope
from toolcell.service.results import kept_result
from toolcell.service.routes.answers import RunResult
from toolcell.service.routes.models import ExecuteRequest
from toolcell.service.run_arguments import script_options
from toolcell.service.running import run_for
from toolcell.service.runs_under_way import RunUnderWay


async def execute(request: ApiRequest) -> Response | Mapping[str, Any]:
    """Run a script. `Accept: text/event-stream` gets its events as they happen, and the result as the last one."""
    given: ExecuteRequest = request.body
    runtime = request.tenant.runtime
    options = script_options(request)
    if wants_events(request.http):
        return RunEventStream(request, lambda cancel: runtime.stream(given.code, **options, cancel=cancel))

    async def work(run: RunUnderWay) -> Mapping[str, Any]:
        return await kept_result(request.tenant, await runtime.execute_code(given.code, **options, cancel=run.cancel))

    return await run_for(request, work)


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
)
