"""Models behind Anthropic's Messages API, through the official SDK (`pip install toolcell[anthropic]`).

Translates messages and answers. The loop retries, so the SDK's own retries are off.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from toolcell.agents.providers.provider import (
    Message,
    MessageUpdate,
    ModelResponse,
    OnUpdate,
    ProviderError,
    read_usage,
    text_of,
)
from toolcell.agents.providers.retries import reported_error
from toolcell.agents.providers.sdk import SdkProvider, StreamAccumulator, fields_of
from toolcell.calls.arguments import unique_ids
from toolcell.support.text import whole_characters
from toolcell.tools import ToolCall, ToolDefinition

MAX_TOKENS = 4096
"""The API requires a number. Used when the options give none."""

_FINISH_REASONS = {
    "end_turn": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "stop_sequence": "stop",
}
_SYSTEM = frozenset({"system", "developer"})
_THOUGHTS = frozenset({"thinking", "redacted_thinking"})


class AnthropicProvider(SdkProvider):
    """Any model that an `anthropic.AsyncAnthropic` client can reach."""

    package = "anthropic"
    client_class = "AsyncAnthropic"
    create_method = "messages.create"

    def request(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Translate a request. System messages are a parameter of their own in this API."""
        request = {"max_tokens": MAX_TOKENS, **options, "model": model, "messages": to_anthropic(messages)}
        contents = [message.get("content") for message in messages if message.get("role") in _SYSTEM]
        if any(isinstance(content, list) for content in contents):
            request["system"] = [part for content in contents for part in _parts(content)]
        elif system := "\n\n".join(content for content in contents if content):
            request["system"] = system
        if tools:
            request["tools"] = [tool.to_anthropic() for tool in tools]
        return request

    def read_answer(self, answer: Any) -> ModelResponse:
        """Translate a message, also one in which a server reports an error with status 200.

        Raises:
            ProviderError: it is an error, or not a message.
        """
        message = fields_of(answer)
        if error := message.get("error"):
            raise reported_error(error)
        if not isinstance(message.get("content"), list):
            raise ProviderError(f"the model's answer is not a message with content: {str(message or answer)[:200]!r}")
        return _response(list(map(fields_of, message["content"])), message.get("stop_reason"), message.get("usage"))

    def accumulator(self, on_update: OnUpdate, tools: Sequence[ToolDefinition]) -> StreamAccumulator:
        return _MessageAccumulator(on_update)


def to_anthropic(messages: Iterable[Message]) -> list[Message]:
    """Translate messages. All answers to one response's calls become blocks of one user message."""
    sent: list[Message] = []
    for message in messages:
        content = message.get("content") or ""
        match message.get("role"):
            case "system" | "developer":
                continue
            case "tool":
                block = _tool_result(message)
                if sent and sent[-1]["role"] == "user" and isinstance(sent[-1]["content"], list):
                    sent[-1]["content"].append(block)
                else:
                    sent.append({"role": "user", "content": [block]})
            case "assistant":
                if blocks := _assistant_blocks(message):
                    sent.append({"role": "assistant", "content": blocks})
            case _:
                sent.append({"role": "user", "content": content if isinstance(content, str) else _parts(content)})
    return sent


def _parts(content: Any) -> list[dict[str, Any]]:
    """Translate a message's content, text or parts, into blocks. The API refuses blank text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
    blocks = [_block({"type": "text", "text": part} if isinstance(part, str) else part) for part in parts]
    return [block for block in blocks if block.get("type") != "text" or str(block.get("text") or "").strip()]


def _block(part: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a part in OpenAI's format; blocks of this API stay as they are."""
    match part:
        case {"type": "text" | "input_text" | "output_text"}:
            return {**part, "type": "text"}
        case {"type": "refusal", "refusal": text}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
            return {"type": "image", "source": _source(url)}
        case {"type": "file", "file": {"file_data": str(url)}}:
            return {"type": "document", "source": _source(url)}
    return dict(part)


def _source(url: str) -> dict[str, str]:
    head, _, data = url.partition(",")
    if head.startswith("data:") and head.endswith(";base64"):
        return {"type": "base64", "media_type": head[5:-7].partition(";")[0], "data": data}
    return {"type": "url", "url": url}


def _tool_result(message: Message) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": str(message["tool_call_id"])}
    content = message.get("content") or ""
    block["content"] = content if isinstance(content, str) else _parts(content)
    if images := message.get("images"):
        pictures = [{"type": "image", "source": {"type": "base64", **image}} for image in images]
        block["content"] = [*_parts(content), *pictures]
    if message.get("is_error"):
        block["is_error"] = True
    return block


def _assistant_blocks(message: Message) -> list[dict[str, Any]]:
    """Return the blocks of an answer, in the order in which they came; none for an empty one, which the API refuses."""
    kept = [dict(block) for block in (message.get("extra") or {}).get("blocks") or ()]
    content, calls = message.get("content"), dict[str, dict[str, Any]]()
    for call in map(ToolCall.read, message.get("tool_calls") or ()):
        calls[call.id] = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.sent_arguments}
    if text_of(kept) == content:
        content = None
    else:  # a processor has edited the text, or it is not kept beside thoughts
        kept = [block for block in kept if block.get("type") != "text"]
    blocks: list[dict[str, Any]] = []
    for block in kept:
        if block.get("type") == "tool_use":
            blocks += _parts(content)
            content = None
            use = calls.pop(str(block.get("id")), None)
            block = block | use if use else {}
        blocks += [block] if block else []
    blocks = _parts([*blocks, *_parts(content), *calls.values()])
    return blocks if any(block["type"] not in _THOUGHTS for block in blocks) else []


