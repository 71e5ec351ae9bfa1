"""Check one chain event by event: what is wrong, and where. Does no I/O: it takes events and checkpoints in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from toolcell.audit import records, signatures
from toolcell.audit.keys import Verifier, key_wanted
from toolcell.audit.records import GENESIS, StoredEvent, hash_digest
from toolcell.audit.signatures import Head

EDITED = "edited"
NOT_AN_EVENT = "not_an_event"
MISSING = "missing"
BROKEN_LINK = "broken_link"
BAD_SIGNATURE = "bad_signature"
UNKNOWN_KEY = "unknown_key"
CUT_OFF = "cut_off"
BAD_PRUNE = "bad_prune"
PUT_BACK = "put_back"

MAX_FINDINGS: Final = 1000
"""Most findings of one kind that are kept of a chain: anybody can add rows by the million."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that differs from what was written, and where."""

    kind: str
    chain: str
    seq: int | None
    """Number of the event, if it is known."""
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class ChainCheck:
    """The state of checking one chain."""

    chain: str
    keys: Mapping[str, Verifier]
    checkpoints: dict[int, list[Head]]
    """Seq to the checkpoints of that event."""
    watched: dict[int, bytes] = field(default_factory=dict)
    """Seq to hash, of events that a head or another chain names, once they were checked."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first_seq: int = 1
    """Number of the first event that was not pruned."""
    seq: int = 0
    """Number of the last event."""
    last_hash: bytes = GENESIS
    events: int = 0
    runs: int = 0
    signed_seq: int = 0
    """Number of the last event with a good signature."""
    is_closed: bool = False
    after: tuple[int, str, int, bytes] | None = None
    """What its first event says was the newest of the record: seq of the saying event, chain, seq and hash."""
    prunings: list[tuple[int, str, int]] = field(default_factory=list)
    """What it says of retention: seq of the saying event, chain, and the last seq that was removed."""
    unknown_keys: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)

    def find(self, kind: str, seq: int | None, message: str) -> None:
        """Add a finding, and keep it unless there are too many of its kind."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] <= MAX_FINDINGS:
            self.findings.append(Finding(kind, self.chain, seq, message))

    def begin(self) -> None:
        """Start after what retention removed. Without that, the first event is number 1."""
        pruned = [head for found in self.checkpoints.values() for head in found if head.reason == signatures.PRUNED]
        if not pruned:
            return
        newest = max(pruned, key=lambda head: head.seq)
        verifier = self.keys.get(newest.key)
        if verifier is None:
            self.report_missing_key(newest)
        elif not newest.is_signed_by(verifier):
            self.find(BAD_PRUNE, newest.seq, f"that events up to {newest.seq} were pruned was not signed like this")
        else:
            self.signed_seq = newest.seq
        self.seq, self.last_hash, self.first_seq = newest.seq, newest.record_hash, newest.seq + 1
        self.notes.append(f"events up to {newest.seq} were removed by retention")

    def add(self, event: StoredEvent) -> dict[str, Any] | None:
        """Check the next event, in order of the numbers. Return its fields; None where no writer writes such a body."""
        try:
            fields, problem = event.fields, ""
        except ValueError as exc:
            fields, problem = None, str(exc)
        self._add(event, fields, problem)
        return fields

    def _add(self, event: StoredEvent, fields: dict[str, Any] | None, problem: str) -> None:
        self.events += 1
        expected = self.seq + 1
        if event.seq < self.first_seq:
            self.find(PUT_BACK, event.seq, f"event {event.seq} was removed by retention, and is there")
            return
        if event.seq > expected:
            many = f"event {expected} is" if event.seq == expected + 1 else f"events {expected} to {event.seq - 1} are"
            self.find(MISSING, expected, f"{many} missing")
        elif event.previous_hash != self.last_hash:
            self.find(
                BROKEN_LINK, event.seq, f"event {event.seq} was written after another than the one before it here"
            )
        own = hash_digest(event.previous_hash, event.run, event.digest)
        if own != event.record_hash:
            self.find(EDITED, event.seq, f"event {event.seq}, a {event.kind}, is not what was written")
        elif fields is None:
            self.find(NOT_AN_EVENT, event.seq, f"event {event.seq} is not one that toolcell writes: {problem}")
        else:
            self._keep(event, fields)
        self.seq, self.last_hash = event.seq, event.record_hash
        if event.seq in self.watched:
            self.watched[event.seq] = event.record_hash
        self._check_signatures(event)

    def add_damaged(self, seq: object, message: str) -> None:
        """Take note of a row that is no event."""
        self.events += 1
        self.find(NOT_AN_EVENT, seq if type(seq) is int else self.seq + 1, message)
        if type(seq) is int and seq == self.seq + 1:
            self.seq = seq

    def _keep(self, event: StoredEvent, fields: dict[str, Any]) -> None:
        if event.kind == records.RUN_STARTED:
            self.runs += 1
        elif event.kind == records.OPENED and event.seq == 1 and fields["after"] is not None:
            self.after = (event.seq, *fields["after"])
        elif event.kind == records.PRUNED:
            self.prunings.append((event.seq, fields["chain"], fields["seq"]))

    def _check_signatures(self, event: StoredEvent) -> None:
        for head in self.checkpoints.get(event.seq, ()):
            if head.reason == signatures.PRUNED:
                continue
            verifier = self.keys.get(head.key)
            if verifier is None:
                self.report_missing_key(head)
            elif head.record_hash != event.record_hash or not head.is_signed_by(verifier):
                message = f"something in events {self.signed_seq + 1} to {event.seq} is not what was signed"
                self.find(BAD_SIGNATURE, event.seq, message)
            else:
                was_closed = self.is_closed and self.signed_seq == event.seq
                self.signed_seq, self.is_closed = event.seq, was_closed or head.reason == signatures.CLOSED

    def report_missing_key(self, head: Head) -> None:
        """Add a finding for a signature whose key was not given; one for each key."""
        if head.key not in self.unknown_keys and len(self.unknown_keys) < MAX_FINDINGS:
            self.unknown_keys.add(head.key)
            self.find(UNKNOWN_KEY, head.seq, f"event {head.seq} is signed with {key_wanted(head.key, head.signature)}")

    def finish(self) -> None:
        """Decide what only the end of the chain can tell. Call it after the last event."""
        last = max((seq for seq, found in self.checkpoints.items() if found), default=0)
        if last > self.seq:
            self.find(
                CUT_OFF, last, f"it ends at event {self.seq}, and a checkpoint is of event {last}: its end was cut off"
            )
        self.is_closed = self.is_closed and self.signed_seq == self.seq
        for kind, count in self.counts.items():
            if count > MAX_FINDINGS:
                self.notes.append(f"{count - MAX_FINDINGS} more findings of kind {kind} are not listed")

    def check_head(self, head: Head, said_by: str = "") -> None:
        """Compare the chain with a head that was kept elsewhere, whose signature was checked."""
        by = f"; {said_by}" if said_by else ""
        if head.seq > self.seq:
            message = f"it ends at event {self.seq}, and had got to {head.seq}: its end was cut off{by}"
            self.find(CUT_OFF, head.seq, message)
        elif head.seq >= self.first_seq and self.watched.get(head.seq) != head.record_hash:
            message = f"event {head.seq} is not the one that its writer signed: the chain was written anew{by}"
            self.find(BROKEN_LINK, head.seq, message)
        elif head.seq >= self.first_seq and not said_by and head.seq not in self.checkpoints:
            self.find(MISSING, head.seq, f"the checkpoint of event {head.seq} is missing")


def by_seq(heads: Iterable[Head]) -> dict[int, list[Head]]:
    """Map the number of an event to its checkpoints."""
    found: dict[int, list[Head]] = {}
    for head in heads:
        found.setdefault(head.seq, []).append(head)
    return found
