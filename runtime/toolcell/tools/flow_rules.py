"""What flows of data mean for one call: whether it is refused or needs approval, and what its run has read with it."""

from __future__ import annotations

from typing import Final

from toolcell.flows import flow_of
from toolcell.tools.call import Call
from toolcell.tools.registry_state import RegistryState
from toolcell.tools.result import ErrorCode, Status, ToolResult

NEEDS_APPROVAL: Final = "needs approval"


def flow_refusal(state: RegistryState, call: Call) -> ToolResult | None:
    """Return why what the run has read must not be sent with this call, or note why somebody has to approve it."""
    options, run = call.options, call.run
    call.approval_reason = NEEDS_APPROVAL if options.requires_approval else ""
    if not options.sends or run.scope.is_shared or not (held := run.state.labels.held):
        return None
    flows = (flow for policy in (*state.policies, *run.scope.policies) for flow in policy.flows)
    match flow_of(flows, options.sends, held):
        case "deny", reason:
            message = f'tool "{call.name}" is not permitted: {reason}'
            return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)
        case "ask", reason:
            call.approval_reason = f"{NEEDS_APPROVAL}: {reason}"
    return None


def note_labels(call: Call) -> None:
    """Add the labels of a call to those of its run, before its tool runs: whoever has an answer has its labels too.

    A hook may answer for a tool, and what it says is as private. A call that was blocked has read nothing.
    """
    if not call.run.scope.is_shared and (call.refusal is None or call.refusal.status is not Status.BLOCKED):
        call.run.state.labels.add(call.options.reads)
