"""Measure what the audit log adds to a tool call and to a run: the same scripts with and without a log, interleaved.

    python -m benchmarks.audit_cost [--rounds N] [--calls N] [--json]

Each round runs every configuration once, in random order, so that a disturbance hits all of them alike. Each is
compared with its baseline of the same round, and the table shows the median of the rounds. A script times its own
calls. Its median call counts; the mean beside it also includes disturbances such as the start of the next sandbox.
The baseline of a `repeatable` configuration is repeatable too, because seeding and the clock are the guest's work
and not the log's. In `wait 15 us per call` the observer only waits as long as the budget allows. What it adds beyond
15 us is the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio

from toolcell import Limits, Policy, PoolConfig, RunContext, Runtime, ToolRegistry
from toolcell.audit.config import RecordConfig
from toolcell.audit.keys import HmacKey
from toolcell.audit.log import AuditLog
from toolcell.tools import Feature

REPEATABLE = Policy(seed=1, clock=1_700_000_000.5, hash_seed=1)
REFERENCE = "wait 15 us per call"
CONFIGURATIONS: dict[str, tuple[Policy, RecordConfig | None]] = {
    "off": (Policy(), None),
    "on": (Policy(), RecordConfig(repeatable=False)),
    "off, repeatable": (REPEATABLE, None),
    "on, repeatable (default)": (REPEATABLE, RecordConfig()),
    REFERENCE: (Policy(), None),
    "on, fsync never": (Policy(), RecordConfig(repeatable=False, fsync="never")),
    "on, fsync always": (Policy(), RecordConfig(repeatable=False, fsync="always")),
}
BASELINE = {name: "off, repeatable" if "repeatable" in name else "off" for name in CONFIGURATIONS}
EMPTY_SCRIPT = "set_result(1)"
PAUSE_S = 0.03
BUDGET_CALL_US, BUDGET_RUN_US = 15.0, 60.0

Samples = dict[str, list[dict[str, float]]]
"""Configuration -> one row of figures for each round, in microseconds."""


def calling_script(times: int) -> str:
    """Return a script that calls a small tool `times` times. Its result is the median and the mean call in seconds."""
    return f"""
import statistics
from time import perf_counter
taken = []
for n in range({times}):
    began = perf_counter()
    call_tool('search', query='single-use sandboxes', limit=n)
    taken.append(perf_counter() - began)
set_result([statistics.median(taken), statistics.mean(taken)])"""


def registry() -> ToolRegistry:
    """Return a registry with one small tool."""
    tools = ToolRegistry()

    @tools.tool
    async def search(query: str, limit: int) -> list[dict[str, object]]:
        """Search for something and find one thing."""
        return [{"title": query, "score": 0.5, "rank": limit}]

    return tools


async def measure(rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Shape: configuration -> {"call_us", "mean_call_us", "run_us", and of each "added_..."}."""
    limits = Limits(tool_calls=calls + 1)
    taken: Samples = {name: [] for name in CONFIGURATIONS}
    async with AsyncExitStack() as stack:
        runtimes = {}
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=os.getcwd())))  # a disk, not a tmpfs
        for index, (name, (policy, config)) in enumerate(CONFIGURATIONS.items()):
            log = None
            if config is not None:
                log = AuditLog(home / str(index), config=config, key=HmacKey.generate(), heads=home / "heads")
            runtime = Runtime(registry(), record=log, limits=limits, policy=policy, pool=PoolConfig(warm=1))
            runtimes[name] = await stack.enter_async_context(runtime)
        for number in range(-3, rounds):
            for name in random.sample(list(CONFIGURATIONS), len(CONFIGURATIONS)):
                row = await one_round(runtimes[name], calls, BusyWaiter() if name == REFERENCE else None)
                if number >= 0:  # earlier rounds warm the caches
                    taken[name].append(row)
    return {name: summary(taken[name], taken[BASELINE[name]]) for name in CONFIGURATIONS}


async def one_round(runtime: Runtime, calls: int, observer: BusyWaiter | None) -> dict[str, float]:
    """Time an empty run and a run that makes calls, each in a warm sandbox."""
    run_s, _ = await timed(runtime, EMPTY_SCRIPT, observer)
    _, (median_s, mean_s) = await timed(runtime, calling_script(calls), observer)
    return {"call_us": median_s * 1e6, "mean_call_us": mean_s * 1e6, "run_us": run_s * 1e6}


class BusyWaiter(Feature):
    """A call observer that waits as long as the budget allows, half of it before a call and half after."""

    def call_started(self, call: object) -> None:
        """Wait."""
        until = time.perf_counter() + BUDGET_CALL_US / 2 * 1e-6
        while time.perf_counter() < until:
            pass

    call_ended = call_started


async def timed(runtime: Runtime, script: str, observer: BusyWaiter | None) -> tuple[float, Any]:
    """Return the seconds from the request to the result, and the result's value."""
    context = RunContext().having(observer) if observer is not None else None
    await anyio.sleep(PAUSE_S)  # the pool starts new sandboxes, which is not measured
    started = time.perf_counter()
    result = await runtime.execute_code(script, context=context)
    elapsed_s = time.perf_counter() - started
    assert result.ok, result.error
    return elapsed_s, result.value


def summary(rows: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, float]:
    """Return medians over the rounds, of the figures and of their differences from the baseline of the same round."""
    whole = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    added = {
        f"added_{key}": statistics.median(row[key] - before[key] for row, before in zip(rows, base, strict=True))
        for key in whole
    }
    return {key: round(value, 1) for key, value in (whole | added).items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what the audit log adds to a tool call and to a run.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = anyio.run(measure, options.rounds, options.calls)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"{'':<26}{'added to a call':>18}{'(mean)':>9}{'to a run':>10}{'whole call':>14}{'whole run':>11}   (us)")
    for name, figure in figures.items():
        print(f"{name:<26}{figure['added_call_us']:>18}{figure['added_mean_call_us']:>9}", end="")
        print(f"{figure['added_run_us']:>10}{figure['call_us']:>14}{figure['run_us']:>11}")
    print(f"{'budget, default policy':<26}{BUDGET_CALL_US:>18}{'':>9}{BUDGET_RUN_US:>10}")


if __name__ == "__main__":
    main()
