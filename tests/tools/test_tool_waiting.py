"""Waiting ends: the deadline and the cancellation of a run cover everything that its calls wait for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.concurrency import Workers
from toolcell.calls.run_state import RunState
from toolcell.tools import Call, Hook, RunContext, Status, ToolRegistry, ToolResult, approval_hook
from tools.toolkit import PATIENCE_S

pytestmark = [pytest.mark.quick, pytest.mark.every_loop, pytest.mark.anyio]

SOON_S = 0.05
GROUP = "printer"


async def forever(*anything: Any) -> Any:
    await anyio.sleep_forever()


def with_tool(**options: Any) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(**options)
    async def work() -> str:
        """Answer at once."""
        return "done"

    @registry.tool(exclusive_group=GROUP)
    async def hold() -> None:
        """Keep a place until cancelled."""
        await anyio.sleep_forever()

    return registry


def with_hook(hook: Hook, **options: Any) -> ToolRegistry:
    registry = with_tool(**options)
    registry.add_hook(hook)
    return registry


def with_own_limit() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(max_concurrency=1)
    async def work(hold: bool = False) -> str:
        """Answer, or keep a place until cancelled."""
        return str(await forever()) if hold else "done"

    return registry


HELD = {"a worker": ("hold", {}), "a place of the tool": ("work", {"hold": True}), "a group": ("hold", {})}
"""What is called first, and keeps what the second call waits for."""

WAITS: dict[str, Callable[[], ToolRegistry]] = {
    "a before hook": lambda: with_hook(Hook(before=forever)),
    "an after hook": lambda: with_hook(Hook(after=forever)),
    "an approval": lambda: with_hook(approval_hook(forever), requires_approval=True),
    "a preparation": lambda: with_tool(prepare=forever),
    "a place of the tool": with_own_limit,
    "a group": lambda: with_tool(exclusive_group=GROUP),
    "a worker": with_tool,
    "the tool": lambda: with_tool_that_waits(),
}


def with_tool_that_waits() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def work() -> None:
        """Wait until cancelled."""
        await anyio.sleep_forever()

    return registry


async def directly(registry: ToolRegistry, run: RunContext) -> ToolResult:
    return await registry.dispatch("work", {}, context=run)


async def in_a_batch(registry: ToolRegistry, run: RunContext) -> ToolResult:
    return (await registry.execute_batch([("work", {}), ("work", {})], context=run))[0]


async def in_a_plan(registry: ToolRegistry, run: RunContext) -> ToolResult:
    row = (await registry.run_plan({"steps": [{"tool": "work", "args": {}}]}, run)).value[0]
    assert row["status"] == "error"
    return ToolResult.fail(row["error"], status=Status.TIMEOUT if "timed out" in row["error"] else Status.CANCELLED)


ROUTES = (directly, in_a_batch, in_a_plan)


@asynccontextmanager
async def kept(what: str, registry: ToolRegistry, state: RunState) -> AsyncIterator[None]:
    """Another call of the same run has what calls wait for."""
    if what not in HELD:
        yield
        return
    name, args = HELD[what]
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: registry.dispatch(name, args, context=RunContext(state=state)))
        await anyio.wait_all_tasks_blocked()
        yield
        group.cancel_scope.cancel()


@each_row("route", ROUTES)
@each_row("what", WAITS)
async def test_the_deadline_of_a_run_ends_whatever_its_calls_wait_for(what: str, route: Any) -> None:
    state, registry = RunState(max_workers=1 if what == "a worker" else 10), WAITS[what]()
    with anyio.fail_after(PATIENCE_S):
        async with kept(what, registry, state):
            run = RunContext(state=state, deadline=anyio.current_time() + SOON_S)
            result = await route(registry, run)

    assert result.status is Status.TIMEOUT
    assert result.message == "timed out: the run's time is used up"


@each_row("route", ROUTES)
@each_row("what", WAITS)
async def test_cancelling_a_run_ends_whatever_its_calls_wait_for(what: str, route: Any) -> None:
    state, registry = RunState(max_workers=1 if what == "a worker" else 10), WAITS[what]()
    run, results = RunContext(state=state), list[ToolResult]()

    async def call() -> None:
        results.append(await route(registry, run))

    with anyio.fail_after(PATIENCE_S):
        async with kept(what, registry, state), anyio.create_task_group() as group:
            group.start_soon(call)
            await anyio.wait_all_tasks_blocked()
            run.cancel("enough")

    assert [(result.status, result.message) for result in results] == [(Status.CANCELLED, "enough")]


@each_row("what", WAITS)
async def test_an_agents_time_covers_whatever_its_calls_wait_for(what: str) -> None:
    state, registry = RunState(max_workers=1 if what == "a worker" else 10), WAITS[what]()
    agent = Agent(ScriptedModel([calls(("work", {})), "done"]), tools=registry, wall_s=SOON_S)
    with anyio.fail_after(PATIENCE_S):
        async with kept(what, registry, state):
            result = await agent.run("go", context=RunContext(state=state))

    assert (result.stop_reason, result.error) == ("budget", "the run's time is used up")
    assert "timed out" in next(message["content"] for message in result.messages if message["role"] == "tool")


async def test_a_hook_that_waits_for_another_calls_hook_ends_with_its_run() -> None:
    registry = with_tool()
    registry.add_hook(before=lambda call: forever() if call.call_id == "first" else None)
    state = RunState()
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: registry.dispatch("work", {}, call_id="first", context=RunContext(state=state)))
            await anyio.wait_all_tasks_blocked()
            run = RunContext(state=state, deadline=anyio.current_time() + SOON_S)
            result = await registry.dispatch("work", {}, call_id="second", context=run)
            group.cancel_scope.cancel()

    assert result.status is Status.TIMEOUT


async def test_a_call_after_the_deadline_is_not_made() -> None:
    made: list[str] = []
    registry = ToolRegistry()

    @registry.tool
    async def work() -> None:
        """Take note of the call."""
        made.append("work")

    run = RunContext(deadline=anyio.current_time() - 1)

    for route in ROUTES:
        assert (await route(registry, run)).status is Status.TIMEOUT
    assert made == []


@pytest.mark.parametrize("end", ["deadline", "cancel"])
async def test_a_result_that_its_after_hooks_have_not_seen_reaches_nobody(end: str) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def work() -> str:
        """Return something that an after hook hides."""
        return "ssn 123-45-6789"

    async def hide(call: Call, result: ToolResult) -> None:
        if end == "cancel":
            call.run.cancel("enough")
        await anyio.sleep_forever()

    registry.add_hook(after=hide)
    until = anyio.current_time() + SOON_S
    run = RunContext() if end == "cancel" else RunContext(deadline=until)

    result = await registry.execute_batch([("work", {})], context=run)

    assert "ssn" not in repr(result)


async def test_a_plan_that_times_out_shows_no_result_that_its_after_hooks_have_not_seen() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def work() -> str:
        """Return something that an after hook hides."""
        return "ssn 123-45-6789"

    registry.add_hook(after=forever)
    steps = [{"tool": "work", "args": {}}, {"tool": "work", "args": {}}]

    result = await registry.run_plan({"steps": steps, "timeout_s": SOON_S}, RunContext())

    assert [row["error"] for row in result.value] == ["tool execution aborted"] * 2
    assert "ssn" not in repr(result)


def counting(options: dict[str, Any]) -> ToolRegistry:
    """Return two tools that count down by calling themselves and each other."""
    registry = ToolRegistry()

    async def call(name: str, left: int) -> int:
        return int((await registry.dispatch(name, {"left": left})).value)

    @registry.tool(**options)
    async def count(left: int) -> int:
        """Count down by calling the other tool or itself."""
        return 1 + await call(("again", "count")[left % 2], left - 1) if left else 0

    @registry.tool(**options)
    async def again(left: int) -> int:
        """Count down by calling the first tool."""
        return 1 + await call("count", left - 1) if left else 0

    return registry


async def test_a_tool_that_calls_itself_does_not_wait_for_its_own_place() -> None:
    """Also by way of another tool, and where the run has one worker."""
    found = list[object]()
    ways: list[dict[str, Any]] = [{"max_concurrency": 1}, {"exclusive_group": GROUP}, {}]
    for options in ways:
        registry = counting(options)
        with anyio.fail_after(60):
            alone = await registry.dispatch("count", {"left": 5}, context=RunContext(state=RunState(1)))
            batch = await registry.execute_batch([("count", {"left": 5})] * 3, context=RunContext(state=RunState(1)))
        found += [alone.value, *(each.value for each in batch)]

    assert found == [5] * 12


@each_row(("take", "places"), [(Workers.take, 1), (Workers.take_all, 3)])
@each_row("is_handed", [True, False])
async def test_a_call_that_is_cancelled_while_it_waits_keeps_no_place(take: Any, places: int, is_handed: bool) -> None:
    """Also when a place is handed to it just then, and when it has some of those that it wants."""
    workers = Workers(places)
    await workers.take()
    async with anyio.create_task_group() as group:
        group.start_soon(take, workers)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
        if is_handed:
            workers.give_back()
    if not is_handed:
        workers.give_back()

    assert workers.free == places
    with anyio.fail_after(PATIENCE_S):
        await workers.take_all()


async def test_what_begins_to_wait_in_a_run_that_was_cancelled_does_not_wait() -> None:
    state = RunState()
    state.cancel("enough")

    with anyio.fail_after(PATIENCE_S), state.cancellable() as scope:
        await anyio.sleep_forever()

    assert scope.cancelled_caught and not state.scopes
