"""The list of runs, its next pages, and the runs that are new since it was shown."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from toolcell.audit import TRUSTS, Index
from toolcell.service.viewer.run_list import (
    OUTCOMES,
    RunPage,
    address,
    page_before,
    place_of,
    place_text,
    runs_after,
    wanted_of,
)
from toolcell.service.viewer.site import Visit, page
from toolcell.service.viewer.visitors import READ

PAGES_IN_A_ROW = 20
"""So many pages follow by themselves. Then a link begins the list again from there, so that the browser stays quick."""


async def runs(visit: Visit) -> Response:
    """Show the list with its form."""
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
        outcomes=OUTCOMES,
        trusts=TRUSTS,
        total=total,
        is_newest=before is None,
        reset=address("/runs", {}),
        **_rows(found, asked, 1),
        newer=address("/runs/new", asked, after=place_text(found.runs[0]) if found.runs else "0.0.000000000000"),
    )


async def older(visit: Visit) -> Response:
    """Return the rows of the next page."""
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
    """Return the row of one run, as it is now."""
    place = "{chain}:{seq}".format(**visit.request.path_params)
    run = await (await visit.log()).read(lambda index: index.find(place))
    return visit.part("run_row", run=run)


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
