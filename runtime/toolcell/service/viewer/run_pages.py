"""The pages of one run: script, calls, output, files; live while it runs; and a replay of it."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from toolcell.audit import Index, RecordedRun, RunSummary, Trust
from toolcell.control import Replay
from toolcell.errors import UsageError
from toolcell.service.viewer.rendering import as_download, as_image
from toolcell.service.viewer.run_view import given_file, on_page, part_of
from toolcell.service.viewer.site import PageMissing, Visit, form, page
from toolcell.service.viewer.visitors import EXECUTE, READ
from toolcell.support import daemon_threads
from toolcell.support.data_text import shown_text


async def load(visit: Visit) -> tuple[RunSummary, RecordedRun]:
    """Return the run that the address names.

    Raises:
        PageMissing: there is none.
    """
    place = "{chain}:{seq}".format(**visit.request.path_params)

    def question(index: Index) -> tuple[RunSummary, RecordedRun]:
        try:
            summary = index.find(place, is_whole=True)
        except UsageError as exc:
            raise PageMissing(f"the log has no run {place}") from exc
        return summary, index.load(summary)

    return await (await visit.log()).read_large(question)


async def show(visit: Visit) -> Response:
    summary, run = await load(visit)
    params = visit.request.query_params
    first = int(text) if (text := params.get("calls", "1")).isascii() and text.isdecimal() and len(text) < 9 else 1
    return visit.page(
        "run",
        summary=summary,
        run=run,
        shown=on_page(run, max(1, first)),
        trust_text=Trust(summary.trust).text,
        replayable=run.kind == "code" and run.source is not None and visit.visitor.can(EXECUTE),
    )


async def state(visit: Visit) -> Response:
    """Return what changes of a run while it is under way."""
    summary, run = await load(visit)
    shown = on_page(run)
    if shown["is_live"] and visit.request.query_params.get("seen") == shown["version"]:
        return Response(status_code=204)
    return visit.part("run_state", summary=summary, run=run, shown=shown)


async def calls(visit: Visit) -> Response:
    first = visit.request.path_params["first"]
    summary, run = await load(visit)
    return visit.part("calls", summary=summary, run=run, shown=on_page(run, max(1, first)))


async def part(visit: Visit) -> Response:
    _, run = await load(visit)
    found = await daemon_threads.run_large(part_of, run, visit.request.path_params["part"])  # it may be long
    if found is None:
        raise PageMissing("the record has nothing of this kind")
    return as_download(*found)


async def picture(visit: Visit) -> Response:
    """Return a file that was given to the script, if it is a picture."""
    image = as_image((await _file(visit))[1])
    if image is None:
        raise PageMissing("this file is not a picture; download it")
    return image


async def download(visit: Visit) -> Response:
    """Return a file that was given to the script, to keep."""
    return as_download(*await _file(visit))


async def _file(visit: Visit) -> tuple[str, bytes]:
    _, run = await load(visit)
    found = given_file(run, visit.request.path_params["number"])
    if found is None:
        raise PageMissing("the record does not hold the content of this file")
    return found


RUN = "/runs/{chain}/{seq:int}"


async def run_again(visit: Visit) -> Response:
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


ROUTES = (
    page(RUN, show, READ),
    page(f"{RUN}/state", state, READ),
    page(f"{RUN}/calls/{{first:int}}", calls, READ),
    page(f"{RUN}/parts/{{part}}", part, READ),
    page(f"{RUN}/pictures/{{number:int}}", picture, READ),
    page(f"{RUN}/files/{{number:int}}", download, READ),
    form(f"{RUN}/replay", run_again, EXECUTE, READ),
)
