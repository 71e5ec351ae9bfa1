"""Results of the runtime as plain data for the wire, and back: the same classes at both ends, equal to one another."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from toolcell.calls.finalize import failure
from toolcell.calls.result import Part, ToolFailure
from toolcell.control import PlanRows
from toolcell.results import (
    CommitResult,
    ExecutionResult,
    Outcome,
    OutputFile,
    Suspension,
)
from toolcell.tools import ErrorCode, File, Image, Status, Text, ToolResult
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import RemoteProtocolError

MAX_PARTS: Final = 1_000
"""Parts and files of one result, each."""


def plain_answer(result: ToolResult) -> dict[str, Any]:
    """Return a tool's result for the wire. One that cannot be sent becomes a failure, as for a script."""
    plain: dict[str, Any] = {"status": str(result.status)}
    if result.error is not None:
        said = failure(0, result)
        text = result.error.message if result.text == said.message else said.message
        plain["error"] = {"code": said.code, "message": text, "retryable": said.retryable, "details": said.details}
    if result.has_value:
        try:
            plain["value"] = to_plain(result.value, "result")
        except (ValueError, TypeError) as exc:
            return unusable(str(exc))
    flags = {"terminate": result.terminate, "silent": result.silent}
    texts = {"for_user": result.for_user, "job_id": result.job_id}
    plain |= {name: flag for name, flag in flags.items() if flag}
    plain |= {name: text for name, text in texts.items() if text is not None}
    for name, parts in (("parts", result.parts), ("files", result.files)):
        if parts:
            plain[name] = [_plain_part(part) for part in parts]
    return plain


def unusable(problem: str) -> dict[str, Any]:
    """Return the answer of a call whose result cannot be sent."""
    error = {"code": "no_result", "message": problem, "retryable": False, "details": {}}
    return {"status": str(Status.ERROR), "error": error}


def failed_answer(problem: object) -> dict[str, Any]:
    """Return the answer to a call that could not even be made."""
    return plain_answer(ToolResult.fail(f"the call could not be made: {problem}", code=ErrorCode.UNAVAILABLE))


def _plain_part(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"text": text}
        case Image(data, media_type):
            return {"image": data, "media_type": media_type}
        case File(name, data, media_type):
            return {"name": name, "data": data, "media_type": media_type}


def read_answer(plain: Mapping[str, Any]) -> ToolResult:
    """Return the result that a caller sent.

    Raises:
        RemoteProtocolError: it is none.
    """
    try:
        error = plain.get("error")
        failed = None if error is None else _failure(error)
        return ToolResult(
            parts=_parts(plain.get("parts", [])),
            status=Status(plain["status"]),
            error=failed,
            value=plain.get("value"),
            has_value="value" in plain,
            for_user=plain.get("for_user"),
            silent=plain.get("silent", False),
            terminate=plain.get("terminate", False),
            files=tuple(part for part in _parts(plain.get("files", [])) if isinstance(part, File)),
            job_id=plain.get("job_id"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise RemoteProtocolError(f"no result of a tool: {type(exc).__name__} {exc!s:.200}") from exc


def _failure(error: Mapping[str, Any]) -> ToolFailure:
    if not (isinstance(error["code"], str) and isinstance(error["message"], str)):
        raise ValueError("code and message of an error are texts")
    return ToolFailure(error["code"], error["message"], error["retryable"] is True, error["details"])


def _parts(given: list[Any]) -> tuple[Part, ...]:
    if len(given) > MAX_PARTS:
        raise ValueError(f"{len(given)} parts, limit {MAX_PARTS}")
    return tuple(map(_part, given))


def _part(plain: Mapping[str, Any]) -> Part:
    if "text" in plain:
        return Text(plain["text"])
    if "image" in plain:
        return Image(plain["image"], plain["media_type"])
    return File(plain["name"], plain["data"], plain["media_type"])


Made = TypeVar("Made")


def plain_record(record: Any) -> Any:
    """Return dataclasses as dicts of their fields, all the way down. Data inside them is left as it is."""
    if is_dataclass(record) and not isinstance(record, type):
        return {each.name: plain_record(getattr(record, each.name)) for each in fields(record)}
    if isinstance(record, Enum):
        return str(record.value)
    if isinstance(record, PlanRows):
        others = {name: plain_record(getattr(record, name)) for name in ("run_id", "journal_id", "suspension", "files")}
        return {"rows": list(record), **others}
    if isinstance(record, tuple):
        return [plain_record(each) for each in record]
    if isinstance(record, Mapping) and type(record) is not dict:
        return {name: plain_record(each) for name, each in record.items()}
    return record


def read_as(kind: type[Made], plain: Any) -> Made:
    """Read plain data of the other end as `kind`.

    Raises:
        RemoteProtocolError: it is something else.
    """
    try:
        found: Made = _plan_rows(plain) if kind is PlanRows else _adapter(kind).validate_python(plain)  # type: ignore[arg-type]
    except (ValidationError, LookupError, TypeError) as exc:
        why = exc.errors(include_url=False, include_input=False)[0]["msg"] if isinstance(exc, ValidationError) else exc
        raise RemoteProtocolError(f"no {kind}: {why}") from exc
    return found


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _plan_rows(plain: Any) -> Any:
    rows = PlanRows(plain["rows"], plain["run_id"], plain["journal_id"])
    rows.suspension = read_as(Suspension, plain["suspension"]) if plain["suspension"] is not None else None
    rows.files = tuple(read_as(OutputFile, each) for each in plain["files"])
    return rows


@dataclass(frozen=True, slots=True)
class SessionAnswer:
    """What a session's method returned, and the state of the session after it."""

    value: Any
    state: dict[str, Any]


def reference_to(result: object) -> dict[str, Any]:
    """Return what the service needs to know of a result that a caller hands back, such as to `revert`."""
    kinds = {ExecutionResult: "result", CommitResult: "commit", PlanRows: "plan"}
    kind = next((name for cls, name in kinds.items() if isinstance(result, cls)), "")
    plain = {"kind": kind, "run_id": getattr(result, "run_id", ""), "journal_id": getattr(result, "journal_id", "")}
    if isinstance(result, ExecutionResult):
        plain |= {name: getattr(result, name) for name in ("draft_id", "draft_digest", "has_value", "value")}
    return plain


def referred(plain: Mapping[str, Any] | None) -> Any:
    """Return a result that stands for the one that a caller handed back; None if there is none."""
    if plain is None:
        return None
    run_id, journal_id = _text(plain, "run_id"), _text(plain, "journal_id")
    match plain.get("kind"):
        case "result":
            return ExecutionResult(
                run_id,
                Outcome.OK,
                plain.get("value"),
                plain.get("has_value") is True,
                draft_id=_text(plain, "draft_id"),
                draft_digest=_text(plain, "draft_digest"),
                journal_id=journal_id,
            )
        case "commit":
            return CommitResult(run_id, (), journal_id=journal_id)
        case "plan":
            return PlanRows([], run_id, journal_id)
    return None


def _text(plain: Mapping[str, Any], name: str) -> str:
    found = plain.get(name, "")
    return found if isinstance(found, str) else ""


def sendable_value(value: Any, what: str) -> Any:
    """Return a value as the wire takes it, or a text that says why it cannot be sent."""
    try:
        return to_plain(value, what)
    except (ValueError, TypeError) as exc:
        return f"({exc})"
