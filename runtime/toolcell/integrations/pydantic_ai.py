"""pydantic-ai: the model writes code that calls the agent's tools, instead of calling them one by one.

`Agent(model, tools=[...], capabilities=[CodeMode()])`. A call that needs approval suspends the script, and `run_code`
becomes one of pydantic-ai's deferred tool calls; once that is approved the script goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from toolcell.calls.result import without_bytes
from toolcell.config import OnApproval
from toolcell.errors import ResumeError, ToolAbort, ToolError
from toolcell.integrations.base import (
    RuntimeOwner,
    framework_tool,
    missing_package,
    pictures,
    text_for_model,
    tools_with,
)
from toolcell.results import ExecutionResult, Outcome, Suspension
from toolcell.run import RunOptions
from toolcell.runtime import Runtime
from toolcell.support.checks import check_kind
from toolcell.tools import Approve, CodeTool, Deny, Origin, ToolRegistry, ToolSpec

try:
    from pydantic import ValidationError
    from pydantic_ai import exceptions
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.messages import BinaryContent, ToolCallPart, ToolReturn
    from pydantic_ai.tool_manager import ToolManager
    from pydantic_ai.tools import RunContext, ToolDefinition, ToolDenied, matches_tool_selector
    from pydantic_ai.toolsets import AbstractToolset, CombinedToolset, ToolsetTool, WrapperToolset
    from pydantic_core import SchemaValidator, core_schema
except ModuleNotFoundError as exc:
    raise missing_package(exc, "pydantic-ai") from exc

RUN_CODE = "run_code"

_CODE = SchemaValidator(
    core_schema.typed_dict_schema({"code": core_schema.typed_dict_field(core_schema.str_schema(min_length=1))})
)
_FOR_THE_MODEL = (
    exceptions.ModelRetry,
    exceptions.ToolFailed,
    exceptions.ToolRetryError,
    exceptions.ToolFailedError,
    ValidationError,
)
"""What pydantic-ai shows its model of a tool. Every other exception ends the agent's run."""

CANNOT_WAIT = (
    "it is to be approved or answered elsewhere, and a script waits only for tools with requires_approval=True"
)


@dataclass(kw_only=True)
class _RunCode(ToolsetTool[Any]):
    """`run_code`, with the tools that its code may call in this step."""

    callable_tools: dict[str, ToolsetTool[Any]]


_CURE = "give it a toolset, such as FunctionToolset([function])"


