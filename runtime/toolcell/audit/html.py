"""Show one run as one HTML file: self-contained, without scripts and without requests to anywhere.

All of a record is hostile text. It becomes text of the page, or a number: `_environment` escapes every value, what a
browser or a reader could mistake for something else is spelled out first, and the policy in the page forbids everything
but its own style sheet.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from toolcell.audit.query import Trust
from toolcell.audit.reader import RecordedCall, RecordedRun
from toolcell.results import standing_of
from toolcell.support.data_text import shown_text
from toolcell.support.text import visible
from toolcell.support.times import time_of

if TYPE_CHECKING:
    from jinja2 import Environment

TRUST_CLASSES: Final = {Trust.VERIFIED: "good", Trust.BROKEN: "bad"}
BAR_WIDTH: Final = 1000


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A call as the page shows it."""

    label: str
    css: str
    start: int
    width: int
    parts: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ShownLine:
    """A line of the script, with the calls that it made."""

    number: int
    text: str
    calls: list[ShownCall]
    failed: bool


class ShownRun:
    """A run as a page shows it."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        times = [run.ended_ns or 0, *(call.ended_ns or call.started_ns for call in run.calls)]
        self.ended_ns = max(run.started_ns + 1, *times)
        """When it ended, or the last of it that is known, since the epoch."""
        self.calls = _calls(run, self.ended_ns)
        self.lines = _lines(run, self.calls)
        self.facts = [*_facts(run)]
        self.output, self.results, self.files = _output(run), [*_results(run)], _files(run)

    def to_html(self, trust: str, *, log: str = "", made_ns: int = 0) -> str:
        """Return the page. `Markup` is not escaped: the style sheet, which is our own, and its digest."""
        from markupsafe import Markup

        style = _style()
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
        return (
            _environment()
            .get_template("run.html.jinja")
            .render(
                style=Markup(style),
                style_hash=Markup(f"sha256-{digest}"),
                run=self.run,
                trust=trust,
                trust_class=TRUST_CLASSES.get(Trust(trust), "warn"),
                trust_text=Trust(trust).text,
                made_at=time_of(made_ns),
                facts=[*self.facts, ("log", log)],
                lines=self.lines,
                calls=[*self.calls.values()],
                span=f"{self.ended_ns / 1e6 - self.run.started_ns / 1e6:.3f} ms",
                output=self.output,
                results=self.results,
                files=self.files,
            )
        )


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # `finalize` sees every value before it is escaped, whatever the template forgets.
    return Environment(
        loader=PackageLoader("toolcell.audit"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=False,
    )


@functools.cache
def _style() -> str:
    return (files("toolcell.audit") / "templates" / "run.css").read_text(encoding="utf-8")


# What is shown


def _facts(run: RecordedRun) -> Iterable[tuple[str, str]]:
    yield "outcome", run.outcome
    yield "started", time_of(run.started_ns)
    if run.ended_ns is not None:
        yield "ended", time_of(run.ended_ns)
    yield "chain", f"{run.chain}, event {run.seq}"
    yield from run.who_lines()
    yield from (("run and those it goes on with", line) for line in run.family_lines())
    for name in ("limits", "policy", "isolation", "egress"):
        if run.kind == "code" and (value := getattr(run, name)):
            yield name, shown_text(value)
    if run.definitions:
        yield "tools", ", ".join(str(each[0]) for each in run.definitions)
    if run.start.get("inputs") is not None:
        yield "inputs", shown_text(run.start["inputs"])
    if digest := run.sha256:
        yield "script", f"sha256 {digest}"
    if usage := run.end.get("usage"):
        measured = {name: float(f"{each:.6g}") if isinstance(each, float) else each for name, each in usage.items()}
        yield "used", shown_text(measured)  # a measured number is not right to more digits
    yield from run.decision_lines(shown_text)
    yield from _notes(run.start.get("more"))
    yield from _notes(run.end.get("more"))


def _notes(more: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    """Say what was cut, redacted or left out."""
    told = ("decisions", "waits")
    yield from ((name.replace("_", " "), shown_text(value)) for name, value in (more or {}).items() if name not in told)


def _calls(run: RecordedRun, ended_ns: int) -> dict[int, ShownCall]:
    span = ended_ns - run.started_ns
    return {call.number: _call(call, run.started_ns, span) for call in run.calls}


def _call(call: RecordedCall, started_ns: int, span_ns: int) -> ShownCall:
    start = min(BAR_WIDTH - 2, max(0, (call.started_ns - started_ns) * BAR_WIDTH // span_ns))
    lasts = round(call.duration_s * 1e9) * BAR_WIDTH // span_ns if call.is_finished else BAR_WIDTH
    took = f" {call.duration_s * 1000:.3f} ms" if call.is_finished else ""
    label = f"{call.number} {call.tool}: {call.status}{took}"
    parts = [("origin", call.place), *call.lines(shown_text)]
    return ShownCall(label, standing_of(call.status), start, min(BAR_WIDTH - start, max(2, lasts)), parts)


def _lines(run: RecordedRun, calls: Mapping[int, ShownCall]) -> list[ShownLine]:
    if run.source is None:
        return []
    by_line: dict[int | None, list[ShownCall]] = {}
    for call in run.calls:
        by_line.setdefault(call.line, []).append(calls[call.number])
    failed = (run.end.get("error") or {}).get("line")
    lines = run.source.rstrip("\n").split("\n")
    return [
        ShownLine(number, text, by_line.get(number, []), number == failed) for number, text in enumerate(lines, start=1)
    ]


def _output(run: RecordedRun) -> list[tuple[str, str]]:
    logs = run.end.get("logs") or ()
    texts = {stream: "".join(text for each, text in logs if each == stream) for stream in ("stdout", "stderr")}
    others = [("printed elsewhere", text) for stream, text in logs if stream not in texts]
    return [(f"Printed to {stream}", text) for stream, text in texts.items() if text] + others


def _results(run: RecordedRun) -> Iterable[tuple[str, str]]:
    if run.end.get("has_value"):
        yield "Result", shown_text(run.end["value"])
    if error := run.end.get("error"):
        yield "Error", shown_text(error)
    if not run.end:
        yield "End", "No end is recorded: the run is under way, or its host was killed."


def _files(run: RecordedRun) -> list[tuple[Any, ...]]:
    given = [(name, "given", size, sha256, "") for name, size, sha256, _ in run.start.get("files") or ()]
    returned = run.end.get("files") or ()
    made = [
        (name, "returned", size, sha256 or "", problem or media or "")
        for name, media, size, sha256, problem in returned
    ]
    return [*given, *made]
