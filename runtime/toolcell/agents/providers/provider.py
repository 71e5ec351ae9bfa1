"""What the loop needs of a model: one `chat`. And what it gets back, read from whatever shape a provider uses.

Knows no SDK. Messages are plain dicts in OpenAI's shape, with two keys more where they apply: `is_error` and `images`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

from toolcell.errors import ToolcellError
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.model_calls import ToolCall
from toolcell.tools.result import NO_USAGE, TokenUsage

Message = dict[str, Any]
"""{"role", "content"}, and `tool_calls` of an assistant, `tool_call_id` (`is_error`, `images`) of a tool's answer."""

OnText = Callable[[str], None]

DEFAULT_OPTIONS: Mapping[str, Any] = {"max_tokens": 4096, "temperature": 0.7}
"""Used when a run gives no options."""


class ProviderError(ToolcellError):
    """A model could not be asked, or did not answer."""

    code = "provider_error"

    def __init__(
        self, message: str, *, status: int | None = None, retryable: bool = False, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status, when it got that far."""
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        """What the provider asked to wait."""


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """One answer of a model."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    usage: TokenUsage = NO_USAGE
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What only this provider needs back in the next request."""

    @classmethod
    def read(cls, answer: Any) -> Self:
        """An answer from a ModelResponse, a text, or a dict with `content` and `tool_calls`.

        Raises:
            ProviderError: it is none of these.
        """
        match answer:
            case cls():
                return answer
            case str():
                return cls(answer)
            case Mapping():
                calls = tuple(ToolCall.read(call) for call in answer.get("tool_calls") or ())
                reason = answer.get("finish_reason") or ("tool_calls" if calls else "stop")
                return cls(answer.get("content") or "", calls, reason, read_usage(answer.get("usage")))
        raise ProviderError(f"model answered with {type(answer).__name__}, which is no answer")


def read_usage(usage: Any) -> TokenUsage:
    """Token counts out of a dict or object, under OpenAI's names or Anthropic's."""
    if isinstance(usage, TokenUsage):
        return usage

    def count(*names: str) -> int:
        for name in names:
            value = usage.get(name) if isinstance(usage, Mapping) else getattr(usage, name, None)
            if isinstance(value, int):
                return value
        return 0

    return TokenUsage(count("input_tokens", "prompt_tokens"), count("output_tokens", "completion_tokens"))


class Provider(Protocol):
    """A model. May also have `supports_images = True`, and `stream_chat`."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any], /
    ) -> Any:
        """Answer: a `ModelResponse`, or anything `ModelResponse.read` takes."""


@runtime_checkable
class StreamingProvider(Protocol):
    """A model that can show its answer while it is being made."""

    async def stream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        model: str,
        options: Mapping[str, Any],
        on_text: OnText,
        /,
    ) -> Any:
        """The same as `chat`, telling `on_text` each piece of text as it comes."""


def system(content: str) -> Message:
    """A system message."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(response: ModelResponse) -> Message:
    """The transcript's record of an answer; arguments stay the JSON text they came as."""
    message: Message = {"role": "assistant", "content": response.content}
    if response.tool_calls:
        message["tool_calls"] = [call.to_openai() for call in response.tool_calls]
    if response.extra:
        message["extra"] = dict(response.extra)
    return message
