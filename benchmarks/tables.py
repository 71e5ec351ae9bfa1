"""What the data tools take beside plain polars: `python -m benchmarks.tables [MEGABYTES ...]`.

A file of CSV is filtered, summed in groups and sorted by both, in turns. polars guesses the types of columns from the
first rows; the tools read every cell as text and apply the rules of `docs/builtin/data.md`. "rules" is the part of the
time that the tools spend on columns of text, between reading and the answer. Medians of wall and CPU seconds.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from toolcell.builtin.tables import columns, operations
from toolcell.builtin.tables.readers import TextTable
from toolcell.builtin.tables.requests import Metric, Transform, condition
from toolcell.builtin.tables.text import open_text

ROUNDS = 7


def write_csv(path: Path, megabytes: float) -> None:
    """Write orders: whole numbers, prices, words, dates and 97 cities."""
    rng = random.Random(1)
    size = 0
    with path.open("w") as file:
        file.write("id,city,amount,pieces,note,day\n")
        for number in range(sys.maxsize):
            size += file.write(
                f"{number},city {number % 97},{rng.random() * 1000:.2f},{rng.randrange(10_000)},"
                f"some words {number % 1000},2026-{number % 12 + 1:02d}-11\n"
            )
            if size >= megabytes * 1_000_000:
                return


def tool(path: Path, wanted: list[str] | None, work: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Do what a data tool does with a file."""
    with path.open("rb") as source, open_text(source) as text:
        return work(TextTable(text).batches(wanted))


PLAIN: dict[str, Callable[[Path], object]] = {
    "filter": lambda path: pl.scan_csv(path).filter(pl.col("amount") > 990).collect(),
    "aggregate": lambda path: pl.scan_csv(path).group_by("city").agg(pl.col("amount").sum()).sort("city").collect(),
    "sort": lambda path: pl.scan_csv(path).sort("amount", descending=True).head(1000).collect(),
}
TOOLS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "filter": lambda path: tool(
        path, ["amount"], lambda rows: operations.filtered(rows, [condition("amount", ">", 990)])
    ),
    "aggregate": lambda path: tool(
        path, ["city", "amount"], lambda rows: operations.aggregated(rows, [Metric("amount", "sum")], ["city"])
    ),
    "sort": lambda path: tool(
        path, None, lambda rows: operations.transformed(rows, Transform(sort_by="amount", sort_desc=True))
    ),
}


@contextmanager
def timed_rules(spent: list[float]) -> Iterator[None]:
    """Add the seconds that the rules of cells take."""
    rules: list[tuple[Any, str]] = [
        (columns.ColumnBatch, "matches"),
        (columns.ColumnBatch, "order_keys"),
        (operations, "totals"),
    ]
    kept = [getattr(where, name) for where, name in rules]

    def timed(function: Any) -> Any:
        def run(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[0] += time.perf_counter() - started

        return run

    for (where, name), function in zip(rules, kept, strict=True):
        setattr(where, name, timed(function))
    try:
        yield
    finally:
        for (where, name), function in zip(rules, kept, strict=True):
            setattr(where, name, function)


def taken(work: Callable[[Path], object], path: Path) -> tuple[float, float]:
    """Return the wall and CPU seconds of one turn."""
    wall, cpu = time.perf_counter(), time.process_time()
    work(path)
    return time.perf_counter() - wall, time.process_time() - cpu


def compared(name: str, path: Path, rounds: int) -> list[float]:
    """Return medians: polars' wall and CPU seconds, the tool's, and the seconds of the rules."""
    samples: list[tuple[float, ...]] = []
    for _ in range(rounds):
        spent = [0.0]
        plain = taken(PLAIN[name], path)
        with timed_rules(spent):
            ours = taken(TOOLS[name], path)
        samples.append((*plain, *ours, spent[0]))
    return [statistics.median(each) for each in zip(*samples, strict=True)]


def main() -> None:
    """Print a table."""
    sizes = [float(size) for size in sys.argv[1:]] or [11.0, 28.0, 200.0]
    print("   MB  work        polars wall    cpu   tool wall    cpu   rules  times wall")
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            path = Path(folder, "orders.csv")
            write_csv(path, size)
            for name in PLAIN:
                compared(name, path, 1)
                plain, plain_cpu, ours, cpu, rules = compared(name, path, ROUNDS)
                figures = f"{plain:11.3f} {plain_cpu:6.3f} {ours:11.3f} {cpu:6.3f} {rules:7.3f} {ours / plain:11.1f}"
                print(f"{size:5.0f}  {name:10} {figures}", flush=True)


if __name__ == "__main__":
    main()
