"""What a run has made that can be undone: calls of tools with a `revert=`, with their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolcell.support.host_work import about_bytes
from toolcell.tools.result import ToolResult

FINAL = "its tool has no revert="


@dataclass(frozen=True, slots=True)
class MadeCall:
    """One call of a tool that writes."""

    call: Any
    """A `Call`; None when it cannot be undone, and nothing of it is kept."""
    tool: str
    result: ToolResult | None = None
    problem: str = ""
    """Why it cannot be undone."""
    size: int = 0
    """Bytes that are kept of it, about."""


class MadeCalls:
    """The calls that a run has made of tools that write, in the order in which they ended."""

    def __init__(self, above: MadeCalls | None = None) -> None:
        self._above = above
        self.calls: list[MadeCall] = []
        self._final: dict[str, MadeCall] = {}
        """By tool: all calls of one without `revert=` have the same entry. Most tools are such."""

    def add(self, call: Any, result: ToolResult) -> None:
        """Take note of a call; those of a part of a run belong to the whole too."""
        if call.options.read_only or call.options.orchestrates:
            return
        if call.options.revert is None:
            if (known := self._final.get(call.name)) is None:
                known = self._final[call.name] = MadeCall(None, call.name, problem=FINAL)
            made = known
        elif result.is_error:
            made = MadeCall(None, call.name, problem="it had failed, and may have done a part of its work")
        else:
            size = about_bytes([call.args, call.raw_args, result.value, result.output])
            made = MadeCall(call, call.name, result, size=size)
        runs: MadeCalls | None = self
        while runs is not None:
            runs.calls.append(made)
            runs = runs._above