class CodeModeToolset(WrapperToolset[Any]):
    """A toolset whose tools are called from code: the model sees `run_code`, and those that `tools` does not select.

    Without a toolset to wrap, code calls the tools of the runtime's own registry. `tools` is a `ToolSelector` of
    pydantic-ai. With a `runtime` of the program's, that is used, and its registry's hooks and rules hold. Otherwise
    `options` are the arguments of one of the toolset's own, which is open while an agent runs.
    """

    def __init__(
        self,
        wrapped: AbstractToolset[Any] | None = None,
        runtime: Runtime | None = None,
        *,
        tools: Any = "all",
        max_retries: int = 3,
        on_approval: OnApproval = "suspend",
        **options: Any,
    ) -> None:
        RunOptions(on_approval=on_approval)  # checks it
        check_kind("CodeModeToolset(wrapped)", wrapped, AbstractToolset, type(None), cure=_CURE)
        super().__init__(CombinedToolset([]) if wrapped is None else wrapped)
        self._owner = RuntimeOwner(runtime, options)
        self._tools, self._max_retries, self._on_approval = tools, max_retries, on_approval
        self._suspended: dict[str, dict[str, Any]] = {}
        """Metadata of deferred calls of `run_code`, by their ids."""

    def over(self, wrapped: AbstractToolset[Any]) -> CodeModeToolset:
        """Return the same over another toolset, with the same runtime."""
        if wrapped is self.wrapped:
            return self
        other = copy.copy(self)
        other.wrapped = wrapped
        return other

    async def for_run(self, ctx: RunContext[Any]) -> AbstractToolset[Any]:
        return self.over(await self.wrapped.for_run(ctx))

    async def for_run_step(self, ctx: RunContext[Any]) -> AbstractToolset[Any]:
        return self.over(await self.wrapped.for_run_step(ctx))

    def visit_and_replace(
        self, visitor: Callable[[AbstractToolset[Any]], AbstractToolset[Any]]
    ) -> AbstractToolset[Any]:
        return self.over(self.wrapped.visit_and_replace(visitor))

    async def __aenter__(self) -> Self:
        await self._owner.open()
        try:
            await super().__aenter__()
        except BaseException:
            await self._owner.close()
            raise
        return self

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        try:
            return bool(await super().__aexit__(*exc_info))
        finally:
            await self._owner.close()

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        """Return `run_code` and the tools that the model calls itself."""
        seen = dict[str, ToolsetTool[Any]]()
        called = dict[str, ToolsetTool[Any]]()
        for name, tool in (await super().get_tools(ctx)).items():
            from_code = tool.tool_def.kind in ("function", "unapproved")
            from_code = from_code and await matches_tool_selector(self._tools, ctx, tool.tool_def)
            (called if from_code else seen)[name] = tool
        if RUN_CODE in seen:
            raise exceptions.UserError(f"a tool is called {RUN_CODE!r}, which is the name of code mode's own")
        return seen | {RUN_CODE: self._run_code(ctx, called)}

    def _run_code(self, ctx: RunContext[Any], called: dict[str, ToolsetTool[Any]]) -> _RunCode:
        runtime = self._owner.runtime
        registry = _Calls(self.wrapped, ctx, called).registry(runtime.registry)

        def offered(origin: Origin) -> list[Any]:
            return [registry.registered(name) for name in registry.names(origin)]

        definition = ToolDefinition(
            name=RUN_CODE,
            description=CodeTool(runtime).describe(offered),
            parameters_json_schema=CodeTool(runtime).spec({}).definition.parameters,
            sequential=True,
        )
        retries = self._max_retries
        return _RunCode(
            toolset=self, tool_def=definition, max_retries=retries, args_validator=_CODE, callable_tools=called
        )

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        """Run the model's code and return its value, with what it printed and the images that it returned.

        Raises:
            ModelRetry: the script failed; the model reads why.
            ApprovalRequired: calls of the script need approval. The metadata has them.
            Exception: a tool raised this, and not for the model; or there is no sandbox.
        """
        if not isinstance(tool, _RunCode):
            return await super().call_tool(name, tool_args, ctx, tool)
        calls = _Calls(self.wrapped, ctx, tool.callable_tools)
        result = await self._run(tool_args["code"], ctx, calls.registry(self._owner.runtime.registry))
        if calls.raised is not None:
            raise calls.raised
        if result.suspension is not None:
            raise exceptions.ApprovalRequired(metadata=self._waiting(ctx, result.suspension))
        if result.outcome is Outcome.UNAVAILABLE:
            raise exceptions.ToolFailed(text_for_model(result))
        if not result.ok:
            raise exceptions.ModelRetry(text_for_model(result))
        return _tool_return(result)

    async def _run(self, code: str, ctx: RunContext[Any], registry: ToolRegistry) -> ExecutionResult:
        runtime = self._owner.runtime
        waiting = self._suspended.pop(ctx.tool_call_id or "", None)
        about: Mapping[str, Any] = (waiting or {}) | (ctx.tool_call_metadata or {})
        if not ctx.tool_call_approved or "token" not in about:
            return await runtime.execute_code(code, tools=registry, on_approval=self._on_approval)
        decisions = {call["id"]: _decision(about.get("decisions", {}).get(call["id"], True)) for call in about["calls"]}
        try:
            return await runtime.resume(about["token"], decisions, tools=registry)
        except ResumeError as exc:
            raise exceptions.ToolFailed(f"the script cannot go on: {exc}") from exc

    def _waiting(self, ctx: RunContext[Any], suspension: Suspension) -> dict[str, Any]:
        calls = [
            {"id": each.id, "tool": each.tool, "args": dict(each.args), "line": each.line, "reason": each.reason}
            for each in suspension.calls
        ]
        about = {"token": suspension.to_json(), "calls": calls}
        self._suspended[ctx.tool_call_id or ""] = about
        return about


