"""Undo what a run or a commit has made, with the `revert=` of its tools, in reverse order."""

from __future__ import annotations

import os

from toolcell.calls.call import RunContext
from toolcell.calls.result import ErrorCode, ToolResult
from toolcell.calls.reverts import MadeCall, MadeCalls, Reverts
from toolcell.calls.run_state import RunLink
from toolcell.control.plans import PlanRows
from toolcell.errors import AuditError, ToolAbort, UsageError
from toolcell.results import CommitResult, ExecutionResult, RevertedCall, RevertResult
from toolcell.run.runs import Runs
from toolcell.support.checks import brief
from toolcell.tools.registry import ToolRegistry
from toolcell.tools.spec import ToolSpec


def made_by(reverts: Reverts, given: ExecutionResult | CommitResult | PlanRows) -> MadeCalls:
    """Return what a run or a commit has made.

    Raises:
        UsageError: `given` is neither, was a dry run, or is not known here.
    """
    if not isinstance(given, ExecutionResult | CommitResult | PlanRows):
        raise UsageError(f"revert takes the result of a run, a plan or a commit, not {brief(given)}")
    if isinstance(given, ExecutionResult) and given.draft_id:
        raise UsageError(f"run {given.run_id} was a dry run and made nothing; revert the result of its commit")
    return reverts.made_by(given.journal_id, given.run_id)


async def revert(
    runs: Runs, reverts: Reverts, result: ExecutionResult | CommitResult | PlanRows, context: RunContext | None
) -> RevertResult:
    """Undo the calls of a run or a commit; see `Runtime.revert`."""
    runs.check_open()
    made = made_by(reverts, result)
    context = context or RunContext(run_id=os.urandom(16).hex())
    link = RunLink("", "reverts", made.link.id, context.user_id)
    for_same = context.child(user_id=made.user_id or context.user_id)
    async with runs.observed(for_same, "revert", link) as run:
        return await revert_calls(made, run)


async def revert_calls(made: MadeCalls, run: RunContext) -> RevertResult:
    """Undo the calls, the last first, until one cannot be undone. Those that were undone are forgotten."""
    rows, is_stopped = list[RevertedCall](), False
    for each in reversed(list(made.calls)):
        if each.call is None:
            rows.append(RevertedCall(each.tool, {}, "cannot be reverted", each.problem))
            continue
        if is_stopped:
            rows.append(RevertedCall(each.tool, each.call.args, "not reverted"))
            continue
        made.calls.remove(each)  # a revert that fails may have done a part of its work: it is not repeated
        result = await _revert(each, run)
        is_stopped = result.is_error
        rows.append(RevertedCall(each.tool, each.call.args, "failed" if is_stopped else "reverted", result.message))
    return RevertResult(run.run_id, tuple(rows))


async def _revert(made: MadeCall, run: RunContext) -> ToolResult:
    """Run one `revert=` as a tool of its own: it is recorded before it runs, has a timeout, and may fail."""
    call = made.call
    assert call is not None
    assert made.result is not None
    spec = ToolSpec.reverting(call.name, call.options, dict(call.args), made.result.guest_value())
    registry = ToolRegistry([spec])
    try:
        return await registry.dispatch(spec.definition.name, {"args": call.args}, context=run)
    except (ToolAbort, AuditError) as exc:
        return ToolResult.fail(f"it was not reverted: {exc}", code=ErrorCode.UNAVAILABLE)
