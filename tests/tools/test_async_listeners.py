"""Listeners of events that are async are awaited, by every way a call is made; one that fails fails nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio.lowlevel
import pytest

from rows import each_row
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.events import TOOL_END, TOOL_START
from toolcell.tools import Event, RunContext, ToolRegistry

pytestmark = pytest.mark.anyio


async def directly(registry: ToolRegistry, run: RunContext) -> Any:
    return (await registry.dispatch("work", {}, context=run)).text


async def in_a_batch(registry: ToolRegistry, run: RunContext) -> Any:
    return (await registry.execute_batch([("work", {})], context=run))[0].text


async def in_a_plan(registry: ToolRegistry, run: RunContext) -> Any:
    return (await registry.run_plan({"steps": [{"tool": "work", "args": {}}]}, run)).value[0]["result"]


async def by_an_agent(registry: ToolRegistry, run: RunContext) -> Any:
    agent = Agent(ScriptedModel([calls(("work", {})), "done"]), tools=registry)
    return (await agent.run("go", context=run)).content


@each_row("route", [directly, in_a_batch, in_a_plan, by_an_agent])
@each_row("fails", [False, True])
async def test_an_async_listener_is_awaited_before_the_next_step(
    route: Callable[[ToolRegistry, RunContext], Awaitable[Any]], fails: bool
) -> None:
    told: list[str] = []
    registry = ToolRegistry()

    @registry.tool
    async def work() -> str:
        """Take note and answer."""
        told.append("work")
        return "done"

    async def listen(event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        told.append(event.type)
        if fails:
            raise RuntimeError("the listener broke")

    run = RunContext()
    run.events.subscribe(listen)

    assert await route(registry, run) == "done"
    seen = [each for each in told if each in (TOOL_START, "work", TOOL_END)]
    assert seen == [TOOL_START, "work", TOOL_END]
    assert run.events.listener_errors == (len(told) - 1 if fails else 0)
