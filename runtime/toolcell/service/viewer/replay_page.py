"""Run a recorded script again with the recorded answers, and show the first difference. No tool is called."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from toolcell.audit import Replay, shown_text
from toolcell.service.viewer.run_pages import RUN, load
from toolcell.service.viewer.site import Visit, form
from toolcell.service.viewer.visitors import EXECUTE, READ


async def run_again(visit: Visit) -> Response:
    """Replay the run that the address names."""
    summary, run = await load(visit)
    done = await visit.host.replay(visit.request, visit.visitor, run, summary.trust)
    values: dict[str, Any] = {"done": done, "summary": summary, **_difference(done)}
    if visit.request.headers.get("hx-request") == "true":
        return visit.part("replayed", **values)
    return visit.page("replay", **values)


def _difference(done: Replay) -> dict[str, Any]:
    found = done.divergence
    if found is None:
        return {"expected": "", "got": ""}
    return {"expected": shown_text(found.expected), "got": shown_text(found.got)}


ROUTES = (form(f"{RUN}/replay", run_again, EXECUTE, READ),)
