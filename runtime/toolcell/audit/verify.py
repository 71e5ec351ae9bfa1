"""Verify a log: find edits, deletions, reorderings, copies, cut-off ends, swapped segments and wrong keys.

A table in docs/audit.md says which changes can be found, which cannot, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolcell.audit import chain_check
from toolcell.audit.chain_check import ChainCheck, Finding
from toolcell.audit.format import chain_directories, read_log_id, segment_files
from toolcell.audit.keys import Verifier, by_id
from toolcell.audit.signatures import Head, read_prune_record, saved_heads
from toolcell.audit.writer import is_locked
from toolcell.errors import AuditError

BAD_HEAD = "bad_head"
BAD_PRUNE_RECORD = "bad_stub"
CHAIN_MISSING = "chain_missing"
NOT_CLOSED = "not_closed"


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
) -> Report:
    """Check a whole log with the keys it may be signed with.

    `heads` give the length that its chains had; the default is the heads that its writer saved on this machine. With
    `strict`, a chain that its writer did not close is a finding instead of a note.

    Raises:
        AuditError: there is no log in `directory`, or it cannot be read.
    """
    keys = by_id(verifiers)
    report = Report(read_log_id(Path(directory)))
    wanted = list(saved_heads(report.log) if heads is None else heads)
    chains = chain_directories(Path(directory))
    for path in chains:
        own = [head for head in wanted if head.chain == path.name]
        check = check_chain(path, report.log, keys, report, own)
        _check_heads(check, own, keys)
        _add_chain(report, path, check, strict)
    for head in wanted:
        if head.log == report.log and head.chain not in {path.name for path in chains}:
            message = f"chain {head.chain} is not there; it had got to record {head.seq}"
            report.findings.append(Finding(CHAIN_MISSING, head.chain, None, head.seq, None, message))
    if not chains:
        report.notes.append("there is no chain in it")
    if not wanted:
        report.notes.append("no heads were given: an end cut off after a checkpoint would not be found")
    return report


def check_chain(
    path: Path, log: str, keys: Mapping[str, Verifier], report: Report, heads: Iterable[Head] = ()
) -> ChainCheck:
    """Check one chain from its beginning, or from its prune record, to its end."""
    check = ChainCheck(log, path.name, keys, watched=dict.fromkeys(head.seq for head in heads))
    found = segment_files(path)
    removed = _check_prune_record(path, check)
    if removed is not None:
        leftover = [number for number in found if number <= removed]
        if leftover:
            report.notes.append(f"chain {path.name}: {len(leftover)} segments that retention removed are still there")
    for number, segment in found.items():
        if removed is None or number > removed:
            try:
                check.check_segment(number, segment.read_bytes())
            except OSError as exc:
                raise AuditError(f"cannot read {segment}: {exc.strerror}") from exc
    check.finish()
    return check


def _check_prune_record(path: Path, check: ChainCheck) -> int | None:
    """Start the check after the removed segments; return the number of the last one."""
    try:
        pruned = read_prune_record(path)
    except AuditError as exc:
        check.findings.append(Finding(BAD_PRUNE_RECORD, path.name, None, None, None, str(exc)))
        return None
    if pruned is None:
        return None
    verifier = check.verifiers.get(pruned.key)
    check.start_after(pruned)
    if verifier is None:
        check.report_missing_key("the prune record", pruned.key, pruned.signature, pruned.seq)
    elif (pruned.log, pruned.chain) != (check.log, path.name) or not pruned.is_signed_by(verifier):
        why = f"the prune record was not signed like this with key {pruned.key}"
        check.findings.append(Finding(BAD_PRUNE_RECORD, path.name, pruned.last_segment, pruned.seq, None, why))
    check.signed_seq = 0 if verifier is None else pruned.seq
    check.notes.append(f"segments up to {pruned.last_segment} (records up to {pruned.seq}) were removed by retention")
    return pruned.last_segment


def _check_heads(check: ChainCheck, heads: Iterable[Head], keys: Mapping[str, Verifier]) -> None:
    for head in heads:
        verifier = keys.get(head.key)
        if verifier is None:
            check.report_missing_key(f"the head at record {head.seq}", head.key, head.signature, head.seq)
        elif head.log != check.log or not head.is_signed_by(verifier):
            message = f"the head at record {head.seq} was not signed like this for this log with key {head.key}"
            check.findings.append(Finding(BAD_HEAD, check.chain, None, head.seq, None, message))
        elif head.seq > check.seq:
            message = f"the chain ends at record {check.seq}, and had got to {head.seq}: its end was cut off"
            check.findings.append(Finding(chain_check.CUT_OFF, check.chain, check.segment, head.seq, None, message))
        elif (found := check.watched.get(head.seq)) is not None and found != head.record_hash:
            message = f"record {head.seq} is not the one its writer signed: the chain was written anew"
            check.findings.append(Finding(chain_check.BROKEN_LINK, check.chain, None, head.seq, None, message))


def _add_chain(report: Report, path: Path, check: ChainCheck, strict: bool) -> None:
    written = is_locked(path)
    chain = ChainReport(
        path.name,
        len(segment_files(path)),
        check.records,
        check.runs,
        check.checkpoints,
        check.seq,
        check.signed_seq,
        check.last_reason == "closed",
        written,
    )
    report.chains.append(chain)
    report.findings.extend(check.findings)
    report.notes.extend(f"chain {path.name}: {note}" for note in check.notes)
    if not chain.is_closed and not check.findings:
        why = "it is being written" if written else "its writer was killed, or its end was cut off"
        message = f"chain {path.name} is not closed ({why}); {chain.unsigned} records at its end are not signed"
        if strict:
            report.findings.append(Finding(NOT_CLOSED, path.name, check.segment, check.seq, None, message))
        else:
            report.notes.append(message)
