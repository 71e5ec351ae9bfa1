"""Time the command line: `toolcell run -c 'set_result(1)'` beside a Python that does nothing, in turns.

`python -m benchmarks.command_line` prints the median of each and their ratio, and the processor time with that of its
sandbox, which is steadier on a busy machine. Run it on a machine that does nothing else, and without
PYTHONDONTWRITEBYTECODE: a command that compiles its modules each time takes three times as long.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import processor_time

TARGET_S = 0.2

COMMANDS = {
    "python -c pass": (sys.executable, "-c", "pass"),
    "import asyncio": (sys.executable, "-c", "import asyncio"),
    "import pydantic": (sys.executable, "-c", "from pydantic import BaseModel, Field"),
    "toolcell run": (sys.executable, "-m", "toolcell", "run", "-c", "set_result(1)"),
}


Times = dict[str, list[tuple[float, float]]]
"""Times of each command: seconds, and seconds of processor time."""


def measure(rounds: int) -> Times:
    """Run every command once per round, and return the times of each."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    taken: Times = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, command in COMMANDS.items():
            start, before = time.perf_counter(), processor_time.of_ended_children()
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            if number:  # the first round writes bytecode and fills caches
                taken[name].append((time.perf_counter() - start, processor_time.of_ended_children() - before))
    return taken


def main(given: Sequence[str] | None = None) -> int:
    """Print the medians; the exit code is 1 when the target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.command_line", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    taken = measure(parser.parse_args(given).rounds)
    medians = {name: [statistics.median(times) for times in zip(*each, strict=True)] for name, each in taken.items()}
    plain_s, plain_cpu_s = medians["python -c pass"]
    for name, (seconds, cpu_s) in medians.items():
        print(f"{name:16} {seconds:.3f} s, {seconds / plain_s:.1f} times a plain Python", end="; ")
        print(f"{cpu_s:.3f} s of processor time, {cpu_s / plain_cpu_s:.1f} times")
    return 0 if medians["toolcell run"][0] <= TARGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
