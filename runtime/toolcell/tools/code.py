"""`execute_code` and `execute_plan` as tools of a registry, and what a model is told about them.

What they say depends on what else the model may use at that moment. The sandbox itself is anything that can run code.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.context import ToolContext
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.options import Origin, ToolOptions
from toolcell.calls.result import ErrorCode, File, Text, ToolResult, to_json
from toolcell.config import MIB, SHOWN_CHARS, Limits, Policy
from toolcell.errors import SandboxUnavailable, ToolAbort, UsageError
from toolcell.flows import Flow
from toolcell.results import ErrorInfo, ExecutionResult, Outcome, RepairedCall, shown_effects
from toolcell.support.checks import brief, check_count
from toolcell.support.text import clean, cut_text, shown_findings, with_line
from toolcell.tools.spec import Offered, ToolSpec
from toolcell.tools.stubs import Detail, shown_within

CODE_TOOL = "execute_code"
PLAN_TOOL = "execute_plan"
SEARCH_TOOL = "search_tools"

MAX_PACKAGES = 50
"""Packages named in the description of execute_code."""

CODE_TEXT = (
    "Run Python in a sandbox. The script may call your tools with call_tool(name, args), which returns data; "
    "set_result(data) returns structured output, print() goes to the logs. A failed call raises ToolError. Use it "
    "when you need loops, conditions, or results of one call in another, or to compute."
)
_CODE_MORE = " call_tools_parallel([(name, args), ...]) makes several calls at once."
_CODE_OR_PLAN = f" For independent calls known upfront, {PLAN_TOOL} is simpler."


_RESTRICTED = (
    " Without set_result, the value of the last expression is the result. Scripts are restricted: they cannot open "
    "files, use no attribute or name that begins with _, no except*, metaclass= or import *, and may import only "
    "{modules}. What is not allowed is refused before anything runs. {state}"
)
_SANDBOX = (
    " Without set_result, the value of the last expression is the result, and open matplotlib figures are returned as "
    "images. Files are written to the current folder; "
    'set_result(data, files=["chart.png"]) returns them, and shows you those that are images; input_files lists those '
    "that came with the script. {state} "
    "{network}, no other program can be started, and {packages}: only your tools reach outside."
)
_NO_NETWORK = "There is no network"
_HOSTS = "HTTP requests (urllib, requests, httpx) reach only {hosts}, there is no other network"
_NO_PACKAGE = "no package can be installed"
_INSTALLABLE = 'install_package("name") installs no other packages than {names}'
MAX_HOSTS = 20
"""That a model is told of."""

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


def offers(offered: Offered, name: str) -> bool:
    """Return whether a model may use a tool of this name."""
    return any(tool.name == name for tool in offered(Origin.MODEL))


def _described_sandbox(runtime: CodeRuntime, limits: Limits | None, keeps_state: bool) -> str:
    """Describe what a script finds in the sandboxes of `runtime`, as far as that is known: limits and packages."""
    limits, packages = limits or runtime.limits, runtime.packages
    state = _KEPT if keeps_state else _AFRESH
    hosts = ", ".join(runtime.hosts[:MAX_HOSTS])
    names = ", ".join(runtime.installable[:MAX_PACKAGES])
    text = _SANDBOX.format(
        state=state,
        network=_HOSTS.format(hosts=hosts) if hosts else _NO_NETWORK,
        packages=_INSTALLABLE.format(names=names) if names else _NO_PACKAGE,
    )
    if runtime.policy is not None and runtime.policy.lint == "strict":
        from toolcell_bridge.guest.lint import IMPORTABLE  # only this profile has it

        text = _RESTRICTED.format(modules=", ".join(sorted(IMPORTABLE)), state=state)
    elif packages:
        more = f" and {len(packages) - MAX_PACKAGES} more" if len(packages) > MAX_PACKAGES else ""
        text += f" Besides the standard library there are: {', '.join(packages[:MAX_PACKAGES])}{more}."
    else:
        text += " There is the standard library and no other package."
    if limits is None:
        return text
    return (
        f"{text} A script has {limits.wall_s:g} s, tool calls included, {limits.memory_bytes // MIB} MiB of memory, "
        f"{limits.disk_bytes / MIB:g} MiB for files, and {limits.tool_calls} tool calls."
    )


_CALLABLE = "callable as call_tool('name', {...}) or tools.name(...)"
_IN_FULL = "print(list_tools('name', detail='full')) tells all about one"
_SEARCH = "print(search_tools('what it is to do', detail='full')) in a script finds the right ones"
_AFTER: Mapping[Detail | None, str] = {"full": "\n```", "signatures": "\n```", "names": "."}


def _intro(count: int, detail: Detail | None, offers_search: bool) -> str:
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


MAX_PROGRESS_CHARS = 4_000
"""Most characters of what a running script has printed."""

MAX_LOG_CHARS = 30_000
"""Most characters of what was printed, for the model: with the value, they leave room for what else is told."""

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


@runtime_checkable
class CodeRuntime(Protocol):
    """Runs a script in a sandbox, with `tools` as what it may call and `context` as the run its calls belong to.

    A class of your own that inherits from this one need only define `execute_code`.
    """

    @property
    def limits(self) -> Limits | None:
        """Limits of a script that is given none. None: they are not known here."""
        return None

    @property
    def packages(self) -> Sequence[str]:
        """What there is in its sandboxes besides the standard library, as a model is told."""
        return ()

    @property
    def hosts(self) -> Sequence[str]:
        """Where libraries of its scripts may send HTTP requests, as a model is told."""
        return ()

    @property
    def installable(self) -> Sequence[str]:
        """Which packages its scripts may install, as a model is told."""
        return ()

    @property
    def policy(self) -> Policy | None:
        """The rules of its runs. None: they are not known here."""
        return None

    async def execute_code(
        self,
        source: str,
        /,
        *,
        inputs: Mapping[str, Any] | None = None,
        tools: CallableTools | None = None,
        limits: Any = None,
        context: RunContext | None = None,
        on_log: Callable[[str, str], None] | None = None,
        on_progress: Callable[[object], None] | None = None,
    ) -> ExecutionResult:
        """Run `source` to its end. `on_log` receives (stream, text) and `on_progress` values while it runs."""


ExecuteCode = Callable[..., Awaitable[ExecutionResult]]
"""Runs a script; takes what `CodeRuntime.execute_code` takes."""


@dataclass(frozen=True, slots=True)
class CodeTool:
    """`execute_code` as a tool: what a model is told about the scripts of one runtime, and about the end of each."""

    runtime: CodeRuntime
    NAME: ClassVar = CODE_TOOL
    MAX_VALUE_CHARS: ClassVar = 60_000
    """Most characters of the result, for the model."""

    def spec(
        self,
        options: Mapping[str, Any],
        shown_chars: int = SHOWN_CHARS,
        *,
        execute: ExecuteCode | None = None,
        with_variables: bool = False,
    ) -> ToolSpec:
        """Return the tool. `shown_chars`: of tools in its description.

        `execute` runs the scripts in place of the runtime itself, whose sandboxes are described. `with_variables`: of a
        script that failed, the model is shown the variables.

        Raises:
            UsageError: `runtime` cannot run code from an event loop.
        """
        runtime = self.runtime
        self.check(CODE_TOOL)
        check_count("shown_chars", shown_chars, 0)

        def invoke(context: ToolContext) -> Any:
            call = context.call
            return run_code(
                runtime,
                call.registry,
                call.args["code"],
                context.run,
                context.update,
                execute=execute,
                with_variables=with_variables,
            )

        known = ToolOptions(orchestrates=True, callable_from=frozenset({Origin.MODEL, Origin.PLAN}), label="Run code")
        return ToolSpec(
            definition=ToolDefinition(CODE_TOOL, CODE_TEXT, CODE_SCHEMA),
            invoke=invoke,
            options=known.changed(options),
            source=runtime,
            args_prefix=f"invalid {CODE_TOOL} args: ",
            describe=lambda offered: self.describe(offered, shown_chars=shown_chars),
        )

    def describe(
        self,
        offered: Offered,
        limits: Limits | None = None,
        *,
        keeps_state: bool = False,
        shown_chars: int = SHOWN_CHARS,
    ) -> str:
        """Describe it for a model that may use what is offered.

        The tools that its code may call are told in as much detail as `shown_chars` has room for. `limits`: of each
        script, when they are not the runtime's. `keeps_state`: the scripts are those of a session.
        """
        tools = list(offered(Origin.CODE))
        text = CODE_TEXT + _CODE_MORE + (_CODE_OR_PLAN if offers(offered, PLAN_TOOL) else "")
        text += _described_sandbox(self.runtime, limits, keeps_state)
        if not tools:
            return text
        detail, shown = shown_within([(tool.definition, tool.options.returns) for tool in tools], shown_chars)
        return f"{text}\n\n{_intro(len(tools), detail, offers(offered, SEARCH_TOOL))}{shown}{_AFTER.get(detail, '')}"

    def check(self, what: str) -> None:
        """Refuse a runtime that cannot run code from an event loop.

        Raises:
            UsageError: `what` names who needs a Runtime.
        """
        runtime: object = self.runtime
        if isinstance(runtime, type) or not inspect.iscoroutinefunction(getattr(runtime, "execute_code", None)):
            cure = f"write {runtime.__name__}(...)" if isinstance(runtime, type) else "write Runtime(...), and open it"
            raise UsageError(f"{what} needs a Runtime, whose execute_code is async, not {brief(runtime)}; {cure}")
        if not isinstance(runtime, CodeRuntime):
            kind = type(runtime).__name__
            raise UsageError(
                f"{what} needs limits, packages, hosts and policy of its {kind}; write class {kind}(CodeRuntime)"
            )

    @property
    def flows(self) -> tuple[Flow, ...]:
        """Return the flows of a runtime's policy: they hold for whoever is offered its `execute_code`."""
        return () if self.runtime.policy is None else self.runtime.policy.flows

    @staticmethod
    def result(result: ExecutionResult, *, with_logs: bool = True, with_variables: bool = False) -> ToolResult:
        """A run's result as a tool's: the value as JSON, or what went wrong; then what was printed."""
        more = _sections(result, with_logs=with_logs, with_variables=with_variables)
        files = tuple(File(file.name, file.data, file.media_type) for file in result.files if file.data is not None)
        given: dict[str, Any] = {"value": result.value, "has_value": result.has_value, "files": files}
        if result.ok:
            said = _value_text(result.value) if result.has_value else NO_RESULT
            return ToolResult(parts=(Text(said + more),), details=result.to_dict(), **given)
        return ToolResult.fail(
            CodeTool.failure(result) + more,
            code=_OWN_CODES.get(result.outcome, str(result.outcome)),
            details=result.to_dict(),
            facts={"outcome": str(result.outcome)},
            **given,
        )

    @staticmethod
    def failure(result: ExecutionResult) -> str:
        """What failed, where, what to do about a limit, and which calls had already run when it did."""
        if (error := result.error) is None:
            said = f"code execution failed: {result.outcome}"
        elif error.traceback:
            said = error.traceback.rstrip() + _limit_reached(error)
        else:
            named = f"{error.type}: " if result.outcome in (Outcome.ERROR, Outcome.DENIED) else ""
            said = named + with_line(error.message, error.line)
        if (advice := ADVICE.get(result.outcome)) is not None:
            said = f"{said}\n{advice}"
        if not result.calls:
            return said
        made = ", ".join(f"{call.name} ({call.status})" for call in result.calls[:20])
        more = f" and {len(result.calls) - 20} more" if len(result.calls) > 20 else ""
        return f"{said}\n\ntool calls already made: {made}{more}"


