"""Check one chain event by event: what is wrong, and where. Does no I/O: it takes events and checkpoints in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from toolcell.audit import records, signatures
from toolcell.audit.keys import Verifier, key_wanted
from toolcell.audit.records import GENESIS, event_digest, fields_of, hash_digest, signed_values_of
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


EventContent = tuple[int, str, int, list[Any]]
"""What an event says, where a writer could have written it: its run, kind and time, and the values of its fields in the
order of `records.FIELDS`."""


@dataclass(slots=True)
class ChainCheck:
    """The state of checking one chain."""

    chain: str
    keys: Mapping[str, Verifier]
    checkpoints: dict[int, list[Head]]
    """Seq to the checkpoints of that event."""
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
        if (verifier := self.keys.get(newest.key)) is None:
            self.report_missing_key(newest)
        elif not newest.is_signed_by(verifier):
            self.find(BAD_PRUNE, newest.seq, f"that events up to {newest.seq} were pruned was not signed like this")
        else:
            self.signed_seq = newest.seq
        self.seq, self.last_hash, self.first_seq = newest.seq, newest.record_hash, newest.seq + 1
        self.notes.append(f"events up to {newest.seq} were removed by retention")

    @property
    def covered_seq(self) -> int:
        """Number of the last event that claims to be signed with a key that we have. What is wrong up to there is
        found by that signature, whoever wrote it."""
        return max(
            (
                head.seq
                for found in self.checkpoints.values()
                for head in found
                if head.reason != signatures.PRUNED and head.key in self.keys
            ),
            default=0,
        )

    def add(self, rows: Iterable[tuple[Any, ...]], covered_seq: int) -> Iterator[EventContent]:
        """Check the next rows of `records.SCANNED`, in order; yield the events that a writer could write.

        `covered_seq`: of this check, which goes through all checkpoints to find it.
        """
        chain, checkpoints, types, kinds = self.chain, self.checkpoints, records.SCANNED_TYPES, records.KIND_OF
        for row in rows:
            seq, run, raw_kind, at_ns, salt, body, previous_hash, record_hash = row
            is_typed = tuple(map(type, row)) == types
            kind = kinds.get(bytes(raw_kind)) if is_typed else None
            self.events += 1
            if (
                kind is not None
                and seq <= covered_seq
                and seq == self.seq + 1
                and previous_hash == self.last_hash
                and run >= 0
                and record_hash
                == hash_digest(previous_hash, run, event_digest(chain, seq, run, kind, at_ns, salt + body))
            ):  # nearly every event: nothing about it is wrong
                values = self._values(seq, kind, body, True)
                self.seq, self.last_hash = seq, record_hash
                if seq in checkpoints:
                    self._check_signatures(seq, record_hash)
            else:
                values = self._add_other(row, kind, is_typed, is_typed and seq <= covered_seq)
            if values is not None:
                assert kind is not None
                yield run, kind, at_ns, values

    def _add_other(self, row: tuple[Any, ...], kind: str | None, is_typed: bool, is_signed: bool) -> list[Any] | None:
        seq, run, _, at_ns, salt, body, previous_hash, record_hash = row
        try:
            if not is_typed:
                raise ValueError(records.WRONG_TYPE)
            records.check_place(seq, run, kind, at_ns)
            if len(previous_hash) != 32 or len(salt) != records.SALT_BYTES:
                raise ValueError(records.WRONG_SIZE)
        except ValueError as exc:
            self._add_damaged(seq, str(exc))
            return None
        assert kind is not None
        expected = self.seq + 1
        if seq < self.first_seq:
            self.find(PUT_BACK, seq, f"event {seq} was removed by retention, and is there")
            return None
        if seq > expected:
            many = f"event {expected} is" if seq == expected + 1 else f"events {expected} to {seq - 1} are"
            self.find(MISSING, expected, f"{many} missing")
        elif previous_hash != self.last_hash:
            self.find(BROKEN_LINK, seq, f"event {seq} was written after another than the one before it here")
        values = None
        own = hash_digest(previous_hash, run, event_digest(self.chain, seq, run, kind, at_ns, salt + body))
        if own != record_hash:
            self.find(EDITED, seq, f"event {seq}, a {kind}, is not what was written")
        else:
            values = self._values(seq, kind, body, is_signed)
        self.seq, self.last_hash = seq, record_hash
        if seq in self.checkpoints:
            self._check_signatures(seq, record_hash)
        return values

    def _values(self, seq: int, kind: str, body: bytes, is_signed: bool) -> list[Any] | None:
        try:
            is_proven = is_signed and kind in records.RUN_KINDS
            values = signed_values_of(kind, body) if is_proven else [*fields_of(kind, body).values()]
        except ValueError as exc:
            self.find(NOT_AN_EVENT, seq, f"event {seq} is not one that toolcell writes: {exc}")
            return None
        if kind == records.RUN_STARTED:
            self.runs += 1
        elif kind == records.OPENED and seq == 1:
            *_, after, _ = values
            self.after = (seq, *after) if after is not None else None
        elif kind == records.PRUNED:
            name, upto, *_ = values
            self.prunings.append((seq, name, upto))
        return values

    def _add_damaged(self, seq: object, message: str) -> None:
        """Take note of a row that is no event."""
        self.find(NOT_AN_EVENT, seq if type(seq) is int else self.seq + 1, message)
        if type(seq) is int and seq == self.seq + 1:
            self.seq = seq

    def _check_signatures(self, seq: int, record_hash: bytes) -> None:
        for head in self.checkpoints[seq]:
            if head.reason == signatures.PRUNED:
                continue
            if (verifier := self.keys.get(head.key)) is None:
                self.report_missing_key(head)
            elif head.record_hash != record_hash or not head.is_signed_by(verifier):
                message = f"something in events {self.signed_seq + 1} to {seq} is not what was signed"
                self.find(BAD_SIGNATURE, seq, message)
            else:
                was_closed = self.is_closed and self.signed_seq == seq
                self.signed_seq, self.is_closed = seq, was_closed or head.reason == signatures.CLOSED

    def report_missing_key(self, head: Head) -> None:
        """Add a finding for a signature whose key was not given; one for each key."""
        if head.key not in self.unknown_keys and len(self.unknown_keys) < MAX_FINDINGS:
            self.unknown_keys.add(head.key)
            self.find(UNKNOWN_KEY, head.seq, f"event {head.seq} is signed with {key_wanted(head.key, head.signature)}")

    def finish(self) -> None:
        """Decide what only the end of the chain can tell. Call it after the last event."""
        if (last := max((seq for seq, found in self.checkpoints.items() if found), default=0)) > self.seq:
            self.find(
                CUT_OFF, last, f"it ends at event {self.seq}, and a checkpoint is of event {last}: its end was cut off"
            )
        self.is_closed = self.is_closed and self.signed_seq == self.seq
        for kind, count in self.counts.items():
            if count > MAX_FINDINGS:
                self.notes.append(f"{count - MAX_FINDINGS} more findings of kind {kind} are not listed")

    def check_head(self, head: Head, stored_hash: Callable[[str, int], bytes | None], said_by: str = "") -> None:
        """Compare the chain with a head that was kept elsewhere, whose signature was checked. `stored_hash`: of an
        event of a chain, as it is in the record."""
        by = f"; {said_by}" if said_by else ""
        if head.seq > self.seq:
            message = f"it ends at event {self.seq}, and had got to {head.seq}: its end was cut off{by}"
            self.find(CUT_OFF, head.seq, message)
        elif head.seq >= self.first_seq and stored_hash(head.chain, head.seq) != head.record_hash:
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
