"""What the options of a tool add to its calls: the need of approval, and the labels of what it reads and sends."""

from __future__ import annotations

from typing import Final

from toolcell.calls.call import NO_FEATURES, Call, Feature, Features
from toolcell.calls.options import ToolOptions
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.flows import flow_of

NEEDS_APPROVAL: Final = "needs approval"


class _Approval(Feature):
    """Of a tool with `requires_approval`."""

    def permit(self, call: Call, /) -> None:
        """Note that somebody has to approve the call."""
        call.approval_reason = NEEDS_APPROVAL


class _Labels(Feature):
    """Of a tool with `reads` or `sends`."""

    def permit(self, call: Call, /) -> ToolResult | None:
        """Return why what the run has read must not be sent with this call, or note why somebody has to approve it."""
        sends, run = call.options.sends, call.run
        if not sends or run.scope.is_shared or not (held := run.state.labels.names):
            return None
        flows = (flow for policy in (*call.registry.policies, *run.scope.policies) for flow in policy.flows)
        match flow_of(flows, sends, held):
            case "deny", reason:
                message = f'tool "{call.name}" is not permitted: {reason}'
                return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)
            case "ask", reason:
                call.approval_reason = f"{NEEDS_APPROVAL}: {reason}"
        return None

    def admitted(self, call: Call, /) -> None:
        """Add the labels of a call to those of its run, before its tool runs: whoever has an answer has its labels too.

        A hook may answer for a tool, and what it says is as private. A call that was blocked has read nothing.
        """
        reads, refusal = call.options.reads, call.refusal
        if reads and not call.run.scope.is_shared and (refusal is None or refusal.status is not Status.BLOCKED):
            call.run.state.labels.add(reads)


_OF_APPROVAL, _OF_LABELS = Features([_Approval()]), Features([_Labels()])
_OF_BOTH = Features([*_OF_APPROVAL, *_OF_LABELS])


def features_of(options: ToolOptions) -> Features:
    """Return what these options add to calls."""
    if options.reads or options.sends:
        return _OF_BOTH if options.requires_approval else _OF_LABELS
    return _OF_APPROVAL if options.requires_approval else NO_FEATURES
