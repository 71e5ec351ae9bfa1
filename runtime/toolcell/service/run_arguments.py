"""From a checked request to the arguments of `execute_code`: at most what the tenant may have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolcell.audit import RecordedRun
from toolcell.service.authentication import check_may
from toolcell.service.endpoints import ApiRequest
from toolcell.service.principal import Scope
from toolcell.service.problems import Problem
from toolcell.service.request_log import note
from toolcell.service.routes.models import ExecuteRequest, InputFile, ScriptRequest
from toolcell.service.tenant_limits import allowed_limits
from toolcell.service.tenants import Tenant
from toolcell.tools import RunContext, ToolRegistry


def context_of(request: ApiRequest) -> RunContext:
    """Return whom a run is for. The audit log and the quotas know its subject."""
    note(run_id=request.run_id)
    return RunContext(run_id=request.run_id, user_id=request.principal.subject)


def replay_context(request: ApiRequest, run: RecordedRun) -> RunContext:
    """Return whom a replay is for. Its own record says that it is one, and of which run."""
    note(replay_id=request.run_id)
    return RunContext(run_id=request.run_id, user_id=request.principal.subject, channel="replay", chat_id=run.id)


def script_options(request: ApiRequest) -> dict[str, Any]:
    """Return the arguments of a script's run.

    Raises:
        Problem: it asks for more than the tenant may have, or for tools that it has not (422), or mends a run that its
            sender may not read (403).
    """
    given: ScriptRequest = request.body
    tenant = request.tenant
    if isinstance(given, ExecuteRequest) and given.repairs is not None:
        check_may(request.principal, Scope.READ)  # its calls are answered with what that run was told
    # A dry run waits for no approval: its commit is the approval.
    on_approval = "ask" if given.dry_run and given.on_approval == "suspend" else given.on_approval
    return {name: getattr(given, name) for name in type(given).model_fields if name != "code"} | {
        "files": files_of(given.files),
        "tools": chosen_tools(given.tools, tenant),
        "limits": allowed_limits(given.limits, tenant.config.limits),
        "on_approval": on_approval,
        "context": context_of(request),
    }


def files_of(files: Iterable[InputFile]) -> list[tuple[str, bytes]]:
    return [(each.name, each.content()) for each in files]


def chosen_tools(names: list[str] | None, tenant: Tenant) -> ToolRegistry | None:
    """Return the tools of these names; None for all.

    Raises:
        Problem: there is no such tool.
    """
    if names is None:
        return None
    missing = [name for name in names if not tenant.registry.has(name)]
    if missing:
        detail = f"tools: there is no tool named {missing[0]!r:.80}; GET /v1/tools lists those that there are"
        raise Problem(422, "unknown_tool", "The request is wrong", detail)
    return tenant.registry.subset(names)
