"""Run a model's Python in a kernel-isolated sandbox, with your tools as its only way out.

Each public name is imported when it is first used, so `import toolcell` costs next to nothing.
"""

from typing import TYPE_CHECKING

from toolcell._version import __version__
from toolcell.support.lazy import lazy_names

__all__ = [
    "Agent",
    "Allow",
    "AnthropicProvider",
    "AuditError",
    "AuditLog",
    "DockerBackend",
    "Egress",
    "ExecutionResult",
    "Flow",
    "KubernetesBackend",
    "Limits",
    "MapItem",
    "MapStopped",
    "Misconfigured",
    "OpenAIProvider",
    "Outcome",
    "PackageError",
    "PendingCall",
    "Policy",
    "PoolConfig",
    "Quota",
    "QuotaExceeded",
    "Quotas",
    "RayBackend",
    "RecordConfig",
    "RegistrationError",
    "ResumeError",
    "RunContext",
    "Runtime",
    "SandboxUnavailable",
    "Secrets",
    "SessionError",
    "Suspension",
    "SyncRuntime",
    "ToolAbort",
    "ToolContext",
    "ToolDefinition",
    "ToolError",
    "ToolRegistry",
    "ToolResult",
    "ToolcellError",
    "UsageError",
    "__version__",
    "tool",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.agents.agent import Agent
    from toolcell.agents.providers.anthropic import AnthropicProvider
    from toolcell.agents.providers.openai import OpenAIProvider
    from toolcell.audit.config import RecordConfig
    from toolcell.audit.log import AuditLog
    from toolcell.calls.run_state import Secrets
    from toolcell.config import Limits, Policy, PoolConfig
    from toolcell.control.map_stream import MapItem
    from toolcell.egress import Allow, Egress
    from toolcell.errors import (
        AuditError,
        MapStopped,
        Misconfigured,
        PackageError,
        QuotaExceeded,
        RegistrationError,
        ResumeError,
        SandboxUnavailable,
        SessionError,
        ToolAbort,
        ToolcellError,
        ToolError,
        UsageError,
    )
    from toolcell.flows import Flow
    from toolcell.quotas import Quota, Quotas
    from toolcell.results import (
        ExecutionResult,
        Outcome,
        PendingCall,
        Suspension,
    )
    from toolcell.runtime import Runtime
    from toolcell.sandbox.docker.backend import DockerBackend
    from toolcell.sandbox.kubernetes.backend import KubernetesBackend
    from toolcell.sandbox.ray.backend import RayBackend
    from toolcell.sync import SyncRuntime
    from toolcell.tools import RunContext, ToolContext, ToolDefinition, ToolResult
    from toolcell.tools.registry import ToolRegistry, tool
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.agents.agent": "Agent",
            "toolcell.agents.providers.anthropic": "AnthropicProvider",
            "toolcell.agents.providers.openai": "OpenAIProvider",
            "toolcell.audit.config": "RecordConfig",
            "toolcell.audit.log": "AuditLog",
            "toolcell.calls.run_state": "Secrets",
            "toolcell.config": "Limits Policy PoolConfig",
            "toolcell.control.map_stream": "MapItem",
            "toolcell.egress": "Allow Egress",
            "toolcell.errors": (
                "AuditError MapStopped Misconfigured PackageError QuotaExceeded RegistrationError ResumeError "
                "SandboxUnavailable SessionError ToolAbort ToolError ToolcellError UsageError"
            ),
            "toolcell.flows": "Flow",
            "toolcell.quotas": "Quota Quotas",
            "toolcell.results": "ExecutionResult Outcome PendingCall Suspension",
            "toolcell.runtime": "Runtime",
            "toolcell.sandbox.docker.backend": "DockerBackend",
            "toolcell.sandbox.kubernetes.backend": "KubernetesBackend",
            "toolcell.sandbox.ray.backend": "RayBackend",
            "toolcell.sync": "SyncRuntime",
            "toolcell.tools": "RunContext ToolContext ToolDefinition ToolResult",
            "toolcell.tools.registry": "ToolRegistry tool",
        },
    )
