"""`python -m benchmarks.audit_load`: 200 writers in four processes share one record, and are killed at random.

The record is a file, or with `--record postgresql://...` in a database.

Each writer makes runs of three calls; each call of the tool leaves its name in a file of effects, and nothing else says
that it happened. Half of the writers record as a script in a sandbox does, half as an agent. A random process is killed
with SIGKILL after some more effects, and another takes its place. At the end all are killed, the record must verify,
and every effect must have its start in it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from toolcell import Limits, Policy, RunContext, ToolRegistry
from toolcell.audit import records
from toolcell.audit.databases import database_of
from toolcell.audit.keys import HmacKey
from toolcell.audit.log import AuditLog
from toolcell.audit.recorder import Recorder, ScriptRecording
from toolcell.audit.signatures import Head
from toolcell.audit.verification import verify
from toolcell.results import ExecutionResult, Outcome
from toolcell_bridge.wire.messages import CallTool, RunScript

KEY = HmacKey(bytes(range(32)))
PROCESSES = 4
WRITERS = 50
"""In each process."""
CALLS = 3
EFFECTS = 300
"""So many come between two kills."""
START_S = 150.0
"""The processes have this long to start and to have so many effects."""


# A process that writes


async def work(folder: Path, place: str) -> None:
    """Write runs until the process is killed, or whoever started it is gone."""
    parent = os.getppid()
    effects = os.open(folder / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    registry = ToolRegistry()

    @registry.tool
    async def act(name: str) -> str:
        """Leave something behind that cannot be undone."""
        os.write(effects, f"{name}\n".encode())
        return name

    async def record(writer: int) -> None:
        run = 0
        while os.getppid() == parent:
            run += 1
            names = [f"{os.getpid()}-{writer}-{run}-{call}" for call in range(CALLS)]
            if writer % 2:
                await as_agent(recorder, registry, names)
            else:
                await as_script(recorder, registry, names)
            await anyio.lowlevel.checkpoint()

    with AuditLog(place, key=KEY, heads=folder / "heads") as log:
        recorder = Recorder(log)
        async with anyio.create_task_group() as tasks:
            for writer in range(WRITERS):
                tasks.start_soon(record, writer)


async def as_agent(recorder: Recorder, registry: ToolRegistry, names: list[str]) -> None:
    """Make the calls of one run without a sandbox."""
    async with recorder.observe(RunContext()) as context:
        for name in names:
            await registry.dispatch("act", {"name": name}, call_id=name, context=context)


async def as_script(recorder: Recorder, registry: ToolRegistry, names: list[str]) -> None:
    """Make the calls of one run as the host of a script makes them."""
    context = RunContext()
    message = RunScript(1, "call_tool('act')", {}, "act", "off", 1, 1, 1, 7, 1e9)
    record = recorder.beginning(
        message, limits=LIMITS, policy=POLICY, registry=registry.snapshot(), context=context, files=()
    )
    record.writes_ends_later = True
    observer = ScriptRecording(lambda _: record, False)
    if (noted := observer.script_sent()) is not None:
        await noted
    for number, name in enumerate(names):
        call = CallTool(number, "act", {"name": name}, 1)
        within = observer.context_of(call, name, context)
        await registry.dispatch("act", {"name": name}, call_id=name, context=within)
        observer.answers_sent()
    if (noted := observer.ended(ExecutionResult(context.run_id, Outcome.OK))) is not None:
        await noted


LIMITS, POLICY = Limits(), Policy(hash_seed=1)


# The processes


def load(folder: Path, *, kills: int, seconds: float = 0.0, record: str = "") -> dict[str, Any]:
    """Kill so many processes, or as many as the time allows, then all of them; return what is wrong, and figures."""
    place = record or str(folder / "runs.db")
    until, done = time.monotonic() + seconds, 0
    with ExitStack() as stack:
        running = [start(stack, folder, place) for _ in range(PROCESSES)]
        while done < kills or time.monotonic() < until:
            wait_for_effects(folder, size(folder) + EFFECTS * 15)
            number = random.randrange(PROCESSES)
            os.kill(running[number].pid, signal.SIGKILL)
            running[number] = start(stack, folder, place)
            done += 1
        wait_for_effects(folder, size(folder) + EFFECTS * 15)
        for process in running:
            os.kill(process.pid, signal.SIGKILL)
    return {"kills": done, **checked(folder, place)}


def start(stack: ExitStack, folder: Path, place: str) -> subprocess.Popen[bytes]:
    """Start a process that writes, and wait for its end when the stack is left."""
    command = [sys.executable, "-m", "benchmarks.audit_load", "--work", str(folder), "--record", place]
    return stack.enter_context(subprocess.Popen(command, cwd=Path(__file__).parents[1]))


def size(folder: Path) -> int:
    """Return the size of the file of effects; a line of it has about 15 bytes."""
    effects = folder / "effects"
    return effects.stat().st_size if effects.exists() else 0


def wait_for_effects(folder: Path, wanted: int) -> None:
    """Wait until the file has this size, and then for a random moment."""
    deadline = time.monotonic() + START_S
    while size(folder) < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {EFFECTS} effects came in {START_S:g} s")
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.05))


def checked(folder: Path, place: str) -> dict[str, Any]:
    """Verify the record, and look for effects without a start."""
    began = time.perf_counter()
    report = verify(place, [KEY], heads=Head.saved(database_of(place).id(), folder / "heads"))
    verify_s = time.perf_counter() - began
    with closing(database_of(place).open_read_only()) as db:
        rows = db.execute("SELECT body FROM event WHERE kind = ?", (records.CALL_STARTED,))
        started = {records.fields_of(records.CALL_STARTED, body)["args"]["name"] for (body,) in rows}
    happened = (folder / "effects").read_text().split()
    return {
        "findings": [asdict(finding) for finding in report.findings],
        "without_start": sorted({*happened} - started),
        "without_effect": len(started) - len(happened),
        "effects": len(happened),
        "chains": len(report.chains),
        "events": sum(chain.events for chain in report.chains),
        "verify_s": round(verify_s, 2),
    }


def main() -> None:
    """Write, kill, check and print."""
    parser = argparse.ArgumentParser(description="Let 200 writers record in one file, and kill them at random.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--record", default="", help="the URL of a PostgreSQL database; a new file if none is given")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        anyio.run(work, options.work, options.record)
        return
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        print(json.dumps(load(Path(folder), kills=0, seconds=options.seconds, record=options.record), indent=2))


if __name__ == "__main__":
    main()
