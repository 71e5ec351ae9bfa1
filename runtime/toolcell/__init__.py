"""Run a model's Python in a kernel-isolated sandbox, with your tools as its only way out.

Names are loaded when they are first used, so that importing this costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolcell.audit.config import AuditConfig
    from toolcell.audit.log import AuditLog
    from toolcell.config import Limits, Policy, PoolConfig
    from toolcell.errors import (
        PackageError,
        RegistrationError,
        SandboxUnavailable,
        ToolAbort,
        ToolcellError,
        UsageError,
    )
    from toolcell.results import ErrorInfo, ExecutionResult, Logs, Outcome, OutputFile, ToolCallRecord, Usage
    from toolcell.runtime import Runtime
    from toolcell.sync import SyncRuntime
    from toolcell.tools import RunContext, ToolDefinition, ToolRegistry, ToolResult, tool

__version__ = "0.1.0"

_HOMES = {
    "toolcell.audit.config": ("AuditConfig",),
    "toolcell.audit.log": ("AuditLog",),
    "toolcell.config": ("Limits", "Policy", "PoolConfig"),
    "toolcell.errors": (
        "PackageError", "RegistrationError", "SandboxUnavailable", "ToolAbort", "ToolcellError", "UsageError",
    ),
    "toolcell.results": ("ErrorInfo", "ExecutionResult", "Logs", "Outcome", "OutputFile", "ToolCallRecord", "Usage"),
    "toolcell.runtime": ("Runtime",),
    "toolcell.sync": ("SyncRuntime",),
    "toolcell.tools": ("RunContext", "ToolDefinition", "ToolRegistry", "ToolResult", "tool"),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AuditConfig", "AuditLog", "ErrorInfo", "ExecutionResult", "Limits", "Logs", "Outcome", "OutputFile",
    "PackageError", "Policy", "PoolConfig", "RegistrationError", "RunContext", "Runtime", "SandboxUnavailable",
    "SyncRuntime", "ToolAbort", "ToolCallRecord", "ToolDefinition", "ToolRegistry", "ToolResult", "ToolcellError",
    "Usage", "UsageError", "__version__", "tool",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'toolcell' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
