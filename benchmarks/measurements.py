"""The measurements: one function each, and one row each in `MEASUREMENTS`.

A function takes one turn with one competitor and returns samples. The command decides who has a turn when.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from benchmarks import memory, own, processor_time
from benchmarks.competitors.competitor import Competitor, NotAvailable


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
    text_bytes: int = 10_000_000
    records: int = 40_000
    """Number of dicts, each of four fields and about 250 bytes."""
    lines: int = 10_000
    requests: int = 100
    scripts: int = 20
    steps: int = 50
    idle: int = 100


QUICK = Workload(spaced=5, calls=100, pipelined=100, runs=8, text_bytes=2_000_000, records=2_000, requests=20, idle=6)
"""Enough to see that everything works. The figures are rough."""

MIB = 2.0**-20

REFILL_S = 0.1
"""After this time every pool has replaced what was used."""

Turn = Callable[[Competitor, Workload], Awaitable[list[float]]]
Act = Callable[[Competitor, int], Awaitable[object]]
"""Does something so many times."""


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
    budget_s: float = 4.0
    """A competitor whose turns have taken this long gets no further turn. It keeps at least one sample."""
    more_is_better: bool = False
    warms_up: bool = True
    """One more round comes first. Its samples are dropped."""


def each(act: Callable[[Competitor, Workload], Awaitable[Sequence[float] | float]]) -> Turn:
    """Return a measurement of what a competitor times by itself."""

    async def turn(competitor: Competitor, workload: Workload) -> list[float]:
        taken = await act(competitor, workload)
        return [taken] if isinstance(taken, float) else [*taken]

    return turn


def spaced(gap_s: float) -> Turn:
    """Return a measurement of runs that come so long after each other."""

    async def turn(competitor: Competitor, workload: Workload) -> list[float]:
        taken = []
        for _ in range(workload.spaced):
            await anyio.sleep(gap_s)
            taken.append(await competitor.run())
        return taken

    return turn


def slope(act: Act, few: Callable[[Workload], int], used: Callable[[], float] = processor_time.seconds) -> Turn:
    """Return a measurement of what all processes use for one more of what `act` does.

    It is the slope between a few and three times as many: what is done once for all of them stays out.
    """

    async def used_for(competitor: Competitor, times: int) -> float:
        before = used()
        await act(competitor, times)
        await anyio.sleep(REFILL_S)
        return used() - before

    async def turn(competitor: Competitor, workload: Workload) -> list[float]:
        times = few(workload)
        return [(await used_for(competitor, 3 * times) - await used_for(competitor, times)) / (2 * times)]

    return turn


def runs(gap_s: float) -> Act:
    """Return what makes runs so long after each other, the start of the next worker and its end included."""

    async def act(competitor: Competitor, times: int) -> None:
        for _ in range(times):
            await competitor.run()
            await anyio.sleep(gap_s)

    return act


def throughput(clients: int) -> Turn:
    """Return a measurement of runs per second with so many clients. New workers are started in that time too."""

    async def turn(competitor: Competitor, workload: Workload) -> list[float]:
        return [workload.runs / await competitor.many(workload.runs, clients)]

    return turn


def idle(measured: Callable[[set[int]], float]) -> Turn:
    """Return a measurement of the memory of each of a number of idle workers. `measured`: that of these processes."""

    async def turn(competitor: Competitor, workload: Workload) -> list[float]:
        before, used = memory.descendants(), measured(set())
        async with competitor.idle(workload.idle):
            started = await memory.wait_settled(before, workload.idle)
            return [max(0, measured(started) - used) / workload.idle]

    return turn


def process(arguments: Callable[[Competitor], Sequence[str]], used: Callable[[], float]) -> Turn:
    """Return a measurement of one process of this interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    async def turn(competitor: Competitor, workload: Workload) -> list[float]:
        if not arguments(competitor):
            raise NotAvailable("it has no such command")
        before = used()
        subprocess.run(  # noqa: ASYNC221 - nothing else is to run meanwhile
            [sys.executable, *arguments(competitor)], env=environment, check=True, stdout=subprocess.DEVNULL
        )
        return [used() - before]

    return turn


def only_toolcell(turn: own.OwnTurn) -> Turn:
    """Return a measurement of what toolcell alone has."""
    checked = own.own(turn)
    return lambda competitor, workload: checked(competitor)


GAPS_MS = 1, 5, 18, 24, 60, 200
CLIENTS = 1, 4, 16
FAULTS = processor_time.faults

