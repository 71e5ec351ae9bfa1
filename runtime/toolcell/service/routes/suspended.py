"""/v1/suspended and /v1/drafts: what waits for a person, and what the person decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolcell.calls.call import AlreadyMade, ResumeDecision
from toolcell.results import CommitResult, Suspension
from toolcell.service.endpoints import ApiRequest, Endpoint
from toolcell.service.principal import Scope
from toolcell.service.problems import Problem
from toolcell.service.routes.models import (
    ApproveCall,
    CallDecision,
    CallWasMade,
    CommitAnswer,
    CommitRequest,
    DecideRequest,
    DenyCall,
    EditCall,
    RevertAnswer,
    RunResult,
    SuspendedRun,
    SuspendedRuns,
)
from toolcell.service.run_arguments import context_of
from toolcell.service.running import result_members, run_for
from toolcell.service.runs_under_way import RunUnderWay
from toolcell.service.socket.values import plain_record
from toolcell.tools import Approve, Deny, Edit


def suspended_members(waits: Suspension) -> dict[str, Any]:
    """Return what is told of a run that waits: its calls, but not the token that carries it on."""
    return {name: plain_record(getattr(waits, name)) for name in SuspendedRun.model_fields}


async def list_suspended(request: ApiRequest) -> Mapping[str, Any]:
    """List what waits."""
    found = request.tenant.journals
    waiting = [suspended_members(each) for each in await found.suspended()]
    return {"suspended": waiting, "interrupted": await found.interrupted()}


async def show(request: ApiRequest) -> Mapping[str, Any]:
    """Show one run that waits."""
    return suspended_members(await _waiting(request))


async def decide(request: ApiRequest) -> Mapping[str, Any]:
    """Decide about the calls that a run waits for, and carry it on."""
    given: DecideRequest = request.body
    tenant, ident = request.tenant, request.path["run_id"]
    token = ident if ident in await tenant.journals.interrupted() else await _waiting(request)
    decisions = {name: _decision(each) for name, each in given.decisions.items()}
    await tenant.reopen_session(ident)

    async def work(run: RunUnderWay) -> Mapping[str, Any]:
        options: dict[str, Any] = {"context": context_of(request), "cancel": run.cancel}
        return result_members(await tenant.runtime.resume(token, decisions, **options))

    return await run_for(request, work)


async def _waiting(request: ApiRequest) -> Suspension:
    ident = request.path["run_id"]
    for each in await request.tenant.journals.suspended():
        if each.run_id == ident:
            return each
    detail = f"no run {ident!r:.80} waits for a decision: it was decided about already, has ended, or never was"
    raise Problem(409 if request.http.method == "POST" else 404, "not_suspended", "Nothing to decide", detail)


def _decision(given: CallDecision) -> ResumeDecision:
    match given:
        case ApproveCall(reason=reason):
            return Approve(reason)
        case DenyCall(reason=reason):
            return Deny(reason or "a person refused it")
        case EditCall(args=args, reason=reason):
            return Edit(args, reason)
        case CallWasMade(value=value):
            return AlreadyMade(value)


async def commit(request: ApiRequest) -> Mapping[str, Any]:
    """Make the effects of a dry run."""
    given: CommitRequest = request.body
    runtime, draft = request.tenant.runtime, request.path["draft_id"]
    options: dict[str, Any] = {"recheck": given.recheck, "context": context_of(request)}
    done = await run_for(request, lambda run: runtime.commit(draft, given.approve, **options))
    return {name: plain_record(getattr(done, name)) for name in CommitAnswer.model_fields}


async def revert(request: ApiRequest) -> Mapping[str, Any]:
    """Undo the calls of a run or a commit."""
    made = CommitResult(request.path["journal_id"], (), journal_id=request.path["journal_id"])
    runtime, context = request.tenant.runtime, context_of(request)
    done = await run_for(request, lambda run: runtime.revert(made, context=context))
    return {"ok": done.ok, "calls": plain_record(done.calls)}


ONE = "/v1/suspended/{run_id}"

ENDPOINTS = (
    Endpoint(
        method="GET", path="/v1/suspended", scope=Scope.READ, handler=list_suspended,
        summary="List the runs that wait for a decision", answer=SuspendedRuns,
    ),
    Endpoint(
        method="GET", path=ONE, scope=Scope.READ, handler=show, summary="Show a run that waits", answer=SuspendedRun,
    ),
    Endpoint(
        method="POST", path=f"{ONE}/decide", scope=Scope.APPROVE, handler=decide,
        summary="Decide, and carry a run on", body=DecideRequest, answer=RunResult, is_keyed=True,
    ),
    Endpoint(
        method="POST", path="/v1/drafts/{draft_id}/commit", scope=Scope.APPROVE, handler=commit,
        summary="Make what a dry run collected", body=CommitRequest, answer=CommitAnswer, is_keyed=True,
    ),
    Endpoint(
        method="POST", path="/v1/runs/{journal_id}/revert", scope=Scope.APPROVE, handler=revert,
        summary="Undo the calls of a run or a commit", answer=RevertAnswer, is_keyed=True,
    ),
)  # fmt: skip
