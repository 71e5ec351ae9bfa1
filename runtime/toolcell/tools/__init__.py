"""The host's tools: defining, registering, checking and calling them.

Knows no sandbox, no run of a script and no model; `runtime` and `agents` build on it.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "CODE_TOOL", "FOUND", "MAX_STEPS", "MAX_VALUE_CHARS", "NEEDS_APPROVAL", "SEARCH_TOOL", "SHOWN_CHARS",
    "AgentTool", "Approve", "Block", "Budget", "Call", "CallPolicy", "CodeRuntime", "Deny", "Edit", "ErrorCode",
    "Event", "EventBus", "Feature", "File", "FunctionTool", "Hook", "Image", "JobTable", "Origin", "Override",
    "RegisteredTool", "Rewrite", "RunContext", "Secrets", "Status", "Substitute", "Text", "Tool", "ToolCall",
    "ToolContext", "ToolDefinition", "ToolDescriptionWarning", "ToolOptions", "ToolRegistry", "ToolResult",
    "ToolSpec", "abandoned_threads", "approval_hook", "check_arguments", "check_code_runtime", "code_result",
    "code_spec", "compile_tool", "current_context", "decode_tool_call", "describe_code", "describe_failure",
    "flows_of", "function_spec", "load_tools", "plan_of", "positional_spec", "preview_of", "python_stubs",
    "run_call", "search_spec", "shown_within", "tool", "with_options",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.calls.arguments import ToolCall, decode_tool_call
    from toolcell.calls.call import (
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
    from toolcell.calls.options import CallPolicy, Origin, ToolOptions
    from toolcell.calls.result import ErrorCode, File, Image, Status, Text, ToolResult
    from toolcell.calls.run_state import Budget, JobTable, Secrets
    from toolcell.tools.adapters import (
        AgentTool,
        FunctionTool,
        Tool,
        function_spec,
        positional_spec,
        preview_of,
        with_options,
    )
    from toolcell.tools.code import (
        CODE_TOOL,
        MAX_VALUE_CHARS,
        SEARCH_TOOL,
        CodeRuntime,
        check_code_runtime,
        code_result,
        code_spec,
        describe_code,
        describe_failure,
        flows_of,
    )
    from toolcell.tools.loading import load_tools
    from toolcell.tools.pipeline import check_arguments, run_call
    from toolcell.tools.plan import MAX_STEPS, plan_of
    from toolcell.tools.registry import ToolRegistry, tool
    from toolcell.tools.search import FOUND, search_spec
    from toolcell.tools.spec import NEEDS_APPROVAL, RegisteredTool, ToolSpec, compile_tool
    from toolcell.tools.stubs import SHOWN_CHARS, python_stubs, shown_within
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.calls.arguments": "ToolCall decode_tool_call",
            "toolcell.calls.call": "Approve Block Call Deny Edit Feature Hook Override Rewrite RunContext Substitute",
            "toolcell.calls.concurrency": "abandoned_threads",
            "toolcell.calls.context": "ToolContext current_context",
            "toolcell.calls.definition": "ToolDefinition ToolDescriptionWarning",
            "toolcell.calls.events": "Event EventBus",
            "toolcell.calls.hooks": "approval_hook",
            "toolcell.calls.options": "CallPolicy Origin ToolOptions",
            "toolcell.calls.result": "ErrorCode File Image Status Text ToolResult",
            "toolcell.calls.run_state": "Budget JobTable Secrets",
            "toolcell.tools.adapters": (
                "AgentTool FunctionTool Tool function_spec positional_spec preview_of with_options"
            ),
            "toolcell.tools.code": (
                "CODE_TOOL MAX_VALUE_CHARS SEARCH_TOOL CodeRuntime check_code_runtime code_result code_spec "
                "describe_code describe_failure flows_of"
            ),
            "toolcell.tools.loading": "load_tools",
            "toolcell.tools.pipeline": "check_arguments run_call",
            "toolcell.tools.plan": "MAX_STEPS plan_of",
            "toolcell.tools.registry": "ToolRegistry tool",
            "toolcell.tools.search": "FOUND search_spec",
            "toolcell.tools.spec": "NEEDS_APPROVAL RegisteredTool ToolSpec compile_tool",
            "toolcell.tools.stubs": "SHOWN_CHARS python_stubs shown_within",
        },
    )
