"""Measurements of what toolcell alone has: calls of a plain `def`, many tools, and its start.

Each function takes one turn and returns samples, as those of `measurements` do.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio

from benchmarks.competitors.competitor import Competitor, NotAvailable, check, intervals
from benchmarks.competitors.scripts import CPYTHON, counted
from benchmarks.competitors.toolcell import MANY_CALLS, Toolcell
from toolcell import Runtime, ToolRegistry

CALLS = 300
PARALLEL = 1000
STEPS = 50
TOOLS = 5000
FEW_TOOLS = 10
SCRIPTS = 20

OwnTurn = Callable[[Toolcell], Awaitable[list[float]]]


def own(turn: OwnTurn) -> Callable[[Competitor], Awaitable[list[float]]]:
    """Return a measurement that only toolcell takes part in. Packages would change nothing."""

    async def checked(competitor: Competitor) -> list[float]:
        if not isinstance(competitor, Toolcell) or competitor.packages:
            raise NotAvailable("toolcell alone has this")
        return await turn(competitor)

    return checked


async def plain_call(toolcell: Toolcell) -> list[float]:
    """Make calls of a plain `def` one after another in one script, and time them in the tool."""
    toolcell.stamps.clear()
    script = counted(CPYTHON.calls, CALLS).replace("echo", "plain")
    check((await toolcell.runtime.execute_code(script, limits=MANY_CALLS)).value, CALLS)
    return intervals(toolcell.stamps, CALLS)


async def parallel_plain(toolcell: Toolcell) -> list[float]:
    """Make many calls of a plain `def` at once, in one script. The sample is the time of all."""
    toolcell.stamps.clear()
    script = counted(CPYTHON.pipeline, PARALLEL).replace("echo", "plain")
    check((await toolcell.runtime.execute_code(script, limits=MANY_CALLS)).value, PARALLEL)
    return [time.perf_counter() - toolcell.stamps[0]]


async def plan_to_gather(toolcell: Toolcell) -> list[float]:
    """Divide the processor time of a plan by that of an `asyncio.gather` of the same functions."""
    steps = [{"tool": "echo", "args": {"q": number}} for number in range(STEPS)]
    planned, gathered = list[float](), list[float]()
    for _ in range(20):
        start = time.thread_time()
        await toolcell.runtime.execute_plan(steps)
        between = time.thread_time()
        await asyncio.gather(*(toolcell.echo(number) for number in range(STEPS)))
        planned.append(between - start)
        gathered.append(time.thread_time() - between)
    return [statistics.median(planned) / statistics.median(gathered)]


async def opening(toolcell: Toolcell) -> list[float]:
    """Open a Runtime: the host has imported its modules."""
    start = time.perf_counter()
    async with Runtime(toolcell.registry):
        return [time.perf_counter() - start]


async def register(toolcell: Toolcell) -> list[float]:
    """Register many functions of three parameters. The sample is the processor time of each."""
    start = time.process_time()
    _registry(TOOLS)
    return [(time.process_time() - start) / TOOLS]


async def many_tools(toolcell: Toolcell) -> list[float]:
    """Divide the host's processor time of a run with many registered tools by that of one with few."""
    taken: tuple[list[float], list[float]] = ([], [])
    async with AsyncExitStack() as stack:
        runtimes = [await stack.enter_async_context(Runtime(_registry(count))) for count in (TOOLS, FEW_TOOLS)]
        for number in range(SCRIPTS + 2):
            for runtime, times in zip(runtimes, taken, strict=True):
                await anyio.sleep(0.02)
                start = time.process_time()
                check((await runtime.execute_code("set_result(call_tool('tool_1', query='x'))")).value, {})
                if number > 1:
                    times.append(time.process_time() - start)
    many, few = map(statistics.median, taken)
    return [many / few]


def _registry(count: int) -> ToolRegistry:
    registry = ToolRegistry()
    for number in range(count):

        async def look(query: str, limit: int = 10, tags: list[str] | None = None) -> dict[str, int]:
            """Look for something and return how often it was found where."""
            return {}

        look.__name__ = f"tool_{number}"
        registry.tool(look)
    return registry
