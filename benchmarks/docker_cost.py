"""Measure what a container adds to a run: one script in processes and in containers.

    python -m benchmarks.docker_cost [--rounds N] [--gap-ms N] [--json]

Each round runs every competitor once, in random order, so that a disturbance hits all of them alike. `alone` is a run
after a pause. `in a row` are the runs directly after it, from a pool that holds twice as many sandboxes. `docker run`
starts a new container per script, with the same hardening flags, and reads its output from a pipe. It cannot call
tools, so it only prints. `start` is the time until one more sandbox is ready, which a pool hides.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio

from benchmarks.machine import describe_machine
from toolcell import Limits, PoolConfig, Runtime, ToolRegistry
from toolcell.sandbox.backend import Backend
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.images.reference import DEFAULT_IMAGE
from toolcell.sandbox.process.backend import ProcessBackend

SCRIPT = "set_result(call_tool('echo', {'q': 1}))"
DOCKER_RUN = [
    "docker", "run", "--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--user=65534:65534", "--pull=never",
    "--security-opt=no-new-privileges", "--log-driver=none", "--memory=512m", "--memory-swap=512m", "--pids-limit=64",
    "--tmpfs=/sandbox:rw,noexec,nosuid,nodev,size=64m", "--entrypoint=python3", DEFAULT_IMAGE, "-I", "-c", "print(1)",
]  # fmt: skip
IN_A_ROW = 7
ALONE = {"docker": 1, "docker run": 1}
"""Runs without a pause, of competitors whose new sandboxes take too long to start."""

TARGETS_MS = {"docker": 5.0}

Competitor = Callable[[], Awaitable[float]]
Figures = dict[str, float | None]


def tools() -> ToolRegistry:
    """Return a registry with one small tool."""
    registry = ToolRegistry()

    @registry.tool
    async def echo(q: int) -> int:
        """Return the number as it was given."""
        return q

    return registry


def backends() -> dict[str, Backend]:
    """Return the backends by name. They are not open."""
    return {
        "process": ProcessBackend(),
        "docker": DockerBackend(),
    }


async def docker_run() -> float:
    """Return the seconds that `docker run` takes to print a number."""
    started = time.perf_counter()
    done = await anyio.run_process(DOCKER_RUN, stderr=subprocess.STDOUT)
    elapsed_s = time.perf_counter() - started
    assert done.stdout.strip() == b"1", done.stdout
    return elapsed_s


async def measure(rounds: int, gap_s: float) -> dict[str, Figures]:
    """Shape: competitor -> {"alone_p50_ms", "alone_best_ms", "row_p50_ms", "row_best_ms", "start_ms"}."""
    async with AsyncExitStack() as stack:
        competitors: dict[str, Competitor] = {"docker run": docker_run}
        starts: dict[str, float] = {}
        for name, backend in backends().items():
            runtime = Runtime(tools(), backend=backend, pool=PoolConfig(warm=2 * ALONE.get(name, IN_A_ROW)))
            await stack.enter_async_context(runtime)
            competitors[name] = warm_run(runtime)
            starts[name] = await start_ms(backend)
        alone: dict[str, list[float]] = {name: [] for name in competitors}
        in_a_row: dict[str, list[float]] = {name: [] for name in competitors}
        for number in range(-3, rounds):
            for name in random.sample(list(competitors), len(competitors)):
                if name == "docker run" and number % 5:
                    continue  # half a second each
                await anyio.sleep(gap_s)  # the pools start new sandboxes, which is not measured
                seconds = [await competitors[name]() for _ in range(ALONE.get(name, IN_A_ROW))]
                if number >= 0:  # earlier rounds warm the caches
                    alone[name].append(seconds[0])
                    in_a_row[name] += seconds[1:]
    return {
        name: figures("alone", alone[name]) | figures("row", in_a_row[name]) | {"start_ms": starts.get(name)}
        for name in competitors
    }


def warm_run(runtime: Runtime) -> Competitor:
    """Return a function that runs the script in a warm sandbox."""

    async def run() -> float:
        started = time.perf_counter()
        result = await runtime.execute_code(SCRIPT)
        elapsed_s = time.perf_counter() - started
        assert result.value == 1, result.error
        return elapsed_s

    return run


async def start_ms(backend: Backend, times: int = 5) -> float:
    """Return the median time to start one more sandbox, up to its first bytes."""
    samples = []
    for _ in range(times):
        started = time.perf_counter()
        sandbox = await backend.start(Limits())
        await sandbox.stream.receive()
        samples.append(time.perf_counter() - started)
        await sandbox.destroy()
    return round(statistics.median(samples) * 1e3, 1)


def figures(kind: str, samples: list[float]) -> Figures:
    """Return median and best in milliseconds, or None without samples."""
    return {
        f"{kind}_p50_ms": round(statistics.median(samples) * 1e3, 2) if samples else None,
        f"{kind}_best_ms": round(min(samples) * 1e3, 2) if samples else None,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what a container adds to a run.")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--gap-ms", type=float, default=150.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = anyio.run(measure, options.rounds, options.gap_ms / 1e3)
    if options.json:
        print(json.dumps({"machine": describe_machine("asyncio"), "competitors": found}, indent=2))
        return
    print(f"{'from a warm pool (ms)':<26}{'alone':>8}{'best':>8}{'in a row':>12}{'best':>8}", end="")
    print(f"{'target':>9}{'one more start':>17}")
    for name, row in found.items():
        alone, best, in_a_row, best_in_a_row, start = ("" if value is None else value for value in row.values())
        print(f"{name:<26}{alone:>8}{best:>8}{in_a_row:>12}{best_in_a_row:>8}{TARGETS_MS.get(name, ''):>9}{start:>17}")


if __name__ == "__main__":
    main()
