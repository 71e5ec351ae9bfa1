"""Calls of a caller's tools, as the service asks for them. They go through the caller's own registry, hooks and all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolcell.control import bound_revert, revert_spec
from toolcell.errors import UsageError
from toolcell.service.socket.messages import AskTool, NoteCall
from toolcell.service.socket.tool_answers import read_answer
from toolcell.tools import (
    Approve,
    Call,
    ErrorCode,
    Origin,
    RegisteredTool,
    RegistryState,
    RunContext,
    ToolRegistry,
    ToolResult,
    keyword_invoke,
    run_call,
)
from toolcell_bridge.wire.errors import RemoteProtocolError


class _Approved:
    """The `Approvals` of calls that whoever decides about them has approved already."""

    async def decide(self, call: Call, /) -> Approve:
        """Approve it."""
        return Approve()

    def waited(self, call: Call, /) -> bool:
        """Return false: what was asked for elsewhere is counted there."""
        return False


class CallerTools:
    """The tools of one request, and the context that they see."""

    def __init__(self, tools: ToolRegistry, context: RunContext) -> None:
        self.tools, self.context = tools, context

    @property
    def is_heard(self) -> bool:
        """Somebody wants to know of calls that the tools do not see."""
        return self.context.observer is not None or self.context.events.active

    async def make(self, tool_call: AskTool) -> ToolResult:
        """Make a call, or what belongs to one.

        Raises:
            ToolAbort, AuditError: as from `ToolRegistry.dispatch`.
        """
        context = self._context_of(tool_call.run_id)
        if tool_call.kind == "revert":
            return await self._revert(tool_call, context)
        state = self.tools.state
        if tool_call.kind == "preview":
            state = self._with_preview(state, tool_call.tool)
        if tool_call.is_approved or tool_call.kind == "preview":
            context = context.within(approvals=_Approved())
        call = self.tools.new_call(
            tool_call.tool,
            tool_call.arguments,
            tool_call.call_id,
            self._origin(tool_call.origin),
            context,
            step=tool_call.step,
        )
        return await run_call(state, call)

    async def note(self, said: NoteCall) -> None:
        """Put a call that was made or refused at the service into the record of the run."""
        try:
            result = read_answer(said.result)
        except RemoteProtocolError as exc:
            result = ToolResult.fail(str(exc))

        async def answer() -> ToolResult:
            return result

        args: Any = said.arguments
        await self.tools.answer(
            said.tool,
            args,
            answer(),
            note="answered by the service",
            call_id=said.call_id,
            origin=self._origin(said.origin),
            context=self.context,
        )

    def _context_of(self, run_id: str) -> RunContext:
        # The service counts calls that fail again and again, and its hint is in the answer once.
        self.context.state.failures.clear()
        return self.context.child(run_id=run_id) if run_id else self.context

    def _origin(self, origin: str) -> Origin:
        return Origin.PLAN if origin == Origin.PLAN else Origin.CODE

    def _with_preview(self, state: RegistryState, name: str) -> RegistryState:
        tool = self._find_tool(name)
        assert tool.options.preview is not None
        spec = replace(tool.spec, invoke=keyword_invoke(tool.options.preview, None, tool.options.blocking))
        return replace(state, tools={name: RegisteredTool(spec, tool.checker, tool.aliases, tool.identity)})

    async def _revert(self, tool_call: AskTool, context: RunContext) -> ToolResult:
        tool = self._find_tool(tool_call.tool)
        assert tool.options.revert is not None
        given: Any = tool_call.arguments.get("args")
        args: dict[str, Any] = given if isinstance(given, dict) else {}
        function = bound_revert(tool.options.revert, args, tool_call.arguments.get("result"))
        spec = revert_spec(tool.name, function, tool.options.timeout_s)
        return await ToolRegistry([spec]).execute(spec.definition.name, {"args": args}, context=context)

    def _find_tool(self, name: str) -> RegisteredTool:
        tool = self.tools.registered(name)
        if tool is None:
            raise UsageError(f"there is no tool {name!r:.80} here")
        return tool


def failed_answer(exc: Exception) -> ToolResult:
    """Return the answer to a call that could not even be made."""
    return ToolResult.fail(f"the call could not be made: {exc}", code=ErrorCode.UNAVAILABLE)