class CodeMode(AbstractCapability[Any]):
    """A capability that lets the model call an agent's tools from code; see `CodeModeToolset` for the arguments."""

    def __init__(
        self,
        runtime: Runtime | None = None,
        *,
        tools: Any = "all",
        max_retries: int = 3,
        on_approval: OnApproval = "suspend",
        **options: Any,
    ) -> None:
        self._toolset = CodeModeToolset(
            None, runtime, tools=tools, max_retries=max_retries, on_approval=on_approval, **options
        )

    @classmethod
    def get_serialization_name(cls) -> str | None:
        """Return None: it holds a runtime, so no file can describe it."""
        return None

    def get_wrapper_toolset(self, toolset: AbstractToolset[Any]) -> AbstractToolset[Any]:
        return self._toolset.over(toolset)


class _Calls:
    """The calls that one script makes of an agent's tools, on the path that all of the agent's calls take."""

    def __init__(self, toolset: AbstractToolset[Any], ctx: RunContext[Any], tools: dict[str, ToolsetTool[Any]]) -> None:
        root = ctx.tool_manager.root_capability if ctx.tool_manager is not None else ctx.root_capability
        self._manager = ToolManager(toolset=toolset, root_capability=root, ctx=ctx, tools=tools)
        self._ident = ctx.tool_call_id
        self._count = 0
        self._tools = tools
        self.raised: Exception | None = None
        """What a tool raised, and not for the model."""

    def registry(self, rules: ToolRegistry) -> ToolRegistry:
        """Return the tools as a registry, with those of `rules` and under its hooks and rules."""
        return tools_with(rules, [self._spec(tool.tool_def) for tool in self._tools.values()])

    def _spec(self, definition: ToolDefinition) -> ToolSpec:
        needs_approval = definition.kind == "unapproved"

        async def call(args: dict[str, Any]) -> Any:
            return await self._call(definition.name, args, needs_approval)

        return framework_tool(
            definition.name,
            definition.description,
            definition.parameters_json_schema,
            call,
            source=definition,
            requires_approval=needs_approval,
            returns=definition.return_schema,
            orchestrates=True,  # its time is bounded by pydantic-ai, and by the script
        )

    async def _call(self, name: str, args: dict[str, Any], approved: bool) -> Any:
        self._count += 1
        part = ToolCallPart(name, args, tool_call_id=f"{self._ident}__{self._count}")
        try:
            answer = await self._manager.handle_call(part, approved=approved, wrap_validation_errors=False)
        except (exceptions.ApprovalRequired, exceptions.CallDeferred) as exc:
            raise ToolError(f"{name} was not called: {CANNOT_WAIT}", code="blocked") from exc
        except _FOR_THE_MODEL as exc:
            raise ToolError(str(exc)) from exc
        except Exception as exc:
            self.raised = exc
            raise ToolAbort(f"{name} raised {type(exc).__name__}") from exc
        if isinstance(answer, ToolDenied):
            raise ToolError(answer.message, code="blocked")
        return answer.return_value if isinstance(answer, ToolReturn) else answer


def _decision(decided: bool | str) -> Approve | Deny:
    """Return a decision about one call: True, False, or why not."""
    return Approve() if decided is True else Deny(decided or "The tool call was denied.")


def _tool_return(result: ExecutionResult) -> Any:
    printed = result.logs.text
    value = without_bytes(result.value)
    if printed:
        value = {"output": printed, "result": value}
    images = [BinaryContent(data=each.data, media_type=each.media_type) for each in pictures(result)]
    files = [{"name": each.name, "media_type": each.media_type, "size": each.size} for each in result.files]
    if not files and not images:
        return value
    return ToolReturn(return_value=value, content=images or None, metadata={"files": files})
