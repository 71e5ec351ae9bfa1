"""What the audit log adds to a tool call and to a run: the same scripts with it and without, in turns.

    python -m benchmarks.audit_cost [--rounds N] [--calls N] [--json]

Whatever else the machine does meanwhile hits all contestants alike, because each round runs every one of them in a
fresh order; the figure is the median over rounds of the difference to `off` in the same round.
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

from toolcell import Limits, PoolConfig, Runtime, ToolRegistry
from toolcell.audit.config import AuditConfig
from toolcell.audit.keys import HmacKey
from toolcell.audit.log import AuditLog

CONTESTANTS: dict[str, AuditConfig | None] = {
    "off": None,
    "on": AuditConfig(),
    "on, not repeatable": AuditConfig(repeatable=False),
    "on, fsync never": AuditConfig(fsync="never"),
    "on, fsync always": AuditConfig(fsync="always"),
}
NOTHING = "set_result(1)"
BUDGET_CALL_US, BUDGET_RUN_US = 15.0, 60.0


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
    """Shape: contestant -> {"call_us", "run_us"}, each over `off`."""
    limits = Limits(tool_calls=calls + 1)
    scripts = {"run": NOTHING, "call": calling(calls)}
    taken: dict[str, dict[str, list[float]]] = {name: {sort: [] for sort in scripts} for name in CONTESTANTS}
    async with AsyncExitStack() as stack:
        runtimes = {}
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=os.getcwd())))  # a disk, not a tmpfs
        for index, (name, config) in enumerate(CONTESTANTS.items()):
            log = None
            if config is not None:
                log = AuditLog(home / str(index), config=config, key=HmacKey.generate(), heads=home / "heads")
            runtime = Runtime(registry(), audit=log, limits=limits, pool=PoolConfig(warm=1))
            runtimes[name] = await stack.enter_async_context(runtime)
        for number in range(-3, rounds):
            for sort, script in scripts.items():
                for name in random.sample(list(CONTESTANTS), len(CONTESTANTS)):
                    seconds = await timed(runtimes[name], script)
                    if number >= 0:  # the rounds before warm caches
                        taken[name][sort].append(seconds)
    return {name: over_off(taken, name, calls) for name in CONTESTANTS}


async def timed(runtime: Runtime, script: str) -> float:
    """Seconds from the call to the result, from a warm sandbox."""
    await anyio.sleep(0.01)  # let the pool refill, which is no part of this
    started = time.perf_counter()
    result = await runtime.execute_code(script)
    elapsed_s = time.perf_counter() - started
    assert result.ok, result.error
    return elapsed_s


def over_off(taken: dict[str, dict[str, list[float]]], name: str, calls: int) -> dict[str, float]:
    """Median differences per run and per call, in microseconds."""
    run_s = statistics.median(mine - off for mine, off in zip(taken[name]["run"], taken["off"]["run"], strict=True))
    whole_s = statistics.median(mine - off for mine, off in zip(taken[name]["call"], taken["off"]["call"], strict=True))
    return {
        "run_us": round(run_s * 1e6, 1),
        "call_us": round((whole_s - run_s) / calls * 1e6, 2),
        "plain_run_us": round(statistics.median(taken[name]["run"]) * 1e6, 1),
        "plain_call_us": round(statistics.median(taken[name]["call"]) / calls * 1e6, 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = anyio.run(measure, options.rounds, options.calls)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"{'audit':<22}{'us per call':>12}{'us per run':>12}{'whole call':>12}{'whole run':>12}")
    for name, figure in figures.items():
        print(f"{name:<22}{figure['call_us']:>12}{figure['run_us']:>12}", end="")
        print(f"{figure['plain_call_us']:>12}{figure['plain_run_us']:>12}")
    print(f"budget at the default policy{BUDGET_CALL_US:>6.0f}{BUDGET_RUN_US:>12.0f}")


if __name__ == "__main__":
    main()
