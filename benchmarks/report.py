"""Turn samples into plain data, print them as a table, and say which rows have become worse."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.competitors import FRESH
from benchmarks.measurements import Measurement, Workload

NOISE = 0.03


@dataclass(slots=True)
class Series:
    """One competitor's samples of one measurement."""

    rounds: list[list[float]] = field(default_factory=list)
    spent_s: float = 0.0
    problem: str | None = None


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the sample below which `share` of all samples lie. It is always one of the samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def row_group(
    measurement: Measurement, all_series: Mapping[str, Series], workload: Workload, bases: Mapping[str, str]
) -> dict[str, Any]:
    """Return one measurement of all competitors. `bases`: what each is compared with in the same rounds."""
    figures = {name: summary(measurement, series) for name, series in all_series.items()}
    monty = figures.get(FRESH, {}).get("p50")
    for name, entry in figures.items():
        if monty and "p50" in entry:
            entry["to_monty"] = entry["p50"] / monty
        if base := all_series.get(bases.get(name, "")):
            entry |= compare(measurement, all_series[name], base)
    return {
        "title": measurement.title.format_map(asdict(workload)),
        "unit": measurement.unit,
        "more_is_better": measurement.more_is_better,
        "competitors": figures,
    }


def summary(measurement: Measurement, series: Series) -> dict[str, Any]:
    """Return one competitor's figures in the measurement's unit, or only `problem` if it has no samples."""
    if not series.rounds:
        return {"problem": series.problem}
    shown = [sample * measurement.scale for samples in series.rounds for sample in samples]
    return {
        "p50": statistics.median(shown),
        "p95": percentile(shown, 0.05 if measurement.more_is_better else 0.95),
        "p99": percentile(shown, 0.01 if measurement.more_is_better else 0.99),
        "samples": len(shown),
        "problem": series.problem,
    }


def compare(measurement: Measurement, series: Series, base: Series) -> dict[str, Any]:
    """Return the median of the ratios within a round, their quartiles, and whether this is better or worse.

    Both quartiles are then on the same side of 1, and the median is more than the noise away from it.
    """
    medians = [map(statistics.median, pair) for pair in zip(series.rounds, base.rounds, strict=False)]
    ratios = [own / other for own, other in medians if other > 0]
    if not ratios:
        return {}
    low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    is_same = abs(ratio - 1) <= NOISE or low <= 1 <= high
    change = "same" if is_same else "better" if (ratio > 1) == measurement.more_is_better else "worse"
    return {"ratio": ratio, "low": low, "high": high, "change": change}


def show(console: Console, results: Mapping[str, Any]) -> None:
    """Print the machine and the figures."""
    machine = results["machine"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['kernel']}, "
        f"{machine['python']}, {machine['event_loop']}, {machine['user']}, load {machine['load_average'][0]}"
        f" to {machine['load_average_after'][0]}, {machine['date']}",
        highlight=False,
    )
    console.print(", ".join(f"{name} {number}" for name, number in machine["versions"].items()), highlight=False)
    for name, layers in results["isolation"].items():
        shown = ", ".join(f"{layer} ({detail})" if detail else layer for layer, detail in layers.items())
        console.print(f"{name}: {shown}", highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("measurement")
    for column in ("p50", "p95", "p99", "/ Monty", "/ base", "quartiles", "", "samples"):
        table.add_column(column, justify="right")
    problems = dict[str, str]()
    for key, group in results["measurements"].items():
        better = "more" if group["more_is_better"] else "less"
        table.add_row(f"[bold]{group['title']}[/bold], {group['unit']} ({better} is better)")
        for name, entry in group["competitors"].items():
            if entry["problem"]:
                problems.setdefault(entry["problem"], f"{name}, {key}")
            if "p50" in entry:
                table.add_row(f"  {name}", *_cells(entry))
        table.add_section()
    console.print(table)
    for problem, where in problems.items():
        console.print(f"{where}: {problem}", style="yellow", highlight=False, markup=False)


def _cells(entry: Mapping[str, Any]) -> list[str]:
    compared = "ratio" in entry
    return [
        *(figure(entry[share]) for share in ("p50", "p95", "p99")),
        f"{entry['to_monty']:.2f}" if "to_monty" in entry else "",
        *(
            [f"{entry['ratio']:.2f}", f"{entry['low']:.2f} to {entry['high']:.2f}", entry["change"]]
            if compared
            else [""] * 3
        ),
        str(entry["samples"]),
    ]


def figure(value: float) -> str:
    """Format a number with three significant digits and no exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"
