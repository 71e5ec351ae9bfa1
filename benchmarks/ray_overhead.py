"""`python -m benchmarks.ray_overhead`: what a run and a call take more on a Ray node than in a local process.

Three nodes run on this machine. Both backends, and Ray's with TLS, have a warm pool, and rounds take turns with them. A
round is a run with one call and a run with many, each after a pause.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AsyncExitStack

import anyio

from benchmarks.ray_growth import cluster_of_four
from benchmarks.scale import registry_of
from toolcell import PoolConfig, RayBackend, Runtime

CALLS = 101
ONE = "call_tool('echo', n=1)"
MANY = f"for _ in range({CALLS}): call_tool('echo', n=1)"
PAUSE_S = 0.05
"""In which the pool starts another sandbox."""

PROCESS, RAY, RAY_TLS = "process backend", "RayBackend", "RayBackend(tls=True)"
THREE_NODES = {"n3": 0.001}


async def took_s(runtime: Runtime, source: str) -> float:
    """Return how long a run takes from a warm pool."""
    await anyio.sleep(PAUSE_S)
    began = time.perf_counter()
    result = await runtime.execute_code(source)
    ended = time.perf_counter()
    assert result.ok, result.error
    return ended - began


async def measure(rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds of a run with one call, and of one more call, for each backend."""
    backends: dict[str, str | RayBackend] = {
        PROCESS: "process",
        RAY: RayBackend(resources=THREE_NODES),
        RAY_TLS: RayBackend(resources=THREE_NODES, tls=True),
    }
    runs: dict[str, list[float]] = {name: [] for name in backends}
    calls: dict[str, list[float]] = {name: [] for name in backends}
    async with AsyncExitStack() as stack:
        opened = {
            name: await stack.enter_async_context(Runtime(registry_of(), backend=backend, pool=PoolConfig(warm=4)))
            for name, backend in backends.items()
        }
        for runtime in opened.values():
            await took_s(runtime, MANY)
        for _ in range(rounds):
            for name, runtime in opened.items():
                runs[name].append(await took_s(runtime, ONE))
                calls[name].append((await took_s(runtime, MANY) - runs[name][-1]) / (CALLS - 1))
    return {name: (statistics.median(runs[name]), statistics.median(calls[name])) for name in backends}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    with cluster_of_four():
        found = anyio.run(measure, options.rounds)
    print(f"medians of {options.rounds} rounds, in ms   a run with one call   more    one more call   more")
    for name, (run_s, call_s) in found.items():
        more = (run_s - found[PROCESS][0], call_s - found[PROCESS][1])
        print(f"{name:32} {run_s * 1e3:19.2f} {more[0] * 1e3:6.2f} {call_s * 1e3:16.3f} {more[1] * 1e3:6.3f}")


if __name__ == "__main__":
    main()
