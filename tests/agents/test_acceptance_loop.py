"""The examples of the tool loop and of agents as tools, as their documents write them."""

from __future__ import annotations

from typing import Any

import pytest

from toolcell.agents import Agent, RetryPolicy, ToolLoopConfig, run_tool_loop, user
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.tools import ToolRegistry

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

ASKS_TO_READ = {
    "content": "I'll read that file for you.",
    "tool_calls": [
        {
            "id": "call_abc123",
            "type": "function",
            "function": {"name": "read_file", "arguments": '{"path": "/tmp/foo"}'},
        }
    ],
    "finish_reason": "tool_calls",
}
ANSWERS = {"content": "It says hello.", "tool_calls": [], "finish_reason": "stop"}
ONCE = RetryPolicy(attempts=1)


def reading() -> ToolRegistry:
    async def read_file(path: str) -> str:
        """Read the contents of a file at the given path."""
        return f"Hello from {path}\n"

    return ToolRegistry([read_file])


@pytest.mark.conforms("EX-39", "O5", "O11", "O12", "E13", "J8", "V-8", "O-b2")
async def test_the_loop_stops_at_its_cap_and_at_a_provider_that_fails() -> None:
    forever = ScriptedModel([ASKS_TO_READ], repeat=True)
    unasked = ScriptedModel([])
    without_tools = ScriptedModel([ASKS_TO_READ, ANSWERS])
    failing = ScriptedModel([RuntimeError("no quota")])

    async def run(model: ScriptedModel, **config: Any) -> Any:
        return await run_tool_loop(ToolLoopConfig(provider=model, retry=ONCE, **config), [user("read it")])

    capped = await run(forever, tools=reading(), max_iterations=3)
    never = await run(unasked, tools=reading(), max_iterations=0)
    bare = await run(without_tools)
    failed = await run(failing)

    assert (capped.stop_reason, capped.iterations, forever.samplings) == ("max_iterations", 3, 3)
    assert (capped.content, capped.error) == ("", "Max steps 3 exceeded")
    assert (never.content, never.iterations, unasked.samplings) == ("", 0, 0)
    assert without_tools.requests[0].tools == ()
    assert without_tools.requests[1].messages[-1]["content"] == "No tools available"
    assert bare.content == "It says hello."
    assert failed.stop_reason == "provider_error"
    assert failed.error == "LLM call failed: RuntimeError: no quota"
    assert forever.requests[0].options == {"max_tokens": 4096, "temperature": 0.7}


@pytest.mark.conforms("EX-33", "N-b1")
async def test_agents_nest_three_deep_and_no_deeper() -> None:
    lowest = Agent(ScriptedModel(["bottom"]))
    for _ in range(4):
        model = ScriptedModel([calls(("below", {"task": "go on"})), lambda request: request.messages[-1]["content"]])
        above = Agent(model)
        above.add_subagent("below", "The agent one level further down.", lowest)
        lowest = above

    run = await lowest.run("go")

    assert "agents may be nested 3 deep, and this would be level 4" in run.content
