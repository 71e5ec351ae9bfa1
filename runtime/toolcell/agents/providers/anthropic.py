"""Models behind Anthropic's Messages API, through the official SDK (`pip install toolcell[anthropic]`).

Translates; decides nothing. Retrying is the loop's business, so the SDK's own is off.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolcell.agents.providers.provider import Message, ModelResponse, OnText, ProviderError
from toolcell.agents.providers.retry import as_provider_error
from toolcell.agents.providers.sdk import SdkProvider, known_options
from toolcell.errors import UsageError
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.model_calls import ToolCall
from toolcell.tools.result import TokenUsage

MAX_TOKENS = 4096
"""The API wants a number; used when the options give none."""

_FINISH_REASONS = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length", "stop_sequence": "stop"}
_KEPT_BLOCKS = frozenset({"thinking", "redacted_thinking"})
"""Blocks the API wants back, unchanged, in front of the tool calls they led to."""


class AnthropicProvider(SdkProvider):
    """Any model an `anthropic.AsyncAnthropic` client reaches."""

    def __init__(self, client: Any = None, *, supports_images: bool = True, **client_options: Any) -> None:
        super().__init__(client or _new_client(client_options), supports_images)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any], /
    ) -> ModelResponse:
        """One message."""
        create = self._client.messages.create
        answer = await create(**_request(messages, tools, model, known_options(create, options)))
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        usage = TokenUsage(answer.usage.input_tokens, answer.usage.output_tokens)
        return _response(blocks, answer.stop_reason, usage)

    async def stream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        model: str,
        options: Mapping[str, Any],
        on_text: OnText,
        /,
    ) -> ModelResponse:
        """One message, as it is being made."""
        create = self._client.messages.create
        wanted = _request(messages, tools, model, known_options(create, options))
        answer = _Growing()
        try:
            async with await create(**wanted, stream=True) as events:
                async for event in events:
                    answer.add(event, on_text)
        except Exception as exc:
            raise answer.broken_off(exc) from exc
        return answer.response()


def _new_client(options: Mapping[str, Any]) -> Any:
    try:
        import anthropic
    except ImportError as exc:
        raise UsageError("AnthropicProvider needs the anthropic package: pip install 'toolcell[anthropic]'") from exc
    return anthropic.AsyncAnthropic(**options)


def _request(
    messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    request: dict[str, Any] = {"max_tokens": MAX_TOKENS, **options, "model": model, "messages": to_anthropic(messages)}
    system = "\n\n".join(message["content"] for message in messages if message.get("role") == "system")
    if system:
        request["system"] = system
    if tools:
        request["tools"] = [tool.to_anthropic() for tool in tools]
    return request


def to_anthropic(messages: Iterable[Message]) -> list[Message]:
    """Messages as the API takes them: tools' answers are blocks of one user message, in the order of the calls."""
    sent: list[Message] = []
    for message in messages:
        match message.get("role"):
            case "system":
                continue
            case "tool":
                block = _tool_result(message)
                if sent and sent[-1]["role"] == "user" and isinstance(sent[-1]["content"], list):
                    sent[-1]["content"].append(block)
                else:
                    sent.append({"role": "user", "content": [block]})
            case "assistant":
                sent.append({"role": "assistant", "content": _assistant_blocks(message)})
            case _:
                sent.append({"role": "user", "content": message.get("content") or ""})
    return sent


def _tool_result(message: Message) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
    block["content"] = message["content"]
    if images := message.get("images"):
        pictures = [{"type": "image", "source": {"type": "base64", **image}} for image in images]
        text = [{"type": "text", "text": message["content"]}] if message["content"] else []
        block["content"] = [*text, *pictures]
    if message.get("is_error"):
        block["is_error"] = True
    return block


def _assistant_blocks(message: Message) -> list[dict[str, Any]] | str:
    blocks: list[dict[str, Any]] = list(message.get("extra", {}).get("blocks", ()))
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = _read_object(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks or ""


def _read_object(text: str) -> dict[str, Any]:
    """What the API wants back as an object; arguments that were none were answered with an error."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _response(blocks: Sequence[Mapping[str, Any]], stop_reason: str | None, usage: TokenUsage) -> ModelResponse:
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = tuple(
        ToolCall(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
        if not isinstance(block["input"], str)
        else ToolCall(block["id"], block["name"], block["input"])
        for block in blocks
        if block["type"] == "tool_use"
    )
    kept = [dict(block) for block in blocks if block["type"] in _KEPT_BLOCKS]
    reason = _FINISH_REASONS.get(stop_reason or "end_turn", stop_reason or "stop")
    return ModelResponse(text, calls, reason, usage, {"blocks": kept} if kept else {})


@dataclass(slots=True)
class _Growing:
    """A message of which more is coming. A tool's input stays text until its block is whole."""

    blocks: dict[int, dict[str, Any]] = field(default_factory=dict)
    stop_reason: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    has_shown_text: bool = False

    def add(self, event: Any, on_text: OnText) -> None:
        match event.type:
            case "message_start":
                self.input_tokens = event.message.usage.input_tokens
            case "content_block_start":
                block = event.content_block.model_dump(exclude_none=True)
                self.blocks[event.index] = block | ({"input": ""} if block["type"] == "tool_use" else {})
            case "content_block_delta":
                self._add_delta(self.blocks[event.index], event.delta, on_text)
            case "message_delta":
                self.stop_reason = event.delta.stop_reason or self.stop_reason
                self.output_tokens = event.usage.output_tokens

    def _add_delta(self, block: dict[str, Any], delta: Any, on_text: OnText) -> None:
        match delta.type:
            case "text_delta":
                block["text"] += delta.text
                self.has_shown_text = True
                on_text(delta.text)
            case "input_json_delta":
                block["input"] += delta.partial_json
            case "thinking_delta":
                block["thinking"] += delta.thinking
            case "signature_delta":
                block["signature"] = delta.signature

    def broken_off(self, exc: Exception) -> ProviderError:
        """A stream that broke cannot be asked for again once somebody has read its beginning."""
        error = as_provider_error(exc)
        error.retryable = error.retryable and not self.has_shown_text
        return error

    def response(self) -> ModelResponse:
        if self.stop_reason is None:
            raise ProviderError("the model's stream ended before its answer did", retryable=not self.has_shown_text)
        usage = TokenUsage(self.input_tokens, self.output_tokens)
        return _response([self.blocks[index] for index in sorted(self.blocks)], self.stop_reason, usage)
