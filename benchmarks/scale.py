"""`python -m benchmarks.scale`: how many runs and calls in a second one Runtime process makes, with a record or none.

The figures are medians of rounds that take turns, so that a busy moment of the machine hits all rows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from toolcell import PoolConfig, Runtime, ToolRegistry

ROUNDS = 5
RUNS = 300
CALLS = 3000
CONCURRENCY = 8

Measurement = Callable[[Runtime], Awaitable[float]]


def registry_of() -> ToolRegistry:
    """Return a tool that does nothing."""
    registry = ToolRegistry()

    @registry.tool(read_only=True)
    async def echo(n: int) -> int:
        """Return the number that was given."""
        return n

    return registry


async def runs(runtime: Runtime, source: str, **options: str) -> float:
    """Return items of a map in a second."""
    began = time.perf_counter()
    count = 0
    async for item in runtime.map(source, ({"n": n} for n in range(RUNS)), concurrency=CONCURRENCY, **options):  # type: ignore[arg-type]
        assert item.ok, item
        count += 1
    return count / (time.perf_counter() - began)


async def calls(runtime: Runtime) -> float:
    """Return calls in a second of scripts that do nothing else, as many at once as a map has runs."""
    began = time.perf_counter()
    source = f"for n in range({CALLS // CONCURRENCY}): call_tool('echo', n=n)"
    async for item in runtime.map(source, [{} for _ in range(CONCURRENCY)], concurrency=CONCURRENCY):
        assert item.ok, item
    return CALLS / (time.perf_counter() - began)


async def main(rounds: int) -> None:
    """Measure and print a table."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pool = PoolConfig(warm=CONCURRENCY)
        async with (
            Runtime(registry_of(), pool=pool) as bare,
            Runtime(registry_of(), pool=pool, record=Path(folder) / "a") as recorded,
        ):
            for number in range(rounds):
                rows: dict[str, Callable[[], Awaitable[float]]] = {
                    "runs/s, no call": lambda: runs(bare, "n"),
                    "runs/s, one call": lambda: runs(bare, "call_tool('echo', n=n)"),
                    "runs/s, one call, map_id, journal and audit log": lambda: runs(
                        recorded,
                        "call_tool('echo', n=n)",
                        map_id=f"round-{number}",  # noqa: B023 - called at once
                    ),
                    "calls/s, 8 scripts": lambda: calls(bare),
                    "calls/s, 8 scripts, journal and audit log": lambda: calls(recorded),
                }
                for name, measure in rows.items():
                    found.setdefault(name, []).append(await measure())
    for name, rates in found.items():
        print(f"{name:<50} {statistics.median(rates):8.0f}   ({min(rates):.0f} to {max(rates):.0f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    anyio.run(main, parser.parse_args().rounds)
