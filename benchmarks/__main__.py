"""Measure all competitors in turns, print a table, and write JSON: `python -m benchmarks`.

    python -m benchmarks --trees BEFORE AFTER --pythons python3.11 python3.12      two checked-out trees of toolcell

Every competitor is a process of its own and has one turn in each round, so that a disturbance hits all of them alike;
each round starts with another one. `/ base` is the ratio to `--base` in the same round, with its quartiles; a row is
worse or better when both quartiles are on the same side of 1 and the median is more than 3 % away from it.
The exit code is 1 when a row is worse, or toolcell could not be opened.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine
from benchmarks.competitors import COMPETITORS
from benchmarks.measurements import MEASUREMENTS, QUICK, Measurement, Workload
from benchmarks.report import Series, row_group, show

ROOT = Path(__file__).parents[1]
KEYS = [measurement.key for measurement in MEASUREMENTS]


class Worker:
    """One competitor. With a tree or a Python it is another one."""

    def __init__(self, competitor: str, tree: Path, python: str, flags: Sequence[str]) -> None:
        self.competitor, self.tree, self.python = competitor, tree, python
        if not (tree / "runtime" / "toolcell").is_dir():
            raise SystemExit(f"{tree} is not a tree of toolcell")
        path = os.pathsep.join(map(str, (ROOT, tree.absolute() / "runtime", tree.absolute() / "bridge")))
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.worker", competitor, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.problem: str | None = None
        """Why the competitor cannot be measured."""
        opened = self._answer()
        used = opened.get("toolcell", tree)
        if not Path(used).resolve().is_relative_to(tree.resolve()):
            raise SystemExit(f"{python} would measure {used}, which is not in the tree {tree}")
        self.layers: dict[str, str] = opened.get("layers", {})
        self.problem = opened.get("problem")
        self.version = opened.get("python", python)
        self.name = competitor

    def is_base_of(self, other: Worker, trees: Sequence[Path]) -> bool:
        """True when another tree is compared with this one: the first tree in the same Python."""
        return (self.competitor, self.python, self.tree) == (other.competitor, other.python, trees[0])

    def turn(self, key: str, workload: Workload) -> dict[str, Any]:
        """Take one turn: samples, or a problem."""
        if self.problem:
            return {"problem": self.problem}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([key, asdict(workload)]) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.problem = "its process has ended"
        return {"problem": self.problem}

    def close(self) -> None:
        """Close the competitor."""
        with suppress(BrokenPipeError):  # of what a worker that died was sent
            self._process.communicate()


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few small rounds")
    parser.add_argument("--rounds", type=int, default=1000, metavar="N", help="at most so many of each measurement")
    parser.add_argument("--only", nargs="+", choices=KEYS, default=KEYS, metavar="KEY", help=f"of {', '.join(KEYS)}")
    parser.add_argument(
        "--competitors", nargs="+", metavar="WORD", default=[""], help="only those with WORD in the name"
    )
    parser.add_argument("--trees", nargs="+", type=Path, default=[ROOT], metavar="TREE", help="of toolcell")
    parser.add_argument("--pythons", nargs="+", default=[sys.executable], help="of toolcell; the others have the first")
    parser.add_argument("--base", help="what toolcell is compared with; default: the first of several trees")
    parser.add_argument("--idle", type=int, metavar="N", help="how many idle sandboxes (default 100)")
    parser.add_argument("--uvloop", action="store_true", help="run on uvloop instead of asyncio's own loop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here as well")
    options = parser.parse_args(given)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1 is needed")
    return options


def open_all(options: argparse.Namespace) -> list[Worker]:
    """Open all competitors that were asked for, one after another."""
    words = [word.lower() for word in options.competitors]
    wanted = [word for word in words if word in map(str.lower, COMPETITORS)]
    workers = []
    for name in COMPETITORS:
        if name.lower() in wanted or any(word not in wanted and word in name.lower() for word in words):
            is_ours = name.startswith("toolcell")
            for python in options.pythons if is_ours else options.pythons[:1]:
                for tree in options.trees if is_ours else options.trees[-1:]:
                    worker = Worker(name, tree, python, ["--uvloop"][: options.uvloop])
                    if is_ours and len(options.trees) > 1:
                        worker.name += f", {tree.absolute().name}"
                    if is_ours and len(options.pythons) > 1:
                        worker.name += f", {worker.version}"
                    workers.append(worker)
    return workers


def measure(measurement: Measurement, workers: Sequence[Worker], workload: Workload, rounds: int) -> dict[str, Series]:
    """Take one measurement in `rounds` rounds, as long as the time of each lasts."""
    series = {worker.name: Series() for worker in workers}
    for number in range(rounds + measurement.warms_up):
        first = number % max(1, len(workers))
        for worker in (*workers[first:], *workers[:first]):
            own = series[worker.name]
            if own.problem is not None or own.spent_s > measurement.budget_s:
                continue
            start = time.perf_counter()
            turn = worker.turn(measurement.key, workload)
            took_s = time.perf_counter() - start
            own.problem = turn.get("problem")
            # A warm-up that uses the whole budget is a sample: there is no time for another.
            if own.problem is None and (number or not measurement.warms_up or took_s > measurement.budget_s):
                own.rounds.append(turn["samples"])
                own.spent_s += took_s
    return series


def main(given: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = arguments(given)
    console = Console(width=None if sys.stdout.isatty() else 130)
    workload = QUICK if options.quick else Workload()
    if options.idle:
        workload = replace(workload, idle=options.idle)
    described = machine.describe_machine("uvloop" if options.uvloop else "asyncio")
    workers = open_all(options)
    if options.base and options.base not in (names := [worker.name for worker in workers]):
        for worker in workers:
            worker.close()
        raise SystemExit(f"--base {options.base}: not one of {', '.join(names)}")
    ours = [worker for worker in workers if worker.competitor.startswith("toolcell")]
    bases = {
        worker.name: options.base or next(other.name for other in ours if other.is_base_of(worker, options.trees))
        for worker in ours
        if options.base or len(options.trees) > 1
    }
    groups: dict[str, Any] = {}
    for measurement in MEASUREMENTS:
        if measurement.key in options.only:
            print(f"{time.strftime('%H:%M:%S')} {measurement.key}", file=sys.stderr)
            rounds = min(options.rounds, 1 + measurement.rounds // 20 if options.quick else measurement.rounds)
            series = measure(measurement, workers, workload, rounds)
            groups[measurement.key] = row_group(measurement, series, workload, bases)
    for worker in reversed(workers):
        worker.close()
    results = {
        "machine": described | {"load_average_after": machine.load_average()},
        "isolation": {worker.name: worker.layers for worker in workers if worker.layers},
        "quick": options.quick,
        "measurements": groups,
    }
    show(console, results)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return exit_code(groups, [worker.layers for worker in ours])


def exit_code(groups: Mapping[str, Any], layers_of_ours: Sequence[Mapping[str, str]]) -> int:
    """Return 1 when a row is worse, or toolcell could not be opened."""
    changes = {entry.get("change") for group in groups.values() for entry in group["competitors"].values()}
    return int("worse" in changes or not all(layers_of_ours))


if __name__ == "__main__":
    sys.exit(main())
