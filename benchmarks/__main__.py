"""`python -m benchmarks`: measure, print the table, write the JSON. Ends with 1 when toolcell should have been
measured and could not be opened."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.status import Status

from benchmarks import machine, memory, report
from benchmarks.contestants import Contestant, all_contestants
from benchmarks.contestants.sandboxes import Toolcell
from benchmarks.measurements import MEASUREMENTS, Effort, Measurement
from benchmarks.rounds import measure, seat_all

QUICK = Effort(calls=100, pipelined=100, runs=8, text_bytes=2_000_000, records=2_000, idle=6)
"""Enough to see that everything works, and figures to within a factor."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    keys = [measurement.key for measurement in MEASUREMENTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds; under 20 seconds")
    parser.add_argument("--only", nargs="+", choices=keys, default=keys, metavar="KEY", help=f"of {', '.join(keys)}")
    parser.add_argument("--contestants", nargs="+", metavar="WORD", help="only those whose name contains a WORD")
    parser.add_argument("--idle", type=int, metavar="N", help="how many idle sandboxes (default 100)")
    parser.add_argument("--uvloop", action="store_true", help="run on uvloop instead of asyncio's own loop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here as well")
    return parser.parse_args(given)


def chosen(words: Sequence[str] | None) -> list[Contestant]:
    """The contestants whose name contains one of the words."""
    everybody = all_contestants()
    return [each for each in everybody if not words or any(word.lower() in each.name.lower() for word in words)]


def wanted(options: argparse.Namespace) -> list[tuple[Measurement, int]]:
    """The measurements to take, each with its number of rounds."""
    rounds = [(each, each.quick_rounds if options.quick else each.rounds) for each in MEASUREMENTS]
    return [(each, number) for each, number in rounds if number and each.key in options.only]


async def run_all(options: argparse.Namespace, status: Status | None) -> dict[str, Any]:
    """Open the contestants, take every measurement, and return all figures."""
    effort = QUICK if options.quick else Effort()
    if options.idle:
        effort = replace(effort, idle=options.idle)
    described = machine.describe_machine("uvloop" if options.uvloop else "asyncio")
    contestants = chosen(options.contestants)
    groups: dict[str, Any] = {}
    async with anyio.create_task_group() as group:
        seats = await seat_all(contestants, group)
        for measurement, rounds in wanted(options):
            start = time.perf_counter()
            cells = await measure(measurement, seats, effort, rounds, partial(_tell, status, measurement, rounds))
            groups[measurement.key] = report.row_group(measurement, effort, cells, time.perf_counter() - start)
        for seat in reversed(seats):
            seat.close()
    return {
        "machine": described | {"load_average_after": machine.load_average()},
        "expects_isolation": any(isinstance(each, Toolcell) for each in contestants),
        "isolation": next((dict(each.layers) for each in contestants if isinstance(each, Toolcell)), {}),
        "quick": options.quick,
        "measurements": groups,
        "targets": report.judge(groups),
    }


def _tell(status: Status | None, measurement: Measurement, rounds: int, number: int, name: str) -> None:
    if status is not None:
        status.update(f"{measurement.key}: round {number} of {rounds}, {name}")


def main(given: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = arguments(given)
    memory.raise_descriptor_limit()
    console = Console(width=None if sys.stdout.isatty() else 110)
    loop = {"use_uvloop": options.uvloop}
    if console.is_terminal:
        with console.status("opening the contestants") as status:
            results = anyio.run(run_all, options, status, backend_options=loop)
    else:
        results = anyio.run(run_all, options, None, backend_options=loop)
    report.show(console, results)
    if options.json:
        report.write_json(options.json, results)
    return 0 if results["isolation"] or not results["expects_isolation"] else 1


if __name__ == "__main__":
    sys.exit(main())
