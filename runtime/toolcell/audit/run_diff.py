"""Compare two recorded runs: script, settings, inputs, calls, output and result.

Nothing runs here. What was not recorded in full is compared by its digest, or named as not compared.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from toolcell.audit.reader import RecordedCall, RecordedRun
from toolcell.support.data_text import json_line, jsonable
from toolcell.support.packing import pack

MAX_LINES: Final = 2000
"""Longer texts are not compared line by line: that takes quadratic time in texts made for it."""
CONTEXT_LINES: Final = 2


@dataclass(frozen=True, slots=True)
class RunChange:
    """One thing in which two runs differ."""

    what: str
    """source, inputs, limits.wall_s, call 3 args, stdout, value, ..."""
    first: Any
    second: Any
    lines: tuple[str, ...] = ()
    """For texts: the changed lines, each after `-`, `+` or a space."""

    @staticmethod
    def between(first: RecordedRun, second: RecordedRun) -> list[RunChange]:
        """Return everything in which the second run differs from the first, in the order of a run."""
        return [*_started(first, second), *_called(first, second), *_end_changes(first, second)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"what": self.what, "first": jsonable(self.first), "second": jsonable(self.second)}


def _started(first: RecordedRun, second: RecordedRun) -> Iterator[RunChange]:
    yield from _text("source", first.source, second.source)
    if first.source is None or second.source is None:
        yield from _value("source sha256", first.start.get("sha256"), second.start.get("sha256"))
    yield from _value("inputs", *_either(first.start, second.start, "inputs", "inputs_sha256"))
    yield from _value("input files", _files(first.start, 3), _files(second.start, 3))
    for name in ("limits", "policy", "isolation"):
        yield from _mapping(name, getattr(first, name), getattr(second, name))
    yield from _value("egress", [*first.egress], [*second.egress])
    yield from _value("tools", sorted(each[0] for each in first.definitions), sorted(e[0] for e in second.definitions))
    who = [
        {name: value for name, value in run.who.items() if name not in ("run", "parent_call")}
        for run in (first, second)
    ]
    yield from _mapping("who", *who)


def _called(first: RecordedRun, second: RecordedRun) -> Iterator[RunChange]:
    for one, two in itertools.zip_longest(first.calls, second.calls):
        if one is None or two is None:
            yield RunChange(f"call {(one or two).number}", one and _call_text(one), two and _call_text(two))
            continue
        name = f"call {one.number}"
        if one.tool != two.tool:
            yield RunChange(name, _call_text(one), _call_text(two))
            continue
        name = f"{name} {one.tool}"
        yield from _value(f"{name} line", one.line, two.line)
        yield from _value(f"{name} status", one.status, two.status)
        yield from _mapping(name, one.facts, two.facts, joint=" ")


def _end_changes(first: RecordedRun, second: RecordedRun) -> Iterator[RunChange]:
    yield from _value("outcome", first.outcome, second.outcome)
    yield from _value("error", first.end.get("error"), second.end.get("error"))
    yield from _value("value", *_either(first.end, second.end, "value", "value_sha256"))
    for stream in ("stdout", "stderr"):
        yield from _text(stream, _printed(first, stream), _printed(second, stream))
    yield from _value("files", _files(first.end, 5), _files(second.end, 5))


def _call_text(call: RecordedCall) -> str:
    return f"{call.tool}({json_line(call.args)})"


def _printed(run: RecordedRun, stream: str) -> str:
    return "".join(text for each, text in run.end.get("logs") or () if each == stream)


def _files(fields: Mapping[str, Any], columns: int) -> list[Any]:
    return sorted((entry[:columns] for entry in fields.get("files") or ()), key=pack)


def _either(first: Mapping[str, Any], second: Mapping[str, Any], name: str, digest: str) -> tuple[Any, Any]:
    """Return two values, or their digests where one of the values was not kept."""
    values = first.get(name), second.get(name)
    digests = first.get(digest), second.get(digest)
    return digests if None in values and None not in digests else values


def _value(what: str, first: Any, second: Any) -> Iterator[RunChange]:
    if pack(first) != pack(second):
        yield RunChange(what, first, second)


def _mapping(
    what: str, first: Mapping[str, Any], second: Mapping[str, Any], *, joint: str = "."
) -> Iterator[RunChange]:
    for name in dict.fromkeys((*first, *second)):
        yield from _value(f"{what}{joint}{name}", first.get(name), second.get(name))


def _text(what: str, first: str | None, second: str | None) -> Iterator[RunChange]:
    if first == second:
        return
    old, new = ((text or "").split("\n") for text in (first, second))
    changed: tuple[str, ...] = ()
    if max(len(old), len(new)) <= MAX_LINES:
        compared = difflib.unified_diff(old, new, lineterm="", n=CONTEXT_LINES)
        changed = tuple(itertools.islice(compared, 2, None))  # without the names of the files
    yield RunChange(what, first, second, changed)
