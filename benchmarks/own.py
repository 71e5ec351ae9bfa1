"""Measurements of what toolcell alone has: plans, sessions, registered functions, and its start.

Each function takes one turn and returns samples, as those of `measurements` do.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import anyio

from benchmarks import processor_time
from benchmarks.competitors.competitor import Competitor, check, intervals
from benchmarks.competitors.scripts import CPYTHON, START_MARK, counted
from benchmarks.competitors.toolcell import MANY_CALLS, Toolcell
from toolcell import Runtime, ToolRegistry

CALLS = 300
PARALLEL = 1000
STEPS = 50
TOOLS = 5000
FEW_TOOLS = 10
SCRIPTS = 20

OwnTurn = Callable[[Toolcell], Awaitable[list[float]]]


def has(competitor: Competitor) -> bool:
    """Return whether these measurements are taken with a competitor. Packages would change nothing."""
    return isinstance(competitor, Toolcell) and not competitor.packages


async def plain_call(toolcell: Toolcell) -> list[float]:
    """Make calls of a plain `def` one after another in one script, and time them in the tool."""
    toolcell.stamps.clear()
    script = counted(CPYTHON.calls, CALLS).replace("echo", "plain")
    check((await toolcell.runtime.execute_code(script, limits=MANY_CALLS)).value, CALLS)
    return intervals(toolcell.stamps, CALLS)


def parallel(tool: str) -> OwnTurn:
    """Return a measurement of many calls of a tool at once, in one script. The sample is the time of all."""

    async def turn(toolcell: Toolcell) -> list[float]:
        toolcell.stamps.clear()
        script = START_MARK + f"set_result(len(call_tools_parallel([({tool!r}, {{'q': i}}) for i in range(COUNT)])))"
        result = await toolcell.runtime.execute_code(counted(script, PARALLEL), limits=MANY_CALLS)
        took = time.perf_counter() - toolcell.stamps[0]
        check(result.value, PARALLEL)
        return [took]

    return turn


async def plan(toolcell: Toolcell) -> list[float]:
    """Run a plan of steps that do next to nothing."""
    return [(await _plan_and_gather(toolcell, time.perf_counter))[0]]


async def plan_to_gather(toolcell: Toolcell) -> list[float]:
    """Divide the processor time of such a plan by that of an `asyncio.gather` of the same functions."""
    turns = [await _plan_and_gather(toolcell, time.thread_time) for _ in range(10)]
    planned, gathered = (statistics.median(times) for times in zip(*turns, strict=True))
    return [planned / gathered]


async def _plan_and_gather(toolcell: Toolcell, clock: Callable[[], float]) -> tuple[float, float]:
    steps = [{"tool": "echo", "args": {"q": number}} for number in range(STEPS)]
    start = clock()
    rows = await toolcell.runtime.execute_plan(steps)
    between = clock()
    check(rows[-1]["result"], {"q": STEPS - 1})
    await asyncio.gather(*(toolcell.echo(number) for number in range(STEPS)))
    return between - start, clock() - between


async def session(toolcell: Toolcell) -> list[float]:
    """Run scripts one after another in one session."""
    taken = []
    async with toolcell.runtime.session() as opened:
        await opened.execute_code("x = 1")
        for _ in range(SCRIPTS):
            start = time.perf_counter()
            result = await opened.execute_code("set_result(x + 1)")
            taken.append(time.perf_counter() - start)
            check(result.value, 2)
    return taken


async def opening(toolcell: Toolcell) -> list[float]:
    """Open a Runtime: the host has imported its modules."""
    start = time.perf_counter()
    async with Runtime(toolcell.registry):
        return [time.perf_counter() - start]


def command(arguments: Sequence[str], cpu: bool) -> OwnTurn:
    """Return a measurement of a process of this interpreter: its time, or the processor time with what it started."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    async def turn(toolcell: Toolcell) -> list[float]:
        start, before = time.perf_counter(), processor_time.of_ended_children()
        subprocess.run(  # noqa: ASYNC221 - nothing else is to run meanwhile
            [sys.executable, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL
        )
        return [processor_time.of_ended_children() - before if cpu else time.perf_counter() - start]

    return turn


IMPORT = ("-c", "from toolcell import Runtime")
RUN = ("-m", "toolcell", "run", "-c", "set_result(1)")


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
