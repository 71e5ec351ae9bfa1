"""A host that is attacked and watches itself: its loop's longest silence, a neighbour's longest delay, its memory.

Started by `harness.measure` in a process of its own. Reads an attack as JSON from its first argument, and prints a
report for each of its guests, one JSON object on a line.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from toolcell import Limits, PoolConfig, Runtime, ToolRegistry

BEAT_S = 0.005
PAUSE_S = 0.1
"""Between two innocent runs. It hides so much of a delay at most, and what is promised are seconds."""
CALM_S = 0.5
INNOCENT = "set_result(call_tool('echo', {'q': 'x'}))"

TREE = {
    "anyOf": [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}, "b": {}}, "required": ["b"]},
        {"type": "integer"},
    ]
}
ITEMS = {"type": "array", "items": {"type": "integer"}}
UNIONS = {"type": "array", "items": {"anyOf": [{"type": "integer"}, ITEMS, {"type": "array", "items": ITEMS}]}}


CATASTROPHES = ("^(a+)+$", "^(?=(a+)+$)a", "^(a|aa)+$", r"^(a+)+\\1$")


class Bodies:
    """How many bodies of a synchronous tool run at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def doze(self, seconds: float) -> float:
        """Sleep for so many seconds, in a thread."""
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(seconds)
        with self._lock:
            self.now -= 1
        return seconds


def make_registry(bodies: Bodies) -> ToolRegistry:
    registry = ToolRegistry()
    registry.tool(bodies.doze)

    @registry.tool
    async def echo(q: Any) -> Any:
        """Return the argument unchanged."""
        return q

    @registry.tool
    async def numbers(numbers: list[int]) -> int:
        """Count the numbers that were passed."""
        return len(numbers)

    @registry.tool
    async def rows(rows: list[list[int]]) -> int:
        """Count the rows that were passed."""
        return len(rows)

    async def count(arguments: dict[str, Any]) -> int:
        return len(arguments)

    catastrophe = {"type": "array", "items": {"anyOf": [{"type": "string", "pattern": f} for f in CATASTROPHES]}}
    for name, schema, key in (
        ("patterns", catastrophe, "items"),
        ("tree", {"$ref": "#/$defs/tree"}, "x"),
        ("unions", UNIONS, "items"),
    ):
        whole = {"type": "object", "properties": {key: schema}, "required": [key], "$defs": {"tree": TREE}}
        registry.register(name, "A tool that has a schema of its own.", whole, count)
    return registry


@dataclass
class Watch:
    """What was seen from outside of any attack."""

    runtime: Runtime
    silence_s: float = 0.0
    worked_s: float = 0.0
    delay_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    is_over: bool = False

    async def begin(self) -> None:
        """Forget what was seen, and let what was going on end."""
        await asyncio.sleep(2 * BEAT_S)
        self.silence_s = self.worked_s = self.delay_s = 0.0
        self.failures = []

    async def beat(self) -> None:
        last, worked = time.perf_counter(), time.thread_time()
        while not self.is_over:
            await asyncio.sleep(BEAT_S)
            now, work = time.perf_counter(), time.thread_time()
            self.silence_s = max(self.silence_s, now - last - BEAT_S)
            self.worked_s = max(self.worked_s, work - worked)
            last, worked = now, work

    async def run_innocently(self) -> None:
        while not self.is_over:
            await self.run_once()
            await asyncio.sleep(PAUSE_S)

    async def run_once(self) -> None:
        began = time.perf_counter()
        try:
            result = await self.runtime.execute_code(INNOCENT)
            if result.value != "x":
                self.failures.append(f"{result.outcome}: {result.error}"[:300])
        except Exception as exc:
            self.failures.append(f"{type(exc).__name__}: {exc}"[:300])
        self.delay_s = max(self.delay_s, time.perf_counter() - began)


@asynccontextmanager
async def watching(runtime: Runtime) -> AsyncIterator[Watch]:
    watch = Watch(runtime)
    tasks = [asyncio.create_task(watch.beat()), asyncio.create_task(watch.run_innocently())]
    try:
        yield watch
    finally:
        watch.is_over = True
        await asyncio.gather(*tasks)


def resident_bytes(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key + ":"))


