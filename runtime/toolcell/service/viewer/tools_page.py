"""The catalogue of tools: how often scripts called each, how often it failed, how long it took, and what it is."""

from __future__ import annotations

from starlette.responses import Response

from toolcell.audit import Filter, Index, jsonable
from toolcell.service.viewer.figures import tool_figures
from toolcell.service.viewer.site import PageMissing, Visit, page
from toolcell.service.viewer.visitors import READ
from toolcell.support.exact_json import json_text

NEWEST_RUNS = 20
"""Definitions are looked for in so many of the newest runs."""
MAX_TOOLS = 2000


async def tools(visit: Visit) -> Response:
    """Show the tools that were called, and those that the newest runs could call."""
    log = await visit.log()
    rows = await log.read_kept("tools", _catalogue)
    return visit.page("tools", tools=rows[:MAX_TOOLS], more=max(0, len(rows) - MAX_TOOLS))


async def tool(visit: Visit) -> Response:
    """Show one tool."""
    name = visit.request.query_params.get("name", "")
    rows = await (await visit.log()).read_kept("tools", _catalogue)
    found = next((row for row in rows if row["tool"] == name), None)
    if found is None:
        raise PageMissing("no recorded run called this tool, or could call it")
    return visit.page("tool", tool=found, stub=await visit.host.stub_of(visit.visitor, name))


def _catalogue(index: Index) -> list[dict[str, object]]:
    told = _definitions(index)
    called = {str(row["tool"]): row for row in tool_figures(index)}
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


ROUTES = (page("/tools", tools, READ), page("/tool", tool, READ))
