"""`execute_plan`: many tool calls for one model turn, in parallel, each on the same path as any other call.

Arguments of a step may refer to results of other steps.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sized
from graphlib import CycleError, TopologicalSorter
from typing import Any, Protocol

import anyio

from toolcell.calls.arguments import ArgumentChecker, InvalidArguments
from toolcell.calls.call import Call
from toolcell.calls.context import ToolContext
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.finalize import told_failure
from toolcell.calls.options import Origin, ToolOptions
from toolcell.calls.result import ErrorCode, File, Status, ToolResult, to_json, total_usage
from toolcell.calls.schema import dicts_in
from toolcell.calls.values import BadValue, bounded_json, copy_arguments, is_large
from toolcell.config import MAX_PLAN_STEPS
from toolcell.errors import UsageError
from toolcell.support import daemon_threads
from toolcell.support.checks import brief
from toolcell.support.event_loop import TimeSlice
from toolcell.support.packing import value_digest
from toolcell.support.text import cut_text, one_line
from toolcell.tools.code import CODE_TOOL, PLAN_TOOL, offers
from toolcell.tools.pipeline import answer_call, examine, run_batch, run_call, together
from toolcell.tools.spec import RegistryState, ToolSpec
from toolcell_bridge.guest.placeholder import RESULT_OF, member_of
from toolcell_bridge.wire.frozen import frozen, replaced

_ID_END = re.compile(r"[.\[]")
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[([0-9]+)\]")


class PlanError(ValueError):
    """The plan as a whole cannot run; no step did."""


def references(value: Any) -> list[str]:
    """Return every "$ref" in arguments, in order."""
    return [each["$ref"] for each in dicts_in(value) if is_reference(each)]


def is_reference(value: Any) -> bool:
    """Shape: {"$ref": "id.path[0]"} and nothing else."""
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get("$ref"), str)


def split_reference(text: str, ids: Mapping[str, int]) -> tuple[str, str]:
    """Shape: ("id", ".path[0]"). The longest id that fits wins, so ids may contain dots."""
    ends = [len(text), *(mark.start() for mark in _ID_END.finditer(text))]
    name = max((text[:end] for end in ends if text[:end] in ids), key=len, default=text[: min(ends)])
    return name, text[len(name) :]


def look_up(value: Any, path: str) -> Any:
    """Return the part of a result that the path of a reference names.

    Raises:
        PlanError: the result has no such part; the message names the last one that exists.
    """
    walked = ""
    for key in path_steps(path):
        step = f"[{key}]" if isinstance(key, int) else f".{key}"
        if isinstance(value, list) and isinstance(key, str) and key.isdecimal():
            key = int(key)
        try:
            value = _member_of_collected(value, step) or value[key]
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


def _member_of_collected(value: Any, step: str) -> dict[str, str] | None:
    """Return what stands for a member of a result that a dry run does not know."""
    reference = value.get(RESULT_OF) if isinstance(value, dict) and len(value) == 1 else None
    member = member_of(reference, step) if isinstance(reference, str) else None
    return None if member is None else {RESULT_OF: member}


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


MAX_NAME_CHARS = 256
"""Most characters of a step's id and of a reference."""
MAX_REFERENCES = 1000
"""In all steps of a plan together."""
STEP_SHAPE = 'a step is {"tool": name, "args": {...}}'

STEP_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tool": {"type": "string", "description": "Name of the tool to call."},
        "args": {
            "type": "object",
            "description": 'Its arguments; {"$ref": "id.path"} is a part of the result of another step.',
        },
        "id": {"type": "string", "description": "A name other steps can refer to."},
        "depends_on": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Ids of steps that must succeed first.",
        },
        "timeout_s": {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "Seconds this step may take.",
        },
    },
    "required": ["tool"],
    "additionalProperties": False,
}

PLAN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "description": f"Tool calls to make, at most {MAX_PLAN_STEPS}.",
            "items": STEP_SCHEMA,
        },
        "on_error": {
            "type": "string",
            "enum": ["continue", "abort"],
            "description": "Whether a failed step stops the others. Default: continue.",
        },
        "timeout_s": {"type": "number", "exclusiveMinimum": 0, "description": "Seconds the whole plan may take."},
        "validate_only": {"type": "boolean", "description": "Check the steps without running any."},
    },
    "required": ["steps"],
}

