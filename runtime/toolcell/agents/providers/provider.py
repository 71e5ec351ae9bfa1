"""The Protocol that every model implements, and the messages and responses it exchanges with the loop.

Messages are plain dicts in OpenAI's format: the one form of a conversation, which each provider writes in its own.
A tool's answer may have more keys: `is_error`, `images`, and `labels`, which any message may have: what has been read
up to it. An assistant's may have `extra`: what its provider needs back as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, runtime_checkable

from toolcell.calls.arguments import unique_ids
from toolcell.calls.result import NO_USAGE, TokenUsage
from toolcell.errors import ToolcellError
from toolcell.support.text import whole_characters
from toolcell.tools import ToolCall, ToolDefinition

Message = dict[str, Any]
"""Shape: {"role", "content"}; an assistant's also has `tool_calls`, a tool's answer has `tool_call_id`."""

REFUSED, PAUSED = "refusal", "pause_turn"
"""Finish reasons: the model does not want to answer, and the model has not finished its turn."""

FIELDS, CALL_FIELDS = "fields", "calls"
"""Under `extra`: fields of a message that this form does not have, as they came, and those of its calls."""

_READ_FIELDS = frozenset(
    {"role", "content", "refusal", "tool_calls", "function_call", "finish_reason", "usage", "extra"}
)
_READ_FIELDS_OF_CALLS = frozenset({"index", "id", "type", "function"})
_READ_FIELDS_OF_FUNCTIONS = frozenset({"id", "name", "arguments"})

_REASONING = ("reasoning_content", "reasoning")
_THOUGHTS = ("thinking", "reasoning")
"""How the types of parts begin that hold thoughts."""

DEFAULT_OPTIONS: Mapping[str, Any] = {"max_tokens": 4096, "temperature": 0.7}
"""What a provider gets when a run gives no options. Those for OpenAI and Anthropic leave the choice to the model."""


class ProviderError(ToolcellError):
    """A request to a model failed."""

    code = "provider_error"

    def __init__(
        self, message: str, *, status: int | None = None, retryable: bool = False, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status, if there was a response."""
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        """The wait that the provider asked for."""


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """One response of a model."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    usage: TokenUsage = NO_USAGE
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Data that this provider needs back in its next request."""

    @classmethod
    def read(cls, answer: Any) -> Self:
        """Convert a provider's answer: a ModelResponse, a text, or a dict with `content` and `tool_calls`.

        Raises:
            ProviderError: `answer` is something else.
        """
        match answer:
            case cls():
                return answer
            case str():
                return cls(whole_characters(answer))
            case Mapping():
                return cls._read_message(whole_characters(answer))
        raise ProviderError(f"the provider returned {type(answer).__name__}, which is not an answer")

    @classmethod
    def _read_message(cls, message: Mapping[str, Any]) -> Self:
        """Read an assistant's message. Whatever has no place in a response is kept in `extra`."""
        content, found = message.get("content"), message.get("tool_calls") or ()
        calls = tuple(unique_ids(map(ToolCall.read, found)))
        fields = {name: value for name, value in message.items() if name not in _READ_FIELDS and value is not None}
        if isinstance(content, list) and any(not _is_plain_text(part) for part in content):
            fields["content"] = content
        of_calls = {call.id: kept for call, given in zip(calls, found, strict=True) if (kept := call_fields(given))}
        made = {name: kept for name, kept in ((FIELDS, fields), (CALL_FIELDS, of_calls)) if kept}
        reason = message.get("finish_reason") or ("tool_calls" if calls else "stop")
        text, refusal = text_of(content), message.get("refusal")
        return cls(
            text or refusal or "",
            calls,
            REFUSED if refusal else reason,
            read_usage(message.get("usage")),
            {**(message.get("extra") or {}), **made},
        )


