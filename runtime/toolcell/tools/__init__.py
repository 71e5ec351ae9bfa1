"""The host's tools: defining, registering, checking and calling them.

Knows no sandbox, no run of a script and no model; `runtime` and `agents` build on it.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "CODE_SCHEMA", "CODE_TEXT", "CODE_TOOL", "DETAILS", "FOUND", "MAX_FOUND", "MAX_STEPS", "MAX_VALUE_CHARS",
    "NEEDS_APPROVAL", "SEARCH_TOOL", "SHOWN_CHARS", "AgentTool", "Approvals", "Approve", "Block", "Budget", "Call",
    "CallPolicy", "CodeRuntime", "Deny", "Edit", "ErrorCode", "Event", "EventBus", "ExecuteCode", "Feature",
    "File", "FunctionTool", "Hook", "Image", "Invoke", "JobTable", "Origin", "Override", "RegisteredTool",
    "RegistrySettings", "RegistryState", "Rewrite", "RunContext", "SavedScript", "Secrets",
    "Status", "Substitute", "Text", "Tool", "ToolCall", "ToolContext", "ToolDefinition",
    "ToolDescriptionWarning", "ToolOptions", "ToolRegistry", "ToolResult", "ToolSpec",
    "abandoned_threads", "approval_hook", "check_arguments", "check_code_runtime",
    "code_result", "code_spec", "compile_tool", "current_context", "decode_tool_call",
    "describe_code", "describe_failure", "described_sandbox", "ends_run", "flows_of", "function_spec", "is_async",
    "is_large", "keyword_invoke", "load_scripts", "load_tools", "plan_of", "plan_spec", "positional_spec",
    "python_stubs", "registry_of", "run_call", "search_spec", "shown_within", "tool", "with_options",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.calls.arguments import ToolCall, decode_tool_call
    from toolcell.calls.call import (
        Approvals,
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
        is_async,
        keyword_invoke,
        positional_spec,
        with_options,
    )
    from toolcell.tools.code import (
        CODE_SCHEMA,
        CODE_TEXT,
        CODE_TOOL,
        MAX_VALUE_CHARS,
        SEARCH_TOOL,
        CodeRuntime,
        ExecuteCode,
        check_code_runtime,
        code_result,
        code_spec,
        describe_code,
        describe_failure,
        described_sandbox,
        flows_of,
    )
    from toolcell.tools.loading import load_tools
    from toolcell.tools.pipeline import check_arguments, ends_run, run_call
    from toolcell.tools.plan import MAX_STEPS, plan_of, plan_spec
    from toolcell.tools.registry import ToolRegistry, registry_of, tool
    from toolcell.tools.saved_script import SavedScript, load_scripts
    from toolcell.tools.search import FOUND, MAX_FOUND, is_large, search_spec
    from toolcell.tools.spec import (
        NEEDS_APPROVAL,
        Invoke,
        RegisteredTool,
        RegistrySettings,
        RegistryState,
        ToolSpec,
        compile_tool,
    )
    from toolcell.tools.stubs import DETAILS, SHOWN_CHARS, python_stubs, shown_within
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.calls.call": (
                "Approvals Approve Block Call Deny Edit Feature Hook Override Rewrite RunContext Substitute"
            ),
            "toolcell.calls.concurrency": "abandoned_threads",
            "toolcell.calls.context": "ToolContext current_context",
            "toolcell.calls.definition": "ToolDefinition ToolDescriptionWarning",
            "toolcell.calls.events": "Event EventBus",
            "toolcell.calls.hooks": "approval_hook",
            "toolcell.calls.arguments": "ToolCall decode_tool_call",
            "toolcell.calls.options": "CallPolicy Origin ToolOptions",
            "toolcell.calls.result": "ErrorCode File Image Status Text ToolResult",
            "toolcell.calls.run_state": "Budget JobTable Secrets",
            "toolcell.tools.adapters": (
                "AgentTool FunctionTool Tool function_spec is_async keyword_invoke positional_spec with_options"
            ),
            "toolcell.tools.code": (
                "CODE_SCHEMA CODE_TEXT CODE_TOOL MAX_VALUE_CHARS SEARCH_TOOL CodeRuntime ExecuteCode "
                "check_code_runtime code_result code_spec describe_code describe_failure "
                "described_sandbox flows_of"
            ),
            "toolcell.tools.stubs": "DETAILS SHOWN_CHARS python_stubs shown_within",
            "toolcell.tools.loading": "load_tools",
            "toolcell.tools.pipeline": "check_arguments ends_run run_call",
            "toolcell.tools.plan": "MAX_STEPS plan_of plan_spec",
            "toolcell.tools.registry": "ToolRegistry registry_of tool",
            "toolcell.tools.saved_script": "SavedScript load_scripts",
            "toolcell.tools.search": "FOUND MAX_FOUND is_large search_spec",
            "toolcell.tools.spec": (
                "NEEDS_APPROVAL Invoke RegisteredTool RegistrySettings RegistryState ToolSpec compile_tool"
            ),
        },
    )