PLAN_CHECKED_SCHEMA: dict[str, Any] = PLAN_SCHEMA | {
    "properties": PLAN_SCHEMA["properties"] | {"steps": {"type": "array"}},
}
"""Each step is checked by itself: what is wrong with one costs that step alone."""

PLAN_TEXT = (
    f"Run up to {MAX_PLAN_STEPS} tool calls in one turn and get all results together. Steps run in parallel. "
    "Use it when you already know every call you need; calling tools one at a time costs a turn each. "
    f"A failed step does not stop the others. Steps cannot call {PLAN_TOOL}."
)
_PLAN_LINKS = (
    ' Give a step an "id" to let others wait for it ("depends_on") or use its result: '
    '{"$ref": "id.path"} as an argument.'
)
_PLAN_OR_CODE = f" For loops, conditions or computing with results, use {CODE_TOOL} instead."

ARGUMENT_LEVEL = len(("steps", 0, "args", "name"))
_STEP_CHECKER = ArgumentChecker(ToolDefinition(PLAN_TOOL, "Checks one step of a plan.", STEP_SCHEMA), extras="forbid")


def plan_spec(options: Mapping[str, Any]) -> ToolSpec:
    """`execute_plan` as a tool."""

    def invoke(context: ToolContext) -> Any:
        return context.call.registry.run_plan(context.call.args, context.run)

    known = ToolOptions(orchestrates=True, callable_from=frozenset({Origin.MODEL}), label="Run a plan")
    return ToolSpec(
        definition=ToolDefinition(PLAN_TOOL, PLAN_TEXT, PLAN_SCHEMA),
        invoke=invoke,
        options=known.changed(options),
        source=PLAN_TOOL,
        args_prefix=f"invalid {PLAN_TOOL} args: ",
        checked_schema=PLAN_CHECKED_SCHEMA,
        describe=lambda offered: PLAN_TEXT + _PLAN_LINKS + (_PLAN_OR_CODE if offers(offered, CODE_TOOL) else ""),
    )


@frozen
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
    problem: str = ""
    """Why it cannot run, whatever the others do."""


@frozen
class Plan:
    """A plan that may run."""

    steps: tuple[Step, ...]
    on_error: str = "continue"
    timeout_s: float | None = None
    validate_only: bool = False


def plan_of(steps: object) -> dict[str, Any]:
    """Return a program's plan, checked as a model's is.

    Raises:
        UsageError: it is not a list of steps, or holds what is not data.
    """
    if isinstance(steps, str | bytes | Mapping) or not isinstance(steps, Iterable):
        cure = "write [{...}] around one step" if isinstance(steps, Mapping) and "tool" in steps else STEP_SHAPE
        raise UsageError(f"execute_plan takes a list of steps, not {brief(steps)}; {cure}")
    given = list(itertools.islice(steps, MAX_PLAN_STEPS + 1))
    if len(given) > MAX_PLAN_STEPS:  # before anything looks at them
        count = len(steps) if isinstance(steps, Sized) else f"more than {MAX_PLAN_STEPS}"
        raise UsageError(f"{PLAN_TOOL} limited to {MAX_PLAN_STEPS} steps, got {count}")
    try:
        return copy_arguments({"steps": given}, None, tables_at=ARGUMENT_LEVEL).args
    except BadValue as exc:
        raise UsageError(f"the plan is not valid: {exc.problem}; {STEP_SHAPE}") from exc


def read_plan(args: Mapping[str, Any]) -> Plan:
    """Read a plan from validated arguments.

    Raises:
        PlanError: too many or no steps, an id used twice or unknown, steps that wait for each other.
    """
    written = args["steps"]
    if not written:
        raise PlanError("execute_plan requires at least one step")
    if len(written) > MAX_PLAN_STEPS:
        raise PlanError(f"execute_plan limited to {MAX_PLAN_STEPS} steps, got {len(written)}")
    written, problems = zip(*map(_checked_step, written), strict=True)
    ids = _ids(written)
    # Without ids nothing can be referred to, so "$ref" in arguments is just a key: the plain plan stays as it was.
    referred = _references(written) if ids else [[] for _ in written]
    steps = tuple(_step(index, step, ids, referred[index], problems[index]) for index, step in enumerate(written))
    try:
        _order([step for step in steps if step.needs])
    except CycleError as exc:
        names = ", ".join(steps[index].id or f"step {index}" for index in sorted({*exc.args[1]}))
        raise PlanError(f"steps wait for each other: {names}") from None
    return Plan(steps, args.get("on_error", "continue"), args.get("timeout_s"), bool(args.get("validate_only", False)))


