"""Verify a log: find edits, deletions, reorderings, copies, cut-off ends, swapped segments and wrong keys.

A table in docs/audit-evidence.md says which changes can be found, which cannot, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolcell.audit import chain_check
from toolcell.audit.chain_check import MAX_FINDINGS, ChainCheck, Finding
from toolcell.audit.format import (
    LOCK_FILE,
    begun_segments,
    chain_directories,
    read_log_id,
    read_segment_file,
    segment_files,
)
from toolcell.audit.keys import Verifier, by_id
from toolcell.audit.signatures import Head, PruneRecord, read_prune_record, saved_heads
from toolcell.errors import AuditError
from toolcell.support.file_lock import is_locked

BAD_PRUNE_RECORD = "bad_stub"
CHAIN_MISSING = "chain_missing"
NOT_CLOSED = "not_closed"
ADDED = "added"
BAD_REDACTION = "bad_redaction"
WRONG_LOG = "wrong_log"

PRUNED_MEANWHILE, ROTATED_MEANWHILE = 5, 1000
"""How often a check looks again at a chain that is pruned, and that is rotated, while it is checked."""


def ignored(size: int) -> None:
    """Take no notice of progress."""


@dataclass(frozen=True, slots=True)
class ChainReport:
    """What checking one chain found."""

    chain: str
    segments: int
    records: int
    runs: int
    checkpoints: int
    last_seq: int
    signed_seq: int
    """A valid signature covers every record up to this one."""
    is_closed: bool
    """Its writer closed it."""
    is_written: bool
    """A process is writing it now."""

    @property
    def unsigned(self) -> int:
        """Records after the last valid signature. Their hashes are right, but anybody could have written them."""
        return self.last_seq - self.signed_seq

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {name: getattr(self, name) for name in self.__slots__} | {"unsigned": self.unsigned}
        return {"sealed_seq" if name == "signed_seq" else name: value for name, value in plain.items()}


@dataclass(slots=True)
class Report:
    """What verifying a log found."""

    log: str
    chains: list[ChainReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Remarks on things that are not wrong."""

    @property
    def ok(self) -> bool:
        """True when nothing was found."""
        return not self.findings

    @property
    def is_unchecked(self) -> bool:
        """True when no signature could be checked because keys are missing, and nothing else was found."""
        return (
            bool(self.findings)
            and {finding.kind for finding in self.findings} == {chain_check.UNKNOWN_KEY}
            and not any(chain.signed_seq for chain in self.chains)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "ok": self.ok,
            "checked": not self.is_unchecked,
            "log": self.log,
            "findings": [finding.to_dict() for finding in self.findings],
            "chains": [chain.to_dict() for chain in self.chains],
            "notes": self.notes,
        }


def verify(
    directory: str | Path,
    verifiers: Iterable[Verifier],
    *,
    heads: Iterable[Head] | None = None,
    strict: bool = False,
    on_bytes: Callable[[int], object] = ignored,
) -> Report:
    """Check a whole log with the keys it may be signed with.

    `heads` give the length that its chains had; the default is the heads that its writer saved on this machine. With
    `strict`, a chain that its writer did not close is a finding instead of a note. `on_bytes` is
    told the size of each segment that was checked.

    Raises:
        AuditError: there is no log in `directory`, or it cannot be read.
    """
    keys = by_id(verifiers)
    report = Report(read_log_id(Path(directory)))
    wanted = list(saved_heads(report.log) if heads is None else heads)
    checks: dict[str, ChainCheck] = {}
    for path in chain_directories(Path(directory)):
        own = [head for head in wanted if head.chain == path.name]
        checks[path.name] = check = check_chain(path, report.log, keys, own, on_bytes)
        _check_heads(check, own, keys)
    for check in checks.values():
        _compare_with_left(check, checks)
    _compare_redactions(checks)
    _compare_prunings(Path(directory), checks)
    for name, check in checks.items():
        _add_chain(report, Path(directory) / name, check, strict)
    report.findings += _check_presence(report.log, wanted, checks)
    if not checks:
        report.notes.append("there is no chain in it")
    if not wanted:
        report.notes.append("no heads were given: an end cut off after a checkpoint would not be found")
    return report


def _check_presence(log: str, heads: Iterable[Head], checks: Mapping[str, ChainCheck]) -> Iterator[Finding]:
    """Find heads of another log, and of chains that are not there."""
    for head in heads:
        if head.log != log:
            message = f"the head at record {head.seq} is of log {head.log}, and this is log {log}: it was replaced"
            yield Finding(WRONG_LOG, head.chain, None, head.seq, None, message)
        elif head.chain not in checks:
            message = f"chain {head.chain} is not there; it had got to record {head.seq}"
            yield Finding(CHAIN_MISSING, head.chain, None, head.seq, None, message)


