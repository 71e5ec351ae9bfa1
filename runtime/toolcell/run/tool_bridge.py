"""Where a script's tool calls are answered: by the registry's tools, and with as much of a result as a guest may see.

Knows no sandbox and no wire; which calls are made, and when, is `calls`'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolcell.errors import AuditError, ToolAbort
from toolcell.run.calls import Answer, Dispatch
from toolcell.tools import Origin, RunContext, ToolDefinition, ToolRegistry
from toolcell.tools.result import ErrorCode, ToolResult
from toolcell_bridge.guest.tools import LIST_TOOLS
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue
from toolcell_bridge.wire.messages import CallTool, ToolFail, ToolReturn

if TYPE_CHECKING:
    from toolcell.audit.run_observer import AuditRunObserver


def answering(registry: ToolRegistry, context: RunContext, witness: AuditRunObserver | None) -> Dispatch:
    """What answers one run's calls, each with its record where there is a log."""

    async def dispatch(call: CallTool) -> Answer:
        record = witness.record if witness is not None else None
        if call.name == LIST_TOOLS:
            return ToolReturn(call.id, [listed(each) for each in registry.definitions(Origin.CODE)])
        call_id = f"call_{call.id}"
        if record is not None:
            record.lines[call_id] = call.line
        try:
            observed = context if record is None else record.context
            result = await registry.dispatch(
                call.name, call.args, call_id=call_id, origin=Origin.CODE, context=observed
            )
        except AuditError as exc:
            if record is not None:
                record.problem = exc
            raise ToolAbort("a tool call could not be recorded") from exc
        return answer(call.id, result)

    return dispatch


def answer(call_id: int, result: ToolResult) -> Answer:
    """A tool's result as the guest may see it: data or a bare message, never an exception's text or trace."""
    try:
        if result.error is not None and result.is_error:
            failure = result.error
            details = to_plain(dict(failure.details), "details")
            text = result.text
            if failure.code == ErrorCode.EXCEPTION:
                # Not str(): what an unexpected exception says may hold anything of the host. A tool that wants its
                # words read raises ToolError or returns ToolResult.fail().
                text = f"the tool raised {type(result.exc).__name__}"
                details = None
            return ToolFail(call_id, str(failure.code), text, failure.retryable, details)
        return ToolReturn(call_id, to_plain(result.guest_value(), "result"))
    except (UnsendableValue, ValueError, TypeError) as exc:
        return ToolFail(call_id, "no_result", f"the tool's result cannot be sent: {exc}", False, None)


def listed(tool: ToolDefinition) -> dict[str, Any]:
    """A tool as `list_tools()` shows it."""
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
