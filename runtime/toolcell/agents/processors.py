"""Processors: functions that edit a request, a response or a tool's result, or end the run.

Processors run in the order they were given. The first that raises stops the run; but one that fails at a tool's result
costs that result only: nobody gets what it has not passed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from toolcell.agents.providers.provider import Message, ModelResponse
from toolcell.calls.concurrency import maybe_await, passes_on
from toolcell.calls.finalize import made_result
from toolcell.calls.hooks import withheld
from toolcell.support.checks import brief
from toolcell.support.log import logger_of
from toolcell.tools import Call, ToolResult

logger = logger_of("toolcell.agents")


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
    """Edit a result before it enters the transcript. One that a processor fails at is withheld."""
    for processor in processors:
        if processor.post_tool is None:
            continue
        try:
            changed = await maybe_await(processor.post_tool(call, result))
            if not isinstance(changed, ToolResult):
                raise TypeError(f"post_tool returned {brief(changed)}; it must return a ToolResult")
            result = await made_result(changed)
        except BaseException as exc:
            if isinstance(exc, Halt) or passes_on(exc):
                raise
            logger.warning("post_tool of a processor failed on %s", call.name, exc_info=exc)
            return withheld(call, result, f"a processor failed: {type(exc).__name__}")
    return result
