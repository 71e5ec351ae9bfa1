"""Compare the speed of two checked-out trees of toolcell, interleaved.

    python -m benchmarks.compare BEFORE_TREE AFTER_TREE [--rounds N] [--only KEY ...] [--venv NAME] [--json FILE]

Each tree needs its own `.venv` with its toolcell installed; `--venv` names another, as of another version of Python.
Every round measures both trees, each in a fresh process of its own interpreter; rounds alternate which tree goes first.
Both are measured with the benchmark code beside this file.
The table shows the median over the rounds. `after / before` is the median of the ratios within a round, with the
quartiles of these ratios. A row is worse or better when both quartiles are on the same side of 1 and the median is more
than 3 % away from it. The exit code is 1 when a row is worse.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import memory
from benchmarks.competitors.toolcell import Toolcell
from benchmarks.measurements import MEASUREMENTS, Measurement, Workload
from benchmarks.report import figure, percentile

ROOT = Path(__file__).parent.parent
TURNS = {"run": 15, "burst": 3, "call": 2, "pipelined": 3, "fan_out": 3, "cold": 2}
"""Turns per round. A measurement that is not listed has one."""

WORKLOAD = Workload(text_bytes=5_000_000, records=10_000, idle=16)
KEYS = [measurement.key for measurement in MEASUREMENTS]
DEFAULT_KEYS = [key for key in KEYS if key != "machine"]
NOISE = 0.03
VENV = ".venv"

Medians = dict[str, float]
"""Name of a figure -> median or p95 of one round, in the measurement's unit."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of both trees."""

    key: str
    unit: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    more_is_better: bool

    @property
    def change(self) -> str:
        """Return "better", "worse" or "same"."""
        if abs(self.ratio - 1) <= NOISE or self.low <= 1 <= self.high:
            return "same"
        return "better" if (self.ratio > 1) == self.more_is_better else "worse"


def compare(
    before: Path, after: Path, rounds: int, keys: Sequence[str], console: Console, venv: str = VENV
) -> list[Row]:
    """Measure both trees in alternating order and return one row per measurement."""
    trees = (before, after)
    medians: dict[Path, list[Medians]] = {tree: [] for tree in trees}
    for number in range(rounds):
        console.print(f"round {number + 1} of {rounds}", style="dim")
        for tree in trees if number % 2 == 0 else reversed(trees):
            medians[tree].append(measure_in_tree(tree, keys, venv))
    return [
        compare_row(each, medians[before], medians[after], key)
        for each in MEASUREMENTS
        if each.key in keys
        for key in figures_of(each)
    ]


def figures_of(measurement: Measurement) -> tuple[str, ...]:
    """Return the names of a measurement's figures."""
    return (measurement.key, f"{measurement.key} p95") if measurement.has_tail else (measurement.key,)


def measure_in_tree(tree: Path, keys: Sequence[str], venv: str) -> Medians:
    """Measure one round in a new process of the tree's interpreter."""
    python = tree / venv / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{tree} has no {venv}: python -m venv {tree / venv} && {python} -m pip install -e {tree}")
    command = [str(python), "-m", "benchmarks.compare", "--measure", str(tree), "--only", *keys]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the benchmarks failed with toolcell from {tree}:\n{done.stderr.strip()[-2000:]}")
    medians: Medians = json.loads(done.stdout)
    return medians


def compare_row(measurement: Measurement, before: Sequence[Medians], after: Sequence[Medians], key: str = "") -> Row:
    """Return the medians over the rounds of one figure, and the ratios within a round. `key`: its name."""
    key = key or measurement.key
    old, new = ([each[key] for each in medians] for medians in (before, after))
    ratios = [late / early for early, late in zip(old, new, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Row(
        key,
        measurement.unit,
        statistics.median(old),
        statistics.median(new),
        ratio,
        low,
        high,
        measurement.more_is_better,
    )


async def measure_here(keys: Sequence[str]) -> Medians:
    """Measure one round with the toolcell of this interpreter."""
    medians: Medians = {}
    async with Toolcell("toolcell") as competitor:
        for measurement in MEASUREMENTS:
            if measurement.key in keys:
                samples = await _samples(measurement, competitor)
                figures = statistics.median(samples), percentile(samples, 0.95)
                medians |= dict(zip(figures_of(measurement), figures, strict=False))
    return medians


async def _samples(measurement: Measurement, competitor: Toolcell) -> list[float]:
    samples: list[float] = []
    for number in range(TURNS.get(measurement.key, 1) + measurement.warms_up):
        await anyio.sleep(measurement.pause_s)
        turn = await measurement.turn(competitor, WORKLOAD)
        if number or not measurement.warms_up:
            samples += turn
    return [sample * measurement.scale for sample in samples]


def check_toolcell_is_from(tree: Path) -> None:
    """Exit if this interpreter imports another toolcell than the tree's."""
    import toolcell

    imported = Path(toolcell.__file__).resolve()
    if not imported.is_relative_to(tree.resolve()):
        raise SystemExit(f"{sys.executable} imports {imported}, which is not in {tree}: pip install -e {tree}")


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("measurement", "unit", "before", "after", "after / before", "quartiles", ""):
        table.add_column(name, justify="left" if name in ("measurement", "unit", "") else "right")
    for row in rows:
        ratios = f"{row.ratio:.3f}", f"{row.low:.3f} to {row.high:.3f}"
        better = ", more is better" if row.more_is_better else ""
        table.add_row(row.key, row.unit + better, figure(row.before), figure(row.after), *ratios, row.change)
    console.print(table)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="Compare the speed of two trees.")
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="BEFORE_TREE AFTER_TREE")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="default 15, about 15 seconds each")
    parser.add_argument("--only", nargs="+", choices=KEYS, default=DEFAULT_KEYS, metavar="KEY", help=", ".join(KEYS))
    parser.add_argument("--venv", default=VENV, metavar="NAME", help=f"environment of each tree, default {VENV}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.measure is None and len(options.trees) != 2:
        parser.error("give two trees: BEFORE_TREE AFTER_TREE")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Run the command, or one round of it in a tree's interpreter."""
    options = arguments(given)
    if options.measure is not None:
        check_toolcell_is_from(options.measure)
        memory.raise_descriptor_limit()
        print(json.dumps(anyio.run(measure_here, options.only)))
        return 0
    before, after = options.trees
    rows = compare(before, after, options.rounds, options.only, Console(stderr=True, highlight=False), options.venv)
    show(Console(width=None if sys.stdout.isatty() else 110, highlight=False), rows)
    if options.json:
        written = [asdict(row) | {"change": row.change} for row in rows]
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return int(any(row.change == "worse" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
