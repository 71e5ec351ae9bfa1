"""Check one chain record by record: what is wrong, and where.

`ChainCheck` does no I/O: it takes the bytes of segments, keeps the state it needs and collects findings. A copy of it
can check a variant of the rest without reading the earlier segments again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.clean_records import pass_clean
from toolcell.audit.format import GENESIS, MAGIC, Frame, Garbage, HashingBudget, Piece, Torn, hash_record, piece_at
from toolcell.audit.keys import Verifier, key_wanted
from toolcell.audit.records import Record
from toolcell.audit.signatures import PruneRecord, checkpoint_statement

EDITED = "edited"
GARBAGE = "garbage"
NOT_A_RECORD = "not_a_record"
NOT_CANONICAL = "not_canonical"
MISSING = "missing"
REORDERED = "reordered"
DUPLICATED = "duplicated"
BROKEN_LINK = "broken_link"
BAD_SIGNATURE = "bad_signature"
UNKNOWN_KEY = "unknown_key"
WRONG_SEGMENT = "wrong_segment"
CUT_OFF = "cut_off"
BAD_HEAD = "bad_head"
UNREADABLE = "unreadable"
PASSED_OVER = "passed_over"

REMEMBERED: Final = 100_000
"""Hashes kept, to tell a repeated record from a changed one."""


MAX_FINDINGS: Final = 1000
"""Most findings of one kind that are kept of a chain: anybody can add records by the million."""


MAX_UNSIGNED, MAX_UNSIGNED_BYTES = 50_000, 16 << 20
"""Records about the log itself that are kept until a signature tells whether a writer wrote them, and their bytes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that differs from what was written, and where."""

    kind: str
    chain: str
    segment: int | None
    seq: int | None
    """Number of the record, if it is known."""
    offset: int | None
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class ChainCheck:
    """The state of checking one chain."""

    log: str
    chain: str
    verifiers: Mapping[str, Verifier]
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pruned: PruneRecord | None = None
    """Stands for what was removed from its beginning."""
    first_seq: int = 1
    """Number of the first record that was not pruned."""
    seq: int = 0
    """Number of the last record that was in its place."""
    last_hash: bytes = GENESIS
    records: int = 0
    runs: int = 0
    checkpoints: int = 0
    signed_seq: int = 0
    """Number of the last checkpoint with a good signature."""
    last_reason: str = ""
    """Reason of the checkpoint that was the last record; empty when the last record was none."""
    segment: int = 0
    torn: int | None = None
    """Segment that ends in the middle of a record."""
    left: list[tuple[int, list[Any]]] = field(default_factory=list)
    """What writers of this chain recorded of chains that they did not continue: seq of the record, and the entry."""
    hashes: dict[int, bytes] = field(default_factory=dict)
    """Seq to hash, of the newest records."""
    redacted: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Seq of each redacted record to the digest of what was there, and of what is left."""
    redactions: list[tuple[int, int, Mapping[str, Any]]] = field(default_factory=list)
    """What this chain says of redactions: seq, time and fields of each record of one."""
    prunings: dict[str, int] = field(default_factory=dict)
    """Chain to the last segment that a signed record of this chain says retention removed from it."""
    watched: dict[int, bytes | None] = field(default_factory=dict)
    """Seq to hash, of records that heads name; None until the record was checked."""
    unknown_keys: set[str] = field(default_factory=set)
    """Keys that signed something and were not given."""
    counts: Counter[str] = field(default_factory=Counter)
    """How many findings of each kind there were, also those that are not kept."""
    stops_early: bool = False
    """The chain goes on after what was checked."""
    passed_over: int = 0
    """Records about the log itself that were not kept: there were too many without a signature."""
    _unsigned: int = 0
    _unsigned_bytes: int = 0
    _rotated_in: int = 0
    _unsigned_prunings: dict[str, int] = field(default_factory=dict)
    _missing: dict[int, Finding] = field(default_factory=dict)
    _alternative_hash: bytes = GENESIS
    """Another previous hash that the next record may name: the computed hash of an edited record."""

    def copy(self) -> ChainCheck:
        """Return a copy that goes on independently."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        kinds = (list, dict, set, Counter)
        return replace(self, **{name: type(value)(value) for name, value in own.items() if type(value) in kinds})

    def start_after(self, pruned: PruneRecord) -> None:
        """Start after the segments that were removed."""
        self.pruned = pruned
        self.seq, self.last_hash, self.segment = pruned.seq, pruned.record_hash, pruned.last_segment
        self._alternative_hash, self.first_seq = pruned.record_hash, pruned.seq + 1

    # Segments

    def check_segment(self, number: int, data: bytes) -> None:
        """Check the next segment."""
        first, last = self.segment + 1, number - 1
        if first <= last:
            many = f"segment {first} is" if first == last else f"segments {first} to {last} are"
            self.find(WRONG_SEGMENT, f"{many} not there", segment=first)
        self.segment = number
        if not data.startswith(MAGIC):
            if not MAGIC.startswith(data):
                self.find(GARBAGE, "the segment does not begin like one", offset=0)
            return
        offset, hashing = len(MAGIC), HashingBudget.of(data)
        while offset < len(data):
            piece = piece_at(data, offset, hashing)
            self.check_piece(piece, is_first=offset == len(MAGIC))
            if isinstance(piece, Torn):
                return
            offset = self._pass_clean(data, piece.end)

    def _pass_clean(self, data: bytes, offset: int) -> int:
        """Pass over the records from `offset` on in which there is nothing to find; return where they end."""
        passed = pass_clean(data, offset, self.seq, self.last_hash)
        first, count = self.seq + 1, len(passed.hashes)
        if not count:
            return offset
        self.records += count
        self.runs += passed.runs
        self.last_reason = ""
        self.seq, self.last_hash = self.seq + count, passed.hashes[-1]
        self._alternative_hash = self.last_hash
        self._remember(first, passed.hashes)
        return passed.end

    def check_piece(self, piece: Piece, is_first: bool = False) -> None:
        """Check the next piece of a segment."""
        match piece:
            case Frame():
                self._check_torn()
                self._check_frame(piece, is_first)
            case Torn(offset, data):
                self.torn = self.segment
                self.notes.append(f"segment {self.segment} ends in {len(data)} bytes of a record cut short at {offset}")
            case Garbage(offset, end):
                self.find(GARBAGE, f"{end - offset} bytes are not a record", offset=offset, seq=self.seq + 1)
                self.last_reason = ""

    def _check_torn(self) -> None:
        """Find a record cut short that something follows: no writer goes on after one."""
        if self.torn is not None and self.torn != self.segment:
            self.find(CUT_OFF, f"segment {self.torn} ends in the middle of a record", segment=self.torn)
            self.torn = None

    # Records

    def _check_frame(self, piece: Frame, is_first: bool) -> None:
        self.records += 1
        record = _parse(piece.body)
        if not piece.is_intact:
            self._check_edited(piece, record)
            return
        if record is None:
            self.find(NOT_A_RECORD, "its bytes are intact but are not a record", piece, self.seq + 1)
            self._advance(self.seq + 1, piece)
            return
        if not records.is_canonical(record):
            self.find(NOT_CANONICAL, "it was not written by this program", piece, record.seq)
        self._check_place(record, piece)
        self._check_first(record, piece, is_first)
        self.last_reason = ""
        if record.original:
            self.redacted[record.seq] = (record.original, hashlib.sha256(piece.body).digest())
        if record.kind == records.RUN_STARTED:
            self.runs += 1
        elif record.kind in _ABOUT_LOG:
            self._keep(record)
        elif record.kind == records.PRUNED:
            chain = (record.fields["more"] or {}).get("chain", self.chain)
            if isinstance(chain, str):
                self._note_pruning(chain, record.fields["last"])
        elif record.kind == records.CHECKPOINT:
            self._check_signature(record, piece)

    def _keep(self, record: Record) -> None:
        """Keep what a record says of the log. Anybody can add such records behind the last signature."""
        self._unsigned += 1
        self._unsigned_bytes += len(record.content)
        if self._unsigned > MAX_UNSIGNED or self._unsigned_bytes > MAX_UNSIGNED_BYTES:
            self.passed_over += 1
        elif record.kind == records.REDACTED:
            self.redactions.append((record.seq, record.at_ns, record.fields))
        elif record.kind == records.OPENED:
            self.left += [(record.seq, each) for each in record.fields["left"] or ()]

    def _check_edited(self, piece: Frame, record: Record | None) -> None:
        seq = self.seq + 1
        about = f", a {record.kind}" if record is not None else ""
        self.find(EDITED, f"record {seq}{about}, is not what was written", piece, seq)
        self._advance(seq, piece)
        self._alternative_hash = hash_record(piece.previous_hash, piece.body)
        self.last_reason = ""

    def _check_place(self, record: Record, piece: Frame) -> None:
        expected = self.seq + 1
        follows = piece.previous_hash in (self.last_hash, self._alternative_hash)
        if record.seq == expected and follows:
            self._advance(record.seq, piece)
        elif record.seq in self._missing:
            del self._missing[record.seq]
            self.find(REORDERED, f"record {record.seq} comes after record {self.seq}", piece, record.seq)
        elif record.seq <= self.seq:
            is_same = self.hashes.get(record.seq) == piece.record_hash
            word = "is there a second time" if is_same else f"comes after record {self.seq}"
            self.find(DUPLICATED if is_same else REORDERED, f"record {record.seq} {word}", piece, record.seq)
        elif record.seq == expected:
            message = f"record {record.seq} was written after another record than the one before it here"
            self.find(BROKEN_LINK, message, piece, record.seq)
            self._advance(record.seq, piece)
        else:
            self._miss(expected, record.seq - 1, piece)
            self._advance(record.seq, piece)

    def _miss(self, first: int, last: int, piece: Frame) -> None:
        many = f"record {first} is missing" if first == last else f"records {first} to {last} are missing"
        finding = self.find(MISSING, many, piece, first)
        room = REMEMBERED - len(self._missing)
        for seq in range(first, min(last + 1, first + room)):
            self._missing[seq] = finding

    def _check_first(self, record: Record, piece: Frame, is_first: bool) -> None:
        if is_first != (record.kind == records.SEGMENT):
            self.find(WRONG_SEGMENT, "a segment does not begin with its own record", piece, record.seq)
        elif is_first:
            fields = record.fields
            if (fields["log"], fields["chain"], fields["number"]) != (self.log, self.chain, self.segment):
                where = f"segment {fields['number']} of chain {fields['chain']} in log {fields['log']}"
                self.find(WRONG_SEGMENT, f"this was written as {where}", piece, record.seq)

    def _check_signature(self, record: Record, piece: Frame) -> None:
        reason, key, signature = (record.fields[name] for name in ("reason", "key", "signature"))
        self.checkpoints += 1
        self.last_reason, self._rotated_in = reason, self.segment
        verifier = self.verifiers.get(key)
        if verifier is None:
            self.report_missing_key(f"checkpoint {record.seq}", key, signature, record.seq, piece.offset)
            return
        statement = checkpoint_statement(self.log, self.chain, record.seq, record.at_ns, piece.previous_hash, reason)
        if verifier.is_valid(statement, signature):
            self.signed_seq = record.seq
            self._unsigned = self._unsigned_bytes = 0
            self.prunings |= self._unsigned_prunings
            self._unsigned_prunings.clear()
        else:
            self._unsigned_prunings.clear()
            message = f"something in records {self.signed_seq + 1} to {record.seq} is not what was signed"
            self.find(BAD_SIGNATURE, message, piece, record.seq)

    def _note_pruning(self, chain: str, last: int) -> None:
        """Keep the last segment removed from a chain until a signature tells whether a writer wrote this."""
        if len(self._unsigned_prunings) < REMEMBERED or chain in self._unsigned_prunings:
            before = max(self._unsigned_prunings.get(chain, 0), self.prunings.get(chain, 0))
            self._unsigned_prunings[chain] = max(last, before)

    def report_missing_key(self, signed: str, key: str, signature: object, seq: int, offset: int | None = None) -> None:
        """Add a finding for a signature whose key was not given; one for each key."""
        if key not in self.unknown_keys and len(self.unknown_keys) < MAX_FINDINGS:
            self.unknown_keys.add(key)
            self.find(UNKNOWN_KEY, f"{signed} is signed with {key_wanted(key, signature)}", seq=seq, offset=offset)

    def _advance(self, seq: int, piece: Frame) -> None:
        self.seq, self.last_hash, self._alternative_hash = seq, piece.record_hash, piece.record_hash
        self._remember(seq, [piece.record_hash])

    def _remember(self, first: int, hashes: list[bytes]) -> None:
        """Keep the hashes of records that follow each other."""
        self.hashes.update(enumerate(hashes, start=first))
        while len(self.hashes) > REMEMBERED:
            del self.hashes[next(iter(self.hashes))]
        if self.watched:
            self.watched |= {seq: each for seq, each in enumerate(hashes, start=first) if seq in self.watched}

    def find(
        self,
        kind: str,
        message: str,
        piece: Frame | None = None,
        seq: int | None = None,
        *,
        offset: int | None = None,
        segment: int | None = None,
    ) -> Finding:
        """Add a finding, and keep it unless there are too many of its kind."""
        at = piece.offset if piece is not None else offset
        finding = Finding(kind, self.chain, segment or self.segment, seq, at, message)
        self.counts[kind] += 1
        if self.counts[kind] <= MAX_FINDINGS:
            self.findings.append(finding)
        return finding

    def report_unreadable(self, number: int, why: str) -> None:
        """Add a finding for a segment that cannot be read. The check goes on behind it."""
        self.segment = number
        self.find(UNREADABLE, why, segment=number)
        self.last_reason = ""

    # The end

    @property
    def ends_rotated(self) -> bool:
        """True when the last record announces a segment that was not checked yet."""
        return self.last_reason == "rotated" and self._rotated_in == self.segment

    @property
    def ends_signed(self) -> bool:
        """True when the last record is a valid signature: then it covers everything before it."""
        return bool(self.last_reason) and self.signed_seq == self.seq

    def finish(self) -> None:
        """Decide what only the end of the chain can tell. Call it after the last segment."""
        moved = {finding for finding in self.findings if finding.kind == MISSING} - set(self._missing.values())
        # A record that came later is not missing; it is reported where it was found.
        self.findings = [finding for finding in self.findings if finding not in moved]
        if self.passed_over:
            many = f"{self.passed_over} records about the log itself were not looked at: more than {MAX_UNSIGNED}, or "
            many += f"{MAX_UNSIGNED_BYTES} bytes, of them have no signature that can be checked"
            if self.unknown_keys:
                self.notes.append(many)
            else:
                self.find(PASSED_OVER, many, seq=self.signed_seq + 1)
        for kind, count in self.counts.items():
            if count > MAX_FINDINGS:
                self.notes.append(f"{count - MAX_FINDINGS} more findings of kind {kind} are not listed")
        if not self.records:
            self.notes.append("there are no records")
        if self.ends_rotated and not self.stops_early:
            self.find(CUT_OFF, f"segment {self.segment + 1} is not there", segment=self.segment + 1)


_ABOUT_LOG: Final = frozenset({records.REDACTED, records.OPENED})


def _parse(body: bytes) -> Record | None:
    try:
        return records.parse(body)
    except ValueError:
        return None
