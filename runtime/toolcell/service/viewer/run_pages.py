"""The pages of one run: script, calls, output, files; live while it runs; and a replay of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from starlette.responses import Response

from toolcell.audit import Index, RecordedCall, RecordedRun, RunSummary, ShownRun, Trust
from toolcell.control import Replay
from toolcell.errors import UsageError
from toolcell.service.viewer.rendering import as_download, as_image, count
from toolcell.service.viewer.site import PageMissing, Visit, form, page
from toolcell.service.viewer.visitors import EXECUTE, READ
from toolcell.support import daemon_threads
from toolcell.support.about_tables import table_with_rows
from toolcell.support.data_text import shown_text
from toolcell.support.text import duration, size
from toolcell_bridge.guest.pictures import picture_type

# What the page of one run shows: plain data made from its records.


CALLS_PER_PAGE: Final = 100
CALL_PARTS: Final = {"sent": "args", "made": "made", "answer": "value"}
"""What can be downloaded of a call: its label, and its fact."""
MAX_LINES: Final = 3000
SCALE: Final = 1000
"""Width of bars, in units of their drawing."""

USED_AND_LIMIT: Final = (
    ("wall_s", "wall_s", "Time", duration),
    ("cpu_s", "cpu_s", "Processor time", duration),
    ("peak_memory_bytes", "memory_bytes", "Memory", size),
    ("peak_processes", "processes", "Processes", count),
    ("host_work", "host_work", "Work for the host", count),
)
"""Field of the usage, field of the limits, name, and how the values are written."""


def on_page(run: RecordedRun, first_call: int = 1) -> dict[str, object]:
    """Return what the page of a run shows besides its summary, with a hundred of its calls."""
    shown = ShownRun(run)
    last = first_call + CALLS_PER_PAGE
    chosen = [call for call in run.calls if first_call <= call.number < last]
    lines = shown.lines
    given = run.start.get("files") or ()
    error = run.end.get("error")
    contents = {number: _content(file[3]) for number, file in enumerate(given)}
    return {
        "lines": lines[:MAX_LINES],
        "more_lines": max(0, len(lines) - MAX_LINES),
        "calls": [_call(call, shown.calls[call.number]) for call in chosen],
        "first_call": first_call,
        "next_call": last if any(call.number >= last for call in run.calls) else None,
        "span": duration((shown.ended_ns - run.started_ns) / 1e9),
        "output": shown.output,
        "results": [(name, text) for name, text in shown.results if name != "Error"],
        "error": error if isinstance(error, Mapping) else None,
        "files": shown.files,
        # Numbers of the files of which the content is on record, and of those that are pictures.
        "kept": frozenset(number for number, data in contents.items() if data is not None),
        "pictures": [number for number, data in contents.items() if data is not None and picture_type(data)],
        "bars": [*usage_bars(run)],
        "layers": [(str(name), str(text)) for name, text in _mapping(run.isolation, "layers").items()],
        "backend": str(run.isolation.get("backend", "")),
        "facts": [(name, text) for name, text in shown.facts if name not in ("isolation", "limits", "used")],
        "is_live": not run.end,
        # Changes with everything that can change while a run is under way.
        "version": f"{len(run.calls)}-{sum(call.is_finished for call in run.calls)}",
    }


def usage_bars(run: RecordedRun) -> Iterator[dict[str, object]]:
    """Yield a bar for each limit of which the use was measured, filled to a part of `SCALE`."""
    usage = _mapping(run.end, "usage")
    pairs = [(usage.get(used), run.limits.get(limit), name, text) for used, limit, name, text in USED_AND_LIMIT]
    pairs.append((len(run.calls), run.limits.get("tool_calls"), "Tool calls", count))
    for used, limit, name, text in pairs:
        if used is not None and limit is not None and _is_number(used) and _is_number(limit) and limit > 0:
            filled = round(min(1.0, max(0.0, used / limit)) * SCALE)
            shown = {"name": name, "used": text(used), "limit": text(limit)}
            yield shown | {"filled": filled, "is_near": filled >= SCALE * 0.9}


def part_of(run: RecordedRun, part: str) -> tuple[str, bytes] | None:
    """Return the file name and the content of a part of a run that can be downloaded whole."""
    name, _, number = part.partition("-")
    if name == "script" and run.source is not None:
        return "script.py", _encoded(run.source)
    if name == "result" and run.end.get("has_value"):
        return "result.json", _encoded(_whole(run.end["value"]))
    if name == "output":
        return "output.txt", _encoded("".join(str(text) for _, text in run.end.get("logs") or ()))
    if name in CALL_PARTS and number.isdecimal():
        call = next((call for call in run.calls if str(call.number) == number), None)
        facts = call.facts if call is not None else {}
        if CALL_PARTS[name] in facts:
            return f"{part}.json", _encoded(_whole(facts[CALL_PARTS[name]]))
    return None


def given_file(run: RecordedRun, number: int) -> tuple[str, bytes] | None:
    """Return name and content of a file that was given to the script, if the record has it."""
    files = run.start.get("files") or ()
    if not 0 <= number < len(files) or (content := _content(files[number][3])) is None:
        return None
    return str(files[number][0]), content


def _call(call: RecordedCall, shown: object) -> dict[str, object]:
    facts = {name: getattr(call, name) for name in ("number", "tool", "status", "line")}
    return facts | {"took": duration(call.duration_s) if call.is_finished else "", "shown": shown}


def _whole(value: Any) -> str:
    return shown_text(value, table_with_rows)


def _content(value: object) -> bytes | None:
    if isinstance(value, str):
        return _encoded(value)
    return value if isinstance(value, bytes) else None


def _mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


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
