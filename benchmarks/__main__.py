"""Measure all competitors, print a table, and write JSON: `python -m benchmarks`.

The exit code is 1 when toolcell was selected and could not be opened.
"""

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
from benchmarks.competitors import Competitor, all_competitors
from benchmarks.competitors.toolcell import Toolcell
from benchmarks.measurements import MEASUREMENTS, Measurement, Workload
from benchmarks.rounds import measure, open_all

QUICK = Workload(spaced=5, calls=100, pipelined=100, runs=8, text_bytes=2_000_000, records=2_000, idle=6)
"""Enough to see that everything works. The figures are rough."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    keys = [measurement.key for measurement in MEASUREMENTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few small rounds")
    parser.add_argument("--rounds", type=int, metavar="N", help="at most so many rounds of each measurement")
    parser.add_argument("--only", nargs="+", choices=keys, default=keys, metavar="KEY", help=f"of {', '.join(keys)}")
    parser.add_argument(
        "--competitors", nargs="+", metavar="WORD", help="only those named WORD, or with it in the name"
    )
    parser.add_argument("--idle", type=int, metavar="N", help="how many idle sandboxes (default 100)")
    parser.add_argument("--uvloop", action="store_true", help="run on uvloop instead of asyncio's own loop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here as well")
    return parser.parse_args(given)


def selected_competitors(words: Sequence[str] | None) -> list[Competitor]:
    """Return the competitors of these names. A word that is no name stands for all names that contain it."""
    everyone = all_competitors()
    names = {each.name.lower() for each in everyone}
    wanted = [word.lower() for word in words or ("",)]
    return [
        each
        for each in everyone
        if any(word == each.name.lower() if word in names else word in each.name.lower() for word in wanted)
    ]


def selected_measurements(options: argparse.Namespace) -> list[tuple[Measurement, int]]:
    """Return the measurements to take, each with its number of rounds."""
    rounds = [(each, each.quick_rounds if options.quick else each.rounds) for each in MEASUREMENTS]
    return [
        (each, min(number, options.rounds or number)) for each, number in rounds if number and each.key in options.only
    ]


async def run_all(options: argparse.Namespace, status: Status | None) -> dict[str, Any]:
    """Open the competitors, take every measurement, and return all figures."""
    workload = QUICK if options.quick else Workload()
    if options.idle:
        workload = replace(workload, idle=options.idle)
    described = machine.describe_machine("uvloop" if options.uvloop else "asyncio")
    competitors = selected_competitors(options.competitors)
    groups: dict[str, Any] = {}
    async with anyio.create_task_group() as group:
        tasks = await open_all(competitors, group)
        for measurement, rounds in selected_measurements(options):
            start = time.perf_counter()
            series = await measure(
                measurement, tasks, workload, rounds, partial(_show_progress, status, measurement, rounds)
            )
            groups[measurement.key] = report.row_group(measurement, workload, series, time.perf_counter() - start)
        for task in reversed(tasks):
            task.close()
    return {
        "machine": described | {"load_average_after": machine.load_average()},
        "expects_isolation": any(isinstance(each, Toolcell) for each in competitors),
        "isolation": next((dict(each.layers) for each in competitors if isinstance(each, Toolcell)), {}),
        "quick": options.quick,
        "measurements": groups,
        "targets": report.check_targets(groups),
    }


def _show_progress(status: Status | None, measurement: Measurement, rounds: int, number: int, name: str) -> None:
    if status is not None:
        status.update(f"{measurement.key}: round {number} of {rounds}, {name}")


def main(given: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = arguments(given)
    memory.raise_descriptor_limit()
    console = Console(width=None if sys.stdout.isatty() else 110)
    loop = {"use_uvloop": options.uvloop}
    if console.is_terminal:
        with console.status("opening the competitors") as status:
            results = anyio.run(run_all, options, status, backend_options=loop)
    else:
        results = anyio.run(run_all, options, None, backend_options=loop)
    report.show(console, results)
    if options.json:
        report.write_json(options.json, results)
    return 0 if results["isolation"] or not results["expects_isolation"] else 1


if __name__ == "__main__":
    sys.exit(main())
