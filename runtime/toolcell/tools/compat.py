"""One result model, seen as four others: content/error, content parts, for_llm/for_user, and Ok/Err.

For programs and transcripts written against one of those shapes. Each function is a plain mapping of fields; both
directions agree on everything the other shape can express.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolcell.text import cut_text
from toolcell.tools.result import Image, Part, Status, Text, ToolResult

MAX_TRANSCRIPT_CHARS = 100_000
TRUNCATED_MARK = "\n\n[output truncated — original was longer]"
IMAGE_OMITTED = "(tool image omitted: model does not support images)"

ErrorStyle = Literal["plain", "error:", "ERROR:"]
"""How a failed result's text begins: as it is, `error: ...` or `ERROR: ...`."""


# content / error


def to_content_error(result: ToolResult) -> dict[str, str]:
    """Shape: {"content"} and, on failure only, {"error"}."""
    if result.error is None:
        return {"content": result.text}
    return {"content": result.output, "error": result.error.message}


def from_content_error(plain: Mapping[str, str]) -> ToolResult:
    """The other way; a non-empty error is a failure, whatever the content."""
    content, error = plain.get("content", ""), plain.get("error", "")
    return ToolResult.fail(error, output=content) if error else ToolResult.ok(content)


# content parts, details, terminate


@dataclass(frozen=True, slots=True)
class PartsResult:
    """Parts for the model, details for people, a hint to stop."""

    content: tuple[Part, ...]
    details: Any = None
    terminate: bool = False
    is_error: bool = False


def to_parts(result: ToolResult) -> PartsResult:
    """Everything the model reads as parts; a value without parts becomes text."""
    images = tuple(part for part in result.parts if not isinstance(part, Text))
    text = result.text
    content: tuple[Part, ...] = result.parts if result.parts and result.error is None else ()
    if not content:
        content = ((Text(text),) if text else ()) + images
    return PartsResult(content, result.details, result.terminate, result.is_error)


def from_parts(plain: PartsResult) -> ToolResult:
    """The other way; the text of a failure is its message."""
    if not plain.is_error:
        return ToolResult(parts=plain.content, details=plain.details, terminate=plain.terminate)
    message = "".join(part.text for part in plain.content if isinstance(part, Text))
    images = tuple(part for part in plain.content if not isinstance(part, Text))
    return ToolResult.fail(message, parts=images, terminate=plain.terminate).with_details(plain.details)


def parts_for_model(result: ToolResult, *, can_see: bool) -> list[Part]:
    """Parts as a model gets them: for one that reads only text, a note stands in for each image."""
    parts = to_parts(result).content
    return [Text(IMAGE_OMITTED) if isinstance(part, Image) and not can_see else part for part in parts]


# for_llm / for_user


def ok(text: str) -> ToolResult:
    """For the model only."""
    return ToolResult.ok(text)


def silent(text: str) -> ToolResult:
    """For the model; nothing is shown to the user."""
    return ToolResult.silenced(text)


def async_(text: str) -> ToolResult:
    """Work goes on in the background."""
    return ToolResult.async_(text)


def error(message: str) -> ToolResult:
    """A failure."""
    return ToolResult.fail(message)


def user(text: str) -> ToolResult:
    """The same for the model and the user."""
    return ToolResult.user(text)


def to_for_llm(result: ToolResult) -> dict[str, Any]:
    """Shape: {"for_llm", "for_user" unless empty, "silent", "is_error", "async"}; exceptions are left out."""
    plain: dict[str, Any] = {"for_llm": result.text}
    if result.for_user:
        plain["for_user"] = result.for_user
    flags = {"silent": result.silent, "is_error": result.is_error, "async": result.status is Status.PENDING}
    return plain | flags


def from_for_llm(plain: Mapping[str, Any]) -> ToolResult:
    """The other way."""
    text, for_user = plain.get("for_llm", ""), plain.get("for_user") or None
    quiet = bool(plain.get("silent", False))
    if plain.get("is_error"):
        return ToolResult.fail(text, for_user=for_user, silent=quiet)
    status = Status.PENDING if plain.get("async") else Status.OK
    return ToolResult(parts=(Text(text),) if text else (), status=status, for_user=for_user, silent=quiet)


# Ok / Err


@dataclass(frozen=True, slots=True)
class Ok:
    """A tool function may return this for success."""

    text: str

    def to_tool_result(self) -> ToolResult:
        """The same as a result."""
        return ToolResult.ok(self.text)


@dataclass(frozen=True, slots=True)
class Err:
    """A tool function may return this for an expected failure."""

    message: str

    def to_tool_result(self) -> ToolResult:
        """The same as a result."""
        return ToolResult.fail(self.message)


def to_ok_err(result: ToolResult) -> Ok | Err:
    """Text or message; nothing else fits."""
    return Err(result.text) if result.is_error else Ok(result.text)


def from_ok_err(plain: Ok | Err) -> ToolResult:
    """The other way."""
    return plain.to_tool_result()


def observed(result: ToolResult) -> str:
    """Shape: `SUCCESS: <text>` or `ERROR: <message>`."""
    return f"{'ERROR' if result.is_error else 'SUCCESS'}: {result.text}"


# Transcripts


def message_text(result: ToolResult, style: ErrorStyle = "plain", max_chars: int = MAX_TRANSCRIPT_CHARS) -> str:
    """What goes into the transcript: `max_chars` characters of it, and a mark when there were more."""
    text = result.text
    if result.is_error and style != "plain":
        text = f"{style} {text}"
    kept, was_cut = cut_text(text, max_chars)
    return kept + TRUNCATED_MARK if was_cut else kept


__all__ = [
    "Err", "ErrorStyle", "Ok", "PartsResult", "async_", "error", "from_content_error", "from_for_llm", "from_ok_err",
    "from_parts", "message_text", "observed", "ok", "parts_for_model", "silent", "to_content_error", "to_for_llm",
    "to_ok_err", "to_parts", "user",
]  # fmt: skip
