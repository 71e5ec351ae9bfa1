"""The routes about runs: /v1/execute and /v1/plan, what waits for a person, and what has run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from toolcell.audit import Filter
from toolcell.calls.call import AlreadyMade, ResumeDecision
from toolcell.results import CommitResult, ExecutionResult, Outcome, Suspension
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
    ExecuteRequest,
    PlanRequest,
    PlanResult,
    RecordedRunAnswer,
    ReplayAnswer,
    ReplayRequest,
    RevertAnswer,
    RunList,
    RunResult,
    RunsQuery,
    SuspendedRun,
    SuspendedRuns,
)
from toolcell.service.run_arguments import chosen_tools, context_of, replay_context
from toolcell.service.running import answer_script, result_members, run_for
from toolcell.service.runs_under_way import RunUnderWay
from toolcell.service.socket.values import plain_record
from toolcell.tools import Approve, Deny, Edit

# /v1/execute: run a script in a sandbox of its own; /v1/plan: independent tool calls at once, without a sandbox.


async def execute(request: ApiRequest) -> Response | Mapping[str, Any]:
    """Run a script in a sandbox of its own."""
    return await answer_script(request, request.tenant.runtime)


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


RUNNING = (
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

# /v1/suspended and /v1/drafts: what waits for a person, and what the person decides.


def suspended_members(waits: Suspension) -> dict[str, Any]:
    """Return what is told of a run that waits: its calls, but not the token that carries it on."""
    return {name: plain_record(getattr(waits, name)) for name in SuspendedRun.model_fields}


async def list_suspended(request: ApiRequest) -> Mapping[str, Any]:
    """List what waits."""
    found = request.tenant.journals
    waiting = [suspended_members(each) for each in await found.suspended()]
    return {"suspended": waiting, "interrupted": await found.interrupted()}


async def show_suspended(request: ApiRequest) -> Mapping[str, Any]:
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


WAITING = "/v1/suspended/{run_id}"

DECIDING = (
    Endpoint(
        method="GET", path="/v1/suspended", scope=Scope.READ, handler=list_suspended,
        summary="List the runs that wait for a decision", answer=SuspendedRuns,
    ),
    Endpoint(
        method="GET", path=WAITING, scope=Scope.READ, handler=show_suspended,
        summary="Show a run that waits", answer=SuspendedRun,
    ),
    Endpoint(
        method="POST", path=f"{WAITING}/decide", scope=Scope.APPROVE, handler=decide,
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

# /v1/runs: what has run, from the audit log: lists, one run, and replays.


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

RECORDED = (
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
