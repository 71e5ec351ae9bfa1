"""The steps of a plan as checked data: limits, ids, dependencies, references between steps.

Pure: reads what the model wrote and says what is wrong with the plan as a whole; nothing here calls a tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_STEPS = 50
PLAN_TOOL = "execute_plan"

_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")

PLAN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "description": f"Tool calls to make, at most {MAX_STEPS}.",
            "items": {
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
                "required": ["tool", "args"],
            },
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
    """A plan from validated arguments.

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
    """Every "$ref" in arguments."""
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
    """The part of a result a reference's path leads to.

    Raises:
        PlanError: there is nothing there; says how far the path leads.
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
    """Arguments with every reference replaced by what it stands for. `results` is keyed by step id.

    Raises:
        PlanError: a path leads nowhere.
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
