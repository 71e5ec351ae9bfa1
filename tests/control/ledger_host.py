"""Lives of a host that runs a script with approvals, and that may kill itself at a random moment.

For each line `WHEN FOLDER` of its input, one life carries the run on from wherever it stands, and its status is printed: 0
when the run has ended, 10 when it waits for decisions. The host is killed WHEN seconds after it began; 0 is never, and -N is
in the tool that makes the Nth effect of this life: before the effect if N is odd, else after it. A life is a fork: to import
toolcell takes longer.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import anyio

from toolcell import Outcome, PoolConfig, RunContext, Runtime, ToolRegistry
from toolcell.tools import AlreadyMade, Approve

CALLS = 40
SCRIPT = f"""
import random, time
total = 0
for n in range({CALLS}):
    if n % 13 == 7:
        total += call_tool('pay', n=n, salt=random.random())
    elif n % 5 == 3:
        total += sum(call_tools_parallel([('write', {{'n': n * 1000 + part}}) for part in range(3)]))
    else:
        total += call_tool('write', n=n)
    time.sleep(0.0005)
total
"""


def make_registry(ledger: Path, last: int) -> ToolRegistry:
    registry = ToolRegistry()
    effects = itertools.count(1)

    def note(text: str) -> None:
        is_last = next(effects) == last
        if is_last and last % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with ledger.open("a") as file:
            file.write(f"{text}\n")
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    @registry.tool
    async def write(n: int) -> int:
        """Write a number into the ledger."""
        note(f"write {n}")
        return n

    @registry.tool(requires_approval=True)
    async def pay(n: int, salt: float) -> int:
        """Write a payment into the ledger."""
        note(f"pay {n} {salt}")
        return n

    return registry


def decide(call: Any, ledger: Path) -> Any:
    """Decide as a person would who can look into the ledger."""
    if call.reason == "needs approval":
        return Approve()
    line = " ".join([call.tool, *map(str, call.args.values())])
    return AlreadyMade(call.args["n"]) if line in ledger.read_text().splitlines() else Approve()


async def main(folder: Path, kill_s: float) -> int:
    ledger = folder / "ledger"
    ledger.touch()
    registry = make_registry(ledger, int(-kill_s) if kill_s < 0 else 0)
    async with Runtime(registry, record=folder / "runs", pool=PoolConfig(warm=1)) as runtime:
        if kill_s > 0:
            threading.Timer(kill_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        suspended, interrupted = runtime.suspended_runs(), runtime.interrupted_runs()
        if suspended:
            decisions = {call.id: decide(call, ledger) for call in suspended[0].calls}
            (folder / "asked").open("a").write("".join(f"{call.reason[:8]}\n" for call in suspended[0].calls))
            result = await runtime.resume(suspended[0].to_json(), decisions)
        elif interrupted:
            result = await runtime.resume(interrupted[0])
        elif (folder / "asked").exists():
            return 0  # it had ended, and what it needed to go on was removed, before its host was killed
        else:
            result = await runtime.execute_code(SCRIPT, on_approval="suspend", context=RunContext(run_id="the-run"))
        if result.outcome is Outcome.SUSPENDED:
            return 10
        assert result.ok, (result.outcome, result.error, result.divergence)
        (folder / "value").write_text(str(result.value))
        return 0


if __name__ == "__main__":
    for line in iter(sys.stdin.readline, ""):
        when, folder = line.rstrip("\n").split(" ", 1)
        if not os.fork():
            signal.alarm(60)
            sys.exit(anyio.run(main, Path(folder), float(when)))
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
