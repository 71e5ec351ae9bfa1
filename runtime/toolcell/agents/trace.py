"""The steps of a run, each shortened to a few hundred characters, for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolcell.calls.result import TokenUsage, to_json
from toolcell.tools import Call, ToolResult

MAX_INPUT_CHARS = 200
MAX_OUTPUT_CHARS = 500


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One tool call, shortened."""

    name: str
    type: Literal["tool", "agent"]
    input: str
    output: str
    usage: TokenUsage
    duration_ms: float


def step_trace(call: Call, result: ToolResult) -> StepTrace:
    """The trace of one finished call."""
    given = call.raw_args if isinstance(call.raw_args, str) else to_json(call.raw_args)
    kind: Literal["tool", "agent"] = "agent" if call.options.is_agent else "tool"
    return StepTrace(
        call.name,
        kind,
        input=call.run.secrets.redact(given)[:MAX_INPUT_CHARS],
        output=result.text[:MAX_OUTPUT_CHARS],
        usage=result.usage,
        duration_ms=result.meta.duration_ms,
    )
