"""`execute_plan`: many tool calls for one model turn, in parallel, each on the same path as any other call.

Needs no sandbox. Steps may wait for each other and use each other's results; a plan that does neither is the plain
parallel plan. First the plan as checked data, then its run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from toolcell.text import cut_text
from toolcell.tools.batch import first_that_ends_run, run_batch
from toolcell.tools.call import Call
from toolcell.tools.pipeline import examine, run_call
from toolcell.tools.registry_state import RegistryState
from toolcell.tools.result import ErrorCode, File, Status, ToolResult, to_json, total_usage

MAX_STEPS = 50
PLAN_TOOL = "execute_plan"

_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


class PlanError(ValueError):
    """The plan as a whole cannot run; no step did."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step, with every step it must wait for."""

    index: int
    tool: str
    args: Mapping[str, Any]
    id: str | None = None
    timeout_s: float | None = None
    needs: tuple[int, ...] = ()
    """Indices of the steps that must succeed first, named or referred to."""
    has_references: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan that may run."""

    steps: tuple[Step, ...]
    on_error: str = "continue"
    timeout_s: float | None = None
    validate_only: bool = False

    @property
    def is_flat(self) -> bool:
        """True when no step waits for another: the plain parallel plan."""
        return not any(step.needs for step in self.steps)


def read_plan(args: Mapping[str, Any]) -> Plan:
    """Read a plan from validated arguments.

    Raises:
        PlanError: too many or no steps, an id used twice or unknown, steps that wait for each other.
    """
    written = args["steps"]
    if not written:
        raise PlanError("execute_plan requires at least one step")
    if len(written) > MAX_STEPS:
        raise PlanError(f"execute_plan limited to {MAX_STEPS} steps, got {len(written)}")
    ids = _ids(written)
    steps = tuple(_step(index, step, ids) for index, step in enumerate(written))
    _refuse_cycles(steps)
    return Plan(steps, args.get("on_error", "continue"), args.get("timeout_s"), bool(args.get("validate_only", False)))


def _ids(written: list[Mapping[str, Any]]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for index, step in enumerate(written):
        if (name := step.get("id")) is None:
            continue
        if name in ids:
            raise PlanError(f"steps {ids[name]} and {index} have the same id {name!r}")
        ids[name] = index
    return ids


def _step(index: int, step: Mapping[str, Any], ids: Mapping[str, int]) -> Step:
    # Without ids nothing can be referred to, so "$ref" in arguments is just a key: the plain plan stays as it was.
    referred = [split_reference(text, ids)[0] for text in references(step["args"])] if ids else []
    needs: dict[int, None] = {}
    for name in [*(step.get("depends_on") or ()), *referred]:
        if name not in ids:
            known = ", ".join(ids) or "none"
            raise PlanError(f"step {index} refers to {name!r}, which is no step's id (ids: {known})")
        needs[ids[name]] = None
    return Step(index, step["tool"], step["args"], step.get("id"), step.get("timeout_s"), tuple(needs), bool(referred))


def references(value: Any) -> Iterator[str]:
    """Iterate over every "$ref" in arguments."""
    if is_reference(value):
        yield value["$ref"]
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def is_reference(value: Any) -> bool:
    """Shape: {"$ref": "id.path[0]"} and nothing else."""
    return isinstance(value, Mapping) and len(value) == 1 and isinstance(value.get("$ref"), str)


def split_reference(text: str, ids: Mapping[str, int]) -> tuple[str, str]:
    """Shape: ("id", ".path[0]"). The longest id that fits wins, so ids may contain dots."""
    fitting = [name for name in ids if text == name or text.startswith((f"{name}.", f"{name}["))]
    name = max(fitting, key=len) if fitting else re.split(r"[.\[]", text, maxsplit=1)[0]
    return name, text[len(name) :]


def look_up(value: Any, path: str) -> Any:
    """Return the part of a result that the path of a reference names.

    Raises:
        PlanError: the result has no such part; the message names the last one that exists.
    """
    walked = ""
    for key in path_steps(path):
        step = f"[{key}]" if isinstance(key, int) else f".{key}"
        if isinstance(value, list) and isinstance(key, str) and key.isdigit():
            key = int(key)
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise PlanError(f"there is no {step!r} in {walked or 'the result'!r} ({_described(value)})") from None
        walked += step
    return value


def path_steps(path: str) -> list[str | int]:
    """Shape: ".a[2]" -> ["a", 2].

    Raises:
        PlanError: it is not a path.
    """
    steps: list[str | int] = []
    position = 0
    while position < len(path):
        step = _PATH_STEP.match(path, position)
        if step is None:
            raise PlanError(f"cannot read path {path!r} at {path[position:]!r}")
        steps.append(int(step[2]) if step[2] is not None else step[1])
        position = step.end()
    return steps


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, list(value)[:10])) or 'no keys'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"


def resolve(args: Any, results: Mapping[str, Any]) -> Any:
    """Return arguments with every reference replaced by the value it names. `results` is keyed by step id.

    Raises:
        PlanError: a reference names a part that does not exist.
    """
    if is_reference(args):
        name, path = split_reference(args["$ref"], dict.fromkeys(results, 0))
        try:
            return look_up(results[name], path)
        except PlanError as exc:
            raise PlanError(f"reference {args['$ref']!r}: {exc}") from None
    if isinstance(args, Mapping):
        return {key: resolve(item, results) for key, item in args.items()}
    if isinstance(args, list):
        return [resolve(item, results) for item in args]
    return args


def _refuse_cycles(steps: tuple[Step, ...]) -> None:
    waiting = {step.index: set(step.needs) for step in steps}
    while ready := [index for index, needs in waiting.items() if not needs]:
        for index in ready:
            del waiting[index]
        for needs in waiting.values():
            needs.difference_update(ready)
    if waiting:
        names = ", ".join(steps[index].id or f"step {index}" for index in waiting)
        raise PlanError(f"steps wait for each other: {names}")


# Running a plan

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
    """One plan being run. A step has the result of its call, or the reason why there is none."""

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
        """Run every step as soon as the steps it needs are done."""
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
        """Return all rows, in the order of the steps, with the files and the usage of the calls."""
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
        """Return what can be known of a step before it runs. Arguments with references are not checked."""
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
