"""Models behind OpenAI's Chat Completions API, through the official SDK (`pip install toolcell[openai]`).

Translates; decides nothing. Retrying is the loop's business, so the SDK's own is off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolcell.agents.providers.provider import Message, ModelResponse, OnText, ProviderError, read_usage
from toolcell.agents.providers.retry import as_provider_error
from toolcell.agents.providers.sdk import SdkProvider, known_options
from toolcell.errors import UsageError
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.model_calls import ToolCall
from toolcell.tools.result import NO_USAGE, TokenUsage

_OWN_KEYS = frozenset({"is_error", "images", "extra", "finish_reason"})
"""Of our messages; the API does not know them."""


class OpenAIProvider(SdkProvider):
    """Any model an `openai.AsyncOpenAI` client reaches."""

    def __init__(self, client: Any = None, *, supports_images: bool = True, **client_options: Any) -> None:
        super().__init__(client or _new_client(client_options), supports_images)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any], /
    ) -> ModelResponse:
        """One completion."""
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
        """One completion, as it is being made."""
        create = self._client.chat.completions.create
        wanted = _request(messages, tools, model, known_options(create, options))
        answer = _Growing()
        try:
            async with await create(**wanted, stream=True, stream_options={"include_usage": True}) as chunks:
                async for chunk in chunks:
                    answer.add(chunk, on_text)
        except Exception as exc:
            raise answer.broken_off(exc) from exc
        return answer.response()


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
    """Messages as the API takes them. Tools cannot answer with pictures there, so these follow as the user's."""
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


@dataclass(slots=True)
class _Growing:
    """An answer of which more is coming."""

    text: str = ""
    calls: dict[int, _PartialCall] = field(default_factory=dict)
    finish_reason: str = ""
    usage: TokenUsage = NO_USAGE

    def add(self, chunk: Any, on_text: OnText) -> None:
        if chunk.usage is not None:
            self.usage = read_usage(chunk.usage)
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.delta.content:
                self.text += choice.delta.content
                on_text(choice.delta.content)
            for piece in choice.delta.tool_calls or ():
                self._add_call(piece)

    def _add_call(self, piece: Any) -> None:
        call = self.calls.setdefault(piece.index, _PartialCall())
        call.id = piece.id or call.id
        if piece.function is not None:
            call.name += piece.function.name or ""
            call.arguments += piece.function.arguments or ""

    def broken_off(self, exc: Exception) -> ProviderError:
        """A stream that broke cannot be asked for again once somebody has read its beginning."""
        error = as_provider_error(exc)
        error.retryable = error.retryable and not self.text
        return error

    def response(self) -> ModelResponse:
        if not self.finish_reason:
            raise ProviderError("the model's stream ended before its answer did", retryable=not self.text)
        ordered = [self.calls[index] for index in sorted(self.calls)]
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in ordered)
        return ModelResponse(self.text, calls, self.finish_reason, self.usage)
