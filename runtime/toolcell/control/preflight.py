"""Look at the calls that a script can make before it runs: which write, need approval, or cannot succeed.

The script is read inside a sandbox. What comes of it is for people and models, and never decides what may run.
"""

from __future__ import annotations

from typing import Any, Final

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.definition import MAX_NAME_CHARS, ToolDefinition
from toolcell.calls.options import Origin
from toolcell.calls.values import list_names
from toolcell.config import Limits
from toolcell.journal.identity import options_of
from toolcell.results import ErrorInfo, ExecutionResult, Outcome, PlannedCall, Preflight
from toolcell.run.run import Run, Script, sendable
from toolcell.support.checks import check_kind, did_you_mean
from toolcell_bridge.guest.planned_calls import MAX_CALLS
from toolcell_bridge.guest.tool_names import provider_name, python_path

SCRIPT: Final = "from toolcell_bridge.guest.planned_calls import planned_calls\nset_result(planned_calls(source))"
"""Reads the script that it gets as its input `source`."""

MAX_ARGUMENTS: Final = 1000
"""Most arguments of one call, that are looked at."""
MAX_HINTS: Final = 10
"""Names that do not exist and are compared with those that do."""
WALL_S: Final = 5.0
"""What reading a script may take."""


def preflight_run(number: int, source: str, limits: Limits, tools: CallableTools) -> Run:
    """Return the run that reads a script, as `number`.

    Raises:
        UsageError: `source` is not text, or too large.
    """
    check_kind("source", source, str)
    limits = limits.model_copy(update={"wall_s": min(limits.wall_s, WALL_S)})
    script = Script(source=SCRIPT, inputs={"source": sendable(source)}, limits=limits)
    return Run(script, tools, RunContext(), script.message(number))


def read_preflight(result: ExecutionResult, tools: CallableTools) -> Preflight:
    """Return what `SCRIPT` found. The guest is not trusted: what is not of its shape is left out."""
    found = result.value if isinstance(result.value, dict) else {}
    error = found.get("error")
    if not result.ok or error:
        said = error if isinstance(error, str) and error else f"{result.outcome}"
        line = found.get("line")
        line = line if type(line) is int and line > 0 else None
        return Preflight(note=f"the script could not be read: {said[:300]}", error_line=line)
    offered = _Offered(tools)
    calls, dynamic = list[PlannedCall](), list[int]()
    rows = found.get("calls")
    for row in rows[:MAX_CALLS] if isinstance(rows, list) else ():
        match row:
            case [int(line), str(name), _, True] if not offered.resolve(name):
                dynamic.append(line)
            case [int(line), str(name), names, *_] if names is None or isinstance(names, list):
                calls.append(offered.planned(line, name, names))
            case [int(line), None, _]:
                dynamic.append(line)
    more = found.get("more")
    note = f"{more} more calls are left out" if isinstance(more, int) and more else ""
    return Preflight(tuple(calls), tuple(dynamic), note)


class _Offered:
    """The tools that a script can call, as its calls are compared with them. Work for each call is bounded."""

    def __init__(self, tools: CallableTools) -> None:
        self._tools = tools
        self._definitions = {each.name: each for each in tools.definitions(Origin.CODE)}
        names = list(reversed(self._definitions))
        self._names = {provider_name(each): each for each in names} | {python_path(each): each for each in names}
        """As attributes, where `tools.github.some_name` stands for github.some-name; and as providers have them."""
        self._listed = list_names(self._definitions) or "none"
        self._hints: dict[str, str] = {}

    def resolve(self, name: str) -> str:
        """Return the tool that a script means by a name; nothing when there is none."""
        return name if name in self._definitions else self._names.get(name, "")

    def planned(self, line: int, name: str, names: list[Any] | None) -> PlannedCall:
        """Compare one call, as a guest has told of it, with the tools."""
        if not (known := self.resolve(name)):
            cut = name[:MAX_NAME_CHARS]
            problem = f"there is no tool of this name{self._hint(cut)}; there are: {self._listed}"
            return PlannedCall(cut, line, problem=problem)
        options = options_of(self._tools, known)
        problem = _wrong(self._definitions[known], names)
        return PlannedCall(known, line, not options.read_only, options.requires_approval, problem)

    def _hint(self, name: str) -> str:
        """Say which tool is meant. Comparing a name with all tools takes long, so the first few names get a hint."""
        if name not in self._hints and len(self._hints) < MAX_HINTS:
            self._hints[name] = did_you_mean(name, self._definitions)
        return self._hints.get(name, "")


def _wrong(definition: ToolDefinition, names: list[Any] | None) -> str:
    if names is None:
        return ""
    given = {each for each in names[:MAX_ARGUMENTS] if isinstance(each, str)}
    missing = [each for each in definition.parameters.get("required", ()) if each not in given]
    return f"missing: {', '.join(missing)}" if missing else ""


def refused_result(preflight: Preflight) -> ExecutionResult:
    """Return the result of a script that was not run, because calls of it cannot succeed."""
    first, *others = preflight.problems
    more = f" (and {len(others)} more)" if others else ""
    findings = tuple(
        {"line": each.line, "column": 0, "rule": "preflight", "message": f"{each.tool}: {each.problem}"}
        for each in preflight.problems[:50]
    )
    said = f"{first.tool}: {first.problem}{more}; the script was not run"
    error = ErrorInfo("Denied", said, first.line, findings=findings)
    return ExecutionResult("", Outcome.DENIED, error=error, preflight=preflight)
