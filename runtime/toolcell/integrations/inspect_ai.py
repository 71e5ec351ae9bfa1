"""Inspect: a `python` tool for evaluations, whose scripts call Inspect's tools under Inspect's approval policies.

    Task(dataset=..., solver=[use_tools(toolcell_python(tools=[web_search()])), generate()], approval=...)

Each call is a sandbox of its own, as with Inspect's own `python` tool.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from typing import Any, get_type_hints

from toolcell.config import Limits
from toolcell.errors import SandboxUnavailable, ToolAbort, ToolError
from toolcell.integrations.base import (
    RuntimeOwner,
    framework_tool,
    instructions,
    missing_package,
    pictures,
    program_output,
    tools_with,
)
from toolcell.results import ExecutionResult, Outcome
from toolcell.runtime import Runtime
from toolcell.tools import Image, ToolRegistry, ToolSpec

try:
    from inspect_ai.model import ChatMessageAssistant, ChatMessageTool, ContentImage, ContentText, execute_tools
    from inspect_ai.tool import Tool, ToolCall, ToolCallContent, ToolCallView, ToolDef, tool
    from inspect_ai.tool import ToolError as InspectToolError
    from inspect_ai.tool import ToolResult as InspectResult
    from inspect_ai.util import SandboxUnavailableError
except ModuleNotFoundError as exc:
    raise missing_package(exc, "inspect-ai") from exc

__all__ = ["toolcell_python"]


@tool(name="python")
def toolcell_python(
    runtime: Runtime | None = None,
    tools: Sequence[Tool | ToolDef] = (),
    limits: Limits | None = None,
    options: dict[str, Any] | None = None,
) -> Tool:
    """Run a model's Python in toolcell sandboxes.

    `tools` are Inspect's tools; scripts call them as `tools.NAME(...)`, beside those of the runtime's registry. Each
    of their calls goes through the registry, whose rules, hooks and audit log hold, and then through Inspect: its
    approval policies decide, and the transcript has it. Without `runtime`, one is open while samples use the tool, and
    `options` are the arguments of `Runtime`. `limits`: of each script.

    Raises:
        RegistrationError: a tool has a name that is taken.
    """
    owner = RuntimeOwner(runtime, options or {})
    known = [each if isinstance(each, ToolDef) else ToolDef(each) for each in tools]
    registry = _callable(owner, known, [])

    async def execute(code: str) -> InspectResult:
        """Run Python.

        Args:
            code: The script to run.
        """
        fatal: list[Exception] = []
        try:
            async with owner:
                result = await owner.runtime.execute_code(code, tools=_callable(owner, known, fatal), limits=limits)
        except SandboxUnavailable as exc:
            raise SandboxUnavailableError(str(exc)) from exc
        if fatal:
            raise fatal[0]
        text, images = _printed_text(result), pictures(result)
        return [ContentText(text=text), *map(_content, images)] if images else text

    description = instructions(registry, owner.runtime, limits, keeps_state=False)
    return ToolDef(execute, name="python", description=description, viewer=_viewer).as_tool()


def _content(image: Image) -> ContentImage:
    return ContentImage(image=f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}")


def _viewer(call: ToolCall) -> ToolCallView:
    """Show the script to whoever approves it."""
    code = str(call.arguments.get("code", ""))
    return ToolCallView(
        call=ToolCallContent(title="python", format="markdown", content=f"```python\n{code.strip()}\n```\n")
    )


def _callable(owner: RuntimeOwner, tools: Sequence[ToolDef], fatal: list[Exception]) -> ToolRegistry:
    """Return what a script may call. `fatal` gets what is to end its sample."""
    return tools_with(owner.runtime.registry, [_spec(each, fatal) for each in tools])


def _spec(known: ToolDef, fatal: list[Exception]) -> ToolSpec:
    async def call(args: dict[str, Any]) -> Any:
        asked = ToolCall(id=os.urandom(8).hex(), function=known.name, arguments=args)
        try:
            messages, _ = await execute_tools([ChatMessageAssistant(content="", tool_calls=[asked])], [known], 0)
        except Exception as exc:  # what Inspect does not show a model is to end the sample
            fatal.append(exc)
            raise ToolAbort(f"{known.name} ended the sample: {type(exc).__name__}") from exc
        answer = next(each for each in messages if isinstance(each, ChatMessageTool))
        if answer.error is not None:
            raise ToolError(f"{answer.error.type}: {answer.error.message}")
        return _value(known, answer)

    parameters = known.parameters.model_dump(mode="json", exclude_none=True)
    return framework_tool(known.name, known.description, parameters, call, source=known)


def _value(known: ToolDef, answer: ChatMessageTool) -> Any:
    """Return what a tool gave: Inspect hands it on as text, a number or truth value that the tool declares is one."""
    declared = get_type_hints(known.tool).get("return") if hasattr(known.tool, "__annotations__") else None
    text = answer.text
    try:
        if declared in (int, float):
            return declared(text)
    except ValueError:
        return text
    return text == "True" if declared is bool and text in ("True", "False") else text


def _printed_text(result: ExecutionResult) -> str:
    """Return what a script printed and what failed in it, as Inspect's own `python` tool does.

    Raises:
        TimeoutError, InspectToolError: Inspect tells its model of these.
    """
    if result.outcome is Outcome.TIMEOUT:
        raise TimeoutError
    done = program_output(result)
    if result.outcome in (Outcome.OK, Outcome.ERROR):
        return f"{done.stderr}\n{done.stdout}" if done.stderr else done.stdout
    raise InspectToolError(f"{done.stderr}{done.stdout}")
