"""What the overview and the catalogue of tools count, from the index of a log."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from toolcell.audit import UNFINISHED, Index, tool_table
from toolcell.results import LIMIT_OUTCOMES, Outcome

WINDOWS: Final = {"1h": 3600, "24h": 86_400, "7d": 7 * 86_400, "30d": 30 * 86_400, "all": 0}
"""Name to seconds; 0 is everything."""
BUCKETS: Final = 48
TOP: Final = 10


@dataclass(frozen=True, slots=True)
class TimeBucket:
    """What happened in a part of the time."""

    start_s: int
    ok: int
    failed: int
    median_ms: float
    p95_ms: float


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What the overview shows."""

    runs: int
    outcomes: list[tuple[str, int, int]]
    """Outcome, runs, and thousandths of all."""
    limits: list[tuple[str, int]]
    median_s: float
    p95_s: float
    p99_s: float
    longest_s: float
    buckets: list[TimeBucket]
    tools: list[dict[str, Any]]
    failures: list[tuple[str, int]]
    """Code of a failed call, and how many failed with it."""


def run_figures(index: Index, window: str) -> RunFigures:
    """Count the runs of a window of time."""
    length_s = WINDOWS[window]
    since_ns = time.time_ns() - length_s * 10**9 if length_s else 0
    outcomes = index.select(
        "SELECT outcome, count(*) FROM plain_run WHERE started >= ? GROUP BY outcome ORDER BY 2 DESC, 1", [since_ns]
    )
    total = sum(number for _, number in outcomes)
    rows = index.select(
        "SELECT started, outcome, wall_s FROM plain_run WHERE started >= ? ORDER BY started", [since_ns]
    )
    taken = sorted(took for _, _, took in rows if isinstance(took, int | float))
    named = dict(outcomes)
    return RunFigures(
        runs=total,
        outcomes=[(str(name), number, number * 1000 // total) for name, number in outcomes],
        limits=[(name, named[name]) for name in LIMIT_OUTCOMES if name in named],
        median_s=quantile(taken, 0.5),
        p95_s=quantile(taken, 0.95),
        p99_s=quantile(taken, 0.99),
        longest_s=taken[-1] if taken else 0.0,
        buckets=time_buckets(rows),
        tools=tool_figures(index, since_ns)[:TOP],
        failures=_failures(index, since_ns),
    )


def tool_figures(index: Index, since_ns: int = 0) -> list[dict[str, Any]]:
    """Return the calls of each tool, most called first; the rows of `tool_table`."""
    rows = index.select(
        "SELECT tool, status, duration_us FROM plain_call WHERE started >= ? ORDER BY tool, duration_us", [since_ns]
    )
    return tool_table(rows)


def _failures(index: Index, since_ns: int) -> list[tuple[str, int]]:
    return index.select(
        "SELECT code, count(*) FROM plain_call "
        f"WHERE started >= ? AND code IS NOT NULL GROUP BY code ORDER BY 2 DESC, 1 LIMIT {TOP}",
        [since_ns],
    )


def quantile(ordered: list[float], share: float) -> float:
    """Return the value below which a share of the ordered values lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def time_buckets(rows: Iterable[tuple[int, str, Any]]) -> list[TimeBucket]:
    """Split the time from the first run to the last into equal parts, and count each. Rows are in order of time."""
    known = list(rows)
    if not known:
        return []
    first, last = known[0][0], known[-1][0]
    width = max(10**9, (last - first) // BUCKETS + 1)
    parts: list[list[tuple[int, str, Any]]] = [[] for _ in range((last - first) // width + 1)]
    for row in known:
        parts[(row[0] - first) // width].append(row)
    return [_bucket((first + number * width) // 10**9, part) for number, part in enumerate(parts)]


def _bucket(start_s: int, part: list[tuple[int, str, Any]]) -> TimeBucket:
    taken = sorted(took for _, _, took in part if isinstance(took, int | float))
    ok = sum(outcome == str(Outcome.OK) for _, outcome, _ in part)
    failed = sum(outcome not in (str(Outcome.OK), UNFINISHED, str(Outcome.SUSPENDED)) for _, outcome, _ in part)
    return TimeBucket(start_s, ok, failed, quantile(taken, 0.5) * 1000, quantile(taken, 0.95) * 1000)
