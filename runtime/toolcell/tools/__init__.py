"""The host's tools: defining, registering, checking and calling them.

Knows no sandbox, no run of a script and no model; `runtime` and `agents` build on it.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "CODE", "CODE_SCHEMA", "CODE_TEXT", "CODE_TOOL", "DEFAULT_TOOL_OPTIONS", "DETAILS", "EVERY_ORIGIN", "FOUND",
    "HIDDEN", "MAX_FOUND", "MAX_IMAGES", "MAX_IMAGE_BYTES", "MAX_MODEL_CHARS", "MAX_NAME_CHARS", "MAX_STEPS",
    "MAX_VALUE_CHARS", "MIN_DESCRIPTION_CHARS", "MODEL", "NEEDS_APPROVAL", "NO_USAGE", "OF_THIS_PROCESS", "PLAN",
    "PROVIDERS", "RESERVED", "SEARCH_TOOL", "SHOWN_CHARS", "STOP_WORDS", "SUBAGENT", "TOOL_UPDATE",
    "AbandonedThreads", "AgentTool", "Approve", "ArgumentChecker", "AskUser", "Block", "Budget", "Call",
    "CallObserver", "CallPolicy", "CallableTools", "CodeRuntime", "CompletionCallback", "Deny", "Detail", "Edit",
    "EmbeddingProvider", "ErrorCode", "Event", "EventBus", "ExecuteCode", "File", "FunctionTool", "Hook", "Image",
    "InvalidArguments", "Invoke", "JobTable", "MadeCalls", "OnUser", "Origin", "Override", "Part", "RegisteredTool",
    "RegistrySettings", "RegistryState", "Reverts", "Rewrite", "RunContext", "RunScope", "SavedScript", "Secrets",
    "SimpleTool", "Status", "Substitute", "Text", "TokenUsage", "Tool", "ToolCall", "ToolContext", "ToolDefinition",
    "ToolDescriptionWarning", "ToolError", "ToolFailure", "ToolObject", "ToolOptions", "ToolRegistry", "ToolResult",
    "ToolSpec", "Upload", "abandoned_threads", "approval_hook", "as_result", "ask_user_spec", "bounded_schema",
    "brief", "bytes_in", "check_arguments", "check_code_runtime", "check_count", "check_does", "check_kind",
    "check_one_of", "check_path", "check_seconds", "check_shown_chars", "checked_vectors", "code_result", "code_spec",
    "compile_tool", "count_values", "current", "current_context", "decode_tool_call", "describe_code",
    "describe_failure", "described_sandbox", "embed_texts", "ends_run", "events", "find_problem", "flows_of",
    "function_spec", "is_approved_later", "is_async", "is_large", "keyword_invoke", "leaves_in", "list_names",
    "load_scripts", "load_tools", "maybe_await", "mentions_bytes", "nearest", "new_id", "open_jobs", "passes_on",
    "plan_of", "plan_spec", "positional_spec", "provider_name", "python_stubs", "query_words", "refused_schemas",
    "registry_of", "run_call", "run_in_thread", "safe_text", "score_of", "search_spec", "share_labels",
    "shown_within", "strict_json", "text_of", "to_json", "tool", "unique_ids", "with_options", "withheld",
    "without_bytes", "words",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.errors import ToolError
    from toolcell.tools import events
    from toolcell.tools.adapters import (
        AgentTool,
        FunctionTool,
        SimpleTool,
        Tool,
        ToolObject,
        function_spec,
        is_async,
        keyword_invoke,
        positional_spec,
        with_options,
    )
    from toolcell.tools.arguments import ArgumentChecker, InvalidArguments
    from toolcell.tools.batch import ends_run
    from toolcell.tools.bytes_arguments import mentions_bytes
    from toolcell.tools.call import Call, CallableTools, CallObserver, CompletionCallback, OnUser, RunContext, RunScope
    from toolcell.tools.checker_process import find_problem, refused_schemas
    from toolcell.tools.checks import (
        brief,
        check_count,
        check_does,
        check_kind,
        check_one_of,
        check_path,
        check_seconds,
        text_of,
    )
    from toolcell.tools.code import (
        CODE_SCHEMA,
        CODE_TEXT,
        CODE_TOOL,
        MAX_VALUE_CHARS,
        SEARCH_TOOL,
        AskUser,
        CodeRuntime,
        ExecuteCode,
        ask_user_spec,
        check_code_runtime,
        code_result,
        code_spec,
        describe_code,
        describe_failure,
        described_sandbox,
        flows_of,
    )
    from toolcell.tools.concurrency import (
        OF_THIS_PROCESS,
        AbandonedThreads,
        abandoned_threads,
        maybe_await,
        passes_on,
        run_in_thread,
    )
    from toolcell.tools.context import ToolContext, current, current_context, share_labels
    from toolcell.tools.definition import MIN_DESCRIPTION_CHARS, ToolDefinition, ToolDescriptionWarning
    from toolcell.tools.detail import DETAILS, SHOWN_CHARS, Detail, check_shown_chars, shown_within
    from toolcell.tools.embeddings import PROVIDERS, EmbeddingProvider, checked_vectors, embed_texts, nearest, score_of
    from toolcell.tools.events import TOOL_UPDATE, Event, EventBus
    from toolcell.tools.finalize import as_result
    from toolcell.tools.foreign_definitions import HIDDEN, bounded_schema, safe_text
    from toolcell.tools.hooks import (
        Approve,
        Block,
        Deny,
        Edit,
        Hook,
        Override,
        Rewrite,
        Substitute,
        approval_hook,
        is_approved_later,
        withheld,
    )
    from toolcell.tools.jobs import JobTable, open_jobs
    from toolcell.tools.loading import load_tools
    from toolcell.tools.model_calls import ToolCall, decode_tool_call, unique_ids
    from toolcell.tools.names import MAX_NAME_CHARS, RESERVED, provider_name
    from toolcell.tools.options import (
        CODE,
        DEFAULT_TOOL_OPTIONS,
        EVERY_ORIGIN,
        MODEL,
        PLAN,
        SUBAGENT,
        Origin,
        ToolOptions,
    )
    from toolcell.tools.parts import MAX_IMAGE_BYTES, MAX_IMAGES, File, Image, Part, Text
    from toolcell.tools.pipeline import NEEDS_APPROVAL, run_call
    from toolcell.tools.plan import MAX_STEPS, plan_of, plan_spec
    from toolcell.tools.policy import CallPolicy
    from toolcell.tools.problems import list_names
    from toolcell.tools.registry import ToolRegistry, registry_of, tool
    from toolcell.tools.registry_state import RegistrySettings, RegistryState
    from toolcell.tools.result import (
        MAX_MODEL_CHARS,
        NO_USAGE,
        ErrorCode,
        Status,
        TokenUsage,
        ToolFailure,
        ToolResult,
        to_json,
        without_bytes,
    )
    from toolcell.tools.reverts import MadeCalls, Reverts
    from toolcell.tools.run_state import Budget, Secrets, new_id
    from toolcell.tools.saved_script import SavedScript
    from toolcell.tools.script_folder import load_scripts
    from toolcell.tools.search import FOUND, MAX_FOUND, is_large, search_spec
    from toolcell.tools.spec import Invoke, RegisteredTool, ToolSpec, compile_tool
    from toolcell.tools.stubs import python_stubs
    from toolcell.tools.text_data import strict_json
    from toolcell.tools.uploads import Upload
    from toolcell.tools.validation import check_arguments
    from toolcell.tools.values import bytes_in, count_values, leaves_in
    from toolcell.tools.vocabulary import STOP_WORDS, query_words, words
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.errors": "ToolError",
            "toolcell.tools.adapters": (
                "AgentTool FunctionTool SimpleTool Tool ToolObject function_spec is_async keyword_invoke "
                "positional_spec with_options"
            ),
            "toolcell.tools.arguments": "ArgumentChecker InvalidArguments",
            "toolcell.tools.batch": "ends_run",
            "toolcell.tools.call": "Call CallObserver CallableTools CompletionCallback OnUser RunContext RunScope",
            "toolcell.tools.checks": (
                "brief check_count check_does check_kind check_one_of check_path check_seconds text_of"
            ),
            "toolcell.tools.code": (
                "CODE_SCHEMA CODE_TEXT CODE_TOOL MAX_VALUE_CHARS SEARCH_TOOL AskUser CodeRuntime ExecuteCode "
                "ask_user_spec check_code_runtime code_result code_spec describe_code describe_failure "
                "described_sandbox flows_of"
            ),
            "toolcell.tools.concurrency": (
                "OF_THIS_PROCESS AbandonedThreads abandoned_threads maybe_await passes_on run_in_thread"
            ),
            "toolcell.tools.context": "ToolContext current current_context share_labels",
            "toolcell.tools.definition": "MIN_DESCRIPTION_CHARS ToolDefinition ToolDescriptionWarning",
            "toolcell.tools.detail": "DETAILS SHOWN_CHARS Detail check_shown_chars shown_within",
            "toolcell.tools.embeddings": "PROVIDERS EmbeddingProvider checked_vectors embed_texts nearest score_of",
            "toolcell.tools.bytes_arguments": "mentions_bytes",
            "toolcell.tools.events": "TOOL_UPDATE Event EventBus",
            "toolcell.tools.finalize": "as_result",
            "toolcell.tools.hooks": (
                "Approve Block Deny Edit Hook Override Rewrite Substitute approval_hook is_approved_later withheld"
            ),
            "toolcell.tools.jobs": "JobTable open_jobs",
            "toolcell.tools.loading": "load_tools",
            "toolcell.tools.model_calls": "ToolCall decode_tool_call unique_ids",
            "toolcell.tools.names": "MAX_NAME_CHARS RESERVED provider_name",
            "toolcell.tools.options": "CODE DEFAULT_TOOL_OPTIONS EVERY_ORIGIN MODEL PLAN SUBAGENT Origin ToolOptions",
            "toolcell.tools.parts": "MAX_IMAGES MAX_IMAGE_BYTES File Image Part Text",
            "toolcell.tools.pipeline": "NEEDS_APPROVAL run_call",
            "toolcell.tools.plan": "MAX_STEPS plan_of plan_spec",
            "toolcell.tools.policy": "CallPolicy",
            "toolcell.tools.problems": "list_names",
            "toolcell.tools.registry": "ToolRegistry registry_of tool",
            "toolcell.tools.registry_state": "RegistrySettings RegistryState",
            "toolcell.tools.result": (
                "MAX_MODEL_CHARS NO_USAGE ErrorCode Status TokenUsage ToolFailure ToolResult to_json without_bytes"
            ),
            "toolcell.tools.reverts": "MadeCalls Reverts",
            "toolcell.tools.run_state": "Budget Secrets new_id",
            "toolcell.tools.saved_script": "SavedScript",
            "toolcell.tools.script_folder": "load_scripts",
            "toolcell.tools.search": "FOUND MAX_FOUND is_large search_spec",
            "toolcell.tools.spec": "Invoke RegisteredTool ToolSpec compile_tool",
            "toolcell.tools.foreign_definitions": "HIDDEN bounded_schema safe_text",
            "toolcell.tools.stubs": "python_stubs",
            "toolcell.tools.text_data": "strict_json",
            "toolcell.tools.uploads": "Upload",
            "toolcell.tools.values": "bytes_in count_values leaves_in",
            "toolcell.tools.validation": "check_arguments",
            "toolcell.tools.checker_process": "find_problem refused_schemas",
            "toolcell.tools.vocabulary": "STOP_WORDS query_words words",
        },
    )
