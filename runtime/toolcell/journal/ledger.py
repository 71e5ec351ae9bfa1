"""The journal of a run: every call that its script made and every answer it got, by the identity of the call.

A run is carried on by running its script again: calls of the journal get their recorded answers, and the first call
that is not in it is the first one to be made. This file holds the journal in memory; `records` writes it to disk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from toolcell.calls.call import Call
from toolcell.calls.result import ErrorCode, Status, ToolFailure, ToolResult, of_plain
from toolcell.calls.run_state import RunLink
from toolcell.errors import RunEnded, ToolError
from toolcell.flows import Labels
from toolcell.journal.identity import digest_of_call
from toolcell.journal.replay import CallReplay, NewCall, RecordedTurn
from toolcell.results import Divergence, Outcome, PendingCall
from toolcell.run.listed_calls import CallList
from toolcell_bridge.wire.codec import decode
from toolcell_bridge.wire.messages import ToolFail, ToolReturn

JOURNAL_BYTES: Final = 64 << 20
"""Bytes of answers that the journal of one run keeps. A run with more cannot be suspended, carried on or repaired."""

CANCELLED: Final = b""
"""The answer of a call that the script cancelled."""

LENGTH_BYTES: Final = 4
"""Length of a frame, before its body."""

DecisionKind = Literal["approve", "edit", "deny", "made"]


@dataclass(frozen=True, slots=True)
class RecordedDecision:
    """What somebody decided about a pending call."""

    kind: DecisionKind
    data: Any
    """Arguments of an edit, reason of a denial, result of a call that was made already."""
    digest: str
    """Digest of the call that was decided about."""
    reason: str
    """Why it waited. A decision holds for no other reason."""
    by: str = ""
    """Who decided."""
    why: str = ""
    """What this person said."""
    at_ns: int = 0


class JournalEntry:
    """One call of a script."""

    __slots__ = (
        "answer", "args", "began", "began_ns", "decision", "edited", "ended", "ended_ns", "is_refused", "is_started",
        "is_taken_over", "is_written", "number", "pending", "reused", "run", "tool",
    )  # fmt: skip

    def __init__(self, number: int, tool: str, args: Any, began: int) -> None:
        self.number = number
        """Counts the calls of the script from 1."""
        self.tool = tool
        self.args = args
        """As the script gave them; the very object that the call holds."""
        self.began = began
        self.ended: int | None = None
        """Place of its answer among all starts and answers."""
        self.began_ns = time.time_ns()
        self.ended_ns = 0
        self.answer: bytes | None = None
        """Frame of the answer, as the script received it."""
        self.is_started = False
        """An observer saw that the tool is about to run."""
        self.is_refused = False
        """The answer says why the tool did not run."""
        self.is_taken_over = False
        """Its answer is that of a repaired run, so its tool does not run."""
        self.is_written = False
        self.run = ""
        """The run in which it was answered, as the record names it; empty while that is under way."""
        self.pending: PendingCall | None = None
        self.decision: RecordedDecision | None = None
        self.edited: dict[str, Any] | None = None
        """Arguments of the decision with which its tool started."""
        self.reused: int | None = None
        """Index of the call of a repaired run whose answer this call got."""

    @property
    def is_in_doubt(self) -> bool:
        """True when the tool had started, and nobody knows what came of it."""
        return self.answer is None and self.is_started

    @property
    def state(self) -> str:
        """What is known of it: `answered`, `in doubt` or `not begun`."""
        return "answered" if self.answer is not None else "in doubt" if self.is_started else "not begun"

    def decide(self, decision: RecordedDecision) -> None:
        """Take a decision. A call in doubt that is approved is a call that has not started."""
        self.pending = None
        if self.is_in_doubt and decision.kind == "approve":
            self.is_started = False
        else:
            self.decision = decision

    def start(self) -> None:
        """Take note that its tool is about to run. A decision is used up by that."""
        decision = self.decision
        self.edited = decision.data if decision is not None and decision.kind == "edit" else None
        self.is_started, self.decision, self.pending = True, None, None

    def result(self) -> ToolResult:
        """Return the recorded answer as a tool's result."""
        assert self.answer
        message = decode(self.answer[LENGTH_BYTES:])
        if isinstance(message, ToolReturn):
            return of_plain(message.value)
        assert isinstance(message, ToolFail)
        details = message.details if isinstance(message.details, dict) else {}
        failure = ToolFailure(message.code, message.message, message.retryable, details)
        return ToolResult(status=Status.ERROR, error=failure)

    @property
    def is_failed(self) -> bool:
        """True when the answer is a failure."""
        return bool(self.answer) and self.result().is_error


