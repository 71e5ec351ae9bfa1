"""The journal of a run: every call that its script made and every answer it got, by the identity of the call.

A run is carried on by running its script again: calls of the journal get their recorded answers, and the first call
that is not in it is the first one to be made. Where there is a record, the start of a call is written to it before its
tool runs. So a host that is killed leaves a start without an answer, never an effect without a record.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Final

from toolcell.calls.call import Call
from toolcell.calls.result import ErrorCode
from toolcell.calls.run_state import RunLink
from toolcell.errors import RunEnded, ToolError
from toolcell.flows import Labels
from toolcell.journal.database import DRAFT, ENDED, OpenJournal, RecordKind, Table
from toolcell.journal.identity import digest_of_call
from toolcell.journal.replay import CANCELLED, CallReplay, JournalEntry, RecordedDecision
from toolcell.results import Divergence, Outcome, PendingCall
from toolcell.run.calls import CallList

JOURNAL_BYTES: Final = 64 << 20
"""Bytes of answers that the journal of one run keeps. A run with more cannot be suspended, carried on or repaired."""

RUN, CALL, START, NOT_MADE, ANSWER, LABELS = "run", "call", "start", "not made", "answer", "labels"
SUSPENDED, RESUMED, PAST, NAMED, APPROVED = "suspended", "resumed", "past", "named", "approved"

BEFORE_CALLS: Final = (RUN, PAST, LABELS)
"""Records of a run that has made no call: it needs nothing to be carried on."""


class RecordedCalls:
    """Calls of an earlier run, found by tool and arguments; each is taken once, those of one kind in their order."""

    def __init__(self, entries: Iterable[JournalEntry]) -> None:
        self._unread = deque(entries)
        """Calls whose digests were not needed yet. Each is computed once: arguments can be large."""
        self._by_digest: dict[str, deque[JournalEntry]] = {}

    async def take(self, tool: str, args: Any) -> JournalEntry | None:
        """Take the first one that is identical and was not taken yet. One at a time."""
        if not (self._unread or self._by_digest):
            return None
        digest = await digest_of_call(tool, args)
        while not (same := self._by_digest.get(digest)) and self._unread:
            entry = self._unread[0]
            known = await digest_of_call(entry.tool, entry.args)
            self._by_digest.setdefault(known, deque()).append(self._unread.popleft())
        return same.popleft() if same else None


@dataclass(slots=True)
class Journal:
    """The journal of one run, and of every run that carries it on."""

    id: str
    header: dict[str, Any] = field(default_factory=dict)
    """Everything that is needed to run the script again; empty for a run that cannot be repeated."""
    entries: dict[int, JournalEntry] = field(default_factory=dict)
    """The calls, by their numbers."""
    past: list[JournalEntry | None] = field(default_factory=list)
    """Calls of the runs that this one repairs, by their numbers; None where this run has taken the answer over."""
    file: OpenJournal | None = None
    """Where it is written, for a journal that outlives this process."""
    lost: str = ""
    """Why the journal is not complete."""
    current: dict[str, JournalEntry] = field(default_factory=dict)
    """Calls of the run under way, by the id of their call."""
    replay: CallReplay | None = None
    """Answers the calls of a run that is carried on."""
    token: str = ""
    """Id of the token that resumes the run; empty when it waits for no decision."""
    expires: float = 0.0
    """Expiry of the token, in seconds since the epoch."""
    run: str = ""
    """The last run of it that is over, as the record names it."""
    link: RunLink | None = None
    """Names the run that is about to go on from that one."""
    labels: frozenset[str] = frozenset()
    """Labels of everything that the run had read, as far as this was written."""
    run_labels: Labels = field(default_factory=Labels)
    """Labels of everything that the run under way has read."""
    size: int = 0
    stamp: int = 0
    """Number of the last start or answer."""
    used_tokens: set[str] = field(default_factory=set)
    ended: str = ""
    """The outcome of a run that is over."""
    _unmatched: RecordedCalls | None = None
    """Recorded calls that the script has not made again."""
    _untaken: RecordedCalls | None = None
    """Calls of `past` whose answers this run has not taken over."""

    @classmethod
    def of_calls(cls, listed: CallList) -> Journal:
        """Return the journal of a finished run whose calls were only listed."""
        journal = cls(listed.id, labels=listed.labels, run=listed.run)
        for call in listed.calls:
            entry = journal.ask("", call.tool, call.args)
            entry.answer, entry.is_refused, entry.run = call.answer, call.is_refused, listed.run
        return journal

    def end_run(self, run: str, is_kept: bool = False) -> None:
        """Take note of the name of a run that is over: its calls were answered in it. `is_kept`: it may be carried on.

        Raises:
            OSError: this could not be written.
        """
        self.run = run
        for entry in self.entries.values():
            if entry.answer is not None:
                entry.run = entry.run or run
        if is_kept and not self.lost:
            self.write(NAMED, run, needs_room=False)

    def write(self, *fields: Any, needs_room: bool = True) -> None:
        """Write a record, for a journal that outlives this process. Raises as `OpenJournal.write`."""
        if self.file is not None:
            self.file.write(*fields, needs_room=needs_room and not self._is_commit)

    @property
    def _is_commit(self) -> bool:
        """What it makes is recorded whatever room that takes."""
        return self.file is not None and self.file.kind == DRAFT

    @property
    def _is_full(self) -> bool:
        return self.size > JOURNAL_BYTES and not self._is_commit

    def write_header(self) -> None:
        """Record the run, and the calls of the run that it repairs."""
        self.write(RUN, self.id, self.header)
        if self.past:
            given = [each for each in self.past if each is not None]
            self.write(PAST, [[e.tool, e.args, e.answer, e.is_started, e.is_refused, e.run] for e in given])
        if self.labels:
            self.write(LABELS, sorted(self.labels))

    def write_call(self, entry: JournalEntry) -> None:
        """Record a call: before its tool runs if `is_started`, else before its answer or its suspension."""
        self.write(
            CALL, entry.number, entry.tool, entry.args, entry.began, entry.began_ns, entry.is_started, entry.reused
        )
        entry.is_written = True

    def approve(self, effects: list[tuple[int, str]]) -> None:
        """Record which effects of a draft are made now: number and tool. Raises as `OpenJournal.write`."""
        self.write(APPROVED, effects)
        _approved(self, effects)

    def write_waiting(self) -> None:
        """Record what a suspended run waits for, and its token."""
        waiting = [(entry, entry.pending) for entry in self.entries.values() if entry.pending is not None]
        for entry, _ in waiting:
            if not entry.is_written:
                self.write_call(entry)
        rows = [[entry.number, each.id, each.args, each.line, each.digest, each.reason] for entry, each in waiting]
        self.write(SUSPENDED, self.token, self.expires, rows)

    def use_token(self, decided: dict[int, RecordedDecision]) -> None:
        """Note that the token is used, and what was decided about calls. Raises as `OpenJournal.write`."""
        rows = [
            [number, each.kind, each.data, each.digest, each.reason, each.by, each.why, each.at_ns]
            for number, each in decided.items()
        ]
        self.write(RESUMED, self.token, rows, needs_room=False)
        self.token = ""
        for number, decision in decided.items():
            self.entries[number].decide(decision)

    def close(self) -> None:
        """Close its file, so that others may open it."""
        if self.file is not None:
            self.file.close()
            self.file = None

    # Carrying on

    def begin_again(self) -> None:
        """Answer the next run of the script from this journal."""
        self.current = {}
        self.replay = CallReplay(self.entries.values(), _missing, lambda message: RunEnded(message, Outcome.DIVERGED))
        self._unmatched = RecordedCalls(self.entries.values())

    async def recorded(self, tool: str, args: Any) -> JournalEntry | None:
        """Find the k-th call of this tool with these arguments, when it is made for the k-th time. One at a time."""
        entry = await self._unmatched.take(tool, args) if self._unmatched is not None else None
        if entry is not None:
            entry.args = args
            assert self.replay is not None
            self.replay.note(entry.number)
        return entry

    async def take_past(self, tool: str, args: Any) -> JournalEntry | None:
        """Take the first call of the repaired run that is identical, and was not taken yet. One at a time."""
        if self._untaken is None:
            self._untaken = RecordedCalls(entry for entry in self.past if entry is not None)
        entry = await self._untaken.take(tool, args)
        if entry is not None:
            self.past[entry.number] = None
        return entry

    def repairable(self) -> list[JournalEntry | None]:
        """Return the calls of this run and those it inherited and did not take over, as the `past` of another one."""
        known = [*self.entries.values(), *(entry for entry in self.past if entry is not None)]
        return [replace(entry, number=number) for number, entry in enumerate(known)]

    def index_of(self, entry: JournalEntry) -> int:
        """Return which call of the script this is, counting from 1."""
        return [*self.entries].index(entry.number) + 1

    # What happens in a run

    def ask(
        self, call_id: str, tool: str, args: Any, entry: JournalEntry | None = None, number: int = 0
    ) -> JournalEntry:
        """Take note of a call, and return its entry. `entry`: what an earlier run of the script recorded of it.
        `number`: of the entry, if not the next one."""
        if entry is None:
            self.stamp += 1
            number = number or next(reversed(self.entries), 0) + 1
            entry = self.entries[number] = JournalEntry(number, tool, args, self.stamp)
        self.current[call_id] = entry
        return entry

    def entry_of(self, call: Call) -> JournalEntry | None:
        """Return the entry of a call that the script itself made; None for calls below it, whatever their ids."""
        entry = self.current.get(call.call_id)
        return entry if entry is not None and call.raw_args is entry.args else None

    def start(self, entry: JournalEntry) -> None:
        """The tool of a call is about to run.

        Raises:
            OSError, ToolError: this could not be written, and the tool must not run.
        """
        if self.file is not None:
            if self._is_full:
                raise ToolError(
                    f"it could not be recorded, so it was not made: {self.lost}", code=ErrorCode.UNAVAILABLE
                )
            if self.lost:
                raise OSError(self.lost)
            entry.is_started = True
            try:
                if entry.is_written:
                    self.write(START, entry.number)
                else:
                    self.write_call(entry)
            except OSError:
                entry.is_started = False
                raise
        entry.start()

    def take_back(self, entry: JournalEntry) -> None:
        """The tool of a call does not run after all: its start could not be recorded."""
        entry.is_started = False
        with suppress(OSError):  # then nothing of it is recorded
            self.write(NOT_MADE, entry.number, needs_room=False)

    def share_labels(self, labels: Labels) -> None:
        """Begin a run: it has read what the journal says, and the journal notes what it reads."""
        if self.labels:
            labels.add(self.labels)
        self.run_labels, self.labels = labels, labels.names

    def note_labels(self) -> None:
        """Take note of what the run has read, before anybody gets it.

        Raises:
            OSError: this could not be written.
        """
        held = self.run_labels.names
        if held <= self.labels:
            return
        if not self.lost:
            self.write(LABELS, sorted(held))
        self.labels = held if self.labels <= held else self.labels | held

    def answer(self, call_number: int, frame: bytes) -> None:
        """Keep the answer to a call of a script. Never raises: what cannot be written is in doubt later."""
        entry = self.current.get(f"call_{call_number}")
        if entry is not None and entry.answer is None:
            self.keep_answer(entry, frame)

    def lose(self, why: str) -> None:
        """The journal is not complete from here on."""
        self.lost = self.lost or why

    def keep_answer(self, entry: JournalEntry, frame: bytes) -> None:
        """Keep an answer. Never raises: what cannot be written is in doubt later."""
        self.stamp += 1
        entry.answer, entry.ended, entry.ended_ns = frame, self.stamp if frame else None, time.time_ns()
        if entry.pending is not None:  # it waited until now, so its tool did not run
            entry.pending, entry.is_refused = None, True
        self.size += len(frame)
        if self._is_full and not self.lost:
            self.lost = (
                f"the answers of this run, with that of call {entry.number} of {entry.tool}, take more than "
                f"{JOURNAL_BYTES} bytes, which is all that a journal keeps"
            )
        if self.lost:
            entry.answer = CANCELLED
            return
        try:
            if self.run_labels.names is not self.labels:
                self.note_labels()
            if not entry.is_written:
                self.write_call(entry)
            self.write(ANSWER, entry.number, frame, self.stamp, entry.ended_ns, entry.is_refused)
        except OSError as exc:
            self.lost = f"the journal could not be written: {exc}"


def _missing(place: int, missing: JournalEntry, call: JournalEntry | None) -> Divergence:
    """Describe that a script does not make a call again."""
    kind, got = "missing_call", None
    message = f"call {place} was {missing.tool}, and the script ended without making it again"
    if call is not None:
        got = {"tool": call.tool, "args": call.args}
        message = f"call {place} was {missing.tool}, and the script does not make it again: it calls {call.tool}"
    if call is not None and call.tool == missing.tool:
        kind, message = "call", f"call {place} of {missing.tool} is not made again: it gets other arguments"
    return Divergence(kind, message, place, expected={"tool": missing.tool, "args": missing.args}, got=got)


def pending_of(entries: Iterable[JournalEntry]) -> list[PendingCall]:
    """Return the calls that wait for a decision."""
    return [entry.pending for entry in entries if entry.pending is not None]


# Reading it back


def _run(journal: Journal, ident: str, header: dict[str, Any]) -> None:
    journal.id, journal.header = ident, header
    journal.run = (header.get("who") or {}).get("run_id", ident)


def _past(journal: Journal, rows: list[list[Any]]) -> None:
    journal.past = [
        JournalEntry(n, tool, args, 0, answer=answer, is_started=is_started, is_refused=is_refused, run=run)
        for n, (tool, args, answer, is_started, is_refused, run) in enumerate(rows)
    ]


def _call(
    journal: Journal,
    number: int,
    tool: str,
    args: Any,
    began: int,
    began_ns: int,
    is_started: bool,
    reused: int | None,
) -> None:
    if reused is not None:
        journal.past[reused] = None
    journal.entries[number] = JournalEntry(
        number, tool, args, began, began_ns=began_ns, is_started=is_started, reused=reused, is_written=True
    )
    journal.stamp = max(journal.stamp, began)


def _approved(journal: Journal, effects: Iterable[tuple[int, str]]) -> None:
    for number, tool in effects:
        journal.entries[number] = JournalEntry(number, tool, None, 0, is_written=True)


def _start(journal: Journal, number: int) -> None:
    journal.entries[number].start()


def _not_made(journal: Journal, number: int) -> None:
    journal.entries[number].is_started = False


def _answer(journal: Journal, number: int, frame: bytes, ended: int, ended_ns: int, is_refused: bool) -> None:
    entry = journal.entries[number]
    entry.answer, entry.ended, entry.ended_ns, entry.is_refused = frame, ended if frame else None, ended_ns, is_refused
    entry.pending = None
    entry.is_taken_over = entry.reused is not None and bool(frame) and not (entry.is_started or is_refused)
    journal.size += len(frame)
    journal.stamp = max(journal.stamp, ended)


def _labels(journal: Journal, labels: list[str]) -> None:
    journal.labels |= frozenset(labels)


def _suspended(journal: Journal, token_id: str, expires: float, rows: list[list[Any]]) -> None:
    journal.token, journal.expires = token_id, expires
    journal.ended = ""  # a run that was lost and carried on waits now
    for number, ident, args, line, digest, reason in rows:
        entry = journal.entries[number]
        entry.pending = PendingCall(ident, entry.tool, args=args, line=line, digest=digest, reason=reason)


def _resumed(journal: Journal, token_id: str, rows: list[list[Any]]) -> None:
    journal.used_tokens.add(token_id)
    journal.token = ""
    for number, *decision in rows:
        journal.entries[number].decide(RecordedDecision(*decision))


RUN_RECORDS: Final[Table] = {
    RUN: RecordKind((str, dict), _run),
    PAST: RecordKind((list,), _past),
    APPROVED: RecordKind((list,), _approved),
    CALL: RecordKind((int, str, object, int, int, bool, (int, NoneType)), _call),
    START: RecordKind((int,), _start),
    NOT_MADE: RecordKind((int,), _not_made),
    ANSWER: RecordKind((int, bytes, int, int, bool), _answer),
    LABELS: RecordKind((list,), _labels),
    SUSPENDED: RecordKind((str, (float, int), list), _suspended),
    RESUMED: RecordKind((str, list), _resumed),
    NAMED: RecordKind((str,), Journal.end_run),
    ENDED: RecordKind((str,), "ended"),
}
"""What each record of a run's journal does to it."""
