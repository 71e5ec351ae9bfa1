"""What is measured: one function per measurement, one row each in `MEASUREMENTS`.

Each function takes one turn with one contestant and returns samples. Turns, their order and pauses are `rounds.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks import memory
from benchmarks.contestants import Contestant


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work one turn of each measurement is."""

    burst: int = 8
    calls: int = 500
    pipelined: int = 300
    parallel: int = 10
    runs: int = 80
    clients: int = 2 * (os.cpu_count() or 1)
    text_bytes: int = 10_000_000
    records: int = 40_000
    """Dicts of four fields and some 250 bytes."""
    idle: int = 100


MIB = 2.0**-20

Turn = Callable[[Contestant, Effort], Awaitable[list[float]]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row group of the table."""

    key: str
    title: str
    """May name fields of `Effort` in braces."""
    unit: str
    scale: float
    """From what a turn returns to the unit shown."""
    turn: Turn
    rounds: int
    quick_rounds: int
    budget_s: float = 4.0
    """A contestant that used this much time in its turns has had its last one; it keeps at least one sample."""
    more_is_better: bool = False
    pause_s: float = 0.02
    """Before each turn. Long enough for every pool to have replaced what was used."""
    warms_up: bool = True
    """One more round goes first, whose samples are dropped."""


async def run(contestant: Contestant, effort: Effort) -> list[float]:
    """One script, one call, one result, with everything warm."""
    return [await contestant.run()]


async def burst(contestant: Contestant, effort: Effort) -> list[float]:
    """The same several times without a pause, out of a pool that holds enough."""
    return await contestant.burst(effort.burst)


async def round_trip(contestant: Contestant, effort: Effort) -> list[float]:
    """Calls one after another in one script, timed where the tool is."""
    return await contestant.call(effort.calls)


async def pipelined(contestant: Contestant, effort: Effort) -> list[float]:
    """Calls all at once in one script, time per call."""
    return [await contestant.pipeline(effort.pipelined)]


async def fan_out(contestant: Contestant, effort: Effort) -> list[float]:
    """Simultaneous calls of a tool that takes 10 ms."""
    return [await contestant.fan_out(effort.parallel)]


async def throughput(contestant: Contestant, effort: Effort) -> list[float]:
    """Runs per second with several clients at once, replacements included."""
    return [effort.runs / await contestant.many(effort.runs, effort.clients)]


async def cold(contestant: Contestant, effort: Effort) -> list[float]:
    """From nothing to the first result; the host has imported what it needs."""
    return [await contestant.cold()]


async def text(contestant: Contestant, effort: Effort) -> list[float]:
    """One long string as the result."""
    return [await contestant.return_text(effort.text_bytes)]


async def records(contestant: Contestant, effort: Effort) -> list[float]:
    """A list of dicts as the result."""
    return [await contestant.return_records(effort.records)]


async def idle(contestant: Contestant, effort: Effort) -> list[float]:
    """Memory of everything an idle crowd needs, divided by its size; parents and helpers are included."""
    before = memory.descendants()
    async with contestant.idle(effort.idle):
        started = await memory.wait_settled(before, effort.idle)
        return [memory.pss_bytes(started) / effort.idle]


async def machine(contestant: Contestant, effort: Effort) -> list[float]:
    """The same by the machine's own counters: memory of the kernel included, and of everybody else."""
    before, used = memory.descendants(), memory.used_bytes()
    async with contestant.idle(effort.idle):
        await memory.wait_settled(before, effort.idle)
        return [max(0, memory.used_bytes() - used) / effort.idle]


MEASUREMENTS = (
    Measurement("run", "one run, one call", "ms", 1e3, run, 150, 8, budget_s=8.0),
    Measurement("burst", "each of {burst} such runs in a row", "ms", 1e3, burst, 30, 2, pause_s=0.15),
    Measurement("call", "tool call round trip", "us", 1e6, round_trip, 8, 2),
    Measurement("pipelined", "{pipelined} calls at once, per call", "us", 1e6, pipelined, 20, 3),
    Measurement("fan_out", "{parallel} calls of 10 ms at once", "ms", 1e3, fan_out, 20, 3),
    Measurement("throughput", "runs/s, {clients} clients", "runs/s", 1.0, throughput, 6, 1, 8.0, more_is_better=True),
    Measurement("cold", "nothing to first result", "ms", 1e3, cold, 15, 1, 6.0, pause_s=0.05, warms_up=False),
    Measurement("text", "{text_bytes:,} characters", "ms", 1e3, text, 10, 1),
    Measurement("records", "{records:,} records", "ms", 1e3, records, 6, 1, budget_s=3.0),
    Measurement("idle", "memory of each of {idle} idle", "MiB", MIB, idle, 1, 1, 60.0, pause_s=0.1, warms_up=False),
    Measurement("machine", "the same by the machine", "MiB", MIB, machine, 3, 0, 60.0, pause_s=0.5, warms_up=False),
)
"""In the order of the table. The two numbers after the function are rounds, full and quick."""
