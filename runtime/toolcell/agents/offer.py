"""Which tools a model is shown with a request: all, or of a large catalogue those that it found or called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolcell.agents.providers.provider import Message
from toolcell.tools import Origin, RunContext, ToolDefinition, ToolRegistry


def shown_tools(
    registry: ToolRegistry | None, origin: Origin, context: RunContext, messages: Sequence[Message], shown_chars: int
) -> list[ToolDefinition]:
    """Return the definitions of a request: what was found last comes before what the conversation has called."""
    if registry is None:
        return []
    found = [*map(registry.state.registered_name, called_tools(messages)), *context.state.found_tools]
    latest_last = list(reversed(dict.fromkeys(reversed(found))))
    return registry.definitions(origin, policies=context.scope.policies, shown_chars=shown_chars, found=latest_last)


def called_tools(messages: Sequence[Message]) -> Iterator[str]:
    """Return the names that a conversation has called, as they were written."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function: Any = call.get("function") if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str):
                yield name
