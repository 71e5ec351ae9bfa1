"""Measure the phases of a sandbox's start and of a run: `python -m benchmarks.profile_start`.

Host and guest read the same monotonic clock, so a time from inside a script can be compared with one from outside.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import anyio
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.floor import floors
from toolcell import Limits, Runtime, ToolRegistry
from toolcell.run.connection import GuestConnection
from toolcell.sandbox.process.backend import ProcessBackend
from toolcell.sandbox.process.packages import resolve
from toolcell.sandbox.process.root_filesystem import interpreter
from toolcell.tools import Origin, RunContext

PAUSE_S = 0.02
"""Pause between runs, in which new sandboxes start. CPUs go idle in it, as they do between a model's messages."""

SCRIPT = """
import time
first = time.perf_counter()
call_tool('moment', {})
set_result([first, time.perf_counter()])
"""

Phases = dict[str, list[float]]


async def profile_start(rounds: int, packages: Sequence[str]) -> Phases:
    """Return the phases of starting and destroying a sandbox."""
    phases: Phases = {"fork, cgroup, descriptors": [], "isolation, Hello": [], "kill and reap": []}
    environment = resolve(packages, python=interpreter().executable) if packages else None
    backend = ProcessBackend(packages=environment.path if environment else None, preload=packages)
    await backend.open()
    try:
        for _ in range(rounds):
            moments = [time.perf_counter()]
            sandbox = await backend.start(Limits())
            moments.append(time.perf_counter())
            await GuestConnection(sandbox).hello()
            moments.append(time.perf_counter())
            await sandbox.destroy()
            moments.append(time.perf_counter())
            add(phases, moments)
            await anyio.sleep(PAUSE_S)
    finally:
        await backend.close()
    return phases


async def profile_run(rounds: int, packages: Sequence[str]) -> Phases:
    """Return the phases of one run in a warm sandbox, from the caller's request to the caller's result."""
    registry = ToolRegistry()
    entered: list[float] = []

    @registry.tool
    async def moment() -> None:
        """Record the time at which the call arrives."""
        entered.append(time.perf_counter())

    phases: Phases = {
        "request to the script's first line": [],
        "call_tool to the tool": [],
        "tool to the script": [],
        "script to the result": [],
    }
    async with Runtime(registry, packages=packages, preload=packages) as runtime:
        for _ in range(rounds):
            await anyio.sleep(PAUSE_S)
            start = time.perf_counter()
            result = await runtime.execute_code(SCRIPT)
            end = time.perf_counter()
            first, back = result.value
            add(phases, [start, first, entered[-1], back, end])
    return phases


async def profile_pause(rounds: int) -> Phases:
    """Return the times of one dispatch of an empty tool, without a sandbox, after pauses of different length.

    The instructions are the same each time. The difference comes from the processor's caches, which go cold.
    """
    registry = ToolRegistry()

    @registry.tool
    async def nothing(number: int) -> int:
        """Return the very same number."""
        return number

    context = RunContext(run_id="profile")

    async def once(pause_s: float) -> float:
        time.sleep(pause_s)  # noqa: ASYNC251 - it is the processor that should sleep
        start = time.perf_counter()
        await registry.dispatch("nothing", {"number": 1}, call_id="c", origin=Origin.CODE, context=context)
        return time.perf_counter() - start

    for _ in range(100):
        await once(0)
    return {
        f"after {pause_s * 1000:g} ms": [await once(pause_s) for _ in range(rounds)] for pause_s in (0, 0.001, PAUSE_S)
    }


async def profile_cpu(rounds: int, packages: Sequence[str]) -> Phases:
    """Return the CPU time of one run by process. The start and end of its sandbox are included."""
    registry = ToolRegistry()

    @registry.tool
    async def nothing() -> None:
        """Do nothing at all here."""

    async with Runtime(registry, packages=packages, preload=packages) as runtime:
        for _ in range(40):
            await runtime.execute_code("call_tool('nothing')")
        host = psutil.Process()
        zygote = next(each for each in host.children(recursive=True) if "zygote" in " ".join(each.cmdline()))
        before = cpu_times(host, zygote)
        for _ in range(rounds):
            await runtime.execute_code("call_tool('nothing')")
        after = cpu_times(host, zygote)
    names = ("host", "zygote", "sandbox")
    return {name: [(late - early) / rounds] for name, early, late in zip(names, before, after, strict=True)}


def cpu_times(host: psutil.Process, zygote: psutil.Process) -> tuple[float, float, float]:
    """Return the seconds of host, zygote, and all reaped sandboxes. A tick is 10 ms, so measure many runs."""
    own, its = host.cpu_times(), zygote.cpu_times()
    sandboxes = its.children_user + its.children_system
    return own.user + own.system, its.user + its.system, sandboxes


def add(phases: Phases, moments: Sequence[float]) -> None:
    """Add the time between each moment and the next to its phase."""
    for name, earlier, later in zip(list(phases), moments[:-1], moments[1:], strict=True):
        phases[name].append(later - earlier)


def show(console: Console, title: str, phases: Phases, has_sum: bool = True) -> None:
    """Print p50 and p95 of each phase in microseconds. `has_sum` adds the sum of the p50s."""
    table = Table(title=f"{title}, us", min_width=60, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("phase")
    for name in ("p50", "p95"):
        table.add_column(name, justify="right")
    for name, samples in phases.items():
        ordered = sorted(samples)
        table.add_row(name, f"{statistics.median(ordered) * 1e6:.0f}", f"{ordered[int(len(ordered) * 0.95)] * 1e6:.0f}")
    if has_sum:
        table.add_row("sum", f"{sum(map(statistics.median, phases.values())) * 1e6:.0f}", "")
    console.print(table)


async def profile_all(rounds: int, packages: Sequence[str]) -> None:
    """Print the machine's round trips, then all profiles without and with packages."""
    console = Console(highlight=False, width=100)
    show(console, "floor: 50 bytes between two processes and back", floors(rounds, PAUSE_S), has_sum=False)
    show(console, "one dispatch of a tool, without a sandbox", await profile_pause(rounds), has_sum=False)
    for loaded in ((), packages) if packages else ((),):
        suffix = f" with {', '.join(loaded)}" if loaded else ""
        show(console, f"start of a sandbox{suffix}", await profile_start(rounds, loaded))
        show(console, f"one run{suffix}", await profile_run(rounds, loaded))
        show(console, f"CPU time of one run{suffix}, back to back", await profile_cpu(3 * rounds, loaded))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--packages", nargs="*", default=("numpy", "pandas"), help="preloaded in the second pass")
    given = parser.parse_args()
    anyio.run(profile_all, given.rounds, given.packages)
