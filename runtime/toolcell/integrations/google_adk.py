"""Google ADK: a `BaseCodeExecutor` for `LlmAgent(code_executor=...)`, with ADK's tools.

    with ToolcellCodeExecutor(tools=[search]) as executor:
        agent = LlmAgent(name="coder", model=model, code_executor=executor, instruction=executor.instructions)

Each ADK session has a toolcell session of its own: names, imports and files stay from one code block to the next.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

from pydantic import PrivateAttr

from toolcell.config import Limits
from toolcell.errors import SessionError, ToolError, UsageError
from toolcell.integrations.base import (
    ConversationSessions,
    SyncRuntimeOwner,
    framework_tool,
    instructions,
    missing_package,
    pictures,
    program_output,
    tool_of,
    tools_with,
)
from toolcell.results import ExecutionResult
from toolcell.runtime import Runtime
from toolcell.sessions import Session
from toolcell.support.checks import is_async
from toolcell.sync import SyncRuntime
from toolcell.tools import ToolRegistry, ToolSpec

try:
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.code_executors import BaseCodeExecutor
    from google.adk.code_executors.code_execution_utils import CodeExecutionInput, CodeExecutionResult, File
    from google.adk.models import LlmRequest
    from google.adk.tools import BaseTool, FunctionTool, ToolContext
    from google.adk.tools.tool_confirmation import ToolConfirmation
except ModuleNotFoundError as exc:
    raise missing_package(exc, "google-adk") from exc

__all__ = ["ToolcellCodeExecutor"]


class ToolcellCodeExecutor(BaseCodeExecutor):
    """Runs an agent's code blocks in toolcell sandboxes. Use it with `with`, or close it with `close`.

    `tools` are ADK's tools or functions; scripts call them as `tools.NAME(...)`, beside the tools of the runtime's
    registry, whose rules, hooks and audit log hold for both. A tool with `require_confirmation` needs an approval hook
    of that registry. Without `runtime` the executor opens one of its own. `options` are the fields of
    `BaseCodeExecutor`, and without `runtime` the arguments of `SyncRuntime`. `limits`: of each code block;
    `timeout_seconds` takes precedence over its `wall_s`.
    """

    stateful: bool = True
    """Names, imports and files stay from one code block of an ADK session to the next."""

    _owner: SyncRuntimeOwner = PrivateAttr()
    _limits: Limits | None = PrivateAttr()
    _tools: list[BaseTool] = PrivateAttr()
    _sessions: ConversationSessions = PrivateAttr(default_factory=ConversationSessions)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)
    _is_closed: bool = PrivateAttr(default=False)

    def __init__(
        self,
        runtime: SyncRuntime | None = None,
        *,
        tools: Sequence[BaseTool | Callable[..., Any]] = (),
        limits: Limits | None = None,
        **options: Any,
    ) -> None:
        fields = {name: options.pop(name) for name in [*options] if name in type(self).model_fields}
        super().__init__(**fields)
        self._owner = SyncRuntimeOwner(runtime, options)
        self._tools = [tool_of(each, BaseTool, FunctionTool, "ADK") for each in tools]
        own = limits or self._owner.runtime.runtime.limits
        if self.timeout_seconds is not None:
            own = own.model_copy(update={"wall_s": self.timeout_seconds})
        self._limits = own
        self._callable(None)  # refuses wrong tools now

    @property
    def instructions(self) -> str:
        """What a model has to know to write code: the tools with their types, and what a script may use."""
        registry, runtime = self._callable(None), self._owner.runtime.runtime
        said = instructions(registry, runtime, self._limits, keeps_state=self.stateful)
        begin, end = self.code_block_delimiters[-1]
        return f"{said}\n\nWrite a script as one block, and wait for its result:\n\n{begin}...{end}"

    def execute_code(
        self, invocation_context: InvocationContext, code_execution_input: CodeExecutionInput
    ) -> CodeExecutionResult:
        """Run a code block. ADK calls this in a thread. What failed is in `stderr`, which is empty otherwise.

        Files that the script returns are output files. The exit code is 0, 124 after a timeout, 137 after another
        limit, otherwise 1 or the script's own.

        Raises:
            SandboxUnavailable: no sandbox could be started.
            UsageError: it was closed.

        Cancellation: ADK cannot cancel a thread, so a script whose agent was cancelled runs on until it ends, or
        `close` ends it.
        """
        asked = code_execution_input
        options: dict[str, Any] = {
            "files": [(each.name, _content(each)) for each in asked.input_files],
            "tools": self._callable(invocation_context),
            "limits": self._limits,
        }
        try:
            result = self._run(asked.code, asked.execution_id if self.stateful else None, options)
        except SessionError as exc:
            return CodeExecutionResult(stderr=str(exc), exit_code=1)
        done = program_output(result)
        files = [File(each.name, each.data, each.media_type) for each in result.files if each.data is not None]
        known = {each.content for each in files}
        files += [
            File(f"result-{number}.{each.media_type.partition('/')[2]}", each.data, each.media_type)
            for number, each in enumerate(pictures(result), 1)
            if each.data not in known
        ]
        # ADK takes anything in stderr for a failure.
        stdout, stderr = (done.stdout + done.stderr, "") if result.ok else (done.stdout, done.stderr)
        return CodeExecutionResult(stdout=stdout, stderr=stderr, output_files=files, exit_code=done.exit_code)

    def close(self) -> None:
        """Destroy every session, and end the code that runs in them. May be called twice."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        try:
            if self._owner.runtime.is_open:
                self._owner.runtime.call(self._sessions.close_all)
        finally:
            self._owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self  # copies of an agent share its sandboxes

    def _run(self, code: str, execution_id: str | None, options: dict[str, Any]) -> ExecutionResult:
        with self._lock:
            if self._is_closed:
                raise UsageError("this ToolcellCodeExecutor was closed; make another one")
            runtime = self._owner.open()
            place: Runtime | Session = runtime.runtime
            if execution_id is not None:
                make = partial(runtime.runtime.session, limits=self._limits)
                place = runtime.call(partial(self._sessions.get, execution_id, make))
        return runtime.call(partial(place.execute_code, code, **options))

    def _callable(self, context: InvocationContext | None) -> ToolRegistry:
        return tools_with(self._owner.registry, [_spec(tool, context) for tool in self._tools])


