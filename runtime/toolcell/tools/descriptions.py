"""What a model is told about `execute_code` and `execute_plan`: what they do, and what a sandbox has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolcell.config import MIB, Limits
from toolcell.results import Outcome
from toolcell.tools.detail import SHOWN_CHARS, Detail, shown_within
from toolcell.tools.options import Origin
from toolcell.tools.plan import MAX_STEPS, PLAN_TOOL
from toolcell.tools.spec import Offered

CODE_TOOL = "execute_code"
SEARCH_TOOL = "search_tools"

MAX_PACKAGES = 50
"""Packages named in the description of execute_code."""

PLAN_TEXT = (
    f"Run up to {MAX_STEPS} tool calls in one turn and get all results together. Steps run in parallel. Use it when "
    "you already know every call you need; calling tools one at a time costs a turn each. A failed step does not stop "
    f"the others. Steps cannot call {PLAN_TOOL}."
)
_PLAN_LINKS = (
    ' Give a step an "id" to let others wait for it ("depends_on") or use its result: '
    '{"$ref": "id.path"} as an argument.'
)
_PLAN_OR_CODE = f" For loops, conditions or computing with results, use {CODE_TOOL} instead."

CODE_TEXT = (
    "Run Python in a sandbox. The script may call your tools with call_tool(name, args), which returns data; "
    "set_result(data) returns structured output, print() goes to the logs. A failed call raises ToolError. Use it "
    "when you need loops, conditions, or results of one call in another, or to compute."
)
_CODE_MORE = " call_tools_parallel([(name, args), ...]) makes several calls at once."
_CODE_OR_PLAN = f" For independent calls known upfront, {PLAN_TOOL} is simpler."


_SANDBOX = (
    " Without set_result, the value of the last expression is the result, and open matplotlib figures are returned as "
    "images. Files are written to the current folder; "
    'set_result(data, files=["chart.png"]) returns them, and shows you those that are images; input_files lists those '
    "that came with the script. {state} "
    "There is no network, no other program can be started, and no package can be installed: only your tools reach "
    "outside."
)

_AFRESH = "Every script starts afresh: no variable, import or file of an earlier one is left."
_KEPT = "Variables, imports and files stay from one script to the next."

ADVICE: Mapping[Outcome, str] = {
    Outcome.TIMEOUT: "do less in one script, make independent calls at once, or do the rest in another script",
    Outcome.CPU_LIMIT: "compute less in one script, or look for a loop that does not end",
    Outcome.MEMORY_LIMIT: "keep less in memory at once: work in pieces, and drop what is done with",
    Outcome.PROCESS_LIMIT: "use fewer threads and processes",
    Outcome.OUTPUT_LIMIT: "print less, and return data with set_result",
    Outcome.HOST_WORK_LIMIT: "send less to tools and as the result: sum up data in the script",
    Outcome.CALL_LIMIT: (
        "ask for more with each call, or do the rest in another script; every call of call_tools_parallel counts"
    ),
}
"""What a model can do about a limit that its script hit."""


def _offers(offered: Offered, name: str) -> bool:
    return any(tool.name == name for tool in offered(Origin.MODEL))


def describe_plan(offered: Offered) -> str:
    """Describe `execute_plan` for a model that may use what is offered."""
    return PLAN_TEXT + _PLAN_LINKS + (_PLAN_OR_CODE if _offers(offered, CODE_TOOL) else "")


def described_sandbox(runtime: Any, limits: Limits | None = None, *, keeps_state: bool = False) -> str:
    """Describe what a script finds in the sandboxes of `runtime`, as far as it says: limits and packages.

    `limits`: of each script, when they are not the runtime's. `keeps_state`: the scripts are those of a session.
    """
    limits, packages = limits or getattr(runtime, "limits", None), tuple(getattr(runtime, "packages", ()))
    text = _SANDBOX.format(state=_KEPT if keeps_state else _AFRESH)
    if packages:
        more = f" and {len(packages) - MAX_PACKAGES} more" if len(packages) > MAX_PACKAGES else ""
        text += f" Besides the standard library there are: {', '.join(packages[:MAX_PACKAGES])}{more}."
    else:
        text += " There is the standard library and no other package."
    return text + (_described_limits(limits) if isinstance(limits, Limits) else "")


def _described_limits(limits: Limits) -> str:
    return (
        f" A script has {limits.wall_s:g} s, tool calls included, {limits.memory_bytes // MIB} MiB of memory, "
        f"{limits.disk_bytes / MIB:g} MiB for files, and {limits.tool_calls} tool calls."
    )


def describe_code(offered: Offered, sandbox: str = "", shown_chars: int = SHOWN_CHARS) -> str:
    """Describe `execute_code` for a model that may use what is offered.

    The tools that its code may call are told in as much detail as `shown_chars` has room for.
    """
    tools = list(offered(Origin.CODE))
    text = CODE_TEXT + _CODE_MORE + (_CODE_OR_PLAN if _offers(offered, PLAN_TOOL) else "") + sandbox
    if not tools:
        return text
    detail, shown = shown_within([(tool.definition, tool.options.returns) for tool in tools], shown_chars)
    return f"{text}\n\n{_told(len(tools), detail, _offers(offered, SEARCH_TOOL))}{shown}{_AFTER.get(detail, '')}"


_CALLABLE = "callable as call_tool('name', {...}) or tools.name(...)"
_IN_FULL = "print(list_tools('name', detail='full')) tells all about one"
_SEARCH = "print(search_tools('what it is to do', detail='full')) in a script finds the right ones"
_AFTER: Mapping[Detail | None, str] = {"full": "\n```", "signatures": "\n```", "names": "."}


def _told(count: int, detail: Detail | None, offers_search: bool) -> str:
    """Introduce tools of which this much is told."""
    search = f"{_SEARCH}{f'; so does {SEARCH_TOOL}' if offers_search else ''}"
    match detail:
        case "full":
            return f"Tools, {_CALLABLE}:\n\n```python\n"
        case "signatures":
            return f"{count} tools, {_CALLABLE}; {_IN_FULL}:\n\n```python\n"
        case "names":
            return f"{count} tools, {_CALLABLE}. {_IN_FULL}; {search}. Their names: "
    return f"{count} tools, {_CALLABLE}: too many to list. Search first: {search}."
