"""What other systems write: their forms of results, events, definitions and calls.

For programs and transcripts written against one of those forms; nothing else in toolcell knows them. Each function is a
plain mapping of fields; where there are two directions, both agree on everything that the other form can express.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolcell.calls import events
from toolcell.calls.call import CompletionCallback
from toolcell.calls.result import Part
from toolcell.errors import RegistrationError
from toolcell.tools import Event, RunContext, Status, Text, ToolDefinition, ToolRegistry, ToolResult

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
    return ToolResult.fail(message, parts=images, terminate=plain.terminate, details=plain.details)


# for_llm / for_user


ok, silent, user = ToolResult.ok, ToolResult.silenced, ToolResult.user
async_, error = ToolResult.async_, ToolResult.fail
"""What makes a result, by the names of that form."""


def to_for_llm(result: ToolResult) -> dict[str, Any]:
    """Shape: {"for_llm", "for_user" unless empty, "silent", "is_error", "async"}; exceptions are left out."""
    plain: dict[str, Any] = {"for_llm": result.text}
    if result.for_user:
        plain["for_user"] = result.for_user
    flags = {"silent": result.silent, "is_error": result.is_error, "async": result.status is Status.PENDING}
    return plain | flags


def from_for_llm(plain: Mapping[str, Any]) -> ToolResult:
    """Convert back."""
    text, for_user = plain.get("for_llm"), plain.get("for_user") or None
    quiet = bool(plain.get("silent", False))
    if plain.get("is_error"):
        return ToolResult.fail(text or "", for_user=for_user, silent=quiet)
    status = Status.PENDING if plain.get("async") else Status.OK
    return ToolResult(parts=() if text is None else (Text(text),), status=status, for_user=for_user, silent=quiet)


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


# Events


def as_stream_event(event: Event) -> dict[str, Any] | None:
    """Shape: {"type", "name", ...}; types are tool-call-start, tool-call-result, tool-progress, agent-start and
    agent-finish. None: that system has no such event."""
    match event:
        case Event(type=events.TOOL_START):
            return {"type": "tool-call-start", "name": event.tool, "args": event.args}
        case Event(type=events.TOOL_UPDATE | events.TOOL_OUTPUT):
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


def new_tool(name: str, description: str, record: Any) -> tuple[ToolDefinition | None, str]:
    """Derive a definition as `ToolDefinition.from_model` does. Shape: (definition, "") or (None, what is wrong)."""
    try:
        return ToolDefinition.from_model(name, description, record), ""
    except RegistrationError as exc:
        return None, str(exc)


def all_definitions(registry: ToolRegistry) -> list[ToolDefinition]:
    """Return the definitions that a model sees."""
    return registry.definitions()


def get_definitions(registry: ToolRegistry) -> list[dict[str, Any]]:
    """Return definitions as OpenAI takes them, as plain dicts."""
    return [dict(definition) for definition in registry.to_provider_defs()]


def get_summaries(registry: ToolRegistry) -> list[str]:
    """Shape: "- `name` - description", one for each tool."""
    tools = registry.state.tools.values()
    return [f"- `{tool.name}` - {tool.definition.description}" for tool in tools]


# Registering and calling


def register_or_replace(registry: ToolRegistry, *tool: Any, **options: Any) -> None:
    """Register a tool, or a name, a description, a schema and a function, and replace a tool of the same name."""
    register = registry.add if len(tool) == 1 else registry.register
    register(*tool, replace=True, **options)


async def execute_with_context(
    registry: ToolRegistry,
    name: str,
    args: Mapping[str, Any] | str,
    channel: str = "",
    chat_id: str = "",
    callback: CompletionCallback | None = None,
) -> ToolResult:
    """Make one call for a chat; `callback` receives the final result of work that goes on after the call."""
    context = RunContext(channel=channel, chat_id=chat_id, on_complete=callback, events=registry.events)
    return await registry.dispatch(name, args, context=context)
