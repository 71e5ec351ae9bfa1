"""Turn samples into plain data, print them as a table, and check them against the project's targets."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.competitors import FRESH, SHARED
from benchmarks.measurements import Measurement, Workload
from benchmarks.rounds import Series


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the sample below which `share` of all samples lie. It is always one of the samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(measurement: Measurement, series: Series) -> dict[str, Any]:
    """Return one competitor's figures in the measurement's unit, or only `problem` if it has no samples."""
    if not series.samples:
        return {"problem": series.problem}
    shown = [sample * measurement.scale for sample in series.samples]
    return {
        "p50": statistics.median(shown),
        "p95": percentile(shown, 0.05 if measurement.more_is_better else 0.95),
        "p99": percentile(shown, 0.01 if measurement.more_is_better else 0.99),
        "min": min(shown),
        "max": max(shown),
        "mean": statistics.fmean(shown),
        "samples": len(shown),
        "problem": series.problem,
    }


def row_group(
    measurement: Measurement, workload: Workload, all_series: Sequence[Series], took_s: float
) -> dict[str, Any]:
    """Return one measurement of all competitors, with their ratios to both kinds of Monty workers."""
    figures = {series.competitor: summary(measurement, series) for series in all_series}
    for entry in figures.values():
        for label, baseline in (("to_fresh_monty", FRESH), ("to_shared_monty", SHARED)):
            reference = figures.get(baseline, {}).get("p50")
            if reference and "p50" in entry:
                entry[label] = entry["p50"] / reference
    return {
        "title": measurement.title.format_map(asdict(workload)),
        "unit": measurement.unit,
        "more_is_better": measurement.more_is_better,
        "took_s": round(took_s, 1),
        "competitors": figures,
    }


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write all results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


# The table


def show(console: Console, results: Mapping[str, Any]) -> None:
    """Print the machine, the figures and the targets."""
    _show_machine(console, results)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("measurement")
    for name in ("p50", "p95", "p99", "/ fresh Monty", "/ shared Monty", "samples"):
        table.add_column(name, justify="right")
    for group in results["measurements"].values():
        better = "more" if group["more_is_better"] else "less"
        table.add_row(f"[bold]{group['title']}[/bold], {group['unit']} ({better} is better)")
        for name, entry in group["competitors"].items():
            table.add_row(*_table_row(name, entry))
        table.add_section()
    console.print(table)
    _show_problems(console, results)
    _show_targets(console, results)


def _show_machine(console: Console, results: Mapping[str, Any]) -> None:
    machine = results["machine"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['kernel']}, "
        f"{machine['python']}, {machine['event_loop']}, {machine['user']}, load {machine['load_average'][0]}"
        f" to {machine['load_average_after'][0]}, {machine['date']}",
        highlight=False,
    )
    console.print(", ".join(f"{name} {number}" for name, number in machine["versions"].items()), highlight=False)
    if results["expects_isolation"]:
        layers = results["isolation"].items()
        shown = ", ".join(f"{name} ({detail})" if detail else name for name, detail in layers) or "none"
        console.print(f"toolcell's live layers: {shown}", highlight=False, markup=False)


def _table_row(name: str, entry: Mapping[str, Any]) -> list[str]:
    if "p50" not in entry:
        return [f"  {name}", "-", "", "", "", "", ""]
    return [
        f"  {name}",
        figure(entry["p50"]),
        *(figure(entry[share]) if entry["samples"] > 1 else "" for share in ("p95", "p99")),
        *(f"{entry[ratio]:.2f}" if ratio in entry else "" for ratio in ("to_fresh_monty", "to_shared_monty")),
        str(entry["samples"]),
    ]


def figure(value: float) -> str:
    """Format a number with three significant digits and no exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def _show_problems(console: Console, results: Mapping[str, Any]) -> None:
    shown: set[str] = set()
    for key, group in results["measurements"].items():
        for name, entry in group["competitors"].items():
            if entry["problem"] and entry["problem"] not in shown:
                shown.add(entry["problem"])
                console.print(f"{name}, {key}: {entry['problem']}", style="yellow", highlight=False, markup=False)


# The targets


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that this project sets itself for one figure."""

    key: str
    competitor: str
    figure: str
    """A key of a competitor's summary."""
    bound: float
    unit: str
    is_least: bool = False
    """The figure must be at least `bound`, not at most."""

    def got(self, measurements: Mapping[str, Any]) -> float | None:
        """Return the figure, or None if it was not measured."""
        got: float | None = (
            measurements.get(self.key, {}).get("competitors", {}).get(self.competitor, {}).get(self.figure)
        )
        return got

    def is_met(self, got: float) -> bool:
        """True when the figure is within the bound."""
        return got >= self.bound if self.is_least else got <= self.bound


LOADED = "toolcell + numpy, pandas"
RATIO = "to_fresh_monty"

TARGETS = (
    Target("run", LOADED, "p50", 0.30, "ms"),
    Target("run", LOADED, RATIO, 0.35, "x"),
    Target("call", LOADED, RATIO, 0.6, "x"),
    Target("pipelined", LOADED, RATIO, 0.3, "x"),
    Target("throughput", LOADED, RATIO, 1.0, "x", is_least=True),
    Target("cold", "toolcell", "p50", 60.0, "ms"),
    Target("idle", LOADED, "p50", 4.096, "MiB"),
    Target("machine", LOADED, "p50", 4.096, "MiB"),
)
"""1,000 idle sandboxes in 4 GiB are 4.096 MiB each."""


def check_targets(measurements: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each target whose figure was measured, with that figure."""
    checked = []
    for target in TARGETS:
        got = target.got(measurements)
        if got is not None:
            named = {"key": target.key, "competitor": target.competitor, "figure": target.figure, "unit": target.unit}
            checked.append(named | {"bound": target.bound, "got": got, "met": target.is_met(got)})
    return checked


def _show_targets(console: Console, results: Mapping[str, Any]) -> None:
    titles = {key: group["title"] for key, group in results["measurements"].items()}
    table = Table(title="Targets", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("figure", "competitor", "bound", "got", ""):
        table.add_column(name, justify="right" if name in ("bound", "got") else "left")
    for entry in results["targets"]:
        unit = "of Monty's" if entry["unit"] == "x" else entry["unit"]
        met = "[green]met[/green]" if entry["met"] else "[red]missed[/red]"
        table.add_row(
            f"{titles[entry['key']]}, {unit}", entry["competitor"], f"{entry['bound']:g}", figure(entry["got"]), met
        )
    if results["targets"]:
        console.print(table)