def _compare_with_left(check: ChainCheck, checks: Mapping[str, ChainCheck]) -> None:
    """Compare the ends of other chains with what signed records of this chain say that they were."""
    for at, entry in check.left:
        if at > check.signed_seq:
            continue
        try:
            name, seq, record_hash, why = entry
            other, found = checks.get(name), f"the writer of chain {check.chain} (record {at}) left it: {why}"
        except (TypeError, ValueError):
            continue
        if other is None:
            message = f"chain {name} is not there; it had got to record {seq}; {found}"
            check.findings.append(Finding(CHAIN_MISSING, name, None, seq, None, message))
        elif other.seq < seq:
            message = f"it ends at record {other.seq}, and had got to {seq}: its end was cut off; {found}"
            other.findings.append(Finding(chain_check.CUT_OFF, name, other.segment, seq, None, message))
        elif seq and (other.seq > seq or other.last_hash != record_hash):
            message = f"records were added or changed since it ended at record {seq}; {found}"
            other.findings.append(Finding(ADDED, name, other.segment, seq + 1, None, message))
        else:
            other.notes.append(found)


def signed_redactions(checks: Iterable[ChainCheck]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Map chain and seq of each redacted record to the newest signed record of its redaction."""
    newest: dict[tuple[str, int], tuple[int, Mapping[str, Any]]] = {}
    for check in checks:
        for at, at_ns, fields in check.redactions:
            place = (fields["chain"], fields["seq"])
            if at <= check.signed_seq and (place not in newest or newest[place][0] <= at_ns):
                newest[place] = (at_ns, fields)
    return {place: fields for place, (_, fields) in newest.items()}


def _compare_redactions(checks: Mapping[str, ChainCheck]) -> None:
    """Compare the redacted records of all chains with the signed records of redactions. The newest one counts."""
    signed = signed_redactions(checks.values())
    for name, check in checks.items():
        for seq, found in check.redacted.items():
            fields = signed.get((name, seq), {})
            if found != (fields.get("original"), fields.get("left")):
                message = f"content of record {seq} was removed, and no signed record says that this is what is left"
                check.counts[BAD_REDACTION] += 1
                if check.counts[BAD_REDACTION] <= MAX_FINDINGS:
                    check.findings.append(Finding(BAD_REDACTION, name, None, seq, None, message))
        if (more := check.counts[BAD_REDACTION] - MAX_FINDINGS) > 0:
            check.notes.append(f"{more} more findings of kind {BAD_REDACTION} are not listed")
    for (name, seq), fields in signed.items():
        there = checks.get(name)
        if there is not None and there.first_seq <= seq <= there.seq and seq not in there.redacted:
            message = f"record {seq} holds again what {fields['by']} removed"
            there.findings.append(Finding(BAD_REDACTION, name, None, seq, None, message))


def _compare_prunings(log: Path, checks: Mapping[str, ChainCheck]) -> None:
    """Find chains with more than what signed records say that retention left of them: it was put back.

    A writer replaces the prune record before it records the removal, so the prune record of now is never behind.
    """
    for check in checks.values():
        for name, last in check.prunings.items():
            other = checks.get(name)
            pruned = _prune_record_of(log / name) if other is not None else None
            if other is None or isinstance(pruned, AuditError) or (pruned is not None and pruned.last_segment >= last):
                continue
            has = "there is no prune record" if pruned is None else f"the prune record ends at {pruned.last_segment}"
            message = f"chain {check.chain} says that its segments up to {last} were removed by retention, and {has}"
            other.findings.append(Finding(BAD_PRUNE_RECORD, name, last, None, None, message))


def check_chain(
    path: Path,
    log: str,
    keys: Mapping[str, Verifier],
    heads: Iterable[Head] = (),
    on_bytes: Callable[[int], object] = ignored,
) -> ChainCheck:
    """Check one chain from its beginning, or from its prune record, to its end.

    The chain may be written, rotated and pruned meanwhile: segments that appear are read too, and when segments were
    removed by retention the check begins again.
    """
    watched = tuple(head.seq for head in heads)
    for _ in range(PRUNED_MEANWHILE):
        check = ChainCheck(log, path.name, keys, watched=dict.fromkeys(watched))
        pruned = _prune_record_of(path)
        _check_prune_record(pruned, path, check)
        removed = 0 if pruned is None or isinstance(pruned, AuditError) else pruned.last_segment
        try:
            _check_segments(path, check, removed, on_bytes)
        except AuditError as exc:  # the directory itself
            check.report_unreadable(removed + 1, str(exc))
        if str(_prune_record_of(path)) == str(pruned):
            break
    check.finish()
    return check


def _check_segments(path: Path, check: ChainCheck, removed: int, on_bytes: Callable[[int], object]) -> None:
    """Check the segments after `removed`. A segment that ends with `rotated` has a successor, so look again for it."""
    found = begun_segments(path, removed)
    leftover = [number for number in found if number <= removed]
    if leftover:
        check.notes.append(f"{len(leftover)} segments that retention removed are still there")
    last = removed
    for _ in range(ROTATED_MEANWHILE):
        for number, segment in found.items():
            if number > last:
                try:
                    data = read_segment_file(segment)
                    check.check_segment(number, data)
                    on_bytes(len(data))
                except AuditError as exc:
                    check.report_unreadable(number, str(exc))
                last = number
        if not check.ends_rotated or not (found := begun_segments(path, last)) or max(found) <= last:
            return
    check.notes.append(f"it is written faster than it is read: checked up to segment {last}")
    check.stops_early = True


def _prune_record_of(path: Path) -> PruneRecord | AuditError | None:
    try:
        return read_prune_record(path)
    except AuditError as exc:
        return exc


def _check_prune_record(pruned: PruneRecord | AuditError | None, path: Path, check: ChainCheck) -> None:
    """Start the check after the removed segments."""
    if isinstance(pruned, AuditError):
        check.findings.append(Finding(BAD_PRUNE_RECORD, path.name, None, None, None, str(pruned)))
        return
    if pruned is None:
        return
    verifier = check.verifiers.get(pruned.key)
    check.start_after(pruned)
    if verifier is None:
        check.report_missing_key("the prune record", pruned.key, pruned.signature, pruned.seq)
    elif (pruned.log, pruned.chain) != (check.log, path.name) or not pruned.is_signed_by(verifier):
        why = f"the prune record was not signed like this with key {pruned.key}"
        check.findings.append(Finding(BAD_PRUNE_RECORD, path.name, pruned.last_segment, pruned.seq, None, why))
    check.signed_seq = 0 if verifier is None else pruned.seq
    check.notes.append(f"segments up to {pruned.last_segment} (records up to {pruned.seq}) were removed by retention")


def _check_heads(check: ChainCheck, heads: Iterable[Head], keys: Mapping[str, Verifier]) -> None:
    for head in heads:
        verifier = keys.get(head.key)
        if verifier is None:
            check.report_missing_key(f"the head at record {head.seq}", head.key, head.signature, head.seq)
        elif head.log != check.log:
            continue  # reported with the log
        elif not head.is_signed_by(verifier):
            message = f"the head at record {head.seq} was not signed like this for this log with key {head.key}"
            check.findings.append(Finding(chain_check.BAD_HEAD, check.chain, None, head.seq, None, message))
        elif head.seq > check.seq:
            message = f"the chain ends at record {check.seq}, and had got to {head.seq}: its end was cut off"
            check.findings.append(Finding(chain_check.CUT_OFF, check.chain, check.segment, head.seq, None, message))
        elif (found := check.watched.get(head.seq)) is not None and found != head.record_hash:
            message = f"record {head.seq} is not the one its writer signed: the chain was written anew"
            check.findings.append(Finding(chain_check.BROKEN_LINK, check.chain, None, head.seq, None, message))


def _count_segments(path: Path) -> int:
    with suppress(AuditError):
        return len(segment_files(path))
    return 0


def _add_chain(report: Report, path: Path, check: ChainCheck, strict: bool) -> None:
    written = is_locked(path / LOCK_FILE)
    chain = ChainReport(
        path.name,
        _count_segments(path),
        records=check.records,
        runs=check.runs,
        checkpoints=check.checkpoints,
        last_seq=check.seq,
        signed_seq=check.signed_seq,
        is_closed=check.last_reason == "closed",
        is_written=written,
    )
    report.chains.append(chain)
    report.findings.extend(check.findings)
    report.notes.extend(f"chain {path.name}: {note}" for note in check.notes)
    if not chain.is_closed and not check.findings:
        why = "it is being written" if written else "its writer was killed, or its end was cut off"
        signed = f"{chain.unsigned} records at its end are not" if chain.unsigned else "all records in it are"
        message = f"chain {path.name} is not closed ({why}); {signed} signed"
        if strict:
            report.findings.append(Finding(NOT_CLOSED, path.name, check.segment, check.seq, None, message))
        else:
            report.notes.append(message)