async def run_code(
    runtime: CodeRuntime,
    registry: CallableTools,
    source: str,
    run: RunContext,
    update: Callable[..., None],
    *,
    execute: ExecuteCode | None = None,
    with_variables: bool = False,
    **options: Any,
) -> ToolResult:
    """Run a model's script and describe its result. What it prints meanwhile is progress of the call.

    `options`: further ones of the runtime's `execute_code`.

    Raises:
        ToolAbort: a tool the script called ended the whole run, or `runtime` is not open.
    """
    if not source.strip():
        return ToolResult.fail(f"{CODE_TOOL} requires non-empty code", code=ErrorCode.INVALID_ARGUMENTS)
    printed = ""

    def add(stream: str, text: str) -> None:
        nonlocal printed
        printed = (printed + text)[-MAX_PROGRESS_CHARS:]  # the latest of it: updates may replace each other
        update(printed)

    try:
        result = await (execute or runtime.execute_code)(
            source,
            tools=registry,
            limits=run.limits,
            context=run,
            on_log=add,
            on_progress=lambda value: update(details=value),
            **options,
        )
    except ToolAbort:
        raise
    except (SandboxUnavailable, UsageError) as exc:
        again = isinstance(exc, SandboxUnavailable)
        return ToolResult.fail(f"code execution failed: {exc}", code=ErrorCode.UNAVAILABLE, retryable=again, exc=exc)
    if run.state.abort is not None:
        raise run.state.abort
    with_logs = runtime.policy is None or runtime.policy.logs_to_model
    return CodeTool.result(result, with_logs=with_logs, with_variables=with_variables)


