"""An agent as a tool: bounded in depth, never its own ancestor, under its caller's rules, hooks and budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolcell.agents.loop import FINAL, TERMINATED, ToolLoopResult
from toolcell.tools.adapters import with_traits
from toolcell.tools.call import Call
from toolcell.tools.context import RunContext
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.options import ToolOptions
from toolcell.tools.result import ErrorCode, Text, ToolResult
from toolcell.tools.spec import ToolSpec

if TYPE_CHECKING:
    from toolcell.agents.agent import Agent

MAX_DEPTH = 3
"""Agents below the first one."""

TASK_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"task": {"type": "string", "description": "What to do, with everything needed to do it."}},
    "required": ["task"],
}


class SubAgent:
    """Registers like any tool."""

    def __init__(self, agent: Agent, name: str, description: str, traits: Mapping[str, Any]) -> None:
        self.agent = agent
        self.name = name
        self.description = description
        self._traits = with_traits(ToolOptions(orchestrates=True, is_agent=True), traits)

    def to_shape(self) -> ToolSpec:
        """As the registry takes it."""
        return ToolSpec(
            definition=ToolDefinition(self.name, self.description, TASK_SCHEMA),
            invoke=self._invoke,
            traits=self._traits,
            source=self,
            requires_result=True,
        )

    async def _invoke(self, call: Call) -> ToolResult:
        if (refusal := self._refusal(call.run)) is not None:
            return failed(refusal)
        return as_answer(await self.agent.work(call.args["task"], self._inner_run(call)))

    def _refusal(self, run: RunContext) -> str | None:
        if run.depth >= MAX_DEPTH:
            return f"agents may be nested {MAX_DEPTH} deep, and this would be level {run.depth + 1}"
        if id(self.agent) in run.agents:
            return f"{self.name} is already working further up; agents cannot call themselves in a circle"
        return None

    def _inner_run(self, call: Call) -> RunContext:
        """The caller's run as the agent sees it: same budget, events and cancellation, every rule and hook above."""
        above = call.nested_run()
        table = call.dispatcher.table
        return above.child(
            depth=above.depth + 1,
            agents=(*above.agents, id(self.agent)),
            hooks=(*above.hooks, *table.hooks),
            policies=(*above.policies, *table.policies),
        )


def failed(reason: str) -> ToolResult:
    """A sub-agent that came to no answer."""
    return ToolResult.fail(f"Sub-agent failed: {reason}", code=ErrorCode.TOOL_ERROR)


def as_answer(result: ToolLoopResult) -> ToolResult:
    """Only the answer is for the caller's model; how it came about is for logs. Hints to stop stay inside."""
    details = {
        "stop_reason": result.stop_reason,
        "iterations": result.iterations,
        "steps": [{"name": step.name, "input": step.input, "output": step.output} for step in result.steps],
    }
    if result.stop_reason not in (FINAL, TERMINATED) and not result.content:
        reason = failed(result.error or result.stop_reason).with_details(details)
        return reason.with_usage(result.usage)
    text = result.content or result.last_output
    return ToolResult(parts=(Text(text),), details=details, files=result.files, usage=result.usage)
