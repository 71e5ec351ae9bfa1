"""A plan as a script, and a straight-line script as a plan.

For authors and for showing a plan to people; no run ever calls this. Reading a script parses it in this process, so
it is for scripts whose author is trusted: what a model wrote is parsed inside the sandbox only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from toolcell.tools.plan import Plan, Step, read_plan
from toolcell.tools.plan_references import PlanError, is_reference, path_steps, split_reference
from toolcell_bridge.guest.tool_names import python_name

MAX_SOURCE_CHARS = 100_000
_MADE_UP = re.compile(r"step_\d+")


# A plan as a script


def plan_to_code(args: Mapping[str, Any]) -> str:
    """A script that makes a plan's calls: at once when no step waits for another, else one after the other.

    Raises:
        PlanError: the plan cannot run.
    """
    plan = read_plan(args)
    names = _names(plan)
    calls = [f"({step.tool!r}, {_expression(step.args, plan, names)})" for step in plan.steps]
    everything = ", ".join(names)
    if plan.is_flat and len(plan.steps) > 1:
        listed = "".join(f"    {call},\n" for call in calls)
        return f"{everything} = call_tools_parallel([\n{listed}])\nset_result([{everything}])\n"
    lines = [
        f"{names[step.index]} = call_tool({step.tool!r}, {_expression(step.args, plan, names)})"
        for step in _in_order(plan)
    ]
    return "\n".join([*lines, f"set_result([{everything}])", ""])


def _names(plan: Plan) -> list[str]:
    names: list[str] = []
    for step in plan.steps:
        name = python_name(step.id) if step.id is not None else f"step_{step.index}"
        while name in names:
            name += "_"
        names.append(name)
    return names


def _in_order(plan: Plan) -> Iterator[Step]:
    waiting, done = list(plan.steps), set[int]()
    while waiting:
        ready = next(step for step in waiting if done.issuperset(step.needs))
        waiting.remove(ready)
        done.add(ready.index)
        yield ready


def _expression(value: Any, plan: Plan, names: list[str]) -> str:
    ids = {step.id: step.index for step in plan.steps if step.id is not None}
    if ids and is_reference(value):
        name, path = split_reference(value["$ref"], ids)
        return names[ids[name]] + "".join(f"[{step!r}]" for step in path_steps(path))
    if isinstance(value, Mapping):
        members = (f"{key!r}: {_expression(item, plan, names)}" for key, item in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list):
        return f"[{', '.join(_expression(item, plan, names) for item in value)}]"
    return repr(value)


# A script as a plan


def code_to_plan(source: str) -> dict[str, Any]:
    """The plan a straight-line script amounts to: only `name = call_tool(...)`, parallel calls, and set_result.

    Raises:
        PlanError: the script does anything else; says on which line.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise PlanError(f"script of {len(source)} characters, more than {MAX_SOURCE_CHARS}")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise PlanError(f"not a script: {exc}") from exc
    reader = _Reader()
    for statement in tree.body:
        reader.read(statement)
    return {"steps": [reader.without_idle_id(step) for step in reader.steps]}


class _Reader:
    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._names: set[str] = set()
        self._used: set[str] = set()

    def read(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="call_tool"), args=args)):
                self._step(name, args, statement)
            case ast.Assign(
                targets=[ast.Tuple(elts=names)],
                value=ast.Call(func=ast.Name(id="call_tools_parallel"), args=[ast.List(elts=written)]),
            ) if len(names) == len(written):
                for target, pair in zip(names, written, strict=True):
                    if not (isinstance(target, ast.Name) and isinstance(pair, ast.Tuple)):
                        raise _unlike_a_plan(statement)
                    self._step(target.id, pair.elts, statement)
            case ast.Expr(value=ast.Call(func=ast.Name(id="set_result"))):
                pass
            case _:
                raise _unlike_a_plan(statement)

    def _step(self, name: str, args: list[ast.expr], statement: ast.stmt) -> None:
        match args:
            case [ast.Constant(value=str() as tool)]:
                given: Any = {}
            case [ast.Constant(value=str() as tool), ast.Dict() as written]:
                given = self._value(written)
            case _:
                raise _unlike_a_plan(statement)
        self.steps.append({"id": name, "tool": tool, "args": given})
        self._names.add(name)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=str() | int() | float() | None as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.List(elts=items):
                return [self._value(item) for item in items]
            case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
                pairs = zip(keys, values, strict=True)
                return {key.value: self._value(value) for key, value in pairs if isinstance(key, ast.Constant)}
            case ast.Name() | ast.Subscript():
                return {"$ref": self._reference(node)}
        raise _unlike_a_plan(node)

    def _reference(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) if name in self._names:
                self._used.add(name)
                return name
            case ast.Subscript(value=inner, slice=ast.Constant(value=bool())):
                raise _unlike_a_plan(node)
            case ast.Subscript(value=inner, slice=ast.Constant(value=int() as index)) if index >= 0:
                return f"{self._reference(inner)}[{index}]"
            case ast.Subscript(value=inner, slice=ast.Constant(value=str() as key)) if re.fullmatch(r"[^.\[\]]+", key):
                return f"{self._reference(inner)}.{key}"
        raise _unlike_a_plan(node)

    def without_idle_id(self, step: dict[str, Any]) -> dict[str, Any]:
        """A name nobody refers to and nobody chose says nothing."""
        if step["id"] not in self._used and _MADE_UP.fullmatch(step["id"]):
            return {key: value for key, value in step.items() if key != "id"}
        return step


def _unlike_a_plan(node: ast.stmt | ast.expr) -> PlanError:
    return PlanError(f"line {node.lineno} is more than a plan can say: {ast.unparse(node)[:80]}")
