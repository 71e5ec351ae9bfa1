"""The measurements: one function each, and one row each in `MEASUREMENTS`.

A function takes one turn with one competitor and returns samples. `rounds.py` decides who has a turn when.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from benchmarks import memory, own, processor_time
from benchmarks.competitors import Competitor
from benchmarks.competitors.toolcell import Toolcell


@dataclass(frozen=True, slots=True)
class Workload:
    """How much work one turn of each measurement does."""

    burst: int = 8
    spaced: int = 20
    """Runs of a turn with pauses between them."""
    calls: int = 500
    pipelined: int = 300
    parallel: int = 10
    runs: int = 80
    clients: int = 2 * (os.cpu_count() or 1)
    text_bytes: int = 10_000_000
    records: int = 40_000
    """Number of dicts, each of four fields and about 250 bytes."""
    idle: int = 100


MIB = 2.0**-20

REFILL_S = 0.1
"""After this time every pool has replaced what was used."""

Turn = Callable[[Competitor, Workload], Awaitable[list[float]]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row group of the table."""

    key: str
    title: str
    """Names fields of `Workload` in braces."""
    unit: str
    scale: float
    """Factor from a turn's samples to `unit`."""
    turn: Turn
    rounds: int
    quick_rounds: int
    budget_s: float = 4.0
    """A competitor whose turns have taken this long gets no further turn. It keeps at least one sample."""
    more_is_better: bool = False
    pause_s: float = 0.02
    """Wait before each turn, in which every pool replaces the workers that were used."""
    warms_up: bool = True
    """One more round comes first. Its samples are dropped."""
    has_tail: bool = False
    """A comparison of trees shows its p95 too."""
    is_own: bool = False
    """It measures what toolcell alone has."""


async def run(competitor: Competitor, workload: Workload) -> list[float]:
    """Run one script with one call, with everything warm."""
    return [await competitor.run()]


async def burst(competitor: Competitor, workload: Workload) -> list[float]:
    """Run that script several times without a pause, from a pool that is large enough."""
    return await competitor.burst(workload.burst)


def spaced(gap_s: float) -> Turn:
    """Return a measurement of runs that come so long after each other."""

    async def turn(competitor: Competitor, workload: Workload) -> list[float]:
        taken = []
        for _ in range(workload.spaced):
            await anyio.sleep(gap_s)
            taken.append(await competitor.run())
        return taken

    return turn


def for_a_run(used: Callable[[], float], gap_s: float = 0.005) -> Turn:
    """Return a measurement of what all processes use for one more run, with the start of the next worker and its end.

    It is the slope between a few runs and three times as many: what is done once for all of them stays out.
    """

    async def used_for(competitor: Competitor, runs: int) -> float:
        before = used()
        for _ in range(runs):
            await competitor.run()
            await anyio.sleep(gap_s)
        await anyio.sleep(REFILL_S)
        return used() - before

    async def turn(competitor: Competitor, workload: Workload) -> list[float]:
        few = workload.spaced
        return [(await used_for(competitor, 3 * few) - await used_for(competitor, few)) / (2 * few)]

    return turn


async def call_cpu(competitor: Competitor, workload: Workload) -> list[float]:
    """Measure the CPU time of all processes for a call of a script that makes many."""
    calls = 4 * workload.calls
    before = processor_time.seconds()
    await competitor.call(calls)
    await anyio.sleep(REFILL_S)
    return [(processor_time.seconds() - before) / calls]


async def round_trip(competitor: Competitor, workload: Workload) -> list[float]:
    """Make calls one after another in one script, and time them in the tool."""
    return await competitor.call(workload.calls)


async def pipelined(competitor: Competitor, workload: Workload) -> list[float]:
    """Make all calls at once in one script. The sample is the time per call."""
    return [await competitor.pipeline(workload.pipelined)]


async def fan_out(competitor: Competitor, workload: Workload) -> list[float]:
    """Call a tool that takes 10 ms several times at once."""
    return [await competitor.fan_out(workload.parallel)]


async def throughput(competitor: Competitor, workload: Workload) -> list[float]:
    """Count runs per second with several clients. New workers are started in that time too."""
    return [workload.runs / await competitor.many(workload.runs, workload.clients)]


async def cold(competitor: Competitor, workload: Workload) -> list[float]:
    """Start from nothing and get the first result. The host has imported its modules."""
    return [await competitor.cold()]


async def text(competitor: Competitor, workload: Workload) -> list[float]:
    """Return one long string."""
    return [await competitor.return_text(workload.text_bytes)]


async def records(competitor: Competitor, workload: Workload) -> list[float]:
    """Return a list of dicts."""
    return [await competitor.return_records(workload.records)]


async def idle(competitor: Competitor, workload: Workload) -> list[float]:
    """Measure the memory of all processes of a number of idle workers, parents included, per worker."""
    before = memory.descendants()
    async with competitor.idle(workload.idle):
        started = await memory.wait_settled(before, workload.idle)
        return [memory.pss_bytes(started) / workload.idle]