MEASUREMENTS = (
    Measurement("run", "one run, one call", "ms", 1e3, each(lambda it, work: it.run()), 150, 8.0),
    Measurement(
        "burst", "each of {burst} such runs in a row", "ms", 1e3, each(lambda it, work: it.burst(work.burst)), 30
    ),
    Measurement("gap_0", "one of {spaced} runs in a row", "ms", 1e3, spaced(0.0), 10),
    *(
        Measurement(f"gap_{gap}", f"one of {{spaced}} runs, {gap} ms apart", "ms", 1e3, spaced(gap / 1000), 10, 12.0)
        for gap in GAPS_MS
    ),
    Measurement("cpu_run", "CPU of all processes per run", "ms", 1e3, slope(runs(0.0), lambda work: work.spaced), 5),
    Measurement("cpu_run_60", "the same, 60 ms apart", "ms", 1e3, slope(runs(0.06), lambda work: work.spaced), 3, 16.0),
    Measurement(
        "faults",
        "page faults of all processes",
        "per run",
        1.0,
        slope(runs(0.005), lambda work: work.spaced, FAULTS),
        3,
    ),
    Measurement("call", "tool call round trip", "us", 1e6, each(lambda it, work: it.call(work.calls)), 8),
    Measurement(
        "cpu_call",
        "CPU of all processes per call",
        "us",
        1e6,
        slope(lambda it, n: it.call(n), lambda work: work.calls),
        5,
    ),
    Measurement(
        "pipelined",
        "{pipelined} calls at once, per call",
        "us",
        1e6,
        each(lambda it, work: it.pipeline(work.pipelined)),
        20,
    ),
    Measurement(
        "fan_out", "{parallel} calls of 10 ms at once", "ms", 1e3, each(lambda it, work: it.fan_out(work.parallel)), 20
    ),
    *(
        Measurement(
            f"clients_{clients}",
            "1 client" if clients == 1 else f"{clients} clients",
            "runs/s",
            1.0,
            throughput(clients),
            6,
            6.0,
            more_is_better=True,
        )
        for clients in CLIENTS
    ),
    Measurement("session", "script of a session", "ms", 1e3, each(lambda it, work: it.session(work.scripts)), 5),
    Measurement(
        "cpu_session",
        "CPU of all processes per script of a session",
        "ms",
        1e3,
        slope(lambda it, n: it.session(n), lambda work: 2 * work.scripts),
        5,
    ),
    Measurement(
        "cpu_print", "CPU of a printed line", "us", 1e6, slope(lambda it, n: it.prints(n), lambda work: work.lines), 5
    ),
    Measurement(
        "cpu_request",
        "CPU of a request, the server's included",
        "ms",
        1e3,
        slope(lambda it, n: it.requests(n), lambda work: work.requests),
        3,
    ),
    Measurement("plan", "plan of {steps} steps", "ms", 1e3, each(lambda it, work: it.plan(work.steps)), 50),
    Measurement(
        "plan_gather", "CPU of the plan, in times of an asyncio.gather", "x", 1.0, only_toolcell(own.plan_to_gather), 10
    ),
    Measurement(
        "cold", "nothing to first result", "ms", 1e3, each(lambda it, work: it.cold()), 15, 6.0, warms_up=False
    ),
    Measurement(
        "command", "one line on the command line", "ms", 1e3, process(lambda it: it.command, time.perf_counter), 10
    ),
    Measurement(
        "command_cpu",
        "CPU of this command",
        "ms",
        1e3,
        process(lambda it: it.command, processor_time.of_ended_children),
        10,
    ),
    Measurement(
        "import", "from toolcell import Runtime", "ms", 1e3, process(lambda it: it.imports, time.perf_counter), 10
    ),
    Measurement(
        "import_cpu",
        "CPU of this import",
        "ms",
        1e3,
        process(lambda it: it.imports, processor_time.of_ended_children),
        10,
    ),
    Measurement("open", "opening a Runtime", "ms", 1e3, only_toolcell(own.opening), 10),
    Measurement(
        "kernel", "start of a kernel to its first result", "ms", 1e3, each(lambda it, work: it.kernel()), 5, 8.0
    ),
    Measurement(
        "text", "{text_bytes:,} characters", "ms", 1e3, each(lambda it, work: it.return_text(work.text_bytes)), 10
    ),
    Measurement(
        "records", "{records:,} records", "ms", 1e3, each(lambda it, work: it.return_records(work.records)), 6, 3.0
    ),
    Measurement("idle", "memory of each of {idle} idle", "MiB", MIB, idle(memory.pss_bytes), 1, warms_up=False),
    Measurement(
        "machine",
        "the same by the machine",
        "MiB",
        MIB,
        idle(lambda pids: memory.used_bytes()),
        3,
        60.0,
        warms_up=False,
    ),
    Measurement("call_plain", "tool call round trip, plain def", "us", 1e6, only_toolcell(own.plain_call), 8),
    Measurement(
        "parallel_plain", f"{own.PARALLEL:,} calls at once, plain def", "ms", 1e3, only_toolcell(own.parallel_plain), 8
    ),
    Measurement("register", f"CPU to register one of {own.TOOLS:,} tools", "us", 1e6, only_toolcell(own.register), 3),
    Measurement(
        "many_tools",
        f"run with {own.TOOLS:,} tools, in times of one with ten",
        "x",
        1.0,
        only_toolcell(own.many_tools),
        3,
    ),
)
"""All measurements, in the table's order."""
