"""`execute_plan`: many tool calls for one model turn, in parallel, each on the same path as any other call.

Needs no sandbox. Steps may wait for each other and use each other's results; a plan that uses neither is the plain
parallel plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from toolcell.text import cut_text
from toolcell.tools.batch import first_that_ends_run, run_batch
from toolcell.tools.call import Call
from toolcell.tools.pipeline import examine, run_call
from toolcell.tools.plan_steps import PLAN_TOOL, Plan, PlanError, Step, read_plan, resolve
from toolcell.tools.registry_state import RegistryState
from toolcell.tools.result import ErrorCode, File, Status, ToolResult, to_json, total_usage

MAX_OUTPUT_CHARS = 100_000
"""Of all rows together. Past it, the longest results are cut, each to an even share."""

Row = dict[str, Any]


NewCall = Callable[[Step, Mapping[str, Any]], Call]


async def run_plan(state: RegistryState, args: Mapping[str, Any], new_call: NewCall) -> ToolResult:
    """Run a plan's steps. Failing steps are rows of the result; only a plan that cannot run at all is a failure."""
    try:
        plan = read_plan(args)
        _refuse_recursion(state, plan)
    except PlanError as exc:
        return ToolResult.fail(str(exc), code=ErrorCode.INVALID_ARGUMENTS)
    runner = _PlanRun(state, plan, new_call)
    if plan.validate_only:
        return ToolResult.of([await runner.examined(step) for step in plan.steps])
    with anyio.move_on_after(plan.timeout_s) as scope:
        await runner.run()
    if scope.cancelled_caught:
        runner.note = f"plan timed out after {plan.timeout_s:g} s"
    return runner.result()


def _refuse_recursion(state: RegistryState, plan: Plan) -> None:
    for step in plan.steps:
        tool = state.tools.get(step.tool)
        if step.tool == PLAN_TOOL or (tool is not None and PLAN_TOOL in tool.aliases):
            raise PlanError(f"{PLAN_TOOL} steps cannot call {PLAN_TOOL}")


class _PlanRun:
    """One plan being run. What came of a step is its call's result, or the reason it has none."""

    def __init__(self, state: RegistryState, plan: Plan, new_call: NewCall) -> None:
        self._state = state
        self._plan = plan
        self._new_call = new_call
        self._calls: dict[int, Call] = {}
        """By step; of steps that have begun."""
        self._failures: dict[int, ToolResult] = {}
        """Of steps whose arguments could not be put together."""
        self._same_as: dict[int, int] = {}
        """Steps that share the call of an identical earlier step."""
        self._skipped: dict[int, str] = {}
        self._done = [anyio.Event() for _ in plan.steps]
        self.note = "not run"
        """Said of steps that never came to run."""

    async def run(self) -> None:
        if self._plan.is_flat and self._plan.on_error == "continue":
            self._coalesce()
            steps = [step for step in self._plan.steps if step.index not in self._same_as]
            self._calls = {step.index: self._new_call(step, step.args) for step in steps}
            calls = list(self._calls.values())
            await run_batch(self._state, calls, limit=None, sequential=self._state.settings.sequential)
        else:
            await self._scheduled()

    def _coalesce(self) -> None:
        """Find identical steps of tools that only read: they are one call."""
        first: dict[str, int] = {}
        for step in self._plan.steps:
            tool = self._state.tools.get(step.tool)
            if tool is not None and tool.options.read_only:
                key = json.dumps([step.tool, step.args, step.timeout_s], sort_keys=True, default=repr)
                if first.setdefault(key, step.index) != step.index:
                    self._same_as[step.index] = first[key]

    async def _scheduled(self) -> None:
        """Every step as soon as the steps it needs are done."""
        try:
            async with anyio.create_task_group() as group:
                for step in self._plan.steps:
                    group.start_soon(self._when_ready, step, group.cancel_scope)
        except BaseExceptionGroup as failures:
            raise first_that_ends_run(failures) from None

    async def _when_ready(self, step: Step, plan_scope: anyio.CancelScope) -> None:
        for needed in step.needs:
            await self._done[needed].wait()
        await self._one(step)
        self._done[step.index].set()
        if self._plan.on_error == "abort" and not self._is_ok(step.index):
            self.note = f"plan aborted: step {step.index} failed"
            plan_scope.cancel()

    async def _one(self, step: Step) -> None:
        if failed := [needed for needed in step.needs if not self._is_ok(needed)]:
            self._skipped[step.index] = f"needs step {self._label(failed[0])}, which did not succeed"
            return
        try:
            args = resolve(step.args, self._results_by_id()) if step.has_references else step.args
        except PlanError as exc:
            self._failures[step.index] = ToolResult.fail(str(exc), code=ErrorCode.INVALID_ARGUMENTS)
            return
        self._calls[step.index] = call = self._new_call(step, args)
        await run_call(self._state, call)

    def _results_by_id(self) -> dict[str, Any]:
        return {
            step.id: result.guest_value()
            for step in self._plan.steps
            if step.id is not None and (result := self._result(step.index)) is not None
        }

    def _result(self, index: int) -> ToolResult | None:
        index = self._same_as.get(index, index)
        call = self._calls.get(index)
        return call.result if call is not None else self._failures.get(index)

    def _is_ok(self, index: int) -> bool:
        result = self._result(index)
        return result is not None and not result.is_error

    def _label(self, index: int) -> str:
        return self._plan.steps[index].id or str(index)

    # Rows

    def result(self) -> ToolResult:
        """All rows, in the order of the steps, with the files and the usage of the calls."""
        rows = [self._row(step) for step in self._plan.steps]
        results = [call.result for call in self._calls.values() if call.result is not None]
        files: list[File] = [file for result in results for file in result.files]
        return ToolResult(value=_bounded(rows), has_value=True, files=tuple(files), usage=total_usage(results))

    def _head(self, step: Step) -> Row:
        row: Row = {"step": step.index, "tool": step.tool}
        return row if step.id is None else row | {"id": step.id}

    def _row(self, step: Step) -> Row:
        row = self._head(step)
        result = self._result(step.index)
        if result is None:
            return row | {"status": "skipped", "error": self._skipped.get(step.index, self.note)}
        if result.is_error:
            return row | {"status": "error", "error": result.text}
        if result.status is Status.PENDING:
            return row | {"status": "pending", "result": result.guest_value()}
        return row | {"status": "ok", "result": result.guest_value()}

    async def examined(self, step: Step) -> Row:
        """What can be known of a step without running it. Arguments with references are only known once it runs."""
        call = self._new_call(step, step.args)
        refusal = await examine(self._state, call, with_arguments=not step.has_references)
        row = self._head(step)
        return row | ({"status": "valid"} if refusal is None else {"status": "error", "error": refusal.message})


def _bounded(rows: list[Row]) -> list[Row]:
    """Rows that fit together: results longer than their even share are cut to text."""
    sizes = [len(to_json(row)) for row in rows]
    if sum(sizes) <= MAX_OUTPUT_CHARS:
        return rows
    share = MAX_OUTPUT_CHARS // len(rows)
    return [row if size <= share else _cut_row(row, share) for row, size in zip(rows, sizes, strict=True)]


def _cut_row(row: Row, share: int) -> Row:
    key = "result" if "result" in row else "error"
    text = row[key] if isinstance(row[key], str) else to_json(row[key])
    return row | {key: cut_text(text, share)[0], "truncated": True}
