"""What other systems write: their forms of results, events and definitions.

For programs and transcripts written against one of those forms. Each function is a plain mapping of fields; where
there are two directions, both agree on everything that the other form can express.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolcell.errors import RegistrationError
from toolcell.text import cut_text
from toolcell.tools import events
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.events import Event
from toolcell.tools.options import ToolOptions
from toolcell.tools.parts import Image, Part, Text
from toolcell.tools.result import MAX_MODEL_CHARS, Status, ToolResult
from toolcell.tools.stub_types import declared

MAX_TRANSCRIPT_CHARS = MAX_MODEL_CHARS
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
    """Convert back; a non-empty error is a failure, whatever the content."""
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
    """Return everything that the model reads as parts; a value without parts becomes text."""
    images = tuple(part for part in result.parts if not isinstance(part, Text))
    text = result.text
    content: tuple[Part, ...] = result.parts if result.parts and result.error is None else ()
    if not content:
        content = ((Text(text),) if text else ()) + images
    return PartsResult(content, result.details, result.terminate, result.is_error)


def from_parts(plain: PartsResult) -> ToolResult:
    """Convert back; the text of a failure is its message."""
    if not plain.is_error:
        return ToolResult(parts=plain.content, details=plain.details, terminate=plain.terminate)
    message = "".join(part.text for part in plain.content if isinstance(part, Text))
    images = tuple(part for part in plain.content if not isinstance(part, Text))
    return ToolResult.fail(message, parts=images, terminate=plain.terminate).with_details(plain.details)


def parts_for_model(result: ToolResult, *, can_see: bool) -> list[Part]:
    """Return parts as a model gets them; a model that reads only text gets a note in place of each image."""
    parts = [
        Text(cut_text(part.text, MAX_TRANSCRIPT_CHARS)[0]) if isinstance(part, Text) else part
        for part in to_parts(result).content
    ]
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
    """Convert back."""
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
        """Return the same as a result."""
        return ToolResult.ok(self.text)


@dataclass(frozen=True, slots=True)
class Err:
    """A tool function may return this for an expected failure."""

    message: str

    def to_tool_result(self) -> ToolResult:
        """Return the same as a result."""
        return ToolResult.fail(self.message)


def to_ok_err(result: ToolResult) -> Ok | Err:
    """Text or message; nothing else fits."""
    return Err(result.text) if result.is_error else Ok(result.text)


def from_ok_err(plain: Ok | Err) -> ToolResult:
    """Convert back."""
    return plain.to_tool_result()


def observed(result: ToolResult) -> str:
    """Shape: `SUCCESS: <text>` or `ERROR: <message>`."""
    return f"{'ERROR' if result.is_error else 'SUCCESS'}: {result.text}"


# Transcripts


def message_text(result: ToolResult, style: ErrorStyle = "plain", max_chars: int = MAX_TRANSCRIPT_CHARS) -> str:
    """Return what goes into the transcript: `max_chars` characters, and a mark when there were more."""
    text = result.whole_text
    if result.is_error and style != "plain":
        text = f"{style} {text}"
    kept, was_cut = cut_text(text, max_chars)
    return kept + TRUNCATED_MARK if was_cut else kept


# Events


def as_stream_event(event: Event) -> dict[str, Any] | None:
    """Shape: {"type", "name", ...}; types are tool-call-start, tool-call-result, tool-progress, agent-start and
    agent-finish. None: that system has no such event."""
    match event:
        case Event(type=events.TOOL_START):
            return {"type": "tool-call-start", "name": event.tool, "args": event.args}
        case Event(type=events.TOOL_UPDATE):
            return {"type": "tool-progress", "name": event.tool, "update": event.update}
        case Event(type=events.TOOL_END, result=ToolResult(usage=used) as result):
            usage = {"input_tokens": used.input_tokens, "output_tokens": used.output_tokens}
            finished = {"type": "tool-call-result", "name": event.tool, "content": result.text}
            return finished | {"usage": usage, "duration": event.duration_ms}
        case Event(type=events.AGENT_START) if event.data.get("depth"):
            return {"type": "agent-start", "name": event.data.get("agent")}
        case Event(type=events.AGENT_END) if event.data.get("depth"):
            return {"type": "agent-finish", "name": event.data.get("agent"), "content": event.data.get("content")}
    return None


def as_call_event(event: Event) -> dict[str, Any] | None:
    """Shape: {"ToolCallStarted": {name, args}} or {"ToolCallFinished": {name, result, success}}."""
    if event.type == events.TOOL_START:
        return {"ToolCallStarted": {"name": event.tool, "args": event.args}}
    if event.type == events.TOOL_END and event.result is not None:
        result, success = event.result.text, not event.result.is_error
        return {"ToolCallFinished": {"name": event.tool, "result": result, "success": success}}
    return None


# Definitions


def mcp_tool(definition: ToolDefinition, options: ToolOptions) -> dict[str, Any]:
    """Return one tool as MCP's tools/list gives it.

    Source: Model Context Protocol, revision 2025-06-18: `outputSchema` must be of type object, and hints are hints.
    """
    described: dict[str, Any] = definition.to_mcp()
    if options.label:
        described["title"] = options.label
    returns = declared(options.returns)
    if returns is not None and returns.get("type") == "object":
        described["outputSchema"] = dict(returns)
    described["annotations"] = {
        "readOnlyHint": options.read_only,
        "idempotentHint": options.idempotent or options.read_only,
        "destructiveHint": options.requires_approval and not options.read_only,
    }
    return described


def new_tool(name: str, description: str, record: Any) -> tuple[ToolDefinition | None, str]:
    """Derive a definition as `ToolDefinition.from_model` does. Shape: (definition, "") or (None, what is wrong)."""
    try:
        return ToolDefinition.from_model(name, description, record), ""
    except RegistrationError as exc:
        return None, str(exc)