class CallRecords(Protocol):
    """Where a journal is kept beyond the life of this process. Each method raises `OSError` if it cannot write."""

    def write_call(self, entry: JournalEntry) -> None:
        """Record a call: before its tool runs if `is_started`, else before its answer or its suspension."""

    def write_start(self, entry: JournalEntry) -> None:
        """Record that the tool of a call that is recorded already is about to run."""

    def write_not_made(self, entry: JournalEntry) -> None:
        """Record that the tool of a call did not run: its start could not be recorded."""

    def write_labels(self, labels: Iterable[str]) -> None:
        """Record what the run has read."""

    def write_answer(self, entry: JournalEntry) -> None:
        """Record an answer."""

    def write_waiting(self, journal: Journal) -> None:
        """Record what a suspended run waits for, and its token."""

    def write_resumed(self, token_id: str, decided: dict[int, RecordedDecision]) -> None:
        """Record that a token was used, and what was decided."""

    def write_run(self, run: str) -> None:
        """Record the name of a run that is over, and may be carried on."""

    def write_ended(self, outcome: str) -> None:
        """Record that the run is over."""

    def remove(self) -> None:
        """Remove what is recorded; it is open until `close`."""

    def close(self) -> None:
        """Close it, so that others may open it."""


@dataclass(slots=True)
class Journal:
    """The journal of one run, and of every run that carries it on."""

    id: str
    header: dict[str, Any] = field(default_factory=dict)
    """Everything that is needed to run the script again; empty for a run that cannot be repeated."""
    entries: list[JournalEntry] = field(default_factory=list)
    past: list[JournalEntry | None] = field(default_factory=list)
    """Calls of the runs that this one repairs; None where this run has taken the answer over."""
    records: CallRecords | None = None
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
    _unread: deque[JournalEntry] = field(default_factory=deque)
    """Recorded calls whose digests were not needed yet."""
    _unmatched: dict[str, deque[JournalEntry]] = field(default_factory=dict)
    """Recorded calls that the script has not made again, by their digests."""
    _past_of: dict[str, deque[int]] = field(default_factory=dict)
    """Indices of `past`, by the digests of their calls; of the first `_known_past`."""
    _known_past: int = 0

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
        for entry in self.entries:
            if entry.answer is not None:
                entry.run = entry.run or run
        if is_kept and self.records is not None and not self.lost:
            self.records.write_run(run)

    # Carrying on

    def begin_again(self) -> None:
        """Answer the next run of the script from this journal."""
        self.current = {}
        self.replay = CallReplay(map(_turn, self.entries), _missing, _diverged)
        self._unread, self._unmatched = deque(self.entries), {}

    async def recorded(self, tool: str, args: Any) -> JournalEntry | None:
        """Find the k-th call of this tool with these arguments, when it is made for the k-th time. One at a time."""
        if not (self._unread or self._unmatched):
            return None
        digest = await digest_of_call(tool, args)
        while not (same := self._unmatched.get(digest)) and self._unread:
            entry = self._unread[0]
            known = await digest_of_call(entry.tool, entry.args)
            self._unmatched.setdefault(known, deque()).append(self._unread.popleft())
        if not same:
            return None
        entry = same.popleft()
        entry.args = args
        assert self.replay is not None
        self.replay.note(entry.number)
        return entry

    async def take_past(self, tool: str, args: Any) -> tuple[int, JournalEntry] | None:
        """Take the first call of the repaired run that is identical, and was not taken yet. One at a time."""
        digest = await digest_of_call(tool, args)
        while not (same := self._past_of.get(digest)) and self._known_past < len(self.past):
            await self._note_past()
        if not same:
            return None
        index = same.popleft()
        entry, self.past[index] = self.past[index], None
        assert entry is not None
        return index, entry

    async def _note_past(self) -> None:
        """Compute the digest of one more call of the repaired run. Each is computed once: arguments can be large."""
        index = self._known_past
        if (entry := self.past[index]) is not None:
            self._past_of.setdefault(await digest_of_call(entry.tool, entry.args), deque()).append(index)
        self._known_past += 1

    def all_entries(self) -> list[JournalEntry]:
        """Return the calls of this run and those it inherited and did not take over."""
        return [*self.entries, *(entry for entry in self.past if entry is not None)]

    def index_of(self, entry: JournalEntry) -> int:
        """Return which call of the script this is, counting from 1."""
        return self.entries.index(entry) + 1

    def numbered(self, number: int) -> JournalEntry:
        """Return the entry of a number."""
        return next(entry for entry in self.entries if entry.number == number)

    # What happens in a run

    def ask(self, call_id: str, tool: str, args: Any, entry: JournalEntry | None = None) -> JournalEntry:
        """Take note of a call, and return its entry. `entry`: what an earlier run of the script recorded of it."""
        if entry is None:
            self.stamp += 1
            number = self.entries[-1].number + 1 if self.entries else 1
            entry = JournalEntry(number, tool, args, self.stamp)
            self.entries.append(entry)
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
        if self.records is not None:
            if self.size > JOURNAL_BYTES:
                raise ToolError(
                    f"it could not be recorded, so it was not made: {self.lost}", code=ErrorCode.UNAVAILABLE
                )
            if self.lost:
                raise OSError(self.lost)
            entry.is_started = True
            try:
                (self.records.write_start if entry.is_written else self.records.write_call)(entry)
            except OSError:
                entry.is_started = False
                raise
        entry.start()

    def take_back(self, entry: JournalEntry) -> None:
        """The tool of a call does not run after all: its start could not be recorded."""
        entry.is_started = False
        if self.records is not None:
            with suppress(OSError):  # then nothing of it is recorded
                self.records.write_not_made(entry)

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
        if self.records is not None and not self.lost:
            self.records.write_labels(held)
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
        entry.answer, entry.ended, entry.ended_ns = frame, self.stamp, time.time_ns()
        if entry.pending is not None:  # it waited until now, so its tool did not run
            entry.pending, entry.is_refused = None, True
        self.size += len(frame)
        if self.size > JOURNAL_BYTES and not self.lost:
            self.lost = (
                f"the answers of this run, with that of call {entry.number} of {entry.tool}, take more than "
                f"{JOURNAL_BYTES} bytes, which is all that a journal keeps"
            )
        if self.lost:
            entry.answer = CANCELLED
        if not self.lost and self.run_labels.names is not self.labels:
            try:
                self.note_labels()
            except OSError as exc:
                self.lost = f"the journal could not be written: {exc}"
        if self.records is not None and not self.lost:
            try:
                if not entry.is_written:
                    self.records.write_call(entry)
                self.records.write_answer(entry)
            except OSError as exc:
                self.lost = f"the journal could not be written: {exc}"


