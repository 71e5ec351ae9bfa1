"""A model that returns prepared responses and records its requests. For tests and examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolcell.agents.providers.provider import Message, ModelResponse, OnUpdate, ProviderError, updates_of
from toolcell.errors import UsageError
from toolcell.tools import ToolCall, ToolDefinition

Reply = str | Mapping[str, Any] | ModelResponse | BaseException | Callable[["Request"], Any]
"""A final text, a response, an exception to raise, or a function that makes one of these from the request."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the model."""

    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...]
    model: str
    options: Mapping[str, Any]

    @property
    def tool_names(self) -> list[str]:
        """Names of the tools in the request."""
        return [tool.name for tool in self.tools]


def calls(*pairs: tuple[str, Mapping[str, Any] | str], content: str = "") -> ModelResponse:
    """Make a response that calls tools: `calls(("search", {"query": "x"}), ...)`. Each call gets an id."""
    given: tuple[Any, ...] = pairs
    for pair in given:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise UsageError(f'calls takes pairs, such as calls(("search", {{"query": "x"}})), not {pair!r:.80}')
    made = [
        ToolCall(f"call_{index}_{name}", name, args if isinstance(args, str) else json.dumps(args, ensure_ascii=False))
        for index, (name, args) in enumerate(pairs)
    ]
    return ModelResponse(content, tuple(made), "tool_calls")


class ScriptedModel:
    """Returns its replies in order. With `repeat=True` it repeats the last one for ever."""

    def __init__(self, replies: Iterable[Reply], *, repeat: bool = False, supports_images: bool = False) -> None:
        self._replies = list(replies)
        self._repeat = repeat
        self.supports_images = supports_images
        self.requests: list[Request] = []
        """Requests so far, oldest first."""

    @property
    def samplings(self) -> int:
        """Number of requests so far."""
        return len(self.requests)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any], /
    ) -> ModelResponse:
        """Return the next reply.

        Raises:
            ProviderError: there is no reply left.
        """
        snapshot = tuple(json.loads(json.dumps(message)) for message in messages)
        request = Request(snapshot, tuple(tools), model, options)
        index = len(self.requests)
        self.requests.append(request)
        if index >= len(self._replies) and not (self._repeat and self._replies):
            raise ProviderError(f"the scripted model has {len(self._replies)} replies, and the loop asked for one more")
        reply: Any = self._replies[min(index, len(self._replies) - 1)]
        if callable(reply):
            reply = reply(request)
        if isinstance(reply, BaseException):
            raise reply
        return ModelResponse.read(reply)

    async def stream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        model: str,
        options: Mapping[str, Any],
        on_update: OnUpdate,
        /,
    ) -> ModelResponse:
        """Return the next reply, and report it word by word."""
        response = await self.chat(messages, tools, model, options)
        for update in updates_of(response):
            for index, word in enumerate(update.piece.split(" ")):
                on_update(replace(update, piece=f" {word}" if index else word))
        return response
