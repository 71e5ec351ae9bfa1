"""Search the content of recorded runs: scripts, inputs, arguments, answers, output, errors, and digests of files.

What is found is read from the records, and each match names its run, how far that run can be trusted, and its call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from toolcell.audit.filters import Filter
from toolcell.audit.query import Index, RunSummary
from toolcell.audit.reader import RecordedCall, RecordedRun
from toolcell.errors import AuditError
from toolcell.support.data_text import jsonable
from toolcell.support.packing import Unrecordable
from toolcell_bridge.wire.tables import Array, Table

MAX_DEPTH: Final = 100
LINE_CHARS: Final = 4096
"""A longer line is searched in pieces of this size, so that one match does not cost the size of a field."""
AROUND_CHARS: Final = 60
"""Shown of a line before and after a match."""


@dataclass(frozen=True, slots=True)
class Match:
    """One place in a run where the pattern was found."""

    run: RunSummary
    where: str
    """Name of the field: source, args.query, stdout, error.message, file report.csv."""
    line: int
    """Line of the field's text, counted from 1."""
    call: RecordedCall | None
    text: str
    """The line, or a piece of it."""
    start: int
    end: int
    """Where in `text` the match is."""

    def excerpt(self, around: int = AROUND_CHARS) -> tuple[str, str, str]:
        """Return the text before the match, the match, and the text behind it."""
        before, after = self.text[: self.start], self.text[self.end :]
        return before[-around:], self.text[self.start : self.end], after[:around]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        call = self.call
        return {
            "run": self.run.id,
            "chain": self.run.chain,
            "trust": self.run.trust,
            "started_ns": self.run.started_ns,
            "where": self.where,
            "line": self.line,
            "call": None if call is None else {"number": call.number, "tool": call.tool, "line": call.line},
            "text": self.text,
            "start": self.start,
            "end": self.end,
        }


@dataclass(slots=True)
class Search:
    """One search: what was searched, and what could not be."""

    runs: int = 0
    unreadable: int = 0
    """Runs whose records cannot be read."""
    not_recorded: int = 0
    """Fields of which only a digest, a beginning or nothing was recorded."""

    def search(self, index: Index, wanted: Filter, pattern: re.Pattern[str]) -> Iterator[Match]:
        """Yield every match in the runs that a filter selects, in order; at most one for each line of a field.

        Where the pattern is a plain text, only runs with a word of it in their events are read.
        """
        word = word_of(pattern) if wanted.limit is None else None
        runs = index.runs(wanted if word is None else replace(wanted, may_hold=word))
        self.runs += 0 if word is None else index.count(wanted) - len(runs)
        for summary in runs:
            try:
                run = index.load(summary)
            except AuditError:
                self.unreadable += 1
                continue
            self.runs += 1
            self.not_recorded += sum(name.endswith("_cut") for name in _extras(run))
            for where, text, call in texts_of(run):
                for number, line in _pieces(text):
                    if (found := pattern.search(line)) is not None:
                        yield Match(summary, where, number, call, line, *found.span())


_PLAIN: Final = re.compile(r"(?:[^\\.^$*+?{}\[\]|()]|\\[^\w])*")
_WORD: Final = re.compile(r"[^\s\\]+")
_OF_A_CHAIN: Final = re.compile(r"[0-9a-f:]+")
_OF_AN_ESCAPE: Final = re.compile(r"[x0-9a-f]{0,3}")
"""What may stand at the beginning of a word and come from a byte that is no text, such as \\xfe."""
_WRITTEN_OUT: Final = ("True", "False", "-inf", "nan")


def word_of(pattern: re.Pattern[str]) -> bytes | None:
    """Return bytes that an event has wherever the pattern matches a text of it; None where that is not known."""
    if pattern.flags & ~re.UNICODE or _PLAIN.fullmatch(pattern.pattern) is None:
        return None
    word = max(_WORD.findall(re.sub(r"\\(.)", r"\1", pattern.pattern)), key=len, default="")
    # Numbers and the names of chains are made when they are shown.
    if _OF_A_CHAIN.fullmatch(word) is not None or any(word in each for each in _WRITTEN_OUT):
        return None
    word = _OF_AN_ESCAPE.sub("", word, count=1)
    if len(word) < 3 or all(each in "eE+-.0123456789" for each in word):
        return None
    return word.encode("utf-8", "surrogatepass")


def _extras(run: RecordedRun) -> Iterator[str]:
    for more in (run.start.get("more"), run.end.get("more")):
        yield from more or ()
    for call in run.calls:
        yield from (*call.start_extra, *call.end_extra)


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        for start in range(0, max(1, len(line)), LINE_CHARS):
            # The pieces overlap, so that a match of ordinary length is not cut in two.
            yield number, line[max(0, start - LINE_CHARS // 8) : start + LINE_CHARS]


def texts_of(run: RecordedRun) -> Iterator[tuple[str, str, RecordedCall | None]]:
    """Yield each text of a run: the name of its field, the text, and the call that it belongs to."""
    start, end = run.start, run.end
    yield "id", run.id, None
    yield "source", run.source or "", None
    for name, value in (("sha256", start.get("sha256")), ("inputs", start.get("inputs")), ("who", run.who)):
        yield from _leaves(name, value, None)
    for name, _, sha256, content in start.get("files") or ():
        yield from _file(name, sha256, content)
    yield from _leaves("start", start.get("more"), None)
    for call in run.calls:
        yield "tool", call.tool, call
        yield "origin", call.place, call
        yield "status", call.status, call
        for name, value in call.facts.items():
            yield from _leaves(name, value, call)
    for stream in ("stdout", "stderr"):
        yield stream, "".join(text for each, text in end.get("logs") or () if each == stream), None
    for name in ("outcome", "value", "value_sha256", "error", "more"):
        yield from _leaves("end" if name == "more" else name, end.get(name), None)
    for name, _, _, sha256, problem in end.get("files") or ():
        yield from _file(name, sha256, problem)


def _file(name: str, sha256: str | None, content: object) -> Iterator[tuple[str, str, None]]:
    yield f"file {name}", name, None
    yield f"file {name} sha256", sha256 or "", None
    if isinstance(content, bytes):
        yield f"file {name}", content.decode("utf-8", "backslashreplace"), None
    elif isinstance(content, str):
        yield f"file {name}", content, None


def _leaves(
    name: str, value: Any, call: RecordedCall | None, depth: int = 0
) -> Iterator[tuple[str, str, RecordedCall | None]]:
    """Yield the texts and numbers inside a value, each with its path. A key is searched like a text."""
    match value:
        case None:
            return
        case str():
            yield name, value, call
        case Mapping() if depth < MAX_DEPTH:
            for key, item in value.items():
                yield f"{name} key", str(key), call
                yield from _leaves(f"{name}.{key}", item, call, depth + 1)
        case list() | tuple() if depth < MAX_DEPTH:
            for number, item in enumerate(value):
                yield from _leaves(f"{name}[{number}]", item, call, depth + 1)
        case bytes():
            yield name, value.decode("utf-8", "backslashreplace"), call
        case Array() | Table():
            yield from _leaves(name, value.plain(), call, depth)
        case Unrecordable(kind, text):
            yield name, f"{kind} {text}", call
        case _:
            yield name, str(jsonable(value)), call