def _turn(entry: JournalEntry) -> RecordedTurn:
    ended = entry.ended if entry.answer else None
    return RecordedTurn(
        number=entry.number,
        tool=entry.tool,
        args=entry.args,
        started=entry.began,
        ended=ended,
        started_ns=entry.began_ns,
        ended_ns=entry.ended_ns,
    )


def _missing(place: int, missing: RecordedTurn, call: NewCall | None) -> Divergence:
    """Describe that a script does not make a call again."""
    kind, got = "missing_call", None
    message = f"call {place} was {missing.tool}, and the script ended without making it again"
    if call is not None:
        got = {"tool": call.tool, "args": call.args}
        message = f"call {place} was {missing.tool}, and the script does not make it again: it calls {call.tool}"
    if call is not None and call.tool == missing.tool:
        kind, message = "call", f"call {place} of {missing.tool} is not made again: it gets other arguments"
    return Divergence(kind, message, place, expected={"tool": missing.tool, "args": missing.args}, got=got)


def _diverged(message: str) -> RunEnded:
    return RunEnded(message, Outcome.DIVERGED)


def pending_of(entries: Iterable[JournalEntry]) -> list[PendingCall]:
    """Return the calls that wait for a decision."""
    return [entry.pending for entry in entries if entry.pending is not None]


def pending_entries(journal: Journal) -> dict[str, JournalEntry]:
    """Return the calls that wait for a decision, by the id that decisions use."""
    return {entry.pending.id: entry for entry in journal.entries if entry.pending is not None}
