"""`python -m benchmarks.ray_kills`: nodes and callers of a Ray cluster that are killed at random moments, under load.

A caller runs scripts on three nodes; each calls a tool five times that appends a line to a ledger. First actors, and
whole nodes, are killed with SIGKILL while one caller goes on; then callers are killed, one after the other. At the end
each run that was begun has its outcome or, of a killed caller, its record; each line of the ledger has the record of
its call; and nothing is left on any node.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil

from toolcell import PoolConfig, RayBackend, RunContext, Runtime, SandboxUnavailable, ToolRegistry
from toolcell.audit.filters import Filter
from toolcell.audit.query import Index

NODES = 3
AT_ONCE = 9
CALLS = 5
SCRIPT = f"import time\nfor n in range({CALLS}):\n    call_tool('note', run=run, n=n)\n    time.sleep(0.05)"
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
WHOLE_NODES = 0.2
"""Share of the kills that end a node, and not its actor alone."""
SOON_S = 60.0
PAUSE_S = (0.2, 1.5)
"""Between two kills of nodes."""
LIFE_S = (0.2, 3.0)
"""Seconds to live of a caller, from its first run to its death."""


async def be_caller(address: str, log: Path, ledger: Path) -> None:
    """Run scripts until the standard input ends. Prints each run when it begins and when it has ended."""
    registry = ToolRegistry()

    @registry.tool
    async def note(run: str, n: int) -> None:
        """Append a line to the ledger."""
        with ledger.open("a") as file:
            file.write(f"{run} {n}\n")

    stopping = anyio.Event()
    async with (
        Runtime(registry, backend=RayBackend(address), pool=PoolConfig(warm=2), record=log) as runtime,
        anyio.create_task_group() as tasks,
    ):

        async def worker(own: int) -> None:
            number = 0
            while not stopping.is_set():
                name, number = f"{os.getpid()}-{own}-{number}", number + 1
                print(json.dumps({"begun": name}), flush=True)
                outcome, calls = "unavailable", list[int]()
                with suppress(SandboxUnavailable):  # every node was killed just now
                    result = await runtime.execute_code(SCRIPT, inputs={"run": name}, context=RunContext(run_id=name))
                    outcome, calls = str(result.outcome), [call.args["n"] for call in result.calls]
                print(json.dumps({"ended": name, "outcome": outcome, "calls": calls}), flush=True)
                if outcome == "unavailable":
                    await anyio.sleep(0.5)

        for own in range(AT_ONCE):
            tasks.start_soon(worker, own)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        stopping.set()


class Caller:
    """A process that runs scripts. What it prints goes to a file: a pipe would be full."""

    def __init__(self, address: str, folder: Path, ledger: Path, number: int) -> None:
        self.log, self.out = folder / "runs", folder / f"caller-{number}.jsonl"
        command = [sys.executable, "-m", "benchmarks.ray_kills", "--caller", address, str(self.log), str(ledger)]
        with self.out.open("w") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out)
        wait_until(lambda: bool(self.said()) or self.process.poll() is not None, "the caller began no run")
        assert self.process.poll() is None, "the caller has ended"

    def said(self) -> list[dict[str, Any]]:
        """Return its whole lines so far. Ray prints lines of its own among them."""
        lines = self.out.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]

    def end(self) -> None:
        """Let it finish what runs."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(SOON_S) == 0

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


@contextmanager
def cluster() -> Iterator[Any]:
    """Start the nodes."""
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    for _ in range(NODES - 1):
        started.add_node(**NODE)
    try:
        yield started
    finally:
        started.shutdown()


