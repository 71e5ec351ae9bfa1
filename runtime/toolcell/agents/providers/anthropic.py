"""Models behind Anthropic's Messages API, through the official SDK (`pip install toolcell[anthropic]`).

Translates messages and answers. The loop retries, so the SDK's own retries are off.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from toolcell.agents.providers.provider import Message, ModelResponse, OnText, ProviderError, read_usage
from toolcell.agents.providers.retries import reported_error
from toolcell.agents.providers.sdk import SdkProvider, StreamAccumulator
from toolcell.tools import TokenUsage, ToolCall, ToolDefinition

MAX_TOKENS = 4096
"""The API requires a number. Used when the options give none."""

_FINISH_REASONS = {
    "end_turn": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "stop_sequence": "stop",
}
_OWN_BLOCKS = frozenset({"text", "tool_use"})
"""What a message of ours holds by itself. The API requires all other blocks back unchanged: thoughts, and the calls and
results of the tools that run at Anthropic."""

_CALL_BLOCKS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
_THOUGHTS = frozenset({"thinking", "redacted_thinking"})


class AnthropicProvider(SdkProvider):
    """Any model that an `anthropic.AsyncAnthropic` client can reach."""

    package = "anthropic"
    client_class = "AsyncAnthropic"

    def create_method(self, client: Any) -> Callable[..., Awaitable[Any]]:
        """Return the method behind POST /v1/messages."""
        method: Callable[..., Awaitable[Any]] = client.messages.create
        return method

    def request(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Translate a request. System messages are a parameter of their own in this API."""
        request = {"max_tokens": MAX_TOKENS, **options, "model": model, "messages": to_anthropic(messages)}
        system = "\n\n".join(message["content"] for message in messages if message.get("role") == "system")
        if system:
            request["system"] = system
        if tools:
            request["tools"] = [tool.to_anthropic() for tool in tools]
        return request

    def read_answer(self, answer: Any) -> ModelResponse:
        """Translate a message, also one in which a server reports an error with status 200.

        Raises:
            ProviderError: it is an error, or not a message.
        """
        if error := getattr(answer, "error", None):
            raise reported_error(error)
        if not isinstance(getattr(answer, "content", None), list):
            raise ProviderError(f"the model's answer is not a message with content: {str(answer)[:200]!r}")
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        usage = read_usage(getattr(answer, "usage", None))
        return _response(blocks, answer.stop_reason, usage)

    def accumulator(self, on_text: OnText, tools: Sequence[ToolDefinition]) -> StreamAccumulator:
        """Return what builds a message from stream events."""
        return _MessageAccumulator(on_text)


def to_anthropic(messages: Iterable[Message]) -> list[Message]:
    """Translate messages. All answers to one response's calls become blocks of one user message."""
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
    if message.get("content") and not any(block["type"] == "text" for block in blocks):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = ToolCall("", function["name"], function["arguments"]).sent_arguments
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks or ""


def _read_object(text: str) -> dict[str, Any]:
    """Parse a call's arguments. The API requires an object; a call without one was already answered with an error."""
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
    # Blocks of tools that run at Anthropic stand between texts, so the texts are kept where they were.
    has_others = any(block["type"] not in _OWN_BLOCKS | _THOUGHTS for block in blocks)
    kept = [
        dict(block)
        for block in blocks
        if block["type"] not in _OWN_BLOCKS or (has_others and block["type"] == "text" and block["text"])
    ]
    reason = _FINISH_REASONS.get(stop_reason or "end_turn", stop_reason or "stop")
    return ModelResponse(text, calls, reason, usage, {"blocks": kept} if kept else {})


class _MessageAccumulator(StreamAccumulator):
    """Builds a message from stream events. A tool's input stays JSON text: half of it may be missing."""

    def __init__(self, on_text: OnText) -> None:
        super().__init__(on_text)
        self._blocks: dict[int, dict[str, Any]] = {}
        self._stop_reason: str | None = None
        self._input_tokens = 0
        self._output_tokens = 0

    def add(self, event: Any) -> None:
        match event.type:
            case "message_start":
                self._input_tokens = event.message.usage.input_tokens
            case "content_block_start":
                block = event.content_block.model_dump(exclude_none=True)
                self._blocks[event.index] = block | ({"input": ""} if block["type"] in _CALL_BLOCKS else {})
            case "content_block_stop":
                block = self._blocks[event.index]
                if block["type"] in _CALL_BLOCKS - _OWN_BLOCKS:  # these go back as they came
                    block["input"] = _read_object(block["input"])
            case "content_block_delta":
                self._add_delta(self._blocks[event.index], event.delta)
            case "message_delta":
                self._stop_reason = event.delta.stop_reason or self._stop_reason
                self._output_tokens = event.usage.output_tokens

    def _add_delta(self, block: dict[str, Any], delta: Any) -> None:
        match delta.type:
            case "text_delta":
                block["text"] += delta.text
                self.show(delta.text)
            case "input_json_delta":
                block["input"] += delta.partial_json
            case "thinking_delta":
                block["thinking"] += delta.thinking
            case "signature_delta":
                block["signature"] = delta.signature

    @property
    def is_complete(self) -> bool:
        return self._stop_reason is not None

    def response(self) -> ModelResponse:
        usage = TokenUsage(self._input_tokens, self._output_tokens)
        return _response([self._blocks[index] for index in sorted(self._blocks)], self._stop_reason, usage)
