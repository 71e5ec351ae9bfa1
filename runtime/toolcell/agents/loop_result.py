"""What one run of the tool loop returns: its answer, why it stopped, and its steps, shortened for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolcell.agents.providers.provider import Message
from toolcell.calls.result import NO_USAGE, TokenUsage, to_json
from toolcell.results import Suspension
from toolcell.tools import Call, File, ToolResult

StopReason = str
FINAL, MAX_REACHED, TERMINATED = "final", "max_iterations", "terminated"
CANCELLED, BUDGET, PROVIDER_ERROR = "cancelled", "budget", "provider_error"
REFUSAL, SUSPENDED = "refused", "suspended"
TRUNCATED, EMPTY = "truncated", "empty"

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


@dataclass(frozen=True, slots=True)
class ToolLoopResult:
    """The result of one run of the loop."""

    content: str
    iterations: int
    """Requests made to the model."""
    stop_reason: StopReason
    """`final`: a whole answer. `truncated`: one that was cut off at the model's limit of tokens. `empty`: no answer."""
    messages: list[Message]
    """The whole conversation. A later run can continue it."""
    error: str | None = None
    usage: TokenUsage = NO_USAGE
    files: tuple[File, ...] = ()
    """Files of all tool calls, in order."""
    steps: tuple[StepTrace, ...] = ()
    run_id: str = ""
    """Id of the run, and of all that carry it on: for `Agent.revert`."""
    suspension: Suspension | None = None
    """What a suspended run waits for, for `Agent.resume`."""
    last_output: str = ""
    """Answer of the last agent that was called as a tool. Of a run that tools ended, what those tools said."""

    @property
    def is_error(self) -> bool:
        """True when the run failed, was cancelled or refused by the model, ran out of budget, or has no answer."""
        return self.stop_reason in (PROVIDER_ERROR, CANCELLED, BUDGET, REFUSAL, EMPTY)


class Stop(Exception):
    """Ends the run. Raised at any depth of a turn and caught in `_run_turns`."""

    def __init__(self, reason: StopReason, content: str = "", error: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.content = content
        self.error = error