def actors() -> list[psutil.Process]:
    """The actors on the nodes."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if "ray::NodeActor" in "".join(each.cmdline()):
                found.append(each)
    return found


def below(processes: list[psutil.Process]) -> set[psutil.Process]:
    """These, and every process below them."""
    found = set(processes)
    for each in processes:
        with suppress(psutil.Error):
            found.update(each.children(recursive=True))
    return found


def wait_until(is_reached: Callable[[], bool], what: str) -> None:
    """Wait, at most for a minute."""
    until = time.monotonic() + SOON_S
    while not is_reached():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def is_gone(process: psutil.Process) -> bool:
    """Return whether it has ended."""
    with suppress(psutil.Error):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def kill_nodes(nodes: Any, caller: Caller, kills: int, chance: random.Random) -> None:
    """Kill actors and nodes at random moments. Nothing of them may be left."""
    others = list(nodes.worker_nodes)
    for number in range(kills):
        time.sleep(chance.uniform(*PAUSE_S))
        if chance.random() < WHOLE_NODES:
            victims = below(actors())
            nodes.remove_node(others.pop(0), allow_graceful=False)
            others.append(nodes.add_node(**NODE))
            victims = {each for each in victims if is_gone(each)}
        else:
            wait_until(lambda: bool(actors()), "there is no actor")
            victim = chance.choice(actors())
            victims = below([victim])
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        wait_until(lambda: all(map(is_gone, victims)), f"left on a node: {victims}")  # noqa: B023
        if number % 10 == 9:
            print(f"  {number + 1} kills of nodes, {len(caller.said())} lines of the caller", flush=True)


def kill_callers(address: str, folder: Path, ledger: Path, kills: int, chance: random.Random) -> list[Caller]:
    """Start callers and kill each. Nothing of it may be left on the nodes."""
    callers = []
    for number in range(kills):
        caller = Caller(address, folder, ledger, number + 1)
        callers.append(caller)
        time.sleep(chance.uniform(*LIFE_S))
        left = below(actors())
        caller.kill()
        wait_until(lambda: all(map(is_gone, left)) and not actors(), f"left on the nodes: {left}")  # noqa: B023
        if number % 10 == 9:
            print(f"  {number + 1} kills of callers", flush=True)
    return callers


def check(caller: Caller, killed: list[Caller], ledger: Path) -> None:
    """Compare what callers said, the ledger and the audit log."""
    said = caller.said()
    begun = {each["begun"] for each in said if "begun" in each}
    ended = {each["ended"]: each for each in said if "ended" in each}
    assert begun == ended.keys(), f"without an outcome: {begun - ended.keys()}"
    outcomes = collections.Counter(each["outcome"] for each in ended.values())
    effects = collections.Counter(tuple(line.split()) for line in ledger.read_text().splitlines())
    assert max(effects.values()) == 1, "an effect was made twice"
    for run, number in effects:
        if run in ended:
            assert int(number) in ended[run]["calls"], f"the result of {run} does not have its call {number}"
    recorded: set[tuple[str, str]] = set()
    runs: set[str] = set()
    with Index(caller.log) as index:
        index.refresh()
        for summary in index.runs(Filter(limit=None)):
            found = index.load(summary)
            runs.add(summary.id)
            recorded |= {(summary.id, str(call.args["n"])) for call in found.calls}
    missing = sorted(effects.keys() - recorded)
    assert not missing, f"{len(missing)} effects without a record: {missing[:5]}"
    print(f"the caller that went on: {len(begun)} runs, each with an outcome: {dict(outcomes)}")
    print(f"killed callers: {len(killed)}; runs in the audit log: {len(runs)}")
    print(f"effects: {len(effects)}, each once, each with the record of its call; nothing is left on any node")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_kills", description=__doc__)
    parser.add_argument("--nodes", type=int, default=100, help="kills of nodes and of their actors")
    parser.add_argument("--callers", type=int, default=100, help="kills of callers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--caller", nargs=3, metavar=("ADDRESS", "LOG", "LEDGER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.caller:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        address, log, ledger = options.caller
        anyio.run(be_caller, address, Path(log), Path(ledger))
        return
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name, cluster() as nodes:
        folder = Path(name)
        ledger = folder / "ledger"
        caller = Caller(nodes.address, folder, ledger, 0)
        kill_nodes(nodes, caller, options.nodes, chance)
        caller.end()
        wait_until(lambda: not actors(), "actors are left")
        killed = kill_callers(nodes.address, folder, ledger, options.callers, chance)
        check(caller, killed, ledger)


if __name__ == "__main__":
    main()
