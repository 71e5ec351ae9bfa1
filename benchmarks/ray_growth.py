"""`python -m benchmarks.ray_growth`: throughput of scripts that wait for tools, on one to four Ray nodes.

Four nodes run on this machine, and rounds take turns with one, two, three and four of them. What a run and a call cost
the caller and the nodes is measured too; `cluster_simulation` takes these costs, is compared with what was measured,
and then says what larger clusters would do. `--plot FILE` draws both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import psutil

from benchmarks.cluster_simulation import ROUNDS, Cluster, Costs, Program, runs_per_second, saturation
from toolcell import PoolConfig, RayBackend, Runtime, ToolRegistry

NODES = (1, 2, 3, 4)
PLACES = 4
"""Sandboxes of a node: few, so that this machine's processors are not what limits them."""
WAITING = Program(calls=2, tool_s=1.0)
COUNTED = 200
"""Runs by which costs are measured."""
LARGER = (1, 2, 4, 10, 30, 100, 300, 1000)
"""Nodes that are simulated."""
LARGE_PLACES = 100
CALLERS = (1, 8, 64)


def registry_of() -> ToolRegistry:
    """Return a tool that takes as long to answer as it is told."""
    registry = ToolRegistry()

    @registry.tool(read_only=True)
    async def wait(seconds: float) -> float:
        """Return the seconds, after them."""
        await anyio.sleep(seconds)
        return seconds

    return registry


@contextmanager
def cluster_of_four() -> Iterator[None]:
    """Start the nodes. The first has the resources n1 to n4, the second n2 to n4, and so on."""
    import ray
    from ray.cluster_utils import Cluster as RayNodes

    started = RayNodes()
    for node in NODES:
        resources = {f"n{count}": 1.0 for count in NODES if count >= node}
        started.add_node(num_cpus=1, object_store_memory=80 << 20, resources=resources, include_dashboard=False)
    ray.init(address=started.address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        started.shutdown()


async def measured(nodes: int, program: Program, runs: int, places: int = PLACES) -> tuple[float, float, float]:
    """Return runs in a second, and processor seconds of caller and nodes for each."""
    source = f"for _ in range({program.calls}): call_tool('wait', seconds={program.tool_s})"
    backend = RayBackend(sandboxes_per_node=places, resources={f"n{nodes}": 0.001})
    cap = nodes * places
    async with Runtime(registry_of(), backend=backend, pool=PoolConfig(warm=0, cap=cap)) as runtime:
        await _all(runtime, "1", cap)
        began, caller_s, nodes_s = time.perf_counter(), _used_s([psutil.Process()]), _used_s(_nodes())
        await _all(runtime, source, runs, cap)
        took_s = time.perf_counter() - began
        used = (_used_s([psutil.Process()]) - caller_s, _used_s(_nodes()) - nodes_s)
        return runs / took_s, used[0] / runs, used[1] / runs


async def _all(runtime: Runtime, source: str, runs: int, concurrency: int = 16) -> None:
    async for item in runtime.map(source, ({} for _ in range(runs)), concurrency=concurrency):
        assert item.ok, item


def _nodes() -> list[psutil.Process]:
    """The actors, with everything below them."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "ray::NodeActor" in "".join(each.cmdline()):
                found += [each, *each.children(recursive=True)]
    return found


def _used_s(processes: list[psutil.Process]) -> float:
    """Processor seconds of these, and of their children that have ended; not of this process's children."""
    used = 0.0
    for each in processes:
        with suppress(psutil.Error):
            times = each.cpu_times()
            used += times.user + times.system
            if each.pid != psutil.Process().pid:
                used += times.children_user + times.children_system
    return used


async def memory_of_a_sandbox() -> float:
    """Return what a sandbox has for itself on its node, in MiB, while its script waits for a tool."""
    count = NODES[-1] * PLACES
    backend = RayBackend(sandboxes_per_node=PLACES, resources={f"n{NODES[-1]}": 0.001})
    async with Runtime(registry_of(), backend=backend, pool=PoolConfig(warm=0, cap=count)) as runtime:
        await _all(runtime, "1", count)
        before = _own_mib()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_all, runtime, "call_tool('wait', seconds=4.0)", count, count)
            await anyio.sleep(2.0)
            used = _own_mib() - before
    return used / count


