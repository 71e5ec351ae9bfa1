"""Errors across the wire: toolcell's own arrive as what they are, and of others only that something failed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
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
from toolcell.service.socket.messages import RequestFailed
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
_BUSY: Final = frozenset({429, 503})
MAX_CHARS: Final = 4_000


def failed(exc: BaseException, folders: Iterable[Path] = ()) -> RequestFailed:
    """Return what the caller is told about an exception, without the service's own `folders`."""
    found = _failed(exc)
    for folder in folders:
        found = replace(found, message=found.message.replace(str(folder), "..."))
    return found


def _failed(exc: BaseException) -> RequestFailed:
    details: dict[str, Any] = {}
    match exc:
        case Problem():
            text = f"{exc.title}: {exc.detail}" if exc.detail else exc.title
            retry = exc.headers.get("Retry-After", "")
            details = {"status": exc.status, "retry_after_s": float(retry) if retry.isdecimal() else 0.0}
            return RequestFailed(exc.code, text[:MAX_CHARS], details)
        case QuotaExceeded():
            details = {"retry_after_s": float(exc.retry_after_s)}
        case Misconfigured():
            return RequestFailed(UsageError.code, _text(exc), {})
        case ToolAbort():
            return RequestFailed("service_error", "a tool ended the request", {})
        case ToolcellError():
            pass
        case _:
            logger.error("a request of a client failed", exc_info=exc)
            return RequestFailed("internal_error", "the service failed; its log has the reason", {})
    return RequestFailed(exc.code, _text(exc), details)


def _text(exc: BaseException) -> str:
    return str(exc).encode("utf-8", "replace").decode()[:MAX_CHARS]


def raised_for(message: RequestFailed) -> ToolcellError:
    """Return the exception that the caller gets."""
    details = message.details
    retry = details.get("retry_after_s", 0.0)
    retry_s = float(retry) if isinstance(retry, int | float) else 0.0
    if message.code == QuotaExceeded.code:
        return QuotaExceeded(message.message, retry_s)
    if (kind := _KINDS.get(message.code)) is not None:
        return kind(message.message)
    status = details.get("status", 0)
    if status in _BUSY:
        return SandboxUnavailable(message.message)
    if status:
        return UsageError(message.message)
    return ServiceError(message.message, may_have_begun=True)
