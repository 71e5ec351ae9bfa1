"""Makes a result of what a tool returned or raised: bounded, redacted, and with the ids of its call.

Decides; it never runs anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from toolcell.errors import ToolError
from toolcell.text import cut_text
from toolcell.tools.call import Call
from toolcell.tools.result import (
    ErrorCode,
    File,
    Image,
    Part,
    ResultMeta,
    Status,
    Text,
    TokenUsage,
    ToolFailure,
    ToolResult,
    of_plain,
    to_json,
)
from toolcell.tools.run_state import NO_SECRETS, Secrets
from toolcell.tools.values import JSON_SCALARS, plain_value


def as_result(value: Any, requires_result: bool = False) -> ToolResult:
    """Return a tool's return value as a result. A value that cannot be one is a failure of the call."""
    kind = type(value)
    if kind in JSON_SCALARS:
        if kind is str:
            return ToolResult(parts=(Text(value),))
        if value is None:
            return _no_result() if requires_result else ToolResult()
        return of_plain(value)
    if kind is ToolResult:
        return _well_formed(value)
    if kind is dict or kind is list:
        return _structured(value)
    return _odd_result(value)


def _odd_result(value: Any) -> ToolResult:
    if hasattr(value, "to_tool_result"):
        return as_result(value.to_tool_result(), requires_result=True)
    match value:
        case ToolResult():
            return _well_formed(value)
        case str():
            return ToolResult(parts=(Text(str(value)),))
        case bytes() | bytearray():
            return ToolResult(files=(File("result.bin", bytes(value)),), parts=(Text(f"({len(value)} bytes)"),))
        case File(name, data, _):
            return ToolResult(files=(value,), parts=(Text(f"({name}, {len(data)} bytes)"),))
        case Text() | Image():
            return ToolResult(parts=(value,))
        case Mapping() | list() | tuple() | int() | float() | BaseModel():
            return _structured(value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _structured(value)
    message = f"tool returned {type(value).__name__}, which is not a result: return text, JSON data or a ToolResult"
    return ToolResult.fail(message, code=ErrorCode.NO_RESULT)


def _well_formed(result: ToolResult) -> ToolResult:
    """Return a tool's own result, or a failure that names the field with a wrong type: later steps rely on them."""
    for name, accepted in _FIELD_TYPES:
        if not isinstance(getattr(result, name), accepted):
            return _malformed(name)
    if not all(isinstance(part, Text | Image | File) for part in result.parts) or not all(
        isinstance(part.text, str) for part in result.parts if isinstance(part, Text)
    ):
        return _malformed("parts")
    if not all(isinstance(file, File) for file in result.files):
        return _malformed("files")
    try:
        to_json(result.value)
    except (TypeError, ValueError, RecursionError):  # a key that is no text, data that contains itself
        return _malformed("value")
    return result


_FIELD_TYPES: tuple[tuple[str, Any], ...] = (
    ("parts", tuple),
    ("status", str),
    ("error", ToolFailure | None),
    ("for_user", str | None),
    ("files", tuple),
    ("job_id", str | None),
    ("usage", TokenUsage),
    ("meta", ResultMeta),
)


def _malformed(name: str) -> ToolResult:
    return ToolResult.fail(f"tool returned a ToolResult with a malformed {name!r}", code=ErrorCode.NO_RESULT)


def _structured(value: Any) -> ToolResult:
    if isinstance(value, tuple) and value and all(isinstance(part, Text | Image | File) for part in value):
        return ToolResult(parts=value)
    try:
        return of_plain(plain_value(value))
    except ValueError as exc:
        return ToolResult.fail(f"tool returned data that is not JSON: {exc}", code=ErrorCode.NO_RESULT)


def _no_result() -> ToolResult:
    return ToolResult.fail("tool returned no result", code=ErrorCode.NO_RESULT)


def raised(name: str, exc: BaseException) -> ToolResult:
    """Return a tool's exception as a failure: class and message for the model, the traceback only in `exc`."""
    if isinstance(exc, ToolError):
        return ToolResult.fail(exc.message, code=exc.code, retryable=exc.retryable, details=exc.details, exc=exc)
    said = _message_of(exc)
    message = f'tool "{name}" panicked: {type(exc).__name__}{f": {said}" if said else ""}'
    return ToolResult.fail(message, code=ErrorCode.EXCEPTION, exc=exc)


def _message_of(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # an exception whose __str__ fails must not take the batch with it
        return ""


def finalize(result: ToolResult, call: Call, duration_s: float, job_id: str | None = None) -> ToolResult:
    """Return the result as everybody else gets it: bounded, without secrets, with its call's ids on it.

    `job_id`: of work that the tool announced; a pending result without an id gets it.
    """
    limit = call.options.max_result_bytes
    truncated = result.meta.truncated
    if limit is not None and not result.is_error:
        result, truncated = _bounded(result, limit)
    if call.run.secrets is not NO_SECRETS:
        try:
            result = _redacted(result, call.run.secrets)
        except RecursionError:  # what cannot be searched for secrets is not passed on
            result = ToolResult.fail("tool returned data that is nested without end", code=ErrorCode.NO_RESULT)
    if result.status is Status.PENDING and result.job_id is None and job_id is not None:
        result = dataclasses.replace(result, job_id=job_id)
    return result.stamped(call.call_id, call.name, int(duration_s * 1e6) / 1000, truncated)


def _bounded(result: ToolResult, limit: int) -> tuple[ToolResult, bool]:
    if result.has_value and (size := len(to_json(result.value).encode("utf-8", "replace"))) > limit:
        failure = ToolResult.fail(f"result too large ({size} > {limit} bytes)", code=ErrorCode.TOO_LARGE)
        return failure, False
    parts, cut = _cut_parts(result.parts, limit)
    return (dataclasses.replace(result, parts=parts), True) if cut else (result, False)


def _cut_parts(parts: tuple[Part, ...], limit: int) -> tuple[tuple[Part, ...], bool]:
    room, was_cut = limit, False
    kept: list[Part] = []
    for part in parts:
        if isinstance(part, Text):
            text, cut = cut_text(part.text, room)
            room = max(0, room - len(text))
            was_cut = was_cut or cut
            kept.append(Text(text))
        else:
            kept.append(part)
    return tuple(kept), was_cut


def _redacted(result: ToolResult, secrets: Secrets) -> ToolResult:
    parts = tuple(Text(secrets.redact(part.text)) if isinstance(part, Text) else part for part in result.parts)
    error = result.error
    if error is not None:
        details = secrets.redact_value(dict(error.details))
        error = ToolFailure(error.code, secrets.redact(error.message), error.retryable, details)
    value = secrets.redact_value(result.value) if result.has_value else None
    for_user = secrets.redact(result.for_user) if result.for_user else result.for_user
    return dataclasses.replace(result, parts=parts, error=error, value=value, for_user=for_user)
