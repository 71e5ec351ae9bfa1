"""Models behind OpenAI's Chat Completions API, through the official SDK (`pip install toolcell[openai]`).

Translates messages and answers. The loop retries, so the SDK's own retries are off.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from toolcell.agents.providers.provider import REFUSED, Message, ModelResponse, OnText, ProviderError, read_usage
from toolcell.agents.providers.sdk import SdkProvider, StreamAccumulator
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.model_calls import ToolCall
from toolcell.tools.result import NO_USAGE

_OWN_KEYS = frozenset({"is_error", "images", "extra", "finish_reason", "labels"})
"""Keys of our messages that the API does not know."""

_NEWER_NAMES = {"max_tokens": "max_completion_tokens"}


class OpenAIProvider(SdkProvider):
    """Any model that an `openai.AsyncOpenAI` client can reach."""

    package = "openai"
    client_class = "AsyncOpenAI"
    stream_options: ClassVar[Mapping[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}

    def create_method(self, client: Any) -> Callable[..., Awaitable[Any]]:
        """Return the method behind POST /v1/chat/completions."""
        method: Callable[..., Awaitable[Any]] = client.chat.completions.create
        return method

    def request(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Translate a request. `max_tokens` is sent under its newer name: many models refuse the old one."""
        options = {_NEWER_NAMES.get(name, name): value for name, value in options.items()}
        request = {**options, "model": model, "messages": to_openai(messages)}
        if tools:
            request["tools"] = [tool.to_openai() for tool in tools]
        return request

    def read_answer(self, answer: Any) -> ModelResponse:
        """Translate a completion."""
        if not answer.choices:
            raise ProviderError("the model's answer has no choices")
        choice = answer.choices[0]
        message, usage = choice.message, read_usage(answer.usage)
        calls = tuple(_read_call(call) for call in message.tool_calls or ())
        if refusal := getattr(message, "refusal", None):
            return ModelResponse(message.content or refusal, calls, REFUSED, usage)
        return ModelResponse(message.content or "", calls, _finish_reason(choice.finish_reason or "stop"), usage)

    def accumulator(self, on_text: OnText) -> StreamAccumulator:
        """Return what builds a completion from stream chunks."""
        return _CompletionAccumulator(on_text)


def to_openai(messages: Iterable[Message]) -> list[Message]:
    """Translate messages. A tool's answer cannot hold images in this API, so they follow in a user message."""
    sent: list[Message] = []
    images: list[Mapping[str, str]] = []
    for message in messages:
        if images and message.get("role") != "tool":
            sent.append(_image_message(images))
            images = []
        sent.append({key: value for key, value in message.items() if key not in _OWN_KEYS})
        images += message.get("images", ())
    return [*sent, _image_message(images)] if images else sent


def _image_message(images: Iterable[Mapping[str, str]]) -> Message:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:{image['media_type']};base64,{image['data']}"}}
        for image in images
    ]
    return {"role": "user", "content": [{"type": "text", "text": "Images from the tools above:"}, *parts]}


def _finish_reason(reason: str) -> str:
    return REFUSED if reason == "content_filter" else reason


def _read_call(call: Any) -> ToolCall:
    return ToolCall(call.id or "", call.function.name, call.function.arguments or "")


@dataclass(slots=True)
class _PartialCall:
    id: str = ""
    name: str = ""
    arguments: str = ""


class _CompletionAccumulator(StreamAccumulator):
    """Builds a completion from stream chunks."""

    def __init__(self, on_text: OnText) -> None:
        super().__init__(on_text)
        self._text = ""
        self._calls: dict[int, _PartialCall] = {}
        self._finish_reason = ""
        self._is_refused = False
        self._usage = NO_USAGE

    def add(self, chunk: Any) -> None:
        if chunk.usage is not None:
            self._usage = read_usage(chunk.usage)
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            if choice.delta.content:
                self._text += choice.delta.content
                self.show(choice.delta.content)
            if refusal := getattr(choice.delta, "refusal", None):
                self._text += refusal
                self._is_refused = True
                self.show(refusal)
            for piece in choice.delta.tool_calls or ():
                self._add_call(piece)

    def _add_call(self, piece: Any) -> None:
        call = self._calls.setdefault(piece.index, _PartialCall())
        call.id = piece.id or call.id
        if piece.function is not None:
            call.name += piece.function.name or ""
            call.arguments += piece.function.arguments or ""

    @property
    def is_complete(self) -> bool:
        return bool(self._finish_reason)

    def response(self) -> ModelResponse:
        ordered = [self._calls[index] for index in sorted(self._calls)]
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in ordered)
        reason = REFUSED if self._is_refused else _finish_reason(self._finish_reason)
        return ModelResponse(self._text, calls, reason, self._usage)
