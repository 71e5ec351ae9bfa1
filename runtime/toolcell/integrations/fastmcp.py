"""FastMCP: toolcell's sandboxes for its CodeMode, in place of its Monty.

`CodeMode(sandbox_provider=ToolcellSandboxProvider())`. Scripts are written as CodeMode asks for them:
`await call_tool(name, params)`, and `return` for the output. Each runs in a sandbox of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from toolcell.calls.concurrency import maybe_await
from toolcell.calls.result import without_bytes
from toolcell.errors import RegistrationError, ToolError
from toolcell.integrations.base import RuntimeOwner, framework_tool, missing_package, pictures, text_for_model
from toolcell.results import ExecutionResult, ToolCallRecord
from toolcell.runtime import Runtime
from toolcell.tools import Origin, ToolRegistry, ToolResult, ToolSpec, current_context

try:
    from fastmcp import FastMCP
    from fastmcp import exceptions as fastmcp_errors
    from fastmcp.server.dependencies import get_context
    from fastmcp.utilities.types import File, Image
except ModuleNotFoundError as exc:
    raise missing_package(exc, "fastmcp") from exc

CALL_TOOL = "call_tool"
"""CodeMode's function, whose first argument is the name of a tool."""

BRIDGE = "external"
"""Name of the one tool of the sandbox: what a script awaits goes through it."""

_BRIDGE_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"function": {"type": "string"}, "args": {"type": "array"}, "kwargs": {"type": "object"}},
    "required": ["function", "args", "kwargs"],
}

_BEGIN = f"""\
def external(function):
    async def called(*args, **kwargs):
        try:
            return await call_tool_async({BRIDGE!r}, {{"function": function, "args": list(args), "kwargs": kwargs}})
        except ToolError as exc:
            failed = exc
        said = str(failed).removeprefix("Tool '{BRIDGE}' failed: ")
        raise ToolError(said, tool=function, code=failed.code, retryable=failed.retryable, details=failed.details)
    called.__name__ = called.__qualname__ = function
    return called
globals().update((name, external(name)) for name in functions)
del external, functions
"""
"""Runs before the script, with the names of its `functions`."""

_FOR_THE_MODEL = (fastmcp_errors.ToolError, fastmcp_errors.ValidationError, fastmcp_errors.NotFoundError)


class ToolcellSandboxProvider:
    """A `SandboxProvider` of FastMCP. The runtime's registry has the hooks and rules of what scripts call.

    With a `runtime` of the program's, that is used. Otherwise `options` are the arguments of one of the provider's own:
    `FastMCP(lifespan=provider.lifespan)` opens it with the server; without that it is opened for each script.
    """

    def __init__(self, runtime: Runtime | None = None, **options: Any) -> None:
        self._owner = RuntimeOwner(runtime, options)

    @asynccontextmanager
    async def lifespan(self, server: FastMCP[Any]) -> AsyncIterator[dict[str, Any]]:
        """Keep the runtime open while a server runs."""
        async with self._owner:
            yield {}

    async def run(
        self,
        code: str,
        *,
        inputs: dict[str, Any] | None = None,
        external_functions: dict[str, Callable[..., Any]] | None = None,
    ) -> Any:
        """Run a script and return its value; without one what it printed, and files as FastMCP's images and files.

        Raises:
            fastmcp.exceptions.ToolError: the script failed; the model reads why, where, and what it printed.
            SandboxUnavailable: no sandbox could be started.

        Cancellation: the sandbox is killed with everything in it.
        """
        async with self._owner:
            runtime = self._owner.runtime
            calls = _ExternalCalls(runtime.registry, external_functions or {})
            async with runtime.session(tools=ToolRegistry([calls.bridge()])) as session:
                begun = await session.execute_code(_BEGIN, inputs={"functions": [*calls.functions]})
                result = await session.execute_code(code, inputs=inputs) if begun.ok else begun
        if not result.ok:
            raise fastmcp_errors.ToolError(text_for_model(_by_tool_names(result, calls.made)))
        return _output(result)


