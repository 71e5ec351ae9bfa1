"""Every exception that toolcell raises, in one tree. Each line names who must act.

    ToolcellError
    ├── UsageError              the calling program: the call is wrong, and a retry cannot help
    │   └── RegistrationError   the calling program: a tool's definition is wrong, found when it is registered
    ├── SandboxUnavailable      the machine: no guest code ran, and a retry may help
    ├── PackageError            the machine: the requested packages could not be installed
    ├── ToolError               a tool: it fails its call, with a message for the model
    ├── ToolAbort               a tool: it ends the whole run, not only its call
    ├── AuditError              the audit log: it could not be written, or it does not verify
    └── ProviderError           the model's provider (in `toolcell.agents`): a request to the model failed

Code that fails inside the sandbox raises nothing on the host: the `ExecutionResult` has an `outcome`.
A tool that fails raises nothing either: its `ToolResult` has a status, whatever the tool raised.
"""

from collections.abc import Mapping
from typing import Any


class ToolcellError(Exception):
    """Base of all exceptions that toolcell raises."""

    code = "toolcell_error"
    """Stable across releases. The audit log and `--json` output contain it."""


class UsageError(ToolcellError, ValueError):
    """The call or a setting is wrong. It fails again until it is changed."""

    code = "usage_error"


class RegistrationError(UsageError):
    """A tool's definition is wrong. Nothing was registered."""

    code = "registration_error"


class SandboxUnavailable(ToolcellError, RuntimeError):
    """No sandbox could be started. No guest code ran, and nothing needs to be cleaned up."""

    code = "sandbox_unavailable"


class PackageError(ToolcellError, RuntimeError):
    """The packages of a sandbox could not be resolved or installed."""

    code = "package_error"


class ToolError(ToolcellError, RuntimeError):
    """Raised by a tool to fail its call. The model reads the message and can act on it."""

    code = "tool_error"

    def __init__(
        self,
        message: str,
        *,
        code: str = "tool_error",
        retryable: bool = False,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retryable = retryable
        self.details = dict(details or {})


class ToolAbort(ToolcellError, RuntimeError):
    """Raised by a tool to end the whole run. Every other exception of a tool ends only its call."""

    code = "tool_abort"


class AuditError(ToolcellError, RuntimeError):
    """The audit log could not be written, read or verified."""

    code = "audit_error"
