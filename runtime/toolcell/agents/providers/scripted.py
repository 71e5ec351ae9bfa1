"""A model that says what it was told to say, and remembers what it was asked. For tests and examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolcell.agents.providers.provider import Message, ModelResponse, OnText, ProviderError
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.model_calls import ToolCall

Line = str | Mapping[str, Any] | ModelResponse | BaseException | Callable[["Request"], Any]
"""What to say: a final text, a response, an exception to raise, or a function of the request that gives one."""


@dataclass(frozen=True, slots=True)
class Request:
    """One thing the model was asked."""

    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...]
    model: str
    options: Mapping[str, Any]

    @property
    def tool_names(self) -> list[str]:
        """Of the tools on offer."""
        return [tool.name for tool in self.tools]


def calls(*pairs: tuple[str, Mapping[str, Any] | str], content: str = "") -> ModelResponse:
    """A response that asks for tools: `calls(("search", {"query": "x"}), ...)`. Ids are made up, one for each."""
    made = [
        ToolCall(f"call_{index}_{name}", name, args if isinstance(args, str) else json.dumps(args, ensure_ascii=False))
        for index, (name, args) in enumerate(pairs)
    ]
    return ModelResponse(content, tuple(made), "tool_calls")


class ScriptedModel:
    """Speaks its lines in order; the last may be repeated for ever with `repeat=True`."""

    def __init__(self, lines: Iterable[Line], *, repeat: bool = False, supports_images: bool = False) -> None:
        self._lines = list(lines)
        self._repeat = repeat
        self.supports_images = supports_images
        self.requests: list[Request] = []
        """What it was asked, oldest first."""

    @property
    def samplings(self) -> int:
        """Times it was asked."""
        return len(self.requests)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any], /
    ) -> ModelResponse:
        """Say the next line.

        Raises:
            ProviderError: there is none left.
        """
        snapshot = tuple(json.loads(json.dumps(message)) for message in messages)
        request = Request(snapshot, tuple(tools), model, options)
        index = len(self.requests)
        self.requests.append(request)
        if index >= len(self._lines) and not (self._repeat and self._lines):
            raise ProviderError(f"the script has {len(self._lines)} lines and was asked for one more")
        line: Any = self._lines[min(index, len(self._lines) - 1)]
        if callable(line):
            line = line(request)
        if isinstance(line, BaseException):
            raise line
        return ModelResponse.read(line)

    async def stream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        model: str,
        options: Mapping[str, Any],
        on_text: OnText,
        /,
    ) -> ModelResponse:
        """The same, word by word."""
        response = await self.chat(messages, tools, model, options)
        for word in response.content.split(" "):
            on_text(word if word == response.content.split(" ")[0] else f" {word}")
        return response
