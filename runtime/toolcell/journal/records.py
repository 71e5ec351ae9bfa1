"""The records of a run's journal on disk: how each is written, and what each does to the ledger when it is read.

The start of a call is written before its tool runs. So a host that is killed leaves a start without an answer, never an
effect without a record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Final

from toolcell.journal.database import RUN as RUN_KIND
from toolcell.journal.database import Damaged, JournalDatabase, OpenJournal, RecordKind, Table
from toolcell.journal.ledger import Journal, JournalEntry, RecordedDecision
from toolcell.results import PendingCall

RUN, CALL, START, NOT_MADE, ANSWER, LABELS = "run", "call", "start", "not made", "answer", "labels"
SUSPENDED, RESUMED, ENDED, PAST, NAMED = "suspended", "resumed", "ended", "past", "named"

BEFORE_CALLS: Final = (RUN, PAST, LABELS)
"""Records of a run that has made no call: it needs nothing to be carried on."""


class RunRecords:
    """The open journal of a run."""

    def __init__(self, file: OpenJournal) -> None:
        self.file = file

    def close(self) -> None:
        """Close it, so that others may open it."""
        self.file.close()

    def remove(self) -> None:
        """Remove what is recorded; it is open until `close`."""
        self.file.remove()

    def write_header(self, journal: Journal) -> None:
        """Record the run, and the calls of the run that it repairs."""
        self.file.write(RUN, journal.id, journal.header)
        if journal.past:
            rows = [
                [each.tool, each.args, each.answer, each.is_started, each.is_refused, each.run]
                for each in journal.past
                if each is not None
            ]
            self.file.write(PAST, rows)
        if journal.labels:
            self.write_labels(journal.labels)

    def write_call(self, entry: JournalEntry) -> None:
        """Record a call: before its tool runs if `is_started`, else before its answer or its suspension."""
        self.file.write(
            CALL, entry.number, entry.tool, entry.args, entry.began, entry.began_ns, entry.is_started, entry.reused
        )
        entry.is_written = True

    def write_start(self, entry: JournalEntry) -> None:
        """Record that the tool of a call that is recorded already is about to run."""
        self.file.write(START, entry.number)

    def write_not_made(self, entry: JournalEntry) -> None:
        """Record that the tool of a call did not run: its start could not be recorded."""
        self.file.write(NOT_MADE, entry.number, needs_room=False)

    def write_labels(self, labels: Iterable[str]) -> None:
        """Record what the run has read."""
        self.file.write(LABELS, sorted(labels))

    def write_answer(self, entry: JournalEntry) -> None:
        """Record an answer."""
        self.file.write(ANSWER, entry.number, entry.answer, entry.ended, entry.ended_ns, entry.is_refused)

    def write_waiting(self, journal: Journal) -> None:
        """Record what a suspended run waits for, and its token."""
        waiting = [(entry, entry.pending) for entry in journal.entries if entry.pending is not None]
        for entry, _ in waiting:
            if not entry.is_written:
                self.write_call(entry)
        rows = [[entry.number, each.id, each.args, each.line, each.digest, each.reason] for entry, each in waiting]
        self.file.write(SUSPENDED, journal.token, journal.expires, rows)

    def write_resumed(self, token_id: str, decided: dict[int, RecordedDecision]) -> None:
        """Record that a token was used, and what was decided."""
        rows = [
            [number, each.kind, each.data, each.digest, each.reason, each.by, each.why, each.at_ns]
            for number, each in decided.items()
        ]
        self.file.write(RESUMED, token_id, rows, needs_room=False)

    def write_run(self, run: str) -> None:
        """Record the name of a run that is over, and may be carried on."""
        self.file.write(NAMED, run, needs_room=False)

    def write_ended(self, outcome: str) -> None:
        """Record that the run is over."""
        self.file.write(ENDED, outcome, needs_room=False)


@dataclass(slots=True)
class LoadedRun:
    """What the journal of a run says."""

    journal: Journal = field(default_factory=lambda: Journal(""))
    used_tokens: set[str] = field(default_factory=set)
    is_ended: bool = False
    entries: dict[int, JournalEntry] = field(default_factory=dict)
    """The calls, by their numbers."""


def _run(loaded: LoadedRun, ident: str, header: dict[str, Any]) -> None:
    loaded.journal.id, loaded.journal.header = ident, header
    loaded.journal.run = (header.get("who") or {}).get("run_id", ident)


def _past(loaded: LoadedRun, rows: list[list[Any]]) -> None:
    past: list[JournalEntry | None] = []
    for number, (tool, args, answer, is_started, is_refused, run) in enumerate(rows):
        entry = JournalEntry(number, tool, args, 0)
        entry.answer, entry.is_started, entry.is_refused, entry.run = answer, is_started, is_refused, run
        past.append(entry)
    loaded.journal.past = past


def _call(
    loaded: LoadedRun,
    number: int,
    tool: str,
    args: Any,
    began: int,
    began_ns: int,
    is_started: bool,
    reused: int | None,
) -> None:
    journal, entry = loaded.journal, JournalEntry(number, tool, args, began)
    entry.began_ns, entry.is_started, entry.is_written, entry.reused = began_ns, is_started, True, reused
    if reused is not None:
        journal.past[reused] = None
    loaded.entries[number] = entry
    journal.entries.append(entry)
    journal.stamp = max(journal.stamp, began)


def _start(loaded: LoadedRun, number: int) -> None:
    loaded.entries[number].start()


def _not_made(loaded: LoadedRun, number: int) -> None:
    loaded.entries[number].is_started = False


def _answer(loaded: LoadedRun, number: int, frame: bytes, ended: int, ended_ns: int, is_refused: bool) -> None:
    journal, entry = loaded.journal, loaded.entries[number]
    entry.answer, entry.ended, entry.ended_ns, entry.is_refused = frame, ended, ended_ns, is_refused
    entry.pending = None
    entry.is_taken_over = entry.reused is not None and bool(frame) and not (entry.is_started or is_refused)
    journal.size += len(frame)
    journal.stamp = max(journal.stamp, ended)


def _labels(loaded: LoadedRun, labels: list[str]) -> None:
    loaded.journal.labels |= frozenset(labels)


def _suspended(loaded: LoadedRun, token_id: str, expires: float, rows: list[list[Any]]) -> None:
    loaded.journal.token, loaded.journal.expires = token_id, expires
    loaded.is_ended = False  # a run that was lost and carried on waits now
    for number, ident, args, line, digest, reason in rows:
        entry = loaded.entries[number]
        entry.pending = PendingCall(ident, entry.tool, args=args, line=line, digest=digest, reason=reason)


def _resumed(loaded: LoadedRun, token_id: str, rows: list[list[Any]]) -> None:
    loaded.used_tokens.add(token_id)
    loaded.journal.token = ""
    for number, *decision in rows:
        loaded.entries[number].decide(RecordedDecision(*decision))


def _named(loaded: LoadedRun, run: str) -> None:
    loaded.journal.end_run(run)


def _ended(loaded: LoadedRun, outcome: str) -> None:
    loaded.is_ended = True


_INDEX: Final[tuple[type, ...]] = (int, NoneType)

RUN_RECORDS: Final[Table] = {
    RUN: RecordKind((str, dict), _run),
    PAST: RecordKind((list,), _past),
    CALL: RecordKind((int, str, object, int, int, bool, _INDEX), _call),
    START: RecordKind((int,), _start),
    NOT_MADE: RecordKind((int,), _not_made),
    ANSWER: RecordKind((int, bytes, int, int, bool), _answer),
    LABELS: RecordKind((list,), _labels),
    SUSPENDED: RecordKind((str, (float, int), list), _suspended),
    RESUMED: RecordKind((str, list), _resumed),
    NAMED: RecordKind((str,), _named),
    ENDED: RecordKind((str,), _ended),
}


def load_run(database: JournalDatabase, ident: str) -> LoadedRun:
    """Return what the journal of a run says. Raises as `JournalDatabase.load`."""
    loaded = database.load(RUN_KIND, ident, RUN_RECORDS, LoadedRun())
    if not loaded.journal.header:
        raise Damaged("it does not begin with its run")
    loaded.journal.entries.sort(key=lambda entry: entry.number)
    return loaded
