"""AG2: a `CodeEnvironment` for `SandboxCodeTool`, with AG2's tools.

    async with ToolcellEnvironment(tools=[search]) as environment:
        agent = Agent("coder", config=config, tools=[SandboxCodeTool(environment, description=environment.description)])

Each conversation has a session of its own: names, imports and files stay from one call to the next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from toolcell.config import Limits
from toolcell.errors import SessionError, ToolError
from toolcell.integrations.base import (
    ConversationSessions,
    RuntimeOwner,
    framework_tool,
    instructions,
    missing_package,
    program_output,
    tool_of,
    tools_with,
)
from toolcell.runtime import Runtime
from toolcell.support.checks import text_of
from toolcell.tools import ToolRegistry, ToolSpec

try:
    from ag2.context import ConversationContext
    from ag2.events import ToolCallEvent, ToolErrorEvent, ToolResultEvent
    from ag2.events.input_events import BinaryInput, DataInput, TextInput
    from ag2.stream import MemoryStream
    from ag2.tools.code import CodeEnvironment, CodeLanguage, CodeRunResult
    from ag2.tools.final.function_tool import FunctionTool
except ModuleNotFoundError as exc:
    raise missing_package(exc, "ag2") from exc

__all__ = ["ToolcellEnvironment"]


class ToolcellEnvironment(CodeEnvironment):
    """Runs a model's Python in toolcell sessions. Use it with `async with`, or close it with `aclose`.

    `tools` are AG2's function tools or functions; scripts call them as `tools.NAME(...)`, beside the tools of the
    runtime's registry, whose rules, hooks and audit log hold for both. Middleware of a tool sees these calls too.
    Without `runtime` the environment opens one of its own, and `options` are the arguments of `Runtime`. `limits`: of
    each call.
    """

    def __init__(
        self,
        runtime: Runtime | None = None,
        *,
        tools: Sequence[FunctionTool | Callable[..., Any]] = (),
        limits: Limits | None = None,
        **options: Any,
    ) -> None:
        self._owner = RuntimeOwner(runtime, options)
        self._limits = limits
        self._tools = [tool_of(each, FunctionTool, FunctionTool.ensure_tool, "AG2") for each in tools]
        self._callable(ConversationContext(MemoryStream()))  # refuses wrong tools now
        self._sessions = ConversationSessions(self._owner)

    @property
    def supported_languages(self) -> tuple[CodeLanguage, ...]:
        """Python alone: there is no shell in the sandbox."""
        return ("python",)

    @property
    def description(self) -> str:
        """What a model has to know, for `SandboxCodeTool(environment, description=...)`."""
        registry = self._callable(ConversationContext(MemoryStream()))
        said = instructions(registry, self._owner.runtime, self._limits)
        return said.replace("{", "{{").replace("}", "}}")  # SandboxCodeTool formats it

    async def run(
        self, code: str, language: CodeLanguage, *, context: ConversationContext | None = None
    ) -> CodeRunResult:
        """Run code in the conversation's session. Cancelling the agent kills it.

        The exit code is 0, 124 after a timeout, 137 after another limit, otherwise 1 or the script's own.

        Raises:
            SandboxUnavailable: no sandbox could be started.
        """
        if language != "python":
            return CodeRunResult(f"Language {language!r:.40} is not enabled. Available: ['python']", 2)
        context = context or ConversationContext(MemoryStream(), variables={})
        try:
            session = await self._sessions.get(
                context.stream.id, lambda: self._owner.runtime.session(limits=self._limits)
            )
            result = await session.execute_code(code, tools=self._callable(context))
        except SessionError as exc:
            return CodeRunResult(str(exc), 1)
        done = program_output(result)
        return CodeRunResult((done.stdout + done.stderr).strip("\n"), done.exit_code)

    async def aclose(self) -> None:
        """Destroy every session, and end the code that runs in them. May be called twice."""
        await self._sessions.close_all()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # an agent copies its tools, and the sandboxes stay those that `aclose` ends

    def _callable(self, context: ConversationContext) -> ToolRegistry:
        return tools_with(self._owner.runtime.registry, [_spec(tool, context) for tool in self._tools])


def _spec(tool: FunctionTool, context: ConversationContext) -> ToolSpec:
    known = tool.schema.function
    execute: Callable[..., Any] = tool
    for each in reversed(tool.middleware):
        execute = partial(each.middleware, execute)

    async def call(args: dict[str, Any]) -> Any:
        event = ToolCallEvent(name=tool.name, arguments=json.dumps(args)).handled_by(tool.source)
        return _value(await execute(event, context))

    return framework_tool(known.name, known.description, known.parameters, call, source=tool)


def _value(event: Any) -> Any:
    """Return what a tool gave, or raise what it raised as AG2 tells it a model.

    Raises:
        ToolError: the tool failed, or its middleware answered with something else than a result.
    """
    if isinstance(event, ToolErrorEvent):
        named = "" if isinstance(event.error, ToolError) else f"{type(event.error).__name__}: "
        raise ToolError(f"{named}{text_of(event.error)}") from event.error
    if not isinstance(event, ToolResultEvent):
        raise ToolError(f"the call cannot be made from code: {type(event).__name__}")
    values = [_part(part) for part in event.result.parts]
    return values[0] if len(values) == 1 else values


def _part(part: Any) -> Any:
    match part:
        case TextInput():
            return part.content
        case DataInput():
            return part.data
        case BinaryInput():
            return bytes(part.data)
        case Mapping():
            return dict(part)
        case _:
            return str(part)