def _read_object(text: str) -> dict[str, Any]:
    """Parse a call's arguments. The API requires an object; a call without one was already answered with an error."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _response(blocks: Sequence[Mapping[str, Any]], stop_reason: Any, usage: Any) -> ModelResponse:
    """Read a whole message's blocks. They are kept where text and calls alone do not make them again."""
    blocks = whole_characters(list(blocks))
    text = text_of([block for block in blocks if block.get("type") == "text"])
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    calls = unique_ids(
        ToolCall("" if (ident := block.get("id")) is None else str(ident), block.get("name") or "", _input(block))
        for block in uses
    )
    idents, kept = iter(calls), []
    for block in blocks:
        fields = {name: value for name, value in block.items() if value is not None}
        if block.get("type") == "tool_use":
            call = next(idents)
            fields = {name: value for name, value in fields.items() if name != "input"} | {
                "id": call.id,
                "name": call.name,
            }
        elif block.get("type") == "text" and not str(block.get("text") or "").strip():
            continue
        kept.append(fields)
    plain = [{"type": "text", "text": text}] if text.strip() else []
    plain += [{"type": "tool_use", "id": call.id, "name": call.name} for call in calls]
    if not stop_reason:
        stop_reason = "tool_use" if calls else "end_turn"
    reason = _FINISH_REASONS.get(stop_reason, stop_reason)
    extra = {"blocks": kept} if kept != plain else {}
    return ModelResponse(text if text.strip() else "", tuple(calls), reason, read_usage(usage), extra)


def _input(block: Mapping[str, Any]) -> Mapping[str, Any] | str:
    given = block.get("input")
    return {} if given is None else given if isinstance(given, str | Mapping) else json.dumps(given, ensure_ascii=False)


_REPORTED: tuple[tuple[Literal["text", "reasoning"], str], ...] = (("reasoning", "thinking"), ("text", "text"))
"""What an update is of, by the field of a block or a delta."""

_BLOCK_OF = {"thinking_delta": "thinking", "signature_delta": "thinking", "input_json_delta": "tool_use"}
"""The type of a block that did not start, by that of its first delta. All others are of text."""


class _MessageAccumulator(StreamAccumulator):
    """Builds a message from stream events. A tool's input stays JSON text: half of it may be missing."""

    def __init__(self, on_update: OnUpdate) -> None:
        super().__init__(on_update)
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, str] = {}
        self._stop_reason: str | None = None
        self._has_ended = False
        self._usage: dict[str, Any] = {}

    def add(self, item: Any) -> None:
        event = fields_of(item)
        index = event.get("index") or 0
        match event.get("type"):
            case "message_start":
                self._count(fields_of(event.get("message")).get("usage"))
            case "content_block_start":
                self._blocks[index] = block = dict(fields_of(event.get("content_block")))
                self._report(block, block, ToolCall("", "", _input(block)).arguments_json if block.get("input") else "")
            case "content_block_delta":
                self._add_delta(index, fields_of(event.get("delta")))
            case "message_delta":
                self._stop_reason = fields_of(event.get("delta")).get("stop_reason") or self._stop_reason
            case "message_stop":
                self._has_ended = True
        self._count(event.get("usage"))

    def _count(self, usage: Any) -> None:
        """Take the counts that an event has. Some servers give all of them in the last one, and 0 before."""
        self._usage |= {name: count for name, count in fields_of(usage).items() if isinstance(count, int) and count}

    def _report(self, block: Mapping[str, Any], piece: Mapping[str, Any], arguments: str) -> None:
        """Report what a piece adds to a block. Calls of tools that run at Anthropic are not reported."""
        if block.get("type") == "tool_use":
            ident, name = str(block.get("id") or ""), str(block.get("name") or "")
            self.report(MessageUpdate("arguments", arguments, ident, name))
        for kind, field in _REPORTED:
            if isinstance(text := piece.get(field), str):
                self.report(MessageUpdate(kind, text))

    def _add_delta(self, index: int, delta: Mapping[str, Any]) -> None:
        block = self._blocks.setdefault(index, {"type": _BLOCK_OF.get(str(delta.get("type")), "text")})
        arguments = delta.get("partial_json") or ""
        match delta.get("type"):
            case "input_json_delta":  # a server may have given the whole input at the start
                self._inputs[index] = self._inputs.get(index, "") + arguments
                self._report(block, {}, arguments)
            case "text_delta" | "thinking_delta":
                field = "text" if delta["type"] == "text_delta" else "thinking"
                block[field] = (block.get(field) or "") + (delta.get(field) or "")
                self._report({}, delta, "")
            case "citations_delta":
                block["citations"] = [*(block.get("citations") or ()), delta.get("citation")]
            case _:
                block |= {name: value for name, value in delta.items() if name != "type" and value is not None}

    @property
    def is_complete(self) -> bool:
        return self._stop_reason is not None or self._has_ended

    def response(self) -> ModelResponse:
        for index, text in self._inputs.items():
            if text.strip():
                block = self._blocks[index]  # those of tools that run at Anthropic go back as they came
                block["input"] = text if block.get("type") == "tool_use" else _read_object(text)
        return _response([self._blocks[index] for index in sorted(self._blocks)], self._stop_reason, self._usage)
