"""Run a recorded script again with the recorded answers, and show the first difference. No tool is called."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.responses import Response

from toolcell.audit.html import shown_text
from toolcell.audit.query import VERIFIED, RunSummary
from toolcell.audit.reader import RecordedRun
from toolcell.audit.replay import Replay, replay, runtime_options
from toolcell.config import Limits, PoolConfig
from toolcell.errors import UsageError
from toolcell.runtime import Runtime
from toolcell.service.viewer.run_pages import RUN, load
from toolcell.service.viewer.site import Visit, form
from toolcell.service.viewer.visitors import EXECUTE


async def run_again(visit: Visit) -> Response:
    """Replay the run that the address names."""
    summary, run, _ = await load(visit)
    run = bounded(summary, run)
    options = visit.host.runtime_options(visit.visitor, runtime_options(run))
    async with visit.host.replays, Runtime(None, pool=PoolConfig(warm=1), **options) as runtime:
        done = await replay(runtime, run)
    values: dict[str, Any] = {"done": done, "summary": summary, **_difference(done)}
    if visit.request.headers.get("hx-request") == "true":
        return visit.part("replayed", **values)
    return visit.page("replay", **values)


def bounded(summary: RunSummary, run: RecordedRun) -> RecordedRun:
    """Return a run whose settings can be used. Whoever wrote a record that is not verified chose them.

    Raises:
        UsageError: the run needs packages, and its record is not verified.
    """
    if summary.trust == VERIFIED:
        return run
    if runtime_options(run)["packages"]:
        raise UsageError(
            f"this run needs packages, and its record is {summary.trust}: only of verified runs are they installed"
        )
    most = Limits()
    limits = {name: min(value, getattr(most, name)) for name, value in run.limits.items() if _is_bounded(name, value)}
    return dataclasses.replace(run, settings={**run.settings, "limits": limits})


def _is_bounded(name: str, value: object) -> bool:
    most = getattr(Limits(), name, None)
    return isinstance(value, int | float) and isinstance(most, int | float)


def _difference(done: Replay) -> dict[str, Any]:
    found = done.divergence
    if found is None:
        return {"expected": "", "got": ""}
    return {"expected": shown_text(found.expected), "got": shown_text(found.got)}


ROUTES = (form(f"{RUN}/replay", run_again, EXECUTE),)