async def machine(competitor: Competitor, workload: Workload) -> list[float]:
    """Measure the same with the machine's own counters. They include the kernel's memory, and every other process's."""
    before, used = memory.descendants(), memory.used_bytes()
    async with competitor.idle(workload.idle):
        await memory.wait_settled(before, workload.idle)
        return [max(0, memory.used_bytes() - used) / workload.idle]


def of_toolcell(turn: own.OwnTurn) -> Turn:
    """Return a measurement of what toolcell alone has."""

    async def checked(competitor: Competitor, workload: Workload) -> list[float]:
        assert isinstance(competitor, Toolcell)
        return await turn(competitor)

    return checked


def _own(
    key: str, title: str, unit: str, scale: float, turn: own.OwnTurn, rounds: int, quick_rounds: int = 1
) -> Measurement:
    return Measurement(key, title, unit, scale, of_toolcell(turn), rounds, quick_rounds, 12.0, is_own=True)


MEASUREMENTS = (
    Measurement("run", "one run, one call", "ms", 1e3, run, 150, 8, budget_s=8.0),
    Measurement("burst", "each of {burst} such runs in a row", "ms", 1e3, burst, 30, 2, pause_s=0.15),
    Measurement("gap_0", "one of {spaced} runs in a row", "ms", 1e3, spaced(0.0), 10, 1, has_tail=True),
    Measurement("gap_5", "one of {spaced} runs, 5 ms apart", "ms", 1e3, spaced(0.005), 10, 1, has_tail=True),
    Measurement("gap_50", "one of {spaced} runs, 50 ms apart", "ms", 1e3, spaced(0.05), 5, 1, 8.0, has_tail=True),
    Measurement("cpu_run", "CPU of all processes per run", "ms", 1e3, for_a_run(processor_time.seconds), 5, 1, 8.0),
    Measurement("cpu_run_50", "the same, 50 ms apart", "ms", 1e3, for_a_run(processor_time.seconds, 0.05), 3, 1, 16.0),
    Measurement("faults", "page faults of all processes", "per run", 1.0, for_a_run(processor_time.faults), 3, 1),
    Measurement("cpu_call", "CPU of all processes per call", "us", 1e6, call_cpu, 5, 1),
    Measurement("call", "tool call round trip", "us", 1e6, round_trip, 8, 2),
    Measurement("pipelined", "{pipelined} calls at once, per call", "us", 1e6, pipelined, 20, 3),
    Measurement("fan_out", "{parallel} calls of 10 ms at once", "ms", 1e3, fan_out, 20, 3),
    Measurement("throughput", "{clients} clients", "runs/s", 1.0, throughput, 6, 1, 8.0, more_is_better=True),
    Measurement("cold", "nothing to first result", "ms", 1e3, cold, 15, 1, 6.0, pause_s=0.05, warms_up=False),
    Measurement("text", "{text_bytes:,} characters", "ms", 1e3, text, 10, 1),
    Measurement("records", "{records:,} records", "ms", 1e3, records, 6, 1, budget_s=3.0),
    Measurement("idle", "memory of each of {idle} idle", "MiB", MIB, idle, 1, 1, 60.0, pause_s=0.1, warms_up=False),
    Measurement("machine", "the same by the machine", "MiB", MIB, machine, 3, 0, 60.0, pause_s=0.5, warms_up=False),
    _own("call_plain", "tool call round trip, plain def", "us", 1e6, own.plain_call, 8),
    _own("parallel", f"{own.PARALLEL:,} calls at once", "ms", 1e3, own.parallel("echo"), 8),
    _own("parallel_plain", f"{own.PARALLEL:,} calls at once, plain def", "ms", 1e3, own.parallel("plain"), 8),
    _own("plan", f"plan of {own.STEPS} steps", "ms", 1e3, own.plan, 50, 5),
    _own("plan_gather", "CPU of the plan, in times of an asyncio.gather", "x", 1.0, own.plan_to_gather, 10),
    _own("session", "script of a session", "ms", 1e3, own.session, 5),
    _own("open", "opening a Runtime", "ms", 1e3, own.opening, 15),
    _own("import", "from toolcell import Runtime", "ms", 1e3, own.command(own.IMPORT, cpu=False), 15),
    _own("import_cpu", "CPU of this import", "ms", 1e3, own.command(own.IMPORT, cpu=True), 15),
    _own("command", "toolcell run -c", "ms", 1e3, own.command(own.RUN, cpu=False), 15),
    _own("command_cpu", "CPU of this command", "ms", 1e3, own.command(own.RUN, cpu=True), 15),
    _own("register", f"CPU to register one of {own.TOOLS:,} tools", "us", 1e6, own.register, 3, 0),
    _own("many_tools", f"run with {own.TOOLS:,} tools, in times of one with ten", "x", 1.0, own.many_tools, 3, 0),
)
"""In the table's order. The two numbers after the function are the rounds of a full and of a quick run."""
