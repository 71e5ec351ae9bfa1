"""Read the calls that a model asked for: providers write them in several forms.

Reads, and recovers what a cut-off stream left of the arguments; whether a call may run is not decided here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Self

from toolcell.calls.arguments import ArgumentChecker
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.text_data import SAFE_MODES, ParseMode, parse_json
from toolcell.calls.values import MAX_TEXT_CHARS
from toolcell.errors import UsageError
from toolcell_bridge.wire.frozen import frozen, replaced

UNREADABLE = "unreadable_arguments"
"""In a transcript: the key under which arguments that could not be read are quoted."""

MAX_QUOTED_CHARS = 2_000

_KEYS = {"name", "tool", "id", "call_id", "type", "index"}
"""Keys of a call without arguments. What stands under another one, such as `parameters`, would be lost."""


@frozen
class ToolCall:
    """One call a model asked for."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """As received: a mapping, or JSON text."""
    mode: ParseMode = ParseMode.STRICT
    """How well the text of the arguments could be read."""

    @classmethod
    def read(cls, call: Any) -> Self:
        """Read a call from a ToolCall, a (name, arguments) pair, or a dict as OpenAI, Anthropic or toolcell writes it.

        An object of an SDK is read as the dict that it dumps.

        Raises:
            UsageError: it has another form.
        """
        if isinstance(call, cls):
            return call
        if isinstance(call, tuple) and len(call) == 2:
            return cls("", call[0], call[1])
        if callable(dump := getattr(call, "model_dump", None)):
            call = dump()
        if isinstance(call, Mapping):
            function = call.get("function")
            source = function if isinstance(function, Mapping) else call
            name = source.get("name", source.get("tool"))
            found: list[Any] = [source[key] for key in ("arguments", "args", "input") if key in source]
            if isinstance(name, str) and (found or source.keys() <= _KEYS):
                # The Responses API has both: `id` is that of the item, `call_id` what its answer refers to.
                ident = next((each for key in ("call_id", "id") if (each := call.get(key)) not in (None, "")), "")
                return cls(str(ident), name, found[0] if found else {})
        raise UsageError(f'{call!r:.200} is not a tool call; write ("name", {{...}})')

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text; text stays exactly as it was received."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)

    def parsed(self) -> Self:
        """Return the same call with its arguments as a mapping if they can be read as one; `mode` says how well."""
        if not isinstance(self.arguments, str):
            return self
        value, mode = parse_json(self.arguments[:MAX_TEXT_CHARS]) if self.arguments.strip() else ({}, ParseMode.STRICT)
        if mode is ParseMode.INVALID or not isinstance(value, dict):
            return replaced(self, mode=mode)
        return replaced(self, arguments=value, mode=mode)

    def parsed_if_safe(self) -> Self:
        """Return the same call with its arguments read, unless something may be missing: then they stay text,
        which no tool accepts."""
        parsed = self.parsed()
        return parsed if parsed.mode in SAFE_MODES else replaced(self, mode=parsed.mode)

    @property
    def sent_arguments(self) -> dict[str, Any]:
        """The arguments as they stand in a transcript: what the tool was called with. Those of a call that was refused
        because they cannot be read are quoted, so that every provider takes them back."""
        read = self.parsed_if_safe().arguments
        return dict(read) if isinstance(read, Mapping) else {UNREADABLE: str(read)[:MAX_QUOTED_CHARS]}

    def to_openai(self) -> dict[str, Any]:
        """Return the call for a transcript. Arguments that came as the text of a JSON object stay that text.

        Shape: {"id", "type": "function", "function": {"name", "arguments": "<json>"}}.
        """
        parsed, text = self.parsed(), self.arguments_json
        is_object = parsed.mode is ParseMode.STRICT and isinstance(parsed.arguments, Mapping) and text.strip()
        sent = text if is_object else json.dumps(self.sent_arguments, ensure_ascii=False)
        function = {"name": self.name, "arguments": sent}
        return {"id": self.id, "type": "function", "function": function}


def unique_ids(calls: Iterable[ToolCall]) -> list[ToolCall]:
    """Return the same calls, each with an id of its own: repeated ids get a suffix, missing ones are made up."""
    seen: set[str] = set()
    unique: list[ToolCall] = []
    for index, call in enumerate(calls):
        wanted = call.id or f"call_{index}"
        chosen, number = wanted, 2
        while chosen in seen:
            chosen, number = f"{wanted}_{number}", number + 1
        seen.add(chosen)
        unique.append(call if chosen == call.id else ToolCall(chosen, call.name, call.arguments, call.mode))
    return unique


def decode_tool_call(tool: ToolDefinition, call: Any) -> dict[str, Any]:
    """Return the validated arguments of `call`, a call of `tool`.

    Raises:
        UsageError: the call is of another tool, or its arguments do not fit.
    """
    read = ToolCall.read(call).parsed_if_safe()
    if read.name != tool.name:
        raise UsageError(f"this is a call of {read.name!r}, not of {tool.name!r}")
    if read.mode not in SAFE_MODES:
        raise UsageError(f"the arguments of {tool.name!r} are {read.mode} JSON: something may be missing")
    return ArgumentChecker(tool).check(read.arguments).args
