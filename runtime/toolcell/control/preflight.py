"""Look at the calls that a script can make before it runs: which write, need approval, or cannot succeed.

The script is read inside a sandbox. What comes of it is for people and models, and never decides what may run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from toolcell.config import Limits
from toolcell.control.identity import options_of
from toolcell.effects import PlannedCall, Preflight
from toolcell.results import ErrorInfo, ExecutionResult, Outcome
from toolcell.run.request import RunRequest, run_message, sendable
from toolcell.tools.call import CallableTools
from toolcell.tools.checks import check_kind
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.options import Origin
from toolcell.tools.problems import did_you_mean, listed

SCRIPT: Final = "from toolcell_bridge.guest.planned_calls import planned_calls\nset_result(planned_calls(source))"
"""Reads the script that it gets as its input `source`."""

MAX_NAME_CHARS: Final = 64
WALL_S: Final = 5.0
"""What reading a script may take."""


def preflight_request(number: int, source: str, limits: Limits) -> RunRequest:
    """Return the request to read a script, as the run of `number`.

    Raises:
        UsageError: `source` is no text, or too large.
    """
    check_kind("source", source, str)
    limits = limits.model_copy(update={"wall_s": min(limits.wall_s, WALL_S)})
    inputs = {"source": sendable(source)}
    return RunRequest(run_message(number, SCRIPT, inputs, [], limits, "off", None, None), limits)


def read_preflight(result: ExecutionResult, tools: CallableTools) -> Preflight:
    """Return what `SCRIPT` found. The guest is not trusted: what is not of its shape is left out."""
    found = result.value if isinstance(result.value, dict) else {}
    error = found.get("error")
    if not result.ok or error:
        said = error if isinstance(error, str) and error else f"{result.outcome}"
        return Preflight(note=f"the script could not be read: {said[:300]}")
    definitions = {each.name: each for each in tools.definitions(Origin.CODE)}
    calls, dynamic = list[PlannedCall](), list[int]()
    rows = found.get("calls")
    for row in rows if isinstance(rows, list) else ():
        match row:
            case [int(line), str(name), names] if names is None or isinstance(names, list):
                calls.append(_planned(line, name, names, definitions, tools))
            case [int(line), None, _]:
                dynamic.append(line)
    more = found.get("more")
    note = f"{more} more calls are left out" if isinstance(more, int) and more else ""
    return Preflight(tuple(calls), tuple(dynamic), note)


def _planned(
    line: int, name: str, names: list[Any] | None, definitions: Mapping[str, ToolDefinition], tools: CallableTools
) -> PlannedCall:
    if name not in definitions:  # tools.some_name stands for some-name
        same = (each for each in definitions if "".join(c if c.isalnum() else "_" for c in each) == name)
        name = next(same, name)
    definition = definitions.get(name)
    if definition is None:
        known = [*definitions]
        problem = f"there is no tool of this name{did_you_mean(name, known)}; there are: {listed(known) or 'none'}"
        return PlannedCall(name[:MAX_NAME_CHARS], line, problem=problem)
    options = options_of(tools, name)
    return PlannedCall(name, line, not options.read_only, options.requires_approval, _wrong(definition, names))


def _wrong(definition: ToolDefinition, names: list[Any] | None) -> str:
    if names is None:
        return ""
    missing = [each for each in definition.parameters.get("required", ()) if each not in names]
    return f"missing: {', '.join(missing)}" if missing else ""


def refused(run_id: str, preflight: Preflight) -> ExecutionResult:
    """Return the result of a script that was not run, because calls of it cannot succeed."""
    first, *others = preflight.problems
    more = f" (and {len(others)} more)" if others else ""
    findings = tuple(
        {"line": each.line, "column": 0, "rule": "preflight", "message": f"{each.tool}: {each.problem}"}
        for each in preflight.problems[:50]
    )
    said = f"{first.tool}: {first.problem}{more}; the script was not run"
    error = ErrorInfo("Denied", said, first.line, findings=findings)
    return ExecutionResult(run_id, Outcome.DENIED, error=error, preflight=preflight)
