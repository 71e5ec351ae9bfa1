"""The conversation as a list of messages: tools' answers put in, gaps repaired, old answers shortened.

Pure functions over plain data; nothing here asks a model or runs a tool.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from toolcell.agents.providers.provider import Message
from toolcell.tools.compat import IMAGE_OMITTED, ErrorStyle, message_text
from toolcell.tools.result import Image, ToolResult

NO_RESULT = "No result provided"
COMPACT_ABOVE_CHARS = 200_000
KEEP_ITERATIONS = 2
COMPACTED_CHARS = 200
"""Left of an old tool answer."""

_DEAD_ENDS = frozenset({"error", "aborted"})


def tool_message(
    call_id: str, result: ToolResult, *, style: ErrorStyle = "plain", can_see: bool = False, max_chars: int = 100_000
) -> Message:
    """A tool's answer, tied to its call."""
    images = [part for part in result.parts if isinstance(part, Image)]
    text = message_text(result, style, max_chars)
    if images and not can_see:
        text = "\n".join([*([text] if text else []), *[IMAGE_OMITTED] * len(images)])
    message: Message = {"role": "tool", "content": text, "tool_call_id": call_id}
    if result.is_error:
        message["is_error"] = True
    if images and can_see:
        message["images"] = [_plain_image(image) for image in images]
    return message


def _plain_image(image: Image) -> dict[str, str]:
    return {"media_type": image.media_type, "data": base64.b64encode(image.data).decode("ascii")}


def missing_answer(call_id: str, text: str = NO_RESULT) -> Message:
    """Stands in for an answer that never came."""
    return {"role": "tool", "content": text, "tool_call_id": call_id, "is_error": True}


def repaired(messages: Iterable[Message]) -> list[Message]:
    """A transcript every provider accepts: each call answered right after it was asked for, in order; no answers to
    nothing; no assistant turns that ended in an error."""
    done: list[Message] = []
    waiting: list[str] = []
    answers: dict[str, Message] = {}
    for message in messages:
        if message.get("role") == "tool":
            if message.get("tool_call_id") in waiting:
                answers.setdefault(message["tool_call_id"], message)
            continue
        done += _answers(waiting, answers)
        waiting, answers = [], {}
        if message.get("role") == "assistant":
            if message.get("finish_reason") in _DEAD_ENDS:
                continue
            waiting = [call["id"] for call in message.get("tool_calls") or ()]
        done.append(message)
    return done + _answers(waiting, answers)


def _answers(waiting: Sequence[str], answers: dict[str, Message]) -> list[Message]:
    return [answers.get(call_id) or missing_answer(call_id) for call_id in waiting]


def compacted(
    messages: Sequence[Message], above_chars: int = COMPACT_ABOVE_CHARS, keep_iterations: int = KEEP_ITERATIONS
) -> list[Message]:
    """Shorten tool answers from before the last iterations, once the transcript is too long."""
    if sum(_size(message) for message in messages) <= above_chars:
        return list(messages)
    asking = [index for index, message in enumerate(messages) if message.get("tool_calls")]
    recent = asking[-keep_iterations] if len(asking) >= keep_iterations else 0
    return [_shortened(message) if index < recent else message for index, message in enumerate(messages)]


def _size(message: Message) -> int:
    return len(str(message.get("content") or "")) + sum(len(str(call)) for call in message.get("tool_calls") or ())


def _shortened(message: Message) -> Message:
    content: Any = message.get("content")
    if message.get("role") != "tool" or not isinstance(content, str) or len(content) <= COMPACTED_CHARS:
        return message
    cut = f"{content[:COMPACTED_CHARS]}\n[{len(content) - COMPACTED_CHARS} characters of this old result were removed]"
    return {key: value for key, value in message.items() if key != "images"} | {"content": cut}