def _by_tool_names(result: ExecutionResult, calls: list[ToolCallRecord]) -> ExecutionResult:
    """Return a failure with the calls by their tools' names, and nothing about a session: each script has its own."""
    error = result.error
    if error is not None:
        error = replace(error, message=error.message.partition("; the session ")[0])
    return replace(result, calls=tuple(calls), error=error)


def _output(result: ExecutionResult) -> Any:
    value = without_bytes(result.value) if result.has_value else result.logs.text or None
    shown = [Image(data=each.data, format=each.media_type.partition("/")[2]) for each in pictures(result)]
    known = {each.data for each in shown}
    files = [
        File(data=each.data, name=each.name, format=each.media_type.partition("/")[2])
        for each in result.files
        if each.data is not None and each.data not in known
    ]
    return [value, *shown, *files] if shown or files else value


class _ExternalCalls:
    """The functions that FastMCP gave with one script, and the tools that were called by name."""

    def __init__(self, rules: ToolRegistry, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = functions
        self.made: list[ToolCallRecord] = []
        self._rules = rules
        self._registries: dict[str, ToolRegistry] = {}

    def bridge(self) -> ToolSpec:
        """The tool that scripts reach them through. It is under no rule: what it calls is."""
        described = "Calls a function that was given with the script."
        return framework_tool(BRIDGE, described, _BRIDGE_SCHEMA, self._call, orchestrates=True)

    async def _call(self, sent: dict[str, Any]) -> ToolResult:
        function, args, kwargs = sent["function"], sent["args"], sent["kwargs"]
        if function not in self.functions:
            raise ToolError(f"there is no function {function!r:.80} to call; there are {', '.join(self.functions)}")
        name, params = function, dict(kwargs)
        if function == CALL_TOOL:
            name, params = _call_arguments(*args, **kwargs)
        elif args:
            raise ToolError(f"{function}() takes its arguments by name")
        registry = await self._registry(function, name)
        result = await registry.dispatch(name, params, origin=Origin.CODE, context=current_context().run)
        self.made.append(ToolCallRecord(f"call_{len(self.made) + 1}", name, params, str(result.status)))
        return result

    async def _registry(self, function: str, name: str) -> ToolRegistry:
        if name not in self._registries:
            try:
                made = self._function(name) if function != CALL_TOOL else await self._tool(name)
                self._registries[name] = self._rules.replaced(ToolRegistry([made]))
            except RegistrationError as exc:
                raise ToolError(f"{name!r:.80} cannot be called from a sandbox: {exc}") from exc
        return self._registries[name]

    def _function(self, name: str) -> ToolSpec:
        function = self.functions[name]
        return ToolSpec.of_function(function, name=name, description=f"{name} of the program that runs the script.")

    async def _tool(self, name: str) -> ToolSpec:
        """Return one of the server's tools. FastMCP itself looks it up again, and checks who may call it."""
        call = partial(_called, self.functions[CALL_TOOL], name)
        tool = await get_context().fastmcp.get_tool(name)
        if tool is None:
            return framework_tool(name, None, None, call, shows=_FOR_THE_MODEL)
        hints = tool.annotations
        return framework_tool(
            name,
            tool.description,
            tool.parameters,
            call,
            shows=_FOR_THE_MODEL,
            source=tool,
            read_only=bool(hints and hints.read_only_hint),
            idempotent=bool(hints and hints.idempotent_hint),
        )


async def _called(function: Callable[..., Any], name: str, args: dict[str, Any]) -> Any:
    return await maybe_await(function(name, args))


def _call_arguments(tool_name: Any = None, params: Any = None, *more: Any, **others: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a tool as CodeMode's `call_tool` takes them.

    Raises:
        ToolError: they are none.
    """
    params = {} if params is None else params
    if more or others or not isinstance(tool_name, str) or not isinstance(params, dict):
        raise ToolError("call_tool takes a tool's name and its arguments: await call_tool('name', {'key': value})")
    return tool_name, params
