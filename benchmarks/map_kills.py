"""`python -m benchmarks.map_kills`: `Runtime.map` over 20,000 inputs, while its caller is killed twice.

Every item calls a tool once that appends a line to a ledger; nothing declares that it may be called twice. One item in
a hundred fails after that. The caller runs in a process of its own and is killed with SIGKILL at a third and at two
thirds of the ledger. A call in doubt is settled as by a person who can look into the ledger. At the end the ledger has
every input once, the map has every item, and the memory of the caller is printed as it grew or did not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import psutil

from toolcell import MapItem, PoolConfig, Runtime, ToolRegistry
from toolcell.tools import AlreadyMade, Approve

ITEMS = 20_000
FAILING = 100
"""One item in so many."""
KILLS = 2
CONCURRENCY = 8
SAMPLES = 20
"""Measurements of the caller's memory in a whole map."""
POLL_S = 0.01
TOOL_S = 0.002
"""Before the line is written and after it, so that kills hit both sides of the effect."""

SCRIPT = f"""
call_tool("enter", n=n)
if n % {FAILING} == 7:
    raise ValueError(f"input {{n}} is bad")
n * n
"""


def registry_of(ledger: Path) -> ToolRegistry:
    """Return the tool with an effect that counts."""
    registry = ToolRegistry()

    @registry.tool
    async def enter(n: int) -> None:
        """Append a number to the ledger. It is not declared idempotent."""
        await anyio.sleep(TOOL_S)
        with ledger.open("a") as file:
            file.write(f"{n}\n")
        await anyio.sleep(TOOL_S)

    return registry


def inputs(items: int) -> Iterator[dict[str, int]]:
    """Yield the inputs, one by one."""
    return ({"n": n} for n in range(items))


class Caller:
    """One life of the program that runs the map."""

    def __init__(self, folder: Path, items: int) -> None:
        self.folder, self.items = folder, items
        self.ledger = folder / "ledger"
        self.counts = {"ok": 0, "failed": 0, "from the record": 0, "in doubt": 0}
        self.rss: list[float] = []

    async def run(self) -> dict[str, Any]:
        """Carry the map on from wherever it stands, and return what was counted."""
        registry, folder = registry_of(self.ledger), self.folder
        pool = PoolConfig(warm=4)
        async with Runtime(registry, record=folder / "runs.db", pool=pool) as runtime:
            ordered = runtime.map(
                SCRIPT,
                inputs(self.items),
                concurrency=CONCURRENCY,
                map_id="squares",
                resume=True,
            )
            async for item in ordered:
                await self._count(runtime, item)
        return {**self.counts, "rss": self.rss}

    async def _count(self, runtime: Runtime, item: MapItem) -> None:
        if item.in_doubt:
            self.counts["in doubt"] += 1
            lines = set(self.ledger.read_text().split())
            decisions = {
                call.id: AlreadyMade(None) if str(call.args["n"]) in lines else Approve() for call in item.in_doubt
            }
            assert item.suspension is not None
            result = await runtime.resume(item.suspension, decisions)
            self.counts["ok" if result.ok else "failed"] += 1
        else:
            assert item.ok == (item.index % FAILING != 7), item
            assert not item.ok or item.value == item.index**2, item
            self.counts["ok" if item.ok else "failed"] += 1
        self.counts["from the record"] += item.is_recorded
        if (item.index + 1) % max(1, self.items // SAMPLES) == 0:
            self.rss.append(psutil.Process().memory_info().rss / 2**20)


def live(folder: Path, items: int, kill_at: int | None) -> dict[str, Any] | None:
    """Run one caller; kill it when the ledger has `kill_at` lines. Return what it counted, if it lived."""
    command = [sys.executable, "-m", "benchmarks.map_kills", "--items", str(items), "--caller", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        while kill_at is not None and caller.poll() is None:
            if lines(folder) >= kill_at:
                os.kill(caller.pid, signal.SIGKILL)
                break
            time.sleep(POLL_S)
        said, _ = caller.communicate()
    if caller.returncode == -signal.SIGKILL:
        return None
    if caller.returncode:
        raise SystemExit(f"the caller ended with status {caller.returncode}")
    counted: dict[str, Any] = json.loads(said)
    return counted


def lines(folder: Path) -> int:
    """Return how many lines the ledger has."""
    ledger = folder / "ledger"
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def check(folder: Path, items: int) -> None:
    """Check that the ledger has every input once, and that nothing is left of the runs.

    Raises:
        AssertionError: something was made twice, or not at all, or is left.
    """
    entered = sorted(map(int, (folder / "ledger").read_text().split()))
    twice = [one for one, other in itertools.pairwise(entered) if one == other]
    assert not twice, f"entered twice: {twice[:10]}"
    assert entered == list(range(items)), f"{items - len(entered)} of {items} were not entered"
    with closing(sqlite3.connect(folder / "runs.db")) as database:
        left = database.execute("SELECT DISTINCT name FROM kept WHERE kind = 'run' LIMIT 10").fetchall()
    assert not left, f"journals of runs are left: {left[:10]}"


def kill_and_carry_on(folder: Path, items: int, kills: int = KILLS) -> dict[str, Any]:
    """Run the map, kill its caller a few times, and return what the last one counted, with all calls in doubt settled.

    Raises:
        AssertionError: the map is not complete, or something was made twice.
    """
    for number in range(kills):
        counted = live(folder, items, items * (number + 1) // (kills + 1))
        assert counted is None, "the caller was not killed"
        print(f"killed at {lines(folder)} lines", flush=True)
    counted = live(folder, items, None)
    assert counted is not None
    again = live(folder, items, None)  # everything is in the record now, also what was in doubt
    assert again is not None
    check(folder, items)
    assert again["from the record"] >= items - counted["in doubt"], again
    assert again["ok"] + again["failed"] == items, again
    assert again["failed"] == len(range(7, items, FAILING)), again
    return counted


def main() -> None:
    """Run the program, or one caller."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.map_kills", description=__doc__)
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--caller", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.caller is not None:
        print(json.dumps(anyio.run(Caller(given.caller, given.items).run)))
        return
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        counted = kill_and_carry_on(Path(folder), given.items)
        rss = ", ".join(f"{each:.1f}" for each in counted["rss"])
        print(f"{given.items} items, {KILLS} kills, {time.monotonic() - began:.0f} s; nothing missing, nothing twice")
        print({name: counted[name] for name in ("ok", "failed", "from the record", "in doubt")})
        print(f"memory of the last caller in MiB, at equal steps: {rss}")


if __name__ == "__main__":
    main()