def give_back_memory() -> None:
    """Of the attack before: in what the process had kept of it, later growth would not be seen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def negative_dentries() -> int:
    with open("/proc/sys/fs/dentry-state", encoding="ascii") as state:
        return int(state.read().split()[4])


def nothing_past_limits(outcome: str) -> dict[str, Any]:
    return {"outcome": outcome, "wall_over_s": -1.0, "cpu_over_s": -1.0, "sent_bytes": 0}


async def attack_once(runtime: Runtime, source: str, attack: dict[str, Any]) -> dict[str, Any]:
    """Run one guest to its end; what it used of its limits, and past them."""
    began = time.perf_counter()
    if attack["plan"]:
        return nothing_past_limits(str([row["status"] for row in await runtime.execute_plan(json.loads(source))])[:100])
    if attack["as_tool"]:
        result = await runtime.registry.execute("execute_code", {"code": source})
        return nothing_past_limits(str(result.status))
    limits = Limits(**attack["limits"])
    try:
        result = await runtime.execute_code(source, inputs={"isolated": True}, limits=limits)
    except Exception as exc:
        return nothing_past_limits(f"{type(exc).__name__}: {exc}"[:200])
    wall_s = time.perf_counter() - began - result.usage.start_s
    said = result.logs.stdout.split()
    cpu_s = max(result.usage.cpu_s, float(said[-1]) if said and said[-1].replace(".", "").isdigit() else 0.0)
    return {
        "outcome": str(result.outcome),
        "wall_over_s": max(wall_s, result.usage.wall_s) - limits.wall_s,
        "cpu_over_s": cpu_s - limits.cpu_s,
        "sent_bytes": result.usage.received_bytes,
        "error": str(result.error)[:300],
    }


async def measure(attack: dict[str, Any], folder: str, show: Callable[[dict[str, Any]], None]) -> None:
    bodies = Bodies()
    runtime = Runtime(
        make_registry(bodies),
        backend=attack["backend"],
        limits=Limits(output_flood_bytes=2 << 30),
        pool=PoolConfig(warm=2 if attack["backend"] == "docker" else min(attack["guests"], 8) + 1),
        record=f"{folder}/runs.db" if attack["audit"] else None,
    )
    runtime.registry.enable_code_execution(runtime)
    async with runtime, watching(runtime) as watch:
        for _ in range(3):
            await watch.run_once()
        await watch.begin()
        await asyncio.sleep(CALM_S)
        calm = {"calm_silence_s": watch.silence_s, "calm_delay_s": watch.delay_s}
        for name, source in attack["sources"].items():
            show({"name": name} | await attack_by_all(watch, source, attack) | {"bodies": bodies.most} | calm)
        await watch.begin()
        await watch.run_once()
        assert not watch.failures, f"the run after the attack: {watch.failures}"


async def attack_by_all(watch: Watch, source: str, attack: dict[str, Any]) -> dict[str, Any]:
    """Run a guest, in as many sandboxes as wanted, and return what it did."""
    give_back_memory()
    await watch.begin()
    forget_peak()
    before, dentries = resident_bytes("VmRSS"), negative_dentries()
    ends = await asyncio.gather(*(attack_once(watch.runtime, source, attack) for _ in range(attack["guests"])))
    await watch.run_once()
    await asyncio.sleep(2 * BEAT_S)
    return {
        "silence_s": watch.silence_s,
        "worked_s": watch.worked_s,
        "delay_s": watch.delay_s,
        "failures": watch.failures,
        "outcomes": sorted({end["outcome"] for end in ends}),
        "errors": sorted({end.get("error", "") for end in ends})[:3],
        "wall_over_s": max(end["wall_over_s"] for end in ends),
        "cpu_over_s": max(end["cpu_over_s"] for end in ends),
        "sent_bytes": sum(end["sent_bytes"] for end in ends),
        "growth_bytes": resident_bytes("VmHWM") - before,
        "dentries": negative_dentries() - dentries,
    }


def main() -> None:
    attack = json.loads(sys.stdin.read())
    if attack["open_files"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (attack["open_files"], attack["open_files"]))
    if attack["umask"] is not None:
        os.umask(attack["umask"])
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(attack, folder, lambda report: print(json.dumps(report), flush=True)))


if __name__ == "__main__":
    main()
