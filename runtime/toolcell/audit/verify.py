"""Is a log what was written? Finds edits, deletions, reorderings, copies, cut-off ends, swapped segments, wrong keys.

What can be found and what cannot, and why, is a table in docs/audit.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolcell.audit import checker, layout
from toolcell.audit.chain import is_locked
from toolcell.audit.checker import ChainCheck, Finding
from toolcell.audit.keys import Verifier, by_id
from toolcell.audit.retention import read_stub
from toolcell.audit.signatures import Head, default_heads_dir
from toolcell.errors import AuditError

BAD_HEAD = "bad_head"
BAD_STUB = "bad_stub"
CHAIN_MISSING = "chain_missing"
NOT_CLOSED = "not_closed"


@dataclass(frozen=True, slots=True)
class ChainReport:
    """One chain that was checked."""

    chain: str
    segments: int
    records: int
    runs: int
    checkpoints: int
    last_seq: int
    sealed_seq: int
    """Everything up to this record is covered by a good signature."""
    is_closed: bool
    """Its writer ended it in good order."""
    is_written: bool
    """A process is writing it now."""

    @property
    def unsigned(self) -> int:
        """Records after the last good signature: chained, but anybody could have written them."""
        return self.last_seq - self.sealed_seq

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {"unsigned": self.unsigned}


@dataclass(slots=True)
class Report:
    """What verifying a log came to."""

    log: str
    chains: list[ChainReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is as it should be but good to know."""

    @property
    def ok(self) -> bool:
        """True when nothing was found."""
        return not self.findings

    @property
    def is_unchecked(self) -> bool:
        """True when no signature could be checked for want of a key, and nothing else was found."""
        return (
            bool(self.findings)
            and {finding.kind for finding in self.findings} == {checker.UNKNOWN_KEY}
            and not any(chain.sealed_seq for chain in self.chains)
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

    `heads` say how far its chains had got; without them, those its writer left on this machine are taken. When it is
    `strict`, a chain that its writer did not close is a finding and no note.

    Raises:
        AuditError: there is no log there, or it cannot be read.
    """
    place = Path(directory)
    keys = by_id(verifiers)
    report = Report(layout.log_id(place))
    wanted = list(saved_heads(report.log) if heads is None else heads)
    chains = layout.chains(place)
    for path in chains:
        own = [head for head in wanted if head.chain == path.name]
        check = check_chain(path, report.log, keys, report, own)
        _check_heads(check, own, keys)
        _add(report, path, check, strict)
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
    """Check one chain from its stub or its beginning to its end."""
    check = ChainCheck(log, path.name, keys, watched=dict.fromkeys(head.seq for head in heads))
    found = layout.segments(path)
    stub = _check_stub(path, check)
    if stub is not None:
        leftover = [number for number in found if number <= stub]
        if leftover:
            report.notes.append(f"chain {path.name}: {len(leftover)} segments that retention removed are still there")
    for number, segment in found.items():
        if stub is None or number > stub:
            try:
                check.check_segment(number, segment.read_bytes())
            except OSError as exc:
                raise AuditError(f"cannot read {segment}: {exc.strerror}") from exc
    check.finish()
    return check


def _check_stub(path: Path, check: ChainCheck) -> int | None:
    """Start after what retention removed; returns the last segment removed."""
    try:
        stub = read_stub(path)
    except AuditError as exc:
        check.findings.append(Finding(BAD_STUB, path.name, None, None, None, str(exc)))
        return None
    if stub is None:
        return None
    verifier = check.verifiers.get(stub.key)
    check.start_after(stub)
    if verifier is None:
        check.miss_key("the stub of what retention removed", stub.key, stub.signature, stub.seq)
    elif (stub.log, stub.chain) != (check.log, path.name) or not stub.is_signed_by(verifier):
        why = f"the stub of what retention removed was not signed like this with key {stub.key}"
        check.findings.append(Finding(BAD_STUB, path.name, stub.last_segment, stub.seq, None, why))
    check.sealed_seq = 0 if verifier is None else stub.seq
    check.notes.append(f"segments up to {stub.last_segment} (records up to {stub.seq}) were removed by retention")
    return stub.last_segment


def _check_heads(check: ChainCheck, heads: Iterable[Head], keys: Mapping[str, Verifier]) -> None:
    for head in heads:
        verifier = keys.get(head.key)
        if verifier is None:
            check.miss_key(f"the head at record {head.seq}", head.key, head.signature, head.seq)
        elif head.log != check.log or not head.is_signed_by(verifier):
            message = f"the head at record {head.seq} was not signed like this for this log with key {head.key}"
            check.findings.append(Finding(BAD_HEAD, check.chain, None, head.seq, None, message))
        elif head.seq > check.seq:
            message = f"the chain ends at record {check.seq}, and had got to {head.seq}: its end was cut off"
            check.findings.append(Finding(checker.CUT_OFF, check.chain, check.segment, head.seq, None, message))
        elif (link := check.watched.get(head.seq)) is not None and link != head.link:
            message = f"record {head.seq} is not the one its writer signed: the chain was written anew"
            check.findings.append(Finding(checker.BROKEN_LINK, check.chain, None, head.seq, None, message))


def _add(report: Report, path: Path, check: ChainCheck, strict: bool) -> None:
    written = is_locked(path)
    chain = ChainReport(
        path.name,
        len(layout.segments(path)),
        check.records,
        check.runs,
        check.checkpoints,
        check.seq,
        check.sealed_seq,
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


# Heads


def saved_heads(log: str, directory: Path | None = None) -> list[Head]:
    """The heads that writers of a log left on this machine."""
    place = (directory or default_heads_dir()) / log
    try:
        files = sorted(place.glob("*.json"))
    except OSError:
        return []
    return [head for file in files for head in load_heads(file)]


def load_heads(path: str | Path) -> list[Head]:
    """Heads from a file: one, or a list.

    Raises:
        BadInput: the file cannot be read or holds something else.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return [Head.from_dict(each) for each in (found if isinstance(found, list) else [found])]
    except (OSError, ValueError) as exc:
        raise layout.BadInput(f"cannot read heads from {path}: {exc}") from exc
    except AuditError as exc:
        raise layout.BadInput(f"{path} holds no heads: {exc}") from exc
