"""The host's tools: defining, registering, checking and calling them.

Knows no sandbox, no run of a script and no model; `runtime` and `agents` build on it.
"""

import logging

from toolcell.errors import ToolError
from toolcell.tools.adapters import AgentTool, FunctionTool, SimpleTool, Tool, ToolObject
from toolcell.tools.call import Call, CallObserver, RunContext
from toolcell.tools.concurrency import abandoned_threads
from toolcell.tools.context import ToolContext, current_context
from toolcell.tools.definition import ToolDefinition, ToolDescriptionWarning
from toolcell.tools.events import Event, EventBus
from toolcell.tools.hooks import Approve, Block, Hook, Modify, Override, Reject, Rewrite, Substitute, approval_hook
from toolcell.tools.jobs import JobTable
from toolcell.tools.model_calls import ToolCall, decode_tool_call
from toolcell.tools.options import CODE, MODEL, PLAN, SUBAGENT, Origin, ToolOptions
from toolcell.tools.parts import File, Image, Text
from toolcell.tools.policy import CallPolicy
from toolcell.tools.registry import ToolRegistry, tool
from toolcell.tools.registry_state import RegistrySettings
from toolcell.tools.result import ErrorCode, Status, TokenUsage, ToolFailure, ToolResult
from toolcell.tools.run_state import Budget, Secrets

# Calls that fail are the model's business first: a program that configures no logging is not shown them.
logging.getLogger("toolcell").addHandler(logging.NullHandler())

__all__ = [
    "CODE",
    "MODEL",
    "PLAN",
    "SUBAGENT",
    "AgentTool",
    "Approve",
    "Block",
    "Budget",
    "Call",
    "CallObserver",
    "CallPolicy",
    "ErrorCode",
    "Event",
    "EventBus",
    "File",
    "FunctionTool",
    "Hook",
    "Image",
    "JobTable",
    "Modify",
    "Origin",
    "Override",
    "RegistrySettings",
    "Reject",
    "Rewrite",
    "RunContext",
    "Secrets",
    "SimpleTool",
    "Status",
    "Substitute",
    "Text",
    "TokenUsage",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolDefinition",
    "ToolDescriptionWarning",
    "ToolError",
    "ToolFailure",
    "ToolObject",
    "ToolOptions",
    "ToolRegistry",
    "ToolResult",
    "abandoned_threads",
    "approval_hook",
    "current_context",
    "decode_tool_call",
    "tool",
]
