"""Results of tools across the wire. What an exception says stays with the caller: the service gets its class's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from toolcell.run import failure
from toolcell.tools import File, Image, Part, Status, Text, ToolFailure, ToolResult
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge

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
        except (UnsendableValue, ValueTooLarge, ValueError, TypeError) as exc:
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
    except (KeyError, TypeError, ValueError) as exc:
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