def _own_mib() -> float:
    size = 0
    for each in _nodes():
        with suppress(psutil.Error):
            size += each.memory_full_info().uss
    return size / (1 << 20)


async def costs_of(rounds: int) -> Costs:
    """Measure what a run and a call cost, as medians."""
    rows = []
    for _ in range(rounds):
        _, empty_s, node_s = await measured(4, Program(0, 0.0), COUNTED)
        _, calling_s, _ = await measured(4, Program(50, 0.0), COUNTED // 4)
        rows.append((empty_s, (calling_s - empty_s) / 50, node_s))
    return Costs(*map(statistics.median, zip(*rows, strict=True)))


def growth(rounds: int) -> dict[int, float]:
    """Print and return runs in a second by the number of nodes, as medians."""
    found: dict[int, list[float]] = {count: [] for count in NODES}
    for _ in range(rounds):
        for count in NODES:
            runs = count * PLACES * ROUNDS
            found[count].append(anyio.run(measured, count, WAITING, runs)[0])
    return {count: statistics.median(rates) for count, rates in found.items()}


def draw(path: Path, rates: dict[int, float], costs: Costs) -> None:
    """Draw what was measured beside what is simulated."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (small, large) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    small.plot(NODES, [_here(count, costs) for count in NODES], label="simulated", color="tab:blue")
    small.plot(list(rates), list(rates.values()), "o", label="measured", color="tab:orange")
    small.set(title=f"one machine, {PLACES} sandboxes a node", xlabel="nodes", ylabel="runs/s", xticks=NODES)
    for callers in CALLERS:
        label = f"{callers} caller{'s' * (callers > 1)}"
        large.plot(LARGER, [_there(count, callers, costs) for count in LARGER], ".-", label=label)
    title = f"a machine for each node, {LARGE_PLACES} sandboxes a node"
    large.set(title=title, xlabel="nodes", ylabel="runs/s, simulated", xscale="log", yscale="log")
    for axes in (small, large):
        axes.set_ylim(bottom=0 if axes is small else None)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, metadata={"Date": None})


def _here(nodes: int, costs: Costs) -> float:
    return runs_per_second(Cluster(nodes, PLACES, is_one_machine=True), WAITING, costs)


def _there(nodes: int, callers: int, costs: Costs) -> float:
    return runs_per_second(Cluster(nodes, LARGE_PLACES, callers=callers), WAITING, costs)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_growth", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw it, as SVG")
    options = parser.parse_args()
    with cluster_of_four():
        rates = growth(options.rounds)
        costs = anyio.run(costs_of, options.rounds)
        full, _, _ = anyio.run(measured, 4, Program(0, 0.0), COUNTED)
        memory_mib = anyio.run(memory_of_a_sandbox)
    print(f"a script that waits {WAITING.calls * WAITING.tool_s:g} s for its tools, {PLACES} sandboxes a node")
    for count, rate in rates.items():
        share = rate / (count * rates[1])
        print(f"  {count} nodes: {rate:5.2f} runs/s, {share:.3f} of linear; simulated {_here(count, costs):5.2f}")
    empty = runs_per_second(Cluster(4, PLACES, is_one_machine=True), Program(0, 0.0), costs)
    print(f"a script that does nothing, 4 nodes: {full:.0f} runs/s; simulated {empty:.0f}")
    print(f"costs in ms of a processor: a run {costs.caller_run_s * 1e3:.2f} of the caller and ", end="")
    print(f"{costs.node_run_s * 1e3:.2f} of its node, a call {costs.caller_call_s * 1e3:.2f} of the caller")
    print(f"memory of a sandbox that waits: {memory_mib:.1f} MiB of its node")
    print(f"one caller is full at {saturation(WAITING, costs):.0f} of these runs/s; simulated, {LARGE_PLACES} a node:")
    for count in LARGER:
        row = ", ".join(f"{callers}: {_there(count, callers, costs):.0f}" for callers in CALLERS)
        print(f"  {count} nodes; runs/s by callers: {row}")
    if options.plot is not None:
        draw(options.plot, rates, costs)


if __name__ == "__main__":
    main()