def text_of(content: Any) -> str:
    """Return the text of a message's content: text, a list of parts, or nothing. Thoughts are not part of it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = [part for part in content if isinstance(part, Mapping)]
    texts = [part.get("text") for part in parts if part.get("type", "text") in ("text", "output_text")]
    return "".join(text for text in texts if isinstance(text, str))


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the thoughts in a message or in a piece of one. Servers have them under different names.

    Source: DeepSeek and Kimi, OpenRouter, MiniMax, Mistral, Anthropic.
    """
    for name in _REASONING:
        if isinstance(text := message.get(name), str) and text:
            return text
    parts = [part for name in ("reasoning_details", "content", "blocks") for part in _parts_of(message.get(name))]
    thoughts = [part for part in parts if str(part.get("type")).startswith(_THOUGHTS)]
    return "".join(text_of(part.get(name)) for part in thoughts for name in ("text", "summary", "thinking"))


def _parts_of(value: Any) -> list[Mapping[str, Any]]:
    return [part for part in value if isinstance(part, Mapping)] if isinstance(value, list) else []


def _is_plain_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.keys() == {"type", "text"} and part["type"] == "text"


def call_fields(call: Any) -> dict[str, Any]:
    """Return the fields of a call in OpenAI's format that a `ToolCall` does not have, such as Gemini's signatures."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return {}
    kept = {name: value for name, value in call.items() if name not in _READ_FIELDS_OF_CALLS and value is not None}
    inside = {name: value for name, value in function.items() if name not in _READ_FIELDS_OF_FUNCTIONS}
    return kept | ({"function": inside} if inside else {})


def read_usage(usage: Any) -> TokenUsage:
    """Read token counts from a dict or an object, under OpenAI's names or Anthropic's."""
    if isinstance(usage, TokenUsage):
        return usage

    def count(*names: str) -> int:
        for name in names:
            value = usage.get(name) if isinstance(usage, Mapping) else getattr(usage, name, None)
            if isinstance(value, int):
                return max(value, 0)  # nobody's counts give a budget back
        return 0

    found = TokenUsage(count("input_tokens", "prompt_tokens"), count("output_tokens", "completion_tokens"))
    return found if found.total else TokenUsage(count("total_tokens"), 0)


@dataclass(frozen=True, slots=True)
class MessageUpdate:
    """A piece of a message that is being generated."""

    kind: Literal["text", "reasoning", "arguments"]
    piece: str
    """What has come since the last update of this kind, of arguments: of this call. May be empty when a call begins."""
    call_id: str = ""
    """Id of the call whose arguments these are; empty if the server gives it later or never."""
    tool: str = ""
    """Name of the tool that is called."""


OnUpdate = Callable[[MessageUpdate], None]


def updates_of(response: ModelResponse) -> Iterator[MessageUpdate]:
    """Return a whole response as updates."""
    for kept in (response.extra, response.extra.get(FIELDS) or {}):
        if thoughts := reasoning_of(kept):
            yield MessageUpdate("reasoning", thoughts)
    if response.content:
        yield MessageUpdate("text", response.content)
    for call in response.tool_calls:
        yield MessageUpdate("arguments", call.arguments_json, call.id, call.name)


class Provider(Protocol):
    """A model. It may also have `supports_images = True`, and `stream_chat`."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any], /
    ) -> Any:
        """Return the model's response: a `ModelResponse`, or anything that `ModelResponse.read` accepts."""


@runtime_checkable
class StreamingProvider(Protocol):
    """A model that can report its response while it is generated."""

    async def stream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        model: str,
        options: Mapping[str, Any],
        on_update: OnUpdate,
        /,
    ) -> Any:
        """Do the same as `chat`, and call `on_update` with each piece of the message as it arrives."""


def system(content: str) -> Message:
    """Make a system message."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """Make a user message."""
    return {"role": "user", "content": content}


def assistant(response: ModelResponse) -> Message:
    """Make the transcript's message from a response. The arguments of its calls are those that are called, as JSON."""
    message: Message = {"role": "assistant", "content": response.content}
    if response.tool_calls:
        message["tool_calls"] = [call.to_openai() for call in response.tool_calls]
    if response.extra:
        message["extra"] = dict(response.extra)
    return message
