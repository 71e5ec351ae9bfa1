"""The examples of the tool loop and of agents as tools, as their documents write them."""

from __future__ import annotations

from typing import Any

import pytest

from toolcell.agents import Agent, RetryPolicy, ToolLoopConfig, run_tool_loop, user
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.tools import ToolRegistry, ToolResult

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


@pytest.mark.conforms("EX-38", "O1", "O2", "O3", "O4", "O6", "O7", "O8", "O9", "O16", "O17")
async def test_one_round_of_the_loop_ends_with_the_answer_tied_to_its_call() -> None:
    model = ScriptedModel([ASKS_TO_READ, ANSWERS])
    config = ToolLoopConfig(provider=model, model="gpt-4o", tools=reading(), max_iterations=5)

    result = await run_tool_loop(config, [user("read it")], "cli", "c1")

    assert (result.content, result.iterations, result.stop_reason) == ("It says hello.", 2, "final")
    assert list(model.requests[1].messages[-2:]) == [
        {
            "role": "assistant",
            "content": "I'll read that file for you.",
            "tool_calls": ASKS_TO_READ["tool_calls"],
        },
        {"role": "tool", "content": "Hello from /tmp/foo\n", "tool_call_id": "call_abc123"},
    ]
    assert model.requests[0].model == "gpt-4o"


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


def calculating() -> Any:
    async def calculator(expression: str) -> ToolResult:
        """Evaluate a mathematical expression."""
        left, _, right = expression.partition("*")
        return ToolResult.ok(str(int(left) * int(right)))

    return calculator


@pytest.mark.conforms("EX-33", "N1", "N2", "N3", "N5", "N-b1")
async def test_an_agent_is_a_tool_of_another_agent() -> None:
    description = "A specialist for complex mathematical proofs."
    inner = ScriptedModel([calls(("calculator", {"expression": "137 * 48"})), "6576"])
    math = Agent(inner, tools=[calculating()]).as_tool("math_specialist", description)
    outer = ScriptedModel([calls(("math_specialist", {"task": "137*48"})), "It is 6576"])
    top = Agent(outer, tools=[math])

    run = await top.run("How much is 137 * 48?")
    [definition] = top.definitions()
    unasked = await top.registry.execute("math_specialist", {})

    assert outer.requests[1].messages[-1]["content"] == "6576"
    assert run.content == "It is 6576"
    assert definition.parameters["required"] == ["task"]
    assert definition.parameters["properties"]["task"]["type"] == "string"
    assert unasked.is_error
    assert '"task"' in unasked.text


@pytest.mark.conforms("V-15")
async def test_a_sub_agent_is_added_as_a_tool_or_by_name_description_and_agent() -> None:
    def math_agent() -> Agent:
        return Agent(ScriptedModel([calls(("calculator", {"expression": "137 * 48"})), "6576"]), tools=[calculating()])

    def caller() -> Agent:
        model = ScriptedModel([calls(("math", {"task": "137*48"})), lambda request: request.messages[-1]["content"]])
        return Agent(model)

    as_tool, by_name = caller(), caller()

    as_tool.add_subagent(math_agent().as_tool("math", "Knows mathematics."))
    by_name.add_subagent("math", "Knows mathematics.", math_agent())

    assert as_tool.definitions() == by_name.definitions()
    assert [(await agent.run("How much?")).content for agent in (as_tool, by_name)] == ["6576", "6576"]


@pytest.mark.conforms("EX-33", "N5", "J8")
async def test_a_failing_sub_agent_is_an_error_result_and_its_caller_goes_on() -> None:
    broken = Agent(ScriptedModel([RuntimeError("no quota")]), retry=ONCE)
    outer = ScriptedModel([calls(("aide", {"task": "try"})), "without help then"])
    top = Agent(outer)
    top.add_subagent("aide", "Helps with everything there is.", broken)

    run = await top.run("go")

    answer = outer.requests[1].messages[-1]
    assert answer["content"] == "Sub-agent failed: LLM call failed: RuntimeError: no quota"
    assert answer["is_error"]
    assert run.content == "without help then"


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