def _sections(result: ExecutionResult, *, with_logs: bool, with_variables: bool) -> str:
    """Return what is told after the value or the failure: limits that were met all the same, variables where it failed,
    findings about types, calls of the script before, what a dry run collected, files, and what was printed."""
    logs = cut_text(clean(result.logs.text).rstrip("\n"), MAX_LOG_CHARS)[0] if with_logs else ""
    # Why the last value is not the result stands in the logs too.
    logged = f"{logs}\n"
    rows = [f"warning: {each}" for each in result.warnings if result.ok and f"[toolcell] {clean(each)}\n" not in logged]
    frames = result.error.frames if with_variables and result.error is not None else ()
    values = [f"  {name} = {text}" for name, text in frames[-1].locals.items()] if frames else []
    rows += ["\n".join(["variables where it failed:", *values])] if values else []
    if result.type_findings and result.outcome is not Outcome.DENIED:
        rows.append(f"the types of the script look wrong: {shown_findings(result.type_findings)}")
    if result.repair is not None:
        reused, orphaned = _counts(result.repair.reused), _counts(result.repair.orphaned)
        rows += [f"answered with the results of the script before, and not made again: {reused}"] if reused else []
        rows += [f"made by the script before, and still in effect: {orphaned}"] if orphaned else []
    rows += [shown_effects(result.effects, is_whole=result.ok)] if result.draft_id else []
    if result.has_value and not result.ok:
        rows.append(f"result set before the failure: {_value_text(result.value)}")
    kept = [f"{file.name} ({file.media_type}, {file.size} bytes)" for file in result.files if not file.problem]
    lost = [f"{file.name}: {file.problem}" for file in result.files if file.problem]
    rows += [f"files returned: {', '.join(kept)}"] if kept else []
    rows += [f"files not returned: {'; '.join(lost)}"] if lost else []
    rows += [f"logs:\n{logs}"] if logs else []
    return "".join(f"\n\n{row}" for row in rows)


def _counts(calls: Iterable[RepairedCall]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in Counter(each.tool for each in calls).items())


def _value_text(value: Any) -> str:
    return cut_text(to_json(value), CodeTool.MAX_VALUE_CHARS)[0]


def _limit_reached(error: ErrorInfo) -> str:
    """Name the limit behind an exception of the script that does not name it, such as a bare MemoryError."""
    if error.limit is not None and error.used is None and error.limit_value is not None:
        return f"\nthe run's limit {error.limit} is {error.limit_value:.16g}"
    if error.limit is None or error.limit in error.message:
        return ""
    return f"\nthe run's limit {error.limit} is {error.limit_value:.16g}, and {error.used:.16g} was in use"
