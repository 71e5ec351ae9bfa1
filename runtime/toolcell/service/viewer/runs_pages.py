"""The list of runs, its next pages, and the runs that are new since it was shown."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from toolcell.audit import Filter, Index, RunSummary, Trust
from toolcell.errors import UsageError
from toolcell.service.viewer.site import Visit, page
from toolcell.service.viewer.visitors import READ
from toolcell.support.times import parse_time

PAGE: Final = 50
MAX_LOOKED_AT: Final = 1000
"""Runs that one page looks at for one with the wanted trust: how far a run can be trusted is in no index."""
MAX_NEW: Final = 200
FIELDS: Final = ("q", "outcome", "tool", "trust", "session", "user", "since", "until")
"""Fields of the form, and of the address."""

_PLACE: Final = re.compile(r"(\d{1,19})\.(\d{1,18})\.([0-9a-f]{12})")
_SPECIAL: Final = re.compile(r"([*?\[])")


@dataclass(frozen=True, slots=True)
class RunPage:
    """A part of the list, the newest run first."""

    runs: list[RunSummary]
    older: str = ""
    """Where the next page begins; empty at the end."""


def wanted_of(params: Mapping[str, str]) -> tuple[Filter, dict[str, str]]:
    """Return the filter that an address asks for, and its fields.

    Raises:
        UsageError: a value is not one of the possible ones.
    """
    asked = {name: value[:200] for name in FIELDS if (value := params.get(name, "").strip())}
    for name, known in (("outcome", RunSummary.OUTCOMES), ("trust", [*Trust])):
        if name in asked and asked[name] not in known:
            raise UsageError(f"{name} {asked[name]!r}: want one of {', '.join(known)}")
    tool = asked.get("tool")
    return Filter(
        text=asked.get("q"),
        outcome=asked.get("outcome"),
        tool=_SPECIAL.sub(r"[\1]", tool) if tool else None,
        trust=asked.get("trust"),
        session=asked.get("session"),
        user=asked.get("user"),
        since_ns=parse_time(asked["since"], UTC) if "since" in asked else None,
        until_ns=parse_time(asked["until"], UTC) if "until" in asked else None,
        limit=PAGE,
    ), asked


def address(path: str, asked: Mapping[str, str], **more: str) -> str:
    query = urlencode({**asked, **{name: value for name, value in more.items() if value}})
    return f"{path}?{query}" if query else path


def place_text(run: RunSummary) -> str:
    return f"{run.started_ns}.{run.seq}.{run.chain}"


def place_of(text: str | None) -> tuple[int, int, str] | None:
    """Return the place that a part of an address names.

    Raises:
        UsageError: it names none.
    """
    if not text:
        return None
    match = _PLACE.fullmatch(text)
    if match is None or int(match[1]) >= 1 << 63:
        raise UsageError(f"{text[:100]!r} is not a place in the list; follow the links of the list")
    return int(match[1]), int(match[2]), match[3]


def page_before(index: Index, wanted: Filter, before: tuple[int, int, str] | None) -> RunPage:
    """Return the runs behind a place, or the newest."""
    found: list[RunSummary] = []
    looked_at = 0
    while looked_at < MAX_LOOKED_AT:
        chunk = index.runs(dataclasses.replace(wanted, before=before, trust=None, limit=PAGE))[::-1]
        for run in chunk:
            looked_at += 1
            before = (run.started_ns, run.seq, run.chain)
            if wanted.trust in (None, run.trust):
                found.append(run)
                if len(found) == PAGE:
                    return RunPage(found, place_text(run))
        if len(chunk) < PAGE:
            return RunPage(found)
    return RunPage(found, "{}.{}.{}".format(*before) if before else "")


def runs_after(index: Index, wanted: Filter, after: tuple[int, int, str]) -> list[RunSummary]:
    """Return the runs that are newer than a place, the newest first; of very many the oldest."""
    new = dataclasses.replace(wanted, after=after, trust=None, limit=None)
    found = index.runs(dataclasses.replace(new, limit=MAX_NEW))[::-1]
    return [run for run in found if wanted.trust in (None, run.trust)]


PAGES_IN_A_ROW = 20
"""So many pages follow by themselves. Then a link begins the list again from there, so that the browser stays quick."""


async def runs(visit: Visit) -> Response:
    params = visit.request.query_params
    wanted, asked = wanted_of(params)
    before = place_of(params.get("before"))
    log = await visit.log()

    def question(index: Index) -> tuple[RunPage, int]:
        return page_before(index, wanted, before), sum(row[0] for row in index.select("SELECT count(*) FROM run"))

    found, total = await log.read(question)
    return visit.page(
        "runs",
        asked=asked,
        outcomes=RunSummary.OUTCOMES,
        trusts=[*Trust],
        total=total,
        is_newest=before is None,
        reset=address("/runs", {}),
        **_rows(found, asked, 1),
        newer=address("/runs/new", asked, after=place_text(found.runs[0]) if found.runs else "0.0.000000000000"),
    )


async def older(visit: Visit) -> Response:
    params = visit.request.query_params
    wanted, asked = wanted_of(params)
    before, number = place_of(params.get("before")), _number(params.get("page"))
    found = await (await visit.log()).read(lambda index: page_before(index, wanted, before))
    return visit.part("run_rows", **_rows(found, asked, number + 1))


async def newer(visit: Visit) -> Response:
    """Return the rows of new runs, and where to look next."""
    params = visit.request.query_params
    wanted, asked = wanted_of(params)
    after = place_of(params.get("after")) or (0, 0, "")
    new = await (await visit.log()).read(lambda index: runs_after(index, wanted, after))
    place = place_text(new[0]) if new else params.get("after", "")
    return visit.part("new_runs", runs=new, newer=address("/runs/new", asked, after=place))


async def row(visit: Visit) -> Response:
    place = "{chain}:{seq}".format(**visit.request.path_params)
    return visit.part("run_row", run=await (await visit.log()).read(lambda index: index.find(place)))


def _rows(found: RunPage, asked: dict[str, str], number: int) -> dict[str, Any]:
    is_pause = number % PAGES_IN_A_ROW == 0
    return {
        "runs": found.runs,
        "older": address("/runs", asked, before=found.older) if found.older else "",
        "older_rows": ""
        if is_pause or not found.older
        else address("/runs/older", asked, before=found.older, page=str(number)),
    }


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 7 else 0


ROUTES = (
    page("/runs", runs, READ),
    page("/runs/older", older, READ),
    page("/runs/new", newer, READ),
    page("/runs/{chain}/{seq:int}/row", row, READ),
)
