"""Errors across the wire: toolcell's own arrive as what they are, and of others only that something failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from toolcell.errors import (
    AuditError,
    McpServerError,
    Misconfigured,
    PackageError,
    QuotaExceeded,
    ResumeError,
    SandboxUnavailable,
    ServiceError,
    SessionError,
    ToolAbort,
    ToolcellError,
    UnknownId,
    UsageError,
)
from toolcell.service.problems import Problem
from toolcell.support.log import logger_of

logger = logger_of("toolcell.service")


class ToolsetForgotten(UsageError):
    """The service has no toolset of this number, or has it no more. It is to be offered again; nothing was done."""

    code = "toolset_forgotten"


_KINDS: Final[dict[str, type[ToolcellError]]] = {
    kind.code: kind
    for kind in (
        UsageError,
        UnknownId,
        ResumeError,
        SessionError,
        SandboxUnavailable,
        PackageError,
        AuditError,
        McpServerError,
        ToolsetForgotten,
    )
}
MAX_CHARS: Final = 4_000


def failed(exc: BaseException, folders: Iterable[Path] = ()) -> dict[str, Any]:
    """Return what the caller is told about an exception, without the service's own `folders`."""
    code, message, details = _failed(exc)
    for folder in folders:
        message = message.replace(str(folder), "...")
    return {"code": code, "message": message, "details": details}


def _failed(exc: BaseException) -> tuple[str, str, dict[str, Any]]:
    details: dict[str, Any] = {}
    match exc:
        case Problem():
            text = f"{exc.title}: {exc.detail}" if exc.detail else exc.title
            retry = exc.headers.get("Retry-After", "")
            details = {"status": exc.status, "retry_after_s": float(retry) if retry.isdecimal() else 0.0}
            return (exc.code, text[:MAX_CHARS], details)
        case QuotaExceeded():
            details = {"retry_after_s": float(exc.retry_after_s)}
        case Misconfigured():
            return (UsageError.code, _text(exc), {})
        case ToolAbort():
            return ("service_error", "a tool ended the request", {})
        case ToolcellError():
            pass
        case _:
            logger.error("a request of a client failed", exc_info=exc)
            return ("internal_error", "the service failed; its log has the reason", {})
    return (exc.code, _text(exc), details)


def _text(exc: BaseException) -> str:
    return str(exc).encode("utf-8", "replace").decode()[:MAX_CHARS]


def raised_for(error: Mapping[str, Any]) -> ToolcellError:
    code, message, details = error.get("code"), str(error.get("message", "")), error.get("details")
    known: Mapping[str, Any] = details if isinstance(details, dict) else {}
    if code == QuotaExceeded.code:
        retry = known.get("retry_after_s", 0.0)
        return QuotaExceeded(message, float(retry) if isinstance(retry, int | float) else 0.0)
    if (kind := _KINDS.get(str(code))) is not None:
        return kind(message)
    if status := known.get("status", 0):
        return SandboxUnavailable(message) if status in (429, 503) else UsageError(message)
    return ServiceError(message, may_have_begun=True)
