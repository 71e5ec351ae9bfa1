"""AutoGen: a `CodeExecutor` for `CodeExecutorAgent` and `PythonCodeExecutionTool`, with AutoGen's tools.

    async with ToolcellSessionCodeExecutor(tools=[search]) as executor:
        agent = CodeExecutorAgent("coder", executor, model_client=model, system_message=executor.instructions)

Code blocks run in one session: names, imports and files stay from one to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import anyio

from toolcell.config import Limits
from toolcell.errors import SessionError
from toolcell.integrations.base import (
    RuntimeOwner,
    framework_tool,
    instructions,
    missing_package,
    program_output,
    tool_of,
    tools_with,
)
from toolcell.runtime import Runtime
from toolcell.sessions import Session
from toolcell.tools import ToolRegistry, ToolSpec

try:
    from autogen_core import CancellationToken
    from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
    from autogen_core.tools import BaseTool, FunctionTool
except ModuleNotFoundError as exc:
    raise missing_package(exc, "autogen") from exc

__all__ = ["ToolcellSessionCodeExecutor"]


class ToolcellSessionCodeExecutor(CodeExecutor):
    """Runs Python code blocks in a toolcell session. Use it with `async with`, or `start` and `stop` it.

    `tools` are AutoGen's tools or functions; scripts call them as `tools.NAME(...)`, beside the tools of the runtime's
    registry, whose rules, hooks and audit log hold for both. Without `runtime` the executor opens one of its own, and
    `options` are the arguments of `Runtime`. `limits`: of each code block.
    """

    SUPPORTED_LANGUAGES: ClassVar[list[str]] = ["python", "py", "python3"]

    def __init__(
        self,
        runtime: Runtime | None = None,
        *,
        tools: Sequence[BaseTool[Any, Any] | Callable[..., Any]] = (),
        limits: Limits | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._owner = RuntimeOwner(runtime, options)
        self._limits = limits
        self._tools = [tool_of(each, BaseTool, _tool, "AutoGen") for each in tools]
        self._callable(CancellationToken())  # refuses wrong tools now
        self._session: Session | None = None

    @property
    def instructions(self) -> str:
        """What a model has to know to write code: the tools with their types, and what a script may use."""
        return instructions(self._callable(CancellationToken()), self._owner.runtime, self._limits)

    def _callable(self, token: CancellationToken) -> ToolRegistry:
        """Return what code may call; cancelling the token cancels its calls."""
        return tools_with(self._owner.runtime.registry, [_spec(tool, token) for tool in self._tools])

    async def start(self) -> None:
        """Open the session. Does nothing when it is open.

        Raises:
            SandboxUnavailable: no sandbox could be started.
        """
        if self._session is not None:
            return
        session = (await self._owner.open()).session(limits=self._limits)
        try:
            await session.open()
        except BaseException:
            await self._owner.close()
            raise
        self._session = session

    async def stop(self) -> None:
        """Destroy the session, and end the code that runs in it. May be called twice."""
        session, self._session = self._session, None
        if session is not None:
            with anyio.CancelScope(shield=True):
                await session.close()
                await self._owner.close()

    async def restart(self) -> None:
        """Forget names, imports and files."""
        if self._session is None:
            await self.start()
        else:
            await self._session.reset()

    async def execute_code_blocks(
        self, code_blocks: list[CodeBlock], cancellation_token: CancellationToken
    ) -> CodeResult:
        """Run the blocks in order, up to the first that fails. Cancelling the token interrupts the code.

        The exit code is 0, 124 after a timeout, 137 after another limit, otherwise 1 or the script's own.

        Raises:
            asyncio.CancelledError: the token was cancelled. The state is kept if the code ends within a second.
            SandboxUnavailable: no sandbox could be started.
        """
        await self.start()
        cancel, printed = anyio.Event(), ""
        cancellation_token.add_callback(partial(_set, asyncio.get_running_loop(), cancel))
        tools = self._callable(cancellation_token)
        for block in code_blocks:
            if block.language.strip().lower() not in self.SUPPORTED_LANGUAGES:
                return CodeResult(1, f"{printed}unknown language {block.language[:40]}: only python runs here\n")
            exit_code, output = await self._run(block.code, tools, cancel)
            if cancellation_token.is_cancelled():
                raise asyncio.CancelledError
            printed += output
            if exit_code:
                return CodeResult(exit_code, printed)
        return CodeResult(0, printed)

    async def _run(self, code: str, tools: ToolRegistry, cancel: anyio.Event) -> tuple[int, str]:
        if self._session is None:
            return 1, "the executor was stopped\n"
        try:
            result = await self._session.execute_code(code, tools=tools, cancel=cancel)
        except SessionError as exc:
            return 1, f"{exc}\n"
        done = program_output(result)
        return done.exit_code, done.stdout + done.stderr


def _tool(function: Callable[..., Any]) -> BaseTool[Any, Any]:
    return FunctionTool(function, (function.__doc__ or "").strip())


def _spec(tool: BaseTool[Any, Any], token: CancellationToken) -> ToolSpec:
    async def call(args: dict[str, Any]) -> Any:
        return await tool.run_json(args, token)

    parameters = tool.schema["parameters"]
    # AutoGen shows a model what its tools raise.
    return framework_tool(tool.name, tool.description, parameters, call, source=tool, expose_errors=True)


def _set(loop: asyncio.AbstractEventLoop, event: anyio.Event) -> None:
    """Set an event of a loop, from any thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