def _checked_step(written: Any) -> tuple[Mapping[str, Any], str]:
    """Return a step fit to run, and "". Or what can be shown of one that is not, and what is wrong with it."""
    if not isinstance(written, dict):
        return {"tool": "", "args": {}}, f"a step must be an object, not {brief(written)}; {STEP_SHAPE}"
    step, args = {**written}, written.get("args")
    if isinstance(args, dict):  # copied with the plan: it is not looked through again
        del step["args"]
    try:
        step = _STEP_CHECKER.check_plain(step) or _STEP_CHECKER.check(step).args
    except InvalidArguments as exc:
        tool, name = written.get("tool"), written.get("id")
        seen: dict[str, Any] = {"tool": tool if isinstance(tool, str) else "", "args": {}}
        if isinstance(name, str):
            seen["id"] = name
        return seen, f"this step is not valid: {'; '.join(map(str, exc.problems[:5]))}; {STEP_SHAPE}"
    step["args"] = args if isinstance(args, dict) else step.get("args", {})
    return step, f"{PLAN_TOOL} steps cannot call {PLAN_TOOL}" if step["tool"] == PLAN_TOOL else ""


def _ids(written: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for index, step in enumerate(written):
        if (name := step.get("id")) is None:
            continue
        if len(name) > MAX_NAME_CHARS:
            raise PlanError(f"the id of step {index} has {len(name)} characters, more than {MAX_NAME_CHARS}")
        if name in ids:
            raise PlanError(f"steps {ids[name]} and {index} have the same id {name!r}")
        ids[name] = index
    return ids


def _references(written: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the references of each step; bounds what resolving them can cost."""
    found, count = [], 0
    for index, step in enumerate(written):
        found.append(references(step["args"]))
        for text in found[-1]:
            if len(text) > MAX_NAME_CHARS:
                said = f"{len(text)} characters, more than {MAX_NAME_CHARS}: {_short(text)}"
                raise PlanError(f"step {index} has a reference of {said}")
        count += len(found[-1])
        if count > MAX_REFERENCES:
            raise PlanError(f"a plan may have {MAX_REFERENCES} references, and step {index} has more; pass less")
    return found


def _short(text: str) -> str:
    return repr(one_line(text, 80))


def _step(index: int, step: Mapping[str, Any], ids: Mapping[str, int], texts: list[str], problem: str) -> Step:
    referred = [split_reference(text, ids)[0] for text in texts]
    needs: dict[int, None] = {}
    for name in [*(step.get("depends_on") or ()), *referred]:
        if name not in ids:
            known = ", ".join(ids) or "none"
            raise PlanError(f"step {index} refers to {_short(name)}, which is not a step's id (ids: {known})")
        needs[ids[name]] = None
    return Step(
        index=index,
        tool=step["tool"],
        args=step["args"],
        id=step.get("id"),
        timeout_s=step.get("timeout_s"),
        needs=tuple(needs),
        has_references=bool(referred),
        problem=problem,
    )


def _order(steps: Iterable[Step]) -> TopologicalSorter[int]:
    """Return what says which steps are ready.

    Raises:
        CycleError: some wait for each other.
    """
    order = TopologicalSorter({step.index: step.needs for step in steps})
    order.prepare()
    return order


# Running a plan

MAX_OUTPUT_CHARS = 100_000
"""Most characters of all rows together. Past it, the longest results are cut, each to an even share."""

Row = dict[str, Any]


NewCall = Callable[[Step, Mapping[str, Any]], Call]


class PlanRecord(Protocol):
    """What is known of the steps of a plan that is carried on, and which of them wait for decisions."""

    is_cut_short: bool
    """The plan was over before all its steps were: nothing of it waits."""

    async def recorded(self, call: Call, /) -> tuple[ToolResult, str] | None:
        """Take note of the call of a step. Return its result, if no call is to be made for it."""

    def waits(self, call: Call, /) -> bool:
        """Return whether the step waits for a decision, so that its result is none."""


async def run_plan(
    state: RegistryState, args: Mapping[str, Any], new_call: NewCall, record: PlanRecord | None = None
) -> ToolResult:
    """Run a plan's steps. Failing steps are rows of the result; only a plan that cannot run at all is a failure."""
    try:
        plan = read_plan(args)
        plan = replaced(plan, steps=tuple(_resolve_step(state, step) for step in plan.steps))
    except PlanError as exc:
        return ToolResult.fail(str(exc), code=ErrorCode.INVALID_ARGUMENTS)
    runner = _PlanRun(state, plan, new_call, record)
    if plan.validate_only:
        return ToolResult.of([await runner.examined(step) for step in plan.steps])
    with anyio.move_on_after(plan.timeout_s) as scope:
        await runner.run()
    if scope.cancelled_caught:
        runner.cut_short(f"plan timed out after {plan.timeout_s:g} s")
    return await runner.result()


def _resolve_step(state: RegistryState, step: Step) -> Step:
    """Return the step with the name that its tool is registered by. A plan does not run plans."""
    name = state.registered_name(step.tool)
    tool = state.tools.get(name)
    if tool is not None and PLAN_TOOL in tool.aliases:
        return replaced(step, tool=name, problem=f"{PLAN_TOOL} steps cannot call {PLAN_TOOL}")
    return step if name == step.tool else replaced(step, tool=name)


class _PlanRun:
    """One plan being run. A step has the result of its call, or the reason why there is none."""

    def __init__(self, state: RegistryState, plan: Plan, new_call: NewCall, record: PlanRecord | None = None) -> None:
        self._state = state
        self._record = record
        self._plan = plan
        self._new_call = new_call
        self._calls: dict[int, Call] = {}
        """By step; of steps that have begun."""
        self._failures = {
            step.index: ToolResult.fail(step.problem, code=ErrorCode.INVALID_ARGUMENTS)
            for step in plan.steps
            if step.problem
        }
        """Rows of steps that are not valid, or whose arguments could not be put together."""
        self._same_as: dict[int, int] = {}
        """Steps that share the call of an identical earlier step."""
        self._skipped: dict[int, str] = {}
        self._waiting: dict[int, str] = {}
        """Steps that wait for a step that waits for a decision."""
        self._turn = TimeSlice()
        self.note = "not run"
        """Said of steps that never came to run."""

    async def run(self) -> None:
        if not any(step.needs for step in self._plan.steps) and self._plan.on_error == "continue":  # a plain plan
            self._coalesce()
            steps = [s for s in self._plan.steps if s.index not in self._same_as and not s.problem]
            self._calls = {step.index: self._new_call(step, step.args) for step in steps}
            calls = [*self._calls.values()]
            if self._record is not None:
                calls = [call for call in calls if not await self._answer_recorded(call)]
            await run_batch(self._state, calls, sequential=bool(calls) and self._state.in_turn(calls[0].run))
        else:
            await self._scheduled()

    def cut_short(self, why: str) -> None:
        """The plan is over although steps are not."""
        self.note = why
        if self._record is not None:
            self._record.is_cut_short = True

    async def _answer_recorded(self, call: Call) -> bool:
        """Give a call the result that is recorded of it; False when it is to be made."""
        found = await self._record.recorded(call) if self._record is not None else None
        if found is None:
            return False
        result, run = found
        await answer_call(call, result, run)
        return True

    def _coalesce(self) -> None:
        """Find identical steps of tools that only read: they are one call."""
        first: dict[str, int] = {}
        for step in self._plan.steps:
            tool = self._state.tools.get(step.tool)
            if tool is not None and tool.options.read_only and not step.problem:
                key = json.dumps([step.tool, step.args, step.timeout_s], sort_keys=True, default=value_digest)
                if first.setdefault(key, step.index) != step.index:
                    self._same_as[step.index] = first[key]

    async def _scheduled(self) -> None:
        """Run every step as soon as the steps it needs are done."""
        order = _order(self._plan.steps)
        ready = deque(sorted(order.get_ready()))

        async def perform(index: int) -> None:
            step = self._plan.steps[index]
            await self._turn.give_way()
            await self._one(step)
            order.done(index)
            ready.extend(sorted(order.get_ready()))
            if self._plan.on_error == "abort" and not (self._is_ok(step.index) or self._waits(step.index)):
                self.cut_short(f"plan aborted: step {step.index} failed")
                ready.clear()
                plan_scope.cancel()

        with anyio.CancelScope() as plan_scope:
            await together(perform, ready)

    async def _one(self, step: Step) -> None:
        if step.problem:
            return
        if failed := [needed for needed in step.needs if not self._is_ok(needed)]:
            if lost := [needed for needed in failed if not self._waits(needed)]:
                self._skipped[step.index] = f"needs step {self._label(lost[0])}, which did not succeed"
            else:
                self._waiting[step.index] = f"needs step {self._label(failed[0])}, which waits for a decision"
            return
        try:
            args = resolve(step.args, self._results_by_id()) if step.has_references else step.args
        except PlanError as exc:
            self._failures[step.index] = ToolResult.fail(str(exc), code=ErrorCode.INVALID_ARGUMENTS)
            return
        self._calls[step.index] = call = self._new_call(step, args)
        if not await self._answer_recorded(call):
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

    def _waits(self, index: int) -> bool:
        call = self._calls.get(self._same_as.get(index, index))
        return index in self._waiting or (call is not None and self._record is not None and self._record.waits(call))

    def _is_ok(self, index: int) -> bool:
        result = self._result(index)
        return result is not None and not result.is_error

    def _label(self, index: int) -> str:
        return self._plan.steps[index].id or str(index)

    # Rows

    async def result(self) -> ToolResult:
        """Return all rows, in the order of the steps, with the files and the usage of the calls."""
        rows = [self._row_of(step) for step in self._plan.steps]
        results = [call.result for call in self._calls.values() if call.result is not None]
        files: list[File] = [file for result in results for file in result.files]
        said = [row.get("result", row.get("error")) for row in rows]
        # Nothing below `is_large` is surely long, so `_bounded` skips that look. It measures the rows as JSON anyway.
        bounded = await daemon_threads.run_large(_bounded, rows, said) if is_large(said) else _bounded(rows, [])
        return ToolResult(value=bounded, has_value=True, files=tuple(files), usage=total_usage(results))

    def _row(self, step: Step, status: str, **more: Any) -> Row:
        name = step.tool if step.tool in self._state.tools else one_line(step.tool, MAX_NAME_CHARS)
        named = {} if step.id is None else {"id": step.id}
        return {"step": step.index, "tool": name, **named, "status": status, **more}

    def _row_of(self, step: Step) -> Row:
        result = self._result(step.index)
        if self._waits(step.index):
            if self._record is not None and self._record.is_cut_short:
                return self._row(step, "skipped", error=self.note)
            return self._row(step, "waiting", error=self._waiting.get(step.index, "it waits for a decision"))
        if result is None:
            return self._row(step, "skipped", error=self._skipped.get(step.index, self.note))
        if result.is_error:
            return self._row(step, "error", error=told_failure(result))
        if result.status is Status.PENDING:
            return self._row(step, "pending", result=result.guest_value())
        call = self._calls.get(step.index)
        status = "collected" if call is not None and call.is_collected else "ok"
        return self._row(step, status, result=result.guest_value())

    async def examined(self, step: Step) -> Row:
        """Return what can be known of a step before it runs. Arguments with references are not checked."""
        await self._turn.give_way()
        if step.problem:
            return self._row(step, "error", error=step.problem)
        refusal = await examine(self._state, self._new_call(step, step.args), with_arguments=not step.has_references)
        return self._row(step, "valid") if refusal is None else self._row(step, "error", error=refusal.message)


def _bounded(rows: list[Row], said: list[Any]) -> list[Row]:
    """Return rows that fit together: results longer than their even share are cut to text. `said`: what is in them."""
    if not _is_surely_long(said) and len(to_json(rows)) <= MAX_OUTPUT_CHARS:
        return rows
    sizes = [_SURELY_LONG if _is_surely_long(row) else len(to_json(row)) for row in rows]
    if sum(sizes) <= MAX_OUTPUT_CHARS:
        return rows
    share = MAX_OUTPUT_CHARS // len(rows)
    return [_cut_row(row, share) if size > share else row for row, size in zip(rows, sizes, strict=True)]


_SURELY_LONG = MAX_OUTPUT_CHARS + 2
"""Characters of a value of half as many elements, at least. It is not written as JSON to its end."""


def _is_surely_long(value: Any) -> bool:
    return is_large(value, _SURELY_LONG // 2, counts_bytes=False)  # of bytes, only kind and size are written


def _cut_row(row: Row, share: int) -> Row:
    key = "result" if "result" in row else "error"
    value = row[key]
    if not isinstance(value, str) and _is_surely_long(value):
        text = bounded_json(value, max(0, share - len(_REST_CUT)), _REST_CUT)
    else:
        text = cut_text(value if isinstance(value, str) else to_json(value), share)[0]
    return row | {key: text, "truncated": True}


_REST_CUT = "\n[... the rest is cut, more than 100,000 characters in all ...]"
