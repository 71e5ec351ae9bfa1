"""`execute_code`, `execute_plan` and `ask_user` as tools of a registry, and what a model is told about them.

What they say depends on what else the model may use at that moment. The sandbox itself is anything that can run code.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.results import ExecutionResult, Outcome
from toolcell.text import clean
from toolcell.tools.adapters import with_options
from toolcell.tools.call import CallableTools, RunContext
from toolcell.tools.concurrency import maybe_await
from toolcell.tools.context import ToolContext
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.options import Origin, ToolOptions
from toolcell.tools.plan import MAX_STEPS, PLAN_TOOL
from toolcell.tools.result import ErrorCode, File, Text, ToolResult, to_json
from toolcell.tools.spec import Offered, ToolSpec
from toolcell.tools.stubs import python_stubs

CODE_TOOL = "execute_code"
MAX_STUBS = 32
"""Tools written out as stubs in the description of execute_code; the script can list the others itself."""

MAX_PROGRESS_CHARS = 4_000
"""Of what a running script has printed."""

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

CODE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python source to run."}},
    "required": ["code"],
}

NO_RESULT = "(no result set — use set_result(data) to return structured output)"

_OWN_CODES: Mapping[Outcome, str] = {
    Outcome.ERROR: ErrorCode.EXCEPTION,
    Outcome.TIMEOUT: ErrorCode.TIMEOUT,
    Outcome.CANCELLED: ErrorCode.CANCELLED,
    Outcome.UNAVAILABLE: ErrorCode.UNAVAILABLE,
    Outcome.DENIED: ErrorCode.NOT_PERMITTED,
}
"""Outcomes that tools in general know; of the others the outcome itself is the code."""


class CodeRuntime(Protocol):
    """Runs a script in a sandbox, with `tools` as what it may call and `context` as the run its calls belong to."""

    async def execute_code(
        self,
        source: str,
        /,
        *,
        tools: CallableTools | None = None,
        limits: Any = None,
        context: RunContext | None = None,
        on_log: Callable[[str, str], None] | None = None,
        on_progress: Callable[[object], None] | None = None,
    ) -> ExecutionResult:
        """Run `source` to its end. `on_log` receives (stream, text) and `on_progress` values while it runs."""


def plan_spec(options: Mapping[str, Any]) -> ToolSpec:
    """`execute_plan` as a tool."""

    def invoke(context: ToolContext) -> Any:
        return context.call.registry.run_plan(context.call.args, context.run)

    known = ToolOptions(orchestrates=True, callable_from=frozenset({Origin.MODEL}), label="Run a plan")
    return ToolSpec(
        definition=ToolDefinition(PLAN_TOOL, _PLAN_TEXT, PLAN_SCHEMA),
        invoke=invoke,
        options=with_options(known, options),
        source=PLAN_TOOL,
        args_prefix=f"invalid {PLAN_TOOL} args: ",
        describe=describe_plan,
        requires_result=True,
    )


def code_spec(runtime: CodeRuntime, options: Mapping[str, Any]) -> ToolSpec:
    """`execute_code` as a tool."""

    def invoke(context: ToolContext) -> Any:
        call = context.call
        return run_code(runtime, call.registry, call.args["code"], context.run, context.update)

    known = ToolOptions(orchestrates=True, callable_from=frozenset({Origin.MODEL, Origin.PLAN}), label="Run code")
    return ToolSpec(
        definition=ToolDefinition(CODE_TOOL, _CODE_TEXT, CODE_SCHEMA),
        invoke=invoke,
        options=with_options(known, options),
        source=runtime,
        args_prefix=f"invalid {CODE_TOOL} args: ",
        describe=describe_code,
        requires_result=True,
    )


async def run_code(
    runtime: CodeRuntime, registry: CallableTools, source: str, run: RunContext, update: Callable[..., None]
) -> ToolResult:
    """Run a model's script and describe its result. What it prints meanwhile is progress of the call.

    Raises:
        ToolAbort: a tool the script called ended the whole run.
    """
    if not source.strip():
        return ToolResult.fail(f"{CODE_TOOL} requires non-empty code", code=ErrorCode.INVALID_ARGUMENTS)
    printed = _Printed(update)
    try:
        result = await runtime.execute_code(
            source,
            tools=registry,
            limits=run.limits,
            context=run,
            on_log=printed.add,
            on_progress=lambda value: update(details=value),
        )
    except (SandboxUnavailable, UsageError) as exc:
        return ToolResult.fail(f"code execution failed: {exc}", code=ErrorCode.UNAVAILABLE, exc=exc)
    if run.state.abort is not None:
        raise run.state.abort
    policy = getattr(runtime, "policy", None)
    return code_result(result, with_logs=getattr(policy, "logs_to_model", True))


class _Printed:
    """What a script has printed so far, as progress: the latest of it, since updates may replace each other."""

    def __init__(self, update: Callable[..., None]) -> None:
        self._update = update
        self._tail = ""

    def add(self, stream: str, text: str) -> None:
        self._tail = (self._tail + text)[-MAX_PROGRESS_CHARS:]
        self._update(self._tail)


def code_result(result: ExecutionResult, *, with_logs: bool = True) -> ToolResult:
    """A run's result as a tool's: the value as JSON, or what went wrong; then what was printed."""
    logs = _logs(result) if with_logs else ""
    files = tuple(File(file.name, file.data, file.media_type) for file in result.files if file.data is not None)
    details = result.to_dict()
    if result.ok:
        said = to_json(result.value) if result.has_value else NO_RESULT
        text = said + _missing_files(result) + logs
        return ToolResult(
            parts=(Text(text),), value=result.value, has_value=result.has_value, files=files, details=details
        )
    code = _OWN_CODES.get(result.outcome, str(result.outcome))
    return ToolResult.fail(
        describe_failure(result) + _partial_result(result) + _missing_files(result) + logs,
        code=code,
        value=result.value,
        has_value=result.has_value,
        files=files,
        details={"outcome": str(result.outcome)},
    ).with_details(details)


def describe_failure(result: ExecutionResult) -> str:
    """What failed, where, and which calls had already run when it did."""
    error = result.error
    if error is None:
        said = f"code execution failed: {result.outcome}"
    elif error.traceback:
        said = error.traceback.rstrip()
    elif result.outcome in (Outcome.ERROR, Outcome.DENIED):
        where = f" (line {error.line})" if error.line is not None else ""
        said = f"{error.type}: {error.message}{where}"
    else:
        said = error.message
    if not result.calls:
        return said
    made = ", ".join(f"{call.name} ({call.status})" for call in result.calls[:20])
    more = f" and {len(result.calls) - 20} more" if len(result.calls) > 20 else ""
    return f"{said}\n\ntool calls already made: {made}{more}"


def _partial_result(result: ExecutionResult) -> str:
    return f"\n\nresult set before the failure: {to_json(result.value)}" if result.has_value else ""


def _missing_files(result: ExecutionResult) -> str:
    lost = [f"{file.name}: {file.problem}" for file in result.files if file.problem]
    return f"\n\nfiles not returned: {'; '.join(lost)}" if lost else ""


def _logs(result: ExecutionResult) -> str:
    text = clean(result.logs.text).rstrip("\n")
    return f"\n\nlogs:\n{text}" if text else ""


# A question to a person

AskUser = Callable[[str], str | Awaitable[str]]
"""Gets the question, gives the answer."""

ASK_TOOL = "ask_user"


def ask_user_spec(ask: AskUser) -> ToolSpec:
    """A tool that asks a person. Plans and code cannot: nobody expects questions in the middle of either."""

    async def invoke(context: ToolContext) -> Any:
        return await maybe_await(ask(context.call.args["question"]))

    schema = {
        "type": "object",
        "properties": {"question": {"type": "string", "description": "What to ask."}},
        "required": ["question"],
    }
    return ToolSpec(
        definition=ToolDefinition(ASK_TOOL, "Ask the user a question and wait for the answer.", schema),
        invoke=invoke,
        # People take their time, and the question holds no worker from other tools meanwhile.
        options=ToolOptions(orchestrates=True, callable_from=frozenset({Origin.MODEL})),
        source=ask,
        requires_result=True,
    )


# What the model is told

_PLAN_TEXT = (
    f"Run up to {MAX_STEPS} tool calls in one turn and get all results together. Steps run in parallel. Use it when "
    "you already know every call you need; calling tools one at a time costs a turn each. A failed step does not stop "
    f"the others. Steps cannot call {PLAN_TOOL}."
)
_PLAN_LINKS = (
    ' Give a step an "id" to let others wait for it ("depends_on") or use its result: '
    '{"$ref": "id.path"} as an argument.'
)
_PLAN_OR_CODE = f" For loops, conditions or computing with results, use {CODE_TOOL} instead."

_CODE_TEXT = (
    "Run Python in a sandbox. The script may call your tools with call_tool(name, args), which returns data; "
    "set_result(data) returns structured output, print() goes to the logs. A failed call raises ToolError. Use it "
    "when you need loops, conditions, or results of one call in another, or to compute."
)
_CODE_MORE = " call_tools_parallel([(name, args), ...]) makes several calls at once."
_CODE_OR_PLAN = f" For independent calls known upfront, {PLAN_TOOL} is simpler."


def _offers(offered: Offered, name: str) -> bool:
    return any(tool.name == name for tool in offered(Origin.MODEL))


def describe_plan(offered: Offered) -> str:
    """Describe `execute_plan` for a model that may use what is offered."""
    return _PLAN_TEXT + _PLAN_LINKS + (_PLAN_OR_CODE if _offers(offered, CODE_TOOL) else "")


def describe_code(offered: Offered) -> str:
    """Describe `execute_code` for a model that may use what is offered; with the tools its code may call, as Python."""
    tools = list(offered(Origin.CODE))
    text = _CODE_TEXT + _CODE_MORE + (_CODE_OR_PLAN if _offers(offered, PLAN_TOOL) else "")
    if not tools:
        return text
    stubs = python_stubs((tool.definition, tool.options.returns) for tool in tools[:MAX_STUBS])
    more = ", ".join(tool.name for tool in tools[MAX_STUBS:])
    rest = f"\n\nAlso available, see list_tools(): {more}" if more else ""
    return (
        f"{text}\n\nTools, callable as call_tool('name', {{...}}) or tools.name(...):\n\n```python\n{stubs}\n```{rest}"
    )
