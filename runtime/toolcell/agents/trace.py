"""A run's events in other words: one line per step for people, and the event names two other systems use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from toolcell.tools import events
from toolcell.tools.call import Call
from toolcell.tools.events import Event
from toolcell.tools.result import TokenUsage, ToolResult, to_json

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
        call.run.secrets.redact(given)[:MAX_INPUT_CHARS],
        result.text[:MAX_OUTPUT_CHARS],
        result.usage,
        result.meta.duration_ms,
    )


def as_stream_event(event: Event) -> dict[str, Any] | None:
    """Shape: {"type", "name", ...}; types are tool-call-start, tool-call-result, tool-progress, agent-start and
    agent-finish. None: that system has no such event."""
    match event:
        case Event(type=events.TOOL_START):
            return {"type": "tool-call-start", "name": event.tool, "args": event.args}
        case Event(type=events.TOOL_UPDATE):
            return {"type": "tool-progress", "name": event.tool, "update": event.update}
        case Event(type=events.TOOL_END, result=ToolResult(usage=used) as result):
            usage = {"input_tokens": used.input_tokens, "output_tokens": used.output_tokens}
            finished = {"type": "tool-call-result", "name": event.tool, "content": result.text}
            return finished | {"usage": usage, "duration": event.duration_ms}
        case Event(type=events.AGENT_START) if event.data.get("depth"):
            return {"type": "agent-start", "name": event.data.get("agent")}
        case Event(type=events.AGENT_END) if event.data.get("depth"):
            return {"type": "agent-finish", "name": event.data.get("agent"), "content": event.data.get("content")}
    return None


def as_call_event(event: Event) -> dict[str, Any] | None:
    """Shape: {"ToolCallStarted": {name, args}} or {"ToolCallFinished": {name, result, success}}."""
    if event.type == events.TOOL_START:
        return {"ToolCallStarted": {"name": event.tool, "args": event.args}}
    if event.type == events.TOOL_END and event.result is not None:
        result, success = event.result.text, not event.result.is_error
        return {"ToolCallFinished": {"name": event.tool, "result": result, "success": success}}
    return None
