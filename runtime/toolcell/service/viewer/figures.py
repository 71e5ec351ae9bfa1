"""The overview, the tools, and the check of the log: figures over a whole log, and their pages."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final

from starlette.responses import RedirectResponse, Response

from toolcell.audit import Filter, Index
from toolcell.errors import UsageError
from toolcell.results import LIMIT_OUTCOMES, Outcome, standing_of
from toolcell.service.viewer.site import PageMissing, Visit, form, page
from toolcell.service.viewer.visitors import READ
from toolcell.support.data_text import jsonable
from toolcell.support.exact_json import json_text

WINDOWS: Final = {"1h": 3600, "24h": 86_400, "7d": 7 * 86_400, "30d": 30 * 86_400, "all": 0}
"""Name to seconds; 0 is everything."""
BUCKETS: Final = 48
TOP: Final = 10


def run_figures(index: Index, window: str) -> dict[str, object]:
    """Return what the overview shows. `outcomes`: name, runs, and thousandths of all runs."""
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
    return {
        "runs": total,
        "outcomes": [(str(name), number, number * 1000 // total) for name, number in outcomes],
        "limits": [(name, named[name]) for name in LIMIT_OUTCOMES if name in named],
        "median_s": quantile(taken, 0.5),
        "p95_s": quantile(taken, 0.95),
        "p99_s": quantile(taken, 0.99),
        "longest_s": taken[-1] if taken else 0.0,
        "buckets": time_buckets(rows),
        "tools": index.tool_table(since_ns)[:TOP],
        "failures": index.select(
            "SELECT code, count(*) FROM plain_call "
            f"WHERE started >= ? AND code IS NOT NULL GROUP BY code ORDER BY 2 DESC, 1 LIMIT {TOP}",
            [since_ns],
        ),
    }


def quantile(ordered: list[float], share: float) -> float:
    """Return the value below which a share of the ordered values lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def time_buckets(rows: Iterable[tuple[int, str, Any]]) -> list[dict[str, float]]:
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


def _bucket(start_s: int, part: list[tuple[int, str, Any]]) -> dict[str, float]:
    taken = sorted(took for _, _, took in part if isinstance(took, int | float))
    ok = sum(outcome == str(Outcome.OK) for _, outcome, _ in part)
    failed = sum(standing_of(outcome) == "bad" for _, outcome, _ in part)
    times = {"median_ms": quantile(taken, 0.5) * 1000, "p95_ms": quantile(taken, 0.95) * 1000}
    return {"start_s": start_s, "ok": ok, "failed": failed, **times}


async def overview(visit: Visit) -> Response:
    window = visit.request.query_params.get("window", "all")
    if window not in WINDOWS:
        raise UsageError(f"window {window[:50]!r}: want one of {', '.join(WINDOWS)}")
    figures = await (await visit.log()).read_kept(("overview", window), lambda index: run_figures(index, window))
    return visit.page("overview", figures=figures, window=window, windows=[*WINDOWS])


NEWEST_RUNS = 20
"""Definitions are looked for in so many of the newest runs."""
MAX_TOOLS = 2000


async def tools(visit: Visit) -> Response:
    """Show the tools that were called, and those that the newest runs could call."""
    rows = await (await visit.log()).read_kept("tools", _catalogue)
    return visit.page("tools", tools=rows[:MAX_TOOLS], more=max(0, len(rows) - MAX_TOOLS))


async def tool(visit: Visit) -> Response:
    name = visit.request.query_params.get("name", "")
    rows = await (await visit.log()).read_kept("tools", _catalogue)
    found = next((row for row in rows if row["tool"] == name), None)
    if found is None:
        raise PageMissing("no recorded run called this tool, or could call it")
    return visit.page("tool", tool=found, stub=await visit.host.stub_of(visit.visitor, name))


def _catalogue(index: Index) -> list[dict[str, object]]:
    told = _definitions(index)
    called = {str(row["tool"]): row for row in index.tool_table()}
    names = [*called, *(name for name in told if name not in called)]
    nothing = {"calls": 0, "failed": 0, "p50_ms": 0.0, "p95_ms": 0.0, "total_s": 0.0}
    return [{"tool": name, **nothing, **called.get(name, {}), **told.get(name, _UNKNOWN)} for name in names]


_UNKNOWN = {"description": "", "parameters": "", "returns": ""}


def _definitions(index: Index) -> dict[str, dict[str, str]]:
    """Return description and schemas of the tools that the newest runs could call."""
    found: dict[str, dict[str, str]] = {}
    seen: set[str] = set()
    for summary in reversed(index.runs(Filter(limit=NEWEST_RUNS))):
        run = index.load(summary)
        if (digest := str(run.start.get("tools"))) in seen:
            continue
        seen.add(digest)
        for name, description, parameters, *returns in run.definitions:
            schemas = [json_text(jsonable(each), indent=2) if each else "" for each in (parameters, *returns[:1])]
            about = dict(zip(("description", "parameters", "returns"), (str(description), *schemas, ""), strict=False))
            found.setdefault(str(name).encode("utf-8", "backslashreplace").decode(), about)
    return found


async def verification(visit: Visit) -> Response:
    log = await visit.log()
    return visit.page("verify", check=visit.host.verifications.newest(log), log=log)


async def verification_state(visit: Visit) -> Response:
    """Return how far the check has got."""
    return visit.part("verification", check=visit.host.verifications.newest(await visit.log()))


async def begin_verification(visit: Visit) -> Response:
    check = visit.host.verifications.begin(await visit.log())
    if visit.request.headers.get("hx-request") == "true":
        return visit.part("verification", check=check)
    return RedirectResponse("/verify", 303)


ROUTES = (
    page("/", overview, READ),
    page("/tools", tools, READ),
    page("/tool", tool, READ),
    page("/verify", verification, READ),
    page("/verify/state", verification_state, READ),
    form("/verify", begin_verification, READ),
)
