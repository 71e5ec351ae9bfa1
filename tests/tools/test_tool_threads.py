"""Threads of synchronous tools: a call that is given up keeps its places until the function has returned.

The rule is the same for each kind of place and on each way to a tool.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.from_thread
import pytest

from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.run_state import RunState
from toolcell.tools import RunContext, ToolContext, ToolRegistry, ToolResult, abandoned_threads
from tools.toolkit import PATIENCE_S, FakeRuntime

pytestmark = [pytest.mark.quick, pytest.mark.every_loop, pytest.mark.anyio]


SHORT_S = 0.05


class Stubborn:
    """A synchronous tool that ignores everything until it is released, and counts its bodies."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.bodies = 0
        self.most = 0
        self._lock = threading.Lock()

    def wait(self) -> str:
        with self._lock:
            self.bodies += 1
            self.most = max(self.most, self.bodies)
        self.released.wait(PATIENCE_S)
        with self._lock:
            self.bodies -= 1
        return "done"


@asynccontextmanager
async def stubborn_tool() -> AsyncIterator[Stubborn]:
    """A tool whose threads have all ended when the block is left."""
    await no_threads()
    tool = Stubborn()
    try:
        yield tool
    finally:
        tool.released.set()
        await no_threads()


async def no_threads() -> None:
    with anyio.fail_after(PATIENCE_S):
        while abandoned_threads():
            await anyio.sleep(0.001)


async def directly(registry: ToolRegistry, run: RunContext) -> str:
    return (await registry.dispatch("stubborn", {}, context=run)).text


async def in_a_batch(registry: ToolRegistry, run: RunContext) -> str:
    return (await registry.execute_batch([("stubborn", {})], context=run))[0].text


async def in_a_plan(registry: ToolRegistry, run: RunContext) -> str:
    row = (await registry.run_plan({"steps": [{"tool": "stubborn", "args": {}}]}, run)).value[0]
    return str(row.get("error") or row.get("result"))


async def in_code(registry: ToolRegistry, run: RunContext) -> str:
    async def script(call_tool: Any) -> Any:
        return await call_tool("stubborn", {})

    result = await FakeRuntime(script).execute_code("", tools=registry, context=run)
    return str(result.value if result.error is None else result.error.message)


async def by_an_agent(registry: ToolRegistry, run: RunContext) -> str:
    model = ScriptedModel([calls(("stubborn", {})), "done"])
    result = await Agent(model, tools=registry).run("go", context=run)
    return str(next(message["content"] for message in result.messages if message["role"] == "tool"))


async def through_another_tool(registry: ToolRegistry, run: RunContext) -> str:
    """The outer tool is cancelled with its call; the places of its own are kept for the inner one's thread."""
    outer = ToolRegistry()

    async def ask(ctx: ToolContext) -> ToolResult:
        """Call the other tool."""
        return await registry.dispatch("stubborn", {}, context=ctx.run)

    outer.add(ask, timeout_s=SHORT_S)
    return (await outer.dispatch("ask", {}, context=run)).text


Route = Callable[[ToolRegistry, RunContext], Awaitable[str]]
ROUTES: tuple[Route, ...] = (directly, in_a_batch, in_a_plan, in_code, by_an_agent, through_another_tool)
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "a worker of the run": (1, {}),
    "a place of its own": (10, {"max_concurrency": 1}),
    "an exclusive group": (10, {"exclusive_group": "printer"}),
}


def make_registry(tool: Stubborn, **options: Any) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(timeout_s=SHORT_S, **options)
    def stubborn() -> str:
        """Wait to be released, whatever happens."""
        return tool.wait()

    return registry


async def leave_threads(count: int, route: Route, registry: ToolRegistry, state: RunState | None = None) -> None:
    """Make calls that time out until so many threads run on. On a busy machine a thread may begin too late."""
    while len(abandoned_threads()) < count:
        text = await route(registry, RunContext(state=state or RunState()))
        assert text == "timed out after 0.05 s"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("place", PLACES)
async def test_the_place_of_a_call_that_was_given_up_is_free_when_its_function_returns(
    route: Route, place: str
) -> None:
    workers, options = PLACES[place]
    state = RunState(max_workers=workers)
    async with stubborn_tool() as tool:
        registry = make_registry(tool, **options)

        await leave_threads(1, route, registry, state)
        meanwhile = [await route(registry, RunContext(state=state)) for _ in range(2)]

        assert all(text.startswith(("not started: after 0.05 s", "timed out after 0.05 s")) for text in meanwhile)
        assert len(abandoned_threads()) == 1
        tool.released.set()
        with anyio.fail_after(PATIENCE_S):
            while await route(registry, RunContext(state=state)) != "done":
                pass
    assert tool.most == 1


async def test_a_cancelled_run_keeps_the_places_of_its_threads_too() -> None:
    started = anyio.Event()
    async with stubborn_tool() as tool:
        registry = ToolRegistry()

        @registry.tool(exclusive_group="printer", timeout_s=SHORT_S)
        def stubborn() -> str:
            """Wait to be released, whatever happens."""
            anyio.from_thread.run_sync(started.set)
            return tool.wait()

        run = RunContext()

        async def call() -> None:
            while not started.is_set():  # on a busy machine a thread may begin too late
                await directly(registry, run)

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await started.wait()
            run.cancel("enough")
        [thread] = abandoned_threads()

        assert "not started" in await directly(registry, RunContext())
        assert (thread.tool, thread.run_id) == ("stubborn", run.run_id)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_tool_with_too_many_threads_that_run_on_is_turned_away_and_others_are_not(route: Route) -> None:
    async with stubborn_tool() as tool:
        registry = make_registry(tool)
        registry = make_limited(registry, most=2)

        @registry.tool
        def quick() -> str:
            """Answer at once."""
            return "quick"

        await leave_threads(2, route, registry)
        refused = await route(registry, RunContext())

        assert "2 of its calls were given up and still run" in refused
        assert "max_abandoned_threads = 2" in refused
        assert len(abandoned_threads()) == 2
        assert (await registry.execute("quick")).text == "quick"
        tool.released.set()
        await no_threads()
        with anyio.fail_after(PATIENCE_S):
            while await route(registry, RunContext()) != "done":
                pass


def make_limited(registry: ToolRegistry, most: int) -> ToolRegistry:
    return ToolRegistry(max_abandoned_threads=most).replaced(registry)


async def test_a_refusal_for_want_of_a_place_may_be_tried_again() -> None:
    async with stubborn_tool() as tool:
        registry = make_registry(tool, max_concurrency=1)
        await leave_threads(1, directly, registry)

        refused = await registry.execute("stubborn")

        assert refused.error is not None
        assert (refused.error.code, refused.error.retryable) == ("unavailable", True)


async def test_the_names_of_a_tool_share_its_places_and_its_limit() -> None:
    async with stubborn_tool() as tool:
        registry = make_limited(make_registry(tool), most=1)
        registry.alias("mule", "stubborn")
        await leave_threads(1, directly, registry)

        assert "max_abandoned_threads = 1" in (await registry.execute("mule")).text


async def test_a_thread_of_the_callers_own_is_no_daemon_because_a_tool_was_called() -> None:
    registry = ToolRegistry()

    @registry.tool
    def quick() -> bool:
        """Say whether this thread is a daemon."""
        return threading.current_thread().daemon

    assert (await registry.execute("quick", {})).value is True
    assert not threading.Thread().daemon
