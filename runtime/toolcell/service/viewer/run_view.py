"""What the page of one run shows: plain data made from its records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from toolcell.audit import RecordedCall, RecordedRun, ShownRun
from toolcell.service.viewer.rendering import count
from toolcell.support.about_tables import table_with_rows
from toolcell.support.data_text import shown_text
from toolcell.support.text import duration, size
from toolcell_bridge.guest.pictures import picture_type

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
