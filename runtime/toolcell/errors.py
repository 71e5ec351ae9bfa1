"""Every exception we raise, in one tree. Read the leaves to learn who must act.

    ToolcellError
    ├── UsageError              the calling program: fix the call, retrying cannot help
    │   └── RegistrationError   a tool's definition is wrong; raised when it is registered
    ├── SandboxUnavailable      the machine: no guest code ran, retrying may help
    ├── PackageError            the machine: the wanted packages could not be installed
    ├── ToolError               a tool: raised by one to fail its call with a message for the model
    ├── ToolAbort               a tool: raised by one to end the whole run, not just its call
    └── AuditError              the record: it could not be written, or it does not verify

Code that fails inside the sandbox is not here: that is an ordinary `ExecutionResult` with an `outcome`.
A tool that fails is not here either: that is a `ToolResult` with a status, whatever the tool raised.
"""

from collections.abc import Mapping
from typing import Any


class ToolcellError(Exception):
    """Base of everything toolcell raises."""

    code = "toolcell_error"
    """Stable across releases; written to the audit log and to `--json` output."""


class UsageError(ToolcellError, ValueError):
    """The call cannot work as written."""

    code = "usage_error"


class RegistrationError(UsageError):
    """A tool's definition is wrong; nothing was registered."""

    code = "registration_error"


class SandboxUnavailable(ToolcellError, RuntimeError):
    """No sandbox could be started, so no guest code ran and nothing needs cleaning up."""

    code = "sandbox_unavailable"


class PackageError(ToolcellError, RuntimeError):
    """The packages a sandbox should see could not be resolved or installed."""

    code = "package_error"


class ToolError(ToolcellError, RuntimeError):
    """Raised by a tool to fail its call: an expected failure the model should read and act on."""

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
    """Raised by a tool to end the whole run; every other exception only ends its call."""

    code = "tool_abort"


class AuditError(ToolcellError, RuntimeError):
    """The audit log could not be written, read or verified."""

    code = "audit_error"
