"""Processors: functions that edit a request, a response or a tool's result, or end the run.

Processors run in the order they were given. The first that raises stops the run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from toolcell.agents.providers.provider import Message, ModelResponse
from toolcell.tools.call import Call
from toolcell.tools.concurrency import maybe_await
from toolcell.tools.result import ToolResult


class Halt(Exception):
    """Raised by a processor to end the run with `response` as its answer."""

    def __init__(self, response: str) -> None:
        super().__init__(response)
        self.response = response


@dataclass(frozen=True, slots=True)
class Processor:
    """Up to three functions, sync or async. Each returns the value that the loop continues with."""

    pre_llm: Callable[[list[Message]], list[Message] | Awaitable[list[Message]]] | None = None
    post_llm: Callable[[ModelResponse], ModelResponse | Awaitable[ModelResponse]] | None = None
    post_tool: Callable[[Call, ToolResult], ToolResult | Awaitable[ToolResult]] | None = None


async def before_request(processors: Sequence[Processor], messages: list[Message]) -> list[Message]:
    """Edit the messages of one request. The transcript keeps the originals."""
    for processor in processors:
        if processor.pre_llm is not None:
            messages = await maybe_await(processor.pre_llm(messages))
    return messages


async def after_response(processors: Sequence[Processor], response: ModelResponse) -> ModelResponse:
    """Edit a response before the loop uses it."""
    for processor in processors:
        if processor.post_llm is not None:
            response = await maybe_await(processor.post_llm(response))
    return response


async def after_tool(processors: Sequence[Processor], call: Call, result: ToolResult) -> ToolResult:
    """Edit a result before it enters the transcript."""
    for processor in processors:
        if processor.post_tool is not None:
            result = await maybe_await(processor.post_tool(call, result))
    return result