def _spec(tool: BaseTool, context: InvocationContext | None) -> ToolSpec:
    confirms = bool(getattr(tool, "_require_confirmation", False))

    async def run(args: dict[str, Any]) -> Any:
        # A call that needs confirmation gets here only when an approval hook has let it pass.
        confirmation = ToolConfirmation(confirmed=True) if confirms else None
        tool_context = ToolContext(context, tool_confirmation=confirmation)
        if not confirms and await tool.check_require_confirmation(args, tool_context):
            raise ToolError(f"{tool.name} needs a confirmation, which code cannot ask for")
        return await tool.run_async(args=args, tool_context=tool_context)

    def run_in_thread(args: dict[str, Any]) -> Any:
        return asyncio.run(run(args))

    # ADK calls a synchronous function in its event loop, which would hold up every other run.
    blocks = isinstance(tool, FunctionTool) and not is_async(tool.func)
    call = run_in_thread if blocks else run
    return framework_tool(tool.name, tool.description, _parameters(tool), call, source=tool, requires_approval=confirms)


def _parameters(tool: BaseTool) -> dict[str, Any] | None:
    request = LlmRequest()
    request.append_tools([tool])
    found = next(iter(request.config.tools or ()), None)
    if found is None:
        return None
    (declared,) = found.function_declarations
    if isinstance(schema := declared.parameters_json_schema, dict):
        return schema
    if declared.parameters is None:
        return {"properties": {}}
    plain: dict[str, Any] = declared.parameters.json_schema.model_dump(mode="json", exclude_none=True, by_alias=True)
    return plain


def _content(file: File) -> bytes:
    """Return a file's content; ADK keeps that of the session's files as base64 text."""
    content: str | bytes = file.content
    if isinstance(content, bytes):
        return content
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        return content.encode("utf-8", "replace")
