"""Run a model's Python in a kernel-isolated sandbox, with your tools as its only way out.

Each public name is imported when it is first used, so `import toolcell` costs next to nothing.
"""

from typing import TYPE_CHECKING

from toolcell.lazy import lazy_names

__version__ = "0.1.0"

__all__ = [
    "AuditConfig", "AuditLog", "ErrorInfo", "ExecutionResult", "Limits", "Logs", "Outcome", "OutputFile",
    "PackageError", "Policy", "PoolConfig", "RegistrationError", "RunContext", "Runtime", "SandboxUnavailable",
    "SyncRuntime", "ToolAbort", "ToolCallRecord", "ToolDefinition", "ToolRegistry", "ToolResult", "ToolcellError",
    "Usage", "UsageError", "__version__", "tool",
]  # fmt: skip

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
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        "toolcell.errors",
        "toolcell.results",
        "toolcell.config",
        "toolcell.tools",
        "toolcell.runtime",
        "toolcell.sync",
        "toolcell.audit.config",
        "toolcell.audit.log",
    )
