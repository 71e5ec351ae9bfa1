"""Edit a conversation: add tools' answers, repair gaps, shorten old answers. Pure functions over lists of messages."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from toolcell.agents.providers.provider import Message
from toolcell.calls.result import MAX_IMAGE_BYTES, MAX_IMAGES, MAX_MODEL_CHARS
from toolcell.errors import UsageError
from toolcell.flows import labels_of
from toolcell.support.checks import brief
from toolcell.support.text import cut_text
from toolcell.tools import Image, ToolCall, ToolResult

NO_RESULT = "No result provided"
ABORTED = "tool execution aborted"
MAX_TRANSCRIPT_CHARS = MAX_MODEL_CHARS
TRUNCATED_MARK = "\n\n[output truncated — original was longer]"
IMAGE_OMITTED = "(tool image omitted: model does not support images)"

ErrorStyle = Literal["plain", "error:", "ERROR:"]
"""How a failed result's text begins: as it is, `error: ...` or `ERROR: ...`."""
COMPACT_ABOVE_CHARS = 200_000
KEEP_ITERATIONS = 2
COMPACTED_CHARS = 200
"""Characters kept of an old tool answer."""

FAILED_REASONS = frozenset({"error", "aborted"})


def check_messages(messages: object) -> None:
    """Check that `messages` are some.

    Raises:
        UsageError: they are not a list of dicts with a role.
    """
    listed = list(messages) if isinstance(messages, Iterable) and not isinstance(messages, str | Mapping) else None
    if listed is None:
        raise UsageError(f"a conversation is a list of messages, not {brief(messages)}; write [user('...')]")
    for message in listed:
        if not isinstance(message, Mapping) or "role" not in message:
            raise UsageError(f"a message is a dict with a role, not {brief(message)}; write user('...')")
    labels_in(listed)


def labels_in(messages: Iterable[Message]) -> frozenset[str]:
    """Return the labels of everything in a conversation.

    Raises:
        UsageError: something under the key `labels` is none.
    """
    found = [labels_of(message["labels"], "a message's labels") for message in messages if "labels" in message]
    return frozenset().union(*found)


def message_text(result: ToolResult, style: ErrorStyle = "plain", max_chars: int = MAX_TRANSCRIPT_CHARS) -> str:
    """Return what goes into the transcript: `max_chars` characters, and a mark when there were more."""
    text = result.whole_text
    if result.is_error and style != "plain":
        text = f"{style} {text}"
    kept, was_cut = cut_text(text, max_chars)
    return kept + TRUNCATED_MARK if was_cut else kept


def tool_message(
    call_id: str,
    result: ToolResult,
    *,
    style: ErrorStyle = "plain",
    supports_images: bool = False,
    max_chars: int = 100_000,
    labels: Iterable[str] = (),
) -> Message:
    """Make the message that answers a tool call. `labels`: of everything that its run has read."""
    images, text = result.images, message_text(result, style, max_chars)
    if images and not supports_images:
        text = "\n".join([*([text] if text else []), *[IMAGE_OMITTED] * len(images)])
    small = shown_images(images)
    if supports_images and len(small) < len(images):
        text += (
            f"\n({len(images) - len(small)} of {len(images)} images omitted: a model is shown {MAX_IMAGES} of at most "
        )
        text += f"{MAX_IMAGE_BYTES} bytes each)"
    message: Message = {"role": "tool", "content": text, "tool_call_id": call_id}
    if result.is_error:
        message["is_error"] = True
    if labels:
        message["labels"] = sorted(labels)
    if small and supports_images:
        message["images"] = [
            {"media_type": image.media_type, "data": base64.b64encode(image.data).decode("ascii")} for image in small
        ]
    return message


def shown_images(images: Iterable[Image]) -> tuple[Image, ...]:
    """Return the pictures that a request has room for: `MAX_IMAGES` of at most `MAX_IMAGE_BYTES` each."""
    return tuple(image for image in images if len(image.data) <= MAX_IMAGE_BYTES)[:MAX_IMAGES]


def missing_answer(call_id: str, text: str = NO_RESULT) -> Message:
    """Make the answer to a call that has no result."""
    return {"role": "tool", "content": text, "tool_call_id": call_id, "is_error": True}


def answers_to_open_calls(messages: Sequence[Message]) -> list[Message]:
    """Make an answer for each call of the last assistant message with calls that has no answer yet."""
    return [missing_answer(call.id, ABORTED) for call in open_calls(messages)[1]]


def open_calls(messages: Sequence[Message]) -> tuple[Message, list[ToolCall]]:
    """Return the last assistant message with calls, and those of its calls that have no answer yet."""
    for index in range(len(messages) - 1, -1, -1):
        if calls := messages[index].get("tool_calls"):
            answered = {str(message.get("tool_call_id")) for message in messages[index + 1 :]}
            return messages[index], [call for call in map(ToolCall.read, calls) if call.id not in answered]
    return {}, []


def repaired(messages: Iterable[Message]) -> list[Message]:
    """Return a transcript that every provider accepts.

    Every call is answered directly after its message, in order. Answers without a call and assistant messages that
    ended in an error are left out.
    """
    whole: list[Message] = []
    waiting: list[str] = []
    answers: dict[str, Message] = {}
    for message in messages:
        if message.get("role") == "tool":
            answers.setdefault(str(message.get("tool_call_id")), message)
            continue
        whole += _answers(waiting, answers)
        waiting, answers = [], {}
        if message.get("role") == "assistant":
            if message.get("finish_reason") in FAILED_REASONS:
                continue
            waiting = [str(call["id"]) for call in message.get("tool_calls") or ()]
        whole.append(message)
    return whole + _answers(waiting, answers)


def _answers(waiting: Sequence[str], answers: dict[str, Message]) -> list[Message]:
    return [answers.get(call_id) or missing_answer(call_id) for call_id in waiting]


def compacted(
    messages: Sequence[Message], above_chars: int = COMPACT_ABOVE_CHARS, keep_iterations: int = KEEP_ITERATIONS
) -> list[Message]:
    """Shorten the tool answers before the last `keep_iterations` iterations, if the transcript is too long."""
    if sum(_size(message) for message in messages) <= above_chars:
        return list(messages)
    iterations = [index for index, message in enumerate(messages) if message.get("tool_calls")]
    first_kept = iterations[-keep_iterations] if len(iterations) >= keep_iterations else 0
    return [_shortened(message) if index < first_kept else message for index, message in enumerate(messages)]


def _size(message: Message) -> int:
    return len(str(message.get("content") or "")) + sum(len(str(call)) for call in message.get("tool_calls") or ())


def _shortened(message: Message) -> Message:
    content: Any = message.get("content")
    if message.get("role") != "tool" or not isinstance(content, str) or len(content) <= COMPACTED_CHARS:
        return message
    cut = f"{content[:COMPACTED_CHARS]}\n[{len(content) - COMPACTED_CHARS} characters of this old result were removed]"
    return {key: value for key, value in message.items() if key != "images"} | {"content": cut}
