"""The first page: how runs end, how long they take, which tools they call, and which limits they reach."""

from __future__ import annotations

from starlette.responses import Response

from toolcell.errors import UsageError
from toolcell.service.viewer.figures import WINDOWS, run_figures
from toolcell.service.viewer.site import Visit, page
from toolcell.service.viewer.visitors import READ


async def overview(visit: Visit) -> Response:
    """Show what the log holds of a window of time."""
    window = visit.request.query_params.get("window", "all")
    if window not in WINDOWS:
        raise UsageError(f"window {window[:50]!r}: want one of {', '.join(WINDOWS)}")
    log = await visit.log()
    figures = await log.read_kept(("overview", window), lambda index: run_figures(index, window))
    return visit.page("overview", figures=figures, window=window, windows=[*WINDOWS])


ROUTES = (page("/", overview, READ),)
