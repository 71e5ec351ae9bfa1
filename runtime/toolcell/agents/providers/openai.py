"""Models behind OpenAI's Chat Completions API, through the official SDK (`pip install toolcell[openai]`).

Translates messages and answers. The loop retries, so the SDK's own retries are off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolcell.agents.providers.provider import Message, ModelResponse, OnText, ProviderError, read_usage
from toolcell.agents.providers.sdk import SdkProvider, StreamAccumulator, known_options
from toolcell.errors import UsageError
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.model_calls import ToolCall
from toolcell.tools.result import NO_USAGE

_OWN_KEYS = frozenset({"is_error", "images", "extra", "finish_reason"})
"""Keys of our messages that the API does not know."""


class OpenAIProvider(SdkProvider):
    """Any model that an `openai.AsyncOpenAI` client can reach."""

    def __init__(self, client: Any = None, *, supports_images: bool = True, **client_options: Any) -> None:
        super().__init__(client or _new_client(client_options), supports_images)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any], /
    ) -> ModelResponse:
        """Request one completion."""
        create = self._client.chat.completions.create
        answer = await create(**_request(messages, tools, model, known_options(create, options)))
        if not answer.choices:
            raise ProviderError("the model's answer has no choices")
        choice = answer.choices[0]
        calls = tuple(_read_call(call) for call in choice.message.tool_calls or ())
        return ModelResponse(
            choice.message.content or "", calls, choice.finish_reason or "stop", read_usage(answer.usage)
        )

    async def stream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        model: str,
        options: Mapping[str, Any],
        on_text: OnText,
        /,
    ) -> ModelResponse:
        """Request one completion as a stream."""
        create = self._client.chat.completions.create
        request = _request(messages, tools, model, known_options(create, options))
        opening = create(**request, stream=True, stream_options={"include_usage": True})
        return await _CompletionAccumulator(on_text).read(opening)


def _new_client(options: Mapping[str, Any]) -> Any:
    try:
        import openai
    except ImportError as exc:
        raise UsageError("OpenAIProvider needs the openai package: pip install 'toolcell[openai]'") from exc
    return openai.AsyncOpenAI(**options)


def _request(
    messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    request = {**options, "model": model, "messages": to_openai(messages)}
    if tools:
        request["tools"] = [tool.to_openai() for tool in tools]
    return request


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
        self._usage = NO_USAGE

    def add(self, chunk: Any) -> None:
        if chunk.usage is not None:
            self._usage = read_usage(chunk.usage)
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            if choice.delta.content:
                self._text += choice.delta.content
                self.show(choice.delta.content)
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
        return ModelResponse(self._text, calls, self._finish_reason, self._usage)
