"""What one run, one agent or one call leaves behind for the next: nothing that nobody asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell import Secrets
from toolcell.agents import Agent, Network, run_tool_loop, user
from toolcell.agents.loop import ToolLoopConfig
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.run_state import JobTable, RunState
from toolcell.tools import (
    AgentTool,
    Budget,
    RunContext,
    Status,
    ToolContext,
    ToolDefinition,
    ToolRegistry,
    ToolResult,
)
from tools.toolkit import PATIENCE_S, recorded

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


async def look() -> str:
    """Look around and say what is there."""
    return "seen"


# An agent and the registry it was given


async def test_an_agent_never_changes_the_registry_it_was_given() -> None:
    registry = ToolRegistry([look])
    before = registry.state
    agent = Agent(ScriptedModel(["done"]), tools=registry, plan_execution=True)
    network = Network(ScriptedModel(["done"]), {"aide": ("Helps with looking.", agent)}, tools=registry)

    agent.add_subagent(Agent(ScriptedModel(["done"])).as_tool("helper", "Helps with everything."))
    agent.registry.register("extra", "A tool of the agent alone.", EMPTY, lambda args: "x")
    agent.registry.add_hook(before=lambda call: None)
    agent.blacklist("look")
    await agent.run("go")
    await network.run("go")

    assert (registry.list(), registry.names(), registry.hooks) == (["look"], ["look"], before.hooks)
    assert network.registry.names() == ["look", "agent_aide"]
    assert agent.registry.names() == ["helper", "extra"]


async def test_what_changes_in_the_given_registry_changes_for_the_agents_next_run() -> None:
    registry = ToolRegistry([look])
    model = ScriptedModel(["done"], repeat=True)
    agent = Agent(model, tools=registry)
    agent.registry.register("extra", "A tool of the agent alone.", EMPTY, lambda args: "x")

    registry.register("late", "A tool that comes late.", EMPTY, lambda args: "late")
    await agent.run("go")
    registry.unregister("look")
    await agent.run("go")
    registry.blacklist("late")
    await agent.run("go")

    offered = [request.tool_names for request in model.requests]
    assert offered == [["look", "extra", "late"], ["extra", "late"], ["extra"]]


# A budget


@each_row("where", ["config", "context"])
async def test_each_run_has_the_whole_budget(where: str) -> None:
    budget = Budget(tool_calls=1)
    model = ScriptedModel([calls(("look", {})), "done"] * 2)
    if where == "config":
        agent = Agent(model, tools=[look], budget=budget)
    else:
        agent = Agent(model, tools=[look], context=RunContext(state=RunState(budget=budget)))

    for _ in range(2):
        result = await agent.run("go")
        assert [message["content"] for message in result.messages if message["role"] == "tool"][-1] == "seen"
    assert budget.used_calls == 0


# Circles


def circle() -> tuple[Agent, Agent]:
    """Two agents that have each other as tools; each asks the other for as long as it may."""
    first = Agent(ScriptedModel([calls(("second", {"task": "x"})), "first"], repeat=True), name="first")
    second = Agent(ScriptedModel([calls(("first", {"task": "x"})), "second"], repeat=True), name="second")
    first.add_subagent("second", "Asks the first one.", second)
    second.add_subagent("first", "Asks the second one.", first)
    return first, second


async def by_run(agent: Agent) -> None:
    await agent.run("go")


async def by_run_task(agent: Agent) -> None:
    await agent.run_task("go", RunContext())


async def as_a_tool(agent: Agent) -> None:
    await ToolRegistry([agent.as_tool("outer", "Starts the circle.")]).execute("outer", {"task": "go"})


async def by_a_loop(agent: Agent) -> None:
    model = ScriptedModel([calls(("outer", {"task": "go"})), "done"])
    registry = ToolRegistry([agent.as_tool("outer", "Starts the circle.")])
    await run_tool_loop(ToolLoopConfig(provider=model, tools=registry), [user("go")])


@each_row("start", [by_run, by_run_task, as_a_tool, by_a_loop])
async def test_a_circle_of_agents_is_found_however_the_outer_one_was_started(start: Callable[[Agent], Any]) -> None:
    first, second = circle()
    said: list[str] = []
    second.registry.add_hook(after=lambda call, result: said.append(result.message))

    with anyio.fail_after(PATIENCE_S):
        await start(first)

    assert said
    assert all("already working further up" in message for message in said)


async def test_a_circle_through_a_tool_that_runs_an_agent_itself_is_found() -> None:
    outer = Agent(ScriptedModel([calls(("ask", {})), "done"]))
    inner = Agent(ScriptedModel([calls(("outer", {"task": "x"})), "inner"]), tools=[])
    inner.add_subagent("outer", "Starts from the beginning.", outer)
    said: list[str] = []
    inner.registry.add_hook(after=lambda call, result: said.append(result.message))

    async def ask() -> str:
        """Ask another agent, in a run of its own."""
        return (await inner.run("go")).content

    outer.registry.add(ask)
    await outer.run("go")

    assert ["already working further up" in message for message in said] == [True]


# A sub-agent that a tool ended


async def test_a_sub_agent_that_a_tool_ended_passes_on_what_the_tool_said() -> None:
    long = "the answer " * 100

    async def finish() -> ToolResult:
        """End the run with an answer."""
        return ToolResult.ok(long, terminate=True)

    inner = Agent(ScriptedModel([calls(("finish", {}))]), tools=[finish])
    result = await ToolRegistry([inner.as_tool("inner", "Finds the answer.")]).execute("inner", {"task": "go"})

    assert (result.is_error, result.text) == (False, long)


# Jobs


def with_callback(execute: Any, **options: Any) -> ToolRegistry:
    return ToolRegistry([AgentTool(ToolDefinition("start", "Start some work.", EMPTY), execute)], **options)


async def answers_at_once(callback: Any) -> ToolResult:
    return ToolResult.ok("all done already")


async def fails(callback: Any) -> ToolResult:
    raise ValueError("no work today")


async def times_out(callback: Any) -> ToolResult:
    await anyio.sleep_forever()
    raise AssertionError


@each_row("execute", [answers_at_once, fails, times_out])
async def test_a_tool_that_has_answered_or_failed_leaves_no_job(execute: Any) -> None:
    registry = with_callback(execute, timeout_s=0.05)
    model = ScriptedModel([calls(("start", {})), "done"])
    with anyio.fail_after(PATIENCE_S):
        async with JobTable() as jobs:
            run = RunContext(state=RunState(jobs=jobs))
            log = recorded(run.events)
            result = await Agent(model, tools=registry).run("go", context=run)

            assert result.content == "done"
            assert jobs.list() == ()
    assert "job_end" not in [event.type for event in log]


async def test_a_call_that_is_cancelled_from_above_leaves_no_job() -> None:
    registry = with_callback(times_out)
    async with JobTable() as jobs:
        with anyio.move_on_after(0.05):
            await registry.dispatch("start", {}, context=RunContext(state=RunState(jobs=jobs)))

        assert jobs.list() == ()


async def test_work_that_lets_out_a_cancellation_has_an_end() -> None:
    async def lets_out() -> ToolResult:
        raise SystemExit(1)

    async def start(ctx: ToolContext) -> ToolResult:
        """Start work that ends in an odd way."""
        return ctx.start_job(lets_out)

    registry = ToolRegistry([start])
    with anyio.fail_after(PATIENCE_S):
        async with JobTable() as jobs:
            pending = await registry.dispatch("start", {}, context=RunContext(state=RunState(jobs=jobs)))
            assert (pending.status, (await jobs.await_("job_1")).is_error) == (Status.PENDING, True)


@each_row("how", ["job", "callback"])
async def test_the_result_of_background_work_loses_the_runs_secrets(how: str) -> None:
    async def work() -> ToolResult:
        return ToolResult.ok("key hunter2secret")

    async def start(ctx: ToolContext) -> ToolResult:
        """Start work that ends with a secret."""
        if how == "job":
            return ctx.start_job(work)
        assert ctx.callback is not None
        await ctx.callback(await work())
        return ToolResult.async_("started")

    model = ScriptedModel([calls(("start", {})), "waiting", "done"])
    async with JobTable() as jobs:
        run = RunContext(state=RunState(jobs=jobs), secrets=Secrets({"key": "hunter2secret"}))
        log = recorded(run.events)
        result = await Agent(model, tools=[start]).run("go", context=run)

    assert "key [redacted]" in repr(result.messages)
    assert "hunter2" not in repr((result, log))
