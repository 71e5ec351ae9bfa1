"""What the audit log adds to a tool call and to a run: the same scripts with it and without, in turns.

    python -m benchmarks.audit_cost [--rounds N] [--calls N] [--json]

Each round runs every contestant once, in a fresh order, so that whatever else the machine does hits all alike. Of each
contestant the quickest quarter of the rounds counts: noise only ever adds. `repeatable` is measured against itself:
seeding and the clock are the guest's work and not the log's. `15 us of nothing` is the yardstick: an observer that only
waits for as long as the budget allows. What it adds beyond 15 us is the machine's doing, which puts the script to sleep
while it waits for an answer and has to wake it.
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

import anyio

from toolcell import Limits, Policy, PoolConfig, RunContext, Runtime, ToolRegistry
from toolcell.audit.config import AuditConfig
from toolcell.audit.keys import HmacKey
from toolcell.audit.log import AuditLog

REPEATABLE = Policy(seed=1, clock=1_700_000_000.5, hash_seed=1)
YARDSTICK = "15 us of nothing per call"
CONTESTANTS: dict[str, tuple[Policy, AuditConfig | None]] = {
    "off": (Policy(), None),
    "on": (Policy(), AuditConfig(repeatable=False)),
    "off, repeatable": (REPEATABLE, None),
    "on, repeatable (default)": (REPEATABLE, AuditConfig()),
    YARDSTICK: (Policy(), None),
    "on, fsync never": (Policy(), AuditConfig(repeatable=False, fsync="never")),
    "on, fsync always": (Policy(), AuditConfig(repeatable=False, fsync="always")),
}
BASELINE = {name: "off, repeatable" if "repeatable" in name else "off" for name in CONTESTANTS}
NOTHING = "set_result(1)"
BUDGET_CALL_US, BUDGET_RUN_US = 15.0, 60.0

Samples = dict[str, dict[str, list[float]]]


def calling(times: int) -> str:
    """A script that calls a small tool so many times."""
    return f"for n in range({times}):\n    call_tool('search', query='single-use sandboxes', limit=n)\nset_result(n)"


def registry() -> ToolRegistry:
    """One tool that does next to nothing."""
    tools = ToolRegistry()

    @tools.tool
    async def search(query: str, limit: int) -> list[dict[str, object]]:
        """Search for something and find one thing."""
        return [{"title": query, "score": 0.5, "rank": limit}]

    return tools


async def measure(rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Shape: contestant -> {"call_us", "run_us", "whole_call_us", "whole_run_us"}."""
    limits = Limits(tool_calls=calls + 1)
    scripts = {"run": NOTHING, "call": calling(calls)}
    taken: Samples = {name: {sort: [] for sort in scripts} for name in CONTESTANTS}
    async with AsyncExitStack() as stack:
        runtimes = {}
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=os.getcwd())))  # a disk, not a tmpfs
        for index, (name, (policy, config)) in enumerate(CONTESTANTS.items()):
            log = None
            if config is not None:
                log = AuditLog(home / str(index), config=config, key=HmacKey.generate(), heads=home / "heads")
            runtime = Runtime(registry(), audit=log, limits=limits, policy=policy, pool=PoolConfig(warm=1))
            runtimes[name] = await stack.enter_async_context(runtime)
        for number in range(-3, rounds):
            for sort, script in scripts.items():
                for name in random.sample(list(CONTESTANTS), len(CONTESTANTS)):
                    seconds = await timed(runtimes[name], script, Idler() if name == YARDSTICK else None)
                    if number >= 0:  # the rounds before warm caches
                        taken[name][sort].append(seconds)
    return {name: added(taken, name, calls) for name in CONTESTANTS}


class Idler:
    """Takes exactly what the log may take, half before a call and half after."""

    def call_started(self, call: object) -> None:
        """Wait."""
        until = time.perf_counter() + BUDGET_CALL_US / 2 * 1e-6
        while time.perf_counter() < until:
            pass

    call_ended = call_started


async def timed(runtime: Runtime, script: str, observer: Idler | None) -> float:
    """Seconds from the call to the result, from a warm sandbox."""
    context = RunContext(observer=observer) if observer is not None else None
    await anyio.sleep(0.02)  # let the pool refill, which is no part of this
    started = time.perf_counter()
    result = await runtime.execute_code(script, context=context)
    elapsed_s = time.perf_counter() - started
    assert result.ok, result.error
    return elapsed_s


def added(taken: Samples, name: str, calls: int) -> dict[str, float]:
    """What a contestant takes beyond its baseline, in microseconds."""
    base = BASELINE[name]
    run_s = quick(taken[name]["run"]) - quick(taken[base]["run"])
    whole_s = quick(taken[name]["call"]) - quick(taken[base]["call"])
    return {
        "call_us": round((whole_s - run_s) / calls * 1e6, 2),
        "run_us": round(run_s * 1e6, 1),
        "whole_call_us": round((quick(taken[name]["call"]) - quick(taken[name]["run"])) / calls * 1e6, 1),
        "whole_run_us": round(quick(taken[name]["run"]) * 1e6, 1),
    }


def quick(samples: list[float]) -> float:
    """Mean of the quickest quarter."""
    return statistics.mean(sorted(samples)[: max(1, len(samples) // 4)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What the audit log adds to a tool call and to a run.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = anyio.run(measure, options.rounds, options.calls)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"{'audit':<26}{'added per call':>16}{'added per run':>16}{'whole call':>12}{'whole run':>12}   (us)")
    for name, figure in figures.items():
        print(f"{name:<26}{figure['call_us']:>16}{figure['run_us']:>16}", end="")
        print(f"{figure['whole_call_us']:>12}{figure['whole_run_us']:>12}")
    print(f"{'budget, default policy':<26}{BUDGET_CALL_US:>16}{BUDGET_RUN_US:>16}")


if __name__ == "__main__":
    main()
