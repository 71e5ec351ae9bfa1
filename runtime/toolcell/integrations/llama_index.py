"""toolcell for LlamaIndex (`pip install 'toolcell[llama-index]'`): a tool for agents, and what `CodeActAgent` runs.

LlamaIndex's tools that are passed to it are called from scripts.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel

from toolcell.config import Limits
from toolcell.errors import Misconfigured, ToolcellError, ToolError, UsageError
from toolcell.integrations.base import (
    CodeArguments,
    framework_tool,
    home_of,
    missing_package,
    pictures,
    text_for_model,
    tools_with,
)
from toolcell.results import ExecutionResult
from toolcell.runtime import Runtime
from toolcell.sessions import Session
from toolcell.support.checks import check_kind
from toolcell.tools import CodeTool, Origin, ToolRegistry, ToolSpec

try:
    from llama_index.core.base.llms.types import ImageBlock, TextBlock
    from llama_index.core.tools import BaseTool, FunctionTool, ToolMetadata, ToolOutput, adapt_to_async_tool
    from llama_index.core.tools.tool_spec.base import BaseToolSpec
    from llama_index.core.workflow import Context
except ModuleNotFoundError as exc:
    raise missing_package(exc, "llama-index") from exc

_context: ContextVar[Any] = ContextVar("toolcell_llama_index_context", default=None)
"""The workflow's context of the tool call that runs a script."""


class CodeInterpreterError(ToolcellError):
    """A script failed; its text is for the model. LlamaIndex makes a `ToolOutput` with `is_error` of it."""

    code = "code_interpreter_error"


class CodeInterpreterToolSpec(BaseToolSpec):
    """Runs Python in sandboxes. `to_tool_list()` is for agents that call tools, `execute` for `CodeActAgent`."""

    spec_functions = ("code_interpreter",)

    def __init__(self, runtime: Runtime | Session, *, tools: Iterable[Any] = (), limits: Limits | None = None) -> None:
        """`runtime` is open while the agent runs. With a session in place of a runtime, names and files stay from one
        script to the next. `tools`: LlamaIndex's tools, or tools in any way that a registry takes, which scripts may
        call besides the runtime's own.

        Raises:
            UsageError: an argument is wrong.
            RegistrationError: a tool's name is taken, or its definition is wrong.
        """
        cure = "write CodeInterpreterToolSpec(Runtime(...)), and open it"
        check_kind("runtime", runtime, Runtime, Session, cure=cure)
        if isinstance(tools, BaseTool):
            raise UsageError(f"tools= takes a list of tools, not one; write tools=[{tools.metadata.get_name()}]")
        home = home_of(runtime)
        given = [_spec(each) if isinstance(each, BaseTool) else each for each in tools]
        self.registry: ToolRegistry = tools_with(home.registry, given)
        """What scripts may call."""
        self._runtime, self._limits = runtime, limits
        self._has_functions = False
        self._description = CodeTool(home).describe(self.registry.state.visible)

    async def code_interpreter(self, code: str) -> str:
        """Run Python, and return its value and what it printed as text.

        Raises:
            CodeInterpreterError: the script failed, or there was no sandbox for it.
        """
        return text_for_model(await self._run(code))

    async def execute(self, code: str) -> str:
        """Run Python and return what it printed, or its value if it printed nothing. Each tool is a function there.

        For `CodeActAgent(code_execute_fn=spec.execute, tools=...)`, with the tools of this spec.

        Raises:
            CodeInterpreterError: the script failed, or there was no sandbox for it.
            UsageError: there is no session, and this agent relies on the names of earlier code.
        """
        if not isinstance(self._runtime, Session):
            raise UsageError("a CodeActAgent relies on names of earlier code: write CodeInterpreterToolSpec(session)")
        if not self._has_functions:
            await self._run(_FUNCTIONS, {"toolcell_tools": _parameters(self.registry)})
        self._has_functions = True
        result = await self._run(code)
        self._has_functions = result.session is None or not result.session.lost
        return result.logs.text or text_for_model(result)

    async def _run(self, code: str, inputs: dict[str, Any] | None = None) -> ExecutionResult:
        if not code.strip():
            raise CodeInterpreterError("there is no code to run")
        try:
            result = await self._runtime.execute_code(code, inputs=inputs, tools=self.registry, limits=self._limits)
        except Misconfigured:
            raise
        except ToolcellError as exc:
            raise CodeInterpreterError(f"code execution failed: {exc}") from exc
        if not result.ok:
            self._has_functions = self._has_functions and not (result.session is not None and result.session.lost)
            raise CodeInterpreterError(text_for_model(result))
        return result

    def to_tool_list(self, *args: Any, **options: Any) -> list[FunctionTool]:
        """Return the tool, for `FunctionAgent(tools=...)` and the like."""

        async def code_interpreter(ctx: Any, code: str) -> Any:
            before = _context.set(ctx)
            try:
                result = await self._run(code)
            finally:
                _context.reset(before)
            text = text_for_model(result)
            images = [ImageBlock(image=each.data, image_mimetype=each.media_type) for each in pictures(result)]
            return [TextBlock(text=text), *images] if images else text

        code_interpreter.__annotations__["ctx"] = Context  # by this the agent knows to pass it
        metadata = ToolMetadata(name="code_interpreter", description=self._description, fn_schema=CodeArguments)
        return [FunctionTool(async_fn=code_interpreter, metadata=metadata)]


_FUNCTIONS = """
def toolcell_define(tools):
    def function_of(name, parameters):
        def function(*args, **kwargs):
            if len(args) > len(parameters):
                raise TypeError(f"{name}() takes {len(parameters)} arguments, and {len(args)} were given")
            return call_tool(name, dict(zip(parameters, args)) | kwargs)
        function.__name__ = name
        return function
    globals().update({name: function_of(name, parameters) for name, parameters in tools.items()})
toolcell_define(toolcell_tools)
del toolcell_define, toolcell_tools
"""


def _parameters(registry: ToolRegistry) -> dict[str, list[str]]:
    """Return the parameters of each tool that can be a function, in their order."""
    return {
        each.name: list(each.parameters.get("properties", {}))
        for each in registry.definitions(Origin.CODE)
        if each.name.isidentifier() and not keyword.iskeyword(each.name)
    }


# LlamaIndex's tools as ours.


def _spec(tool: BaseTool) -> ToolSpec:
    called = adapt_to_async_tool(tool)
    wants_context = isinstance(tool, FunctionTool) and tool.requires_context

    async def call(args: dict[str, Any]) -> Any:
        if wants_context:
            if _context.get() is None:
                raise ToolError(f"{tool.metadata.get_name()} needs the context of a workflow, and there is none here")
            args = {**args, tool.ctx_param_name: _context.get()}
        return _plain(await called.acall(**args))

    metadata = tool.metadata
    return framework_tool(metadata.get_name(), metadata.description, metadata.get_parameters_dict(), call, source=tool)


def _plain(output: ToolOutput) -> Any:
    """Return what a tool gave as data: what it returned, if that is data, else its text.

    Raises:
        ToolError: the tool says that it failed.
    """
    if output.is_error:
        raise ToolError(output.content)
    given = output.raw_output
    if isinstance(given, BaseModel):
        return output.content if isinstance(given, TextBlock) else given.model_dump(mode="json")
    if given is None or isinstance(given, str | int | float | bool | list | dict | tuple | bytes):
        return given
    return output.content
