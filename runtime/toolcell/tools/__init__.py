"""The host's tools: defining, registering, checking and calling them.

Knows no sandbox, no run of a script and no model; `runtime` and `agents` build on it.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "AgentTool", "AlreadyMade", "Approve", "Block", "Budget", "Call", "CodeRuntime", "CodeTool", "Deny", "Edit",
    "ErrorCode", "Event", "EventBus", "Feature", "File", "Hook", "Image", "Origin", "Override", "RegisteredTool",
    "Rewrite", "RunContext", "Status", "Substitute", "Text", "Tool", "ToolCall", "ToolContext",
    "ToolDefinition", "ToolDescriptionWarning", "ToolOptions", "ToolRegistry", "ToolResult", "ToolSpec",
    "abandoned_threads", "approval_hook", "current_context", "decode_tool_call", "load_tools",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.calls.arguments import ToolCall, decode_tool_call
    from toolcell.calls.call import (
        AlreadyMade,
        Approve,
        Block,
        Call,
        Deny,
        Edit,
        Feature,
        Hook,
        Override,
        Rewrite,
        RunContext,
        Substitute,
    )
    from toolcell.calls.concurrency import abandoned_threads
    from toolcell.calls.context import ToolContext, current_context
    from toolcell.calls.definition import ToolDefinition, ToolDescriptionWarning
    from toolcell.calls.events import Event, EventBus
    from toolcell.calls.hooks import approval_hook
    from toolcell.calls.options import Origin, ToolOptions
    from toolcell.calls.result import ErrorCode, File, Image, Status, Text, ToolResult
    from toolcell.calls.run_state import Budget
    from toolcell.tools.adapters import AgentTool, Tool
    from toolcell.tools.code import CodeRuntime, CodeTool
    from toolcell.tools.loading import load_tools
    from toolcell.tools.registry import ToolRegistry
    from toolcell.tools.spec import RegisteredTool, ToolSpec
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.calls.arguments": "ToolCall decode_tool_call",
            "toolcell.calls.call": (
                "AlreadyMade Approve Block Call Deny Edit Feature Hook Override Rewrite RunContext Substitute"
            ),
            "toolcell.calls.concurrency": "abandoned_threads",
            "toolcell.calls.context": "ToolContext current_context",
            "toolcell.calls.definition": "ToolDefinition ToolDescriptionWarning",
            "toolcell.calls.events": "Event EventBus",
            "toolcell.calls.hooks": "approval_hook",
            "toolcell.calls.options": "Origin ToolOptions",
            "toolcell.calls.result": "ErrorCode File Image Status Text ToolResult",
            "toolcell.calls.run_state": "Budget",
            "toolcell.tools.adapters": "AgentTool Tool",
            "toolcell.tools.code": "CodeRuntime CodeTool",
            "toolcell.tools.loading": "load_tools",
            "toolcell.tools.registry": "ToolRegistry",
            "toolcell.tools.spec": "RegisteredTool ToolSpec",
        },
    )
