"""Every exception that toolcell raises, in one tree. Each line names who must act.

    ToolcellError
    ├── UsageError              the calling program: the call is wrong, and a retry cannot help
    │   ├── MissingPackage      the calling program: it uses an extra of toolcell that is not installed
    │   ├── RegistrationError   the calling program: a tool's definition is wrong, found when it is registered
    │   ├── Misconfigured       the calling program: found in a run, which ends with it (a ToolAbort too)
    │   ├── UnknownId           the calling program: there is no draft, or nothing to revert, under this id here
    │   ├── ResumeError         the calling program: this run cannot be carried on with this token, here or now
    │   └── SessionError        the calling program: this session is closed, used up, or cannot be rebuilt
    ├── SandboxUnavailable      the machine: no guest code ran, and a retry may help
    │   ├── ServiceUnavailable  the service behind a `Client`: it cannot be reached, and nothing began there
    │   └── QuotaExceeded       the user, tenant or agent: its quota is used up; says when it is free again
    ├── PackageError            the machine: the requested packages could not be installed
    ├── ToolError               a tool: it fails its call, with a message for the model
    ├── ToolAbort               a tool: it ends the whole run, not only its call
    │   └── RunEnded            toolcell: the run ends with an outcome of its own, such as `suspended`
    ├── StoreError              the machine: a store of the built-in tools is locked, full, damaged or not ours
    ├── DocumentError           a document that was to be ingested: damaged, encrypted, of no known kind, too long
    ├── EmbeddingError          the embedding provider: no vectors, or vectors that cannot be used
    ├── McpServerError          an MCP server: it could not be started or reached, or it does not speak MCP
    ├── MapStopped              the calling program: it asked `Runtime.map` to raise at the first failure
    ├── ServiceError            the service behind a `Client`: a run was lost; says whether it may have begun
    ├── AuditError              the audit log: it could not be written, or it does not verify
    │   └── BadInput            the calling program: a file that it names is missing, or of the wrong kind
    └── ProviderError           the model's provider (in `toolcell.agents`): a request to the model failed

Code that fails inside the sandbox raises nothing on the host: the `ExecutionResult` has an `outcome`.
A tool that fails raises nothing either: its `ToolResult` has a status, whatever the tool raised.
"""

import sys
import warnings
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


class MissingPackage(UsageError, ImportError):
    """A package is not installed that only an extra of toolcell needs. The message has the command that installs it."""

    code = "missing_package"


class UnknownId(UsageError):
    """There is nothing under the id that the call names: no draft, or nothing that could be reverted."""

    code = "no_such_id"


class ResumeError(UsageError):
    """A run cannot be resumed: the token is foreign, used or expired, or the tools have changed. No call was made."""

    code = "resume_error"


class SessionError(UsageError):
    """A session cannot do this: it is closed or used up, or its journal cannot bring it back. No code ran."""

    code = "session_error"


class SandboxUnavailable(ToolcellError, RuntimeError):
    """No sandbox could be started. No guest code ran, and nothing needs to be cleaned up."""

    code = "sandbox_unavailable"


class QuotaExceeded(SandboxUnavailable):
    """A user, tenant or agent has used up its quota. No guest code ran, and no call was made."""

    code = "quota_exceeded"

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds until something of it is free again; infinite when the quota is 0."""


class ServiceUnavailable(SandboxUnavailable):
    """The service cannot be reached, or is about to end. It did not begin what was asked for: a retry is safe."""

    code = "service_unavailable"


class ServiceError(ToolcellError, RuntimeError):
    """A request to a service has no answer. `may_have_begun`: its script may have run, and its calls were made."""

    code = "service_error"

    def __init__(self, message: str, *, may_have_begun: bool, calls: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.may_have_begun = may_have_begun
        self.calls = calls
        """Calls of the run that this program's tools got, as `ToolCallRecord`s, in the order in which they came."""


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
        self.message = f"{message}"
        self.code = code
        self.retryable = retryable
        # What an author hands on may be anything, and must not hide the failure.
        given: object = details or {}
        self.details: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"details": given}


class ToolAbort(ToolcellError, RuntimeError):
    """Raised by a tool to end the whole run. Every other exception of a tool ends only its call."""

    code = "tool_abort"
    outcome = "cancelled"
    """Outcome of the run that it ends."""


class RunEnded(ToolAbort):
    """Ends a run with an outcome of its own. Raised inside toolcell; a program sees the result."""

    code = "run_ended"

    def __init__(self, message: str, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Misconfigured(UsageError, ToolAbort):
    """A run's setup is wrong: a Runtime that is not open, a provider's key. No model can fix that, so it
    ends the run, and comes out of whatever started the run, however many agents, scripts and plans are in between."""

    code = "usage_error"


class StoreError(ToolcellError, RuntimeError):
    """A store could not be opened, read or written. What it held is unchanged."""

    code = "store_error"

    def __init__(self, message: str, *, reason: str = "", retryable: bool = False) -> None:
        super().__init__(message)
        self.reason = reason or "the store cannot be used now"
        """For a model: without paths and addresses of the host."""
        self.retryable = retryable


class DocumentError(ToolcellError, ValueError):
    """A document could not be read. Nothing of it was stored."""

    code = "document_error"


class EmbeddingError(ToolcellError, RuntimeError):
    """An embedding provider gave no vectors, or some that cannot be used."""

    code = "embedding_error"

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason = "no embedding could be made of the text"
        """For a model: without addresses and keys of the host."""
        self.retryable = retryable


class McpServerError(ToolcellError, RuntimeError):
    """An MCP server could not be started or reached, or what it says is not MCP. None of its tools was registered."""

    code = "mcp_server_error"


class MapStopped(ToolcellError, RuntimeError):
    """An item of `Runtime.map(..., on_error="raise")` failed. Running items were cancelled."""

    code = "map_stopped"

    def __init__(self, message: str, item: Any = None) -> None:
        super().__init__(message)
        self.item = item
        """The `MapItem` that failed."""


class AuditError(ToolcellError, RuntimeError):
    """The audit log could not be written, read or verified."""

    code = "audit_error"


_OURS = frozenset({"toolcell", "toolcell_bridge", "asyncio", "anyio", "trio", "uvloop", "contextlib", "threading"})
"""Packages whose lines say nothing to somebody who is warned."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and point at the line of the program that led here, whatever is in between."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class BadInput(UsageError, AuditError):
    """A named file or directory is missing, unreadable, unwritable or of the wrong kind. No change was found in it."""
