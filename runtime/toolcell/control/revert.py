"""Undo what a run or a commit has made, with the `revert=` of its tools, in reverse order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from toolcell.control.steps_of_plans import PlanRows
from toolcell.effects import CommitResult, RevertedCall, RevertResult
from toolcell.errors import AuditError, ToolAbort, UnknownId, UsageError
from toolcell.host_work import KEPT_BYTES
from toolcell.results import ExecutionResult
from toolcell.tools.adapters import is_async, positional_spec
from toolcell.tools.call import Call, RunContext
from toolcell.tools.checks import shown
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.options import ToolOptions
from toolcell.tools.registry import ToolRegistry
from toolcell.tools.result import ErrorCode, ToolResult
from toolcell.tools.reverts import MadeCall, MadeCalls
from toolcell.tools.spec import ToolSpec

RUNS: Final = 64
"""Runs and commits that a Runtime can revert, the latest."""

NAME_CHARS: Final = 64
SCHEMA: Final = {"type": "object", "properties": {"args": {"type": "object"}}}


class Reverts:
    """What the runs and commits of one runtime have made, by the id of their journal."""

    def __init__(self) -> None:
        self._made: OrderedDict[str, MadeCalls] = OrderedDict()

    def keep(self, ident: str, made: MadeCalls) -> None:
        """Keep what a run has made; of a run that is carried on, in addition to what it had made before."""
        if not made.calls:
            return
        known = self._made.setdefault(ident, made)
        if known is not made:
            known.calls += made.calls
        self._made.move_to_end(ident)
        sizes = {name: sum(call.size for call in each.calls) for name, each in self._made.items()}
        while len(self._made) > 1 and (len(self._made) > RUNS or sum(sizes.values()) > KEPT_BYTES):
            del sizes[self._made.popitem(last=False)[0]]

    def find(self, given: ExecutionResult | CommitResult | PlanRows) -> MadeCalls:
        """Return what a run or a commit has made.

        Raises:
            UsageError: `given` is neither, was a dry run, or is not known here.
        """
        if not isinstance(given, ExecutionResult | CommitResult | PlanRows):
            raise UsageError(f"revert takes the result of a run, a plan or a commit, not {shown(given)}")
        if isinstance(given, ExecutionResult) and given.draft_id:
            raise UsageError(f"run {given.run_id} was a dry run and made nothing; revert the result of its commit")
        return self.made_by(given.journal_id, given.run_id)

    def made_by(self, ident: str, run_id: str = "") -> MadeCalls:
        """Return what is kept under this id.

        Raises:
            UnknownId: nothing is.
        """
        found = self._made.get(ident)
        if found is None:
            raise UnknownId(
                f"there is nothing of run {run_id or ident} to revert: it made no call of a tool that writes, it ran "
                f"elsewhere, or it is not among the last {RUNS} runs here with at most {KEPT_BYTES} bytes together"
            )
        return found


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
    call: Call = made.call
    assert call.options.revert is not None
    assert made.result is not None
    function = bound_revert(call.options.revert, dict(call.args), made.result.guest_value())
    spec = revert_spec(call.name, function, call.options.timeout_s)
    registry = ToolRegistry([spec])
    try:
        return await registry.dispatch(spec.definition.name, {"args": call.args}, context=run)
    except (ToolAbort, AuditError) as exc:
        return ToolResult.fail(f"it was not reverted: {exc}", code=ErrorCode.UNAVAILABLE)


def revert_spec(tool: str, function: Callable[..., Any], timeout_s: float | None) -> ToolSpec:
    """Return the tool that undoes one call of another one."""
    definition = ToolDefinition(f"revert_{tool}"[:NAME_CHARS], f"Undo a call of {tool}.", SCHEMA)
    return positional_spec(definition, function, ToolOptions(timeout_s=timeout_s, expose_errors=True))


def bound_revert(revert: Callable[..., Any], args: dict[str, Any], value: Any) -> Callable[..., Any]:
    """Return the function of that tool: a tool's `revert=` with the arguments and the result of a call."""
    if not is_async(revert):
        return lambda _args: revert(args, value)

    async def undo(_args: Any) -> Any:
        return await revert(args, value)

    return undo
