"""Receipts: one run in one file that anybody with the verification key can check.

A receipt holds the run's records as they were written, and inclusion proofs: the hash chain from the run's first record
to the next signed checkpoint, and the same for the run's settings and tools. Records of other runs in between appear as
digests only. The readable summary in a receipt is checked against the records.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.format import BadInput, Frame, body_digest, hash_digest, hash_record, read_log_id, segment_files
from toolcell.audit.keys import HMAC, Verifier, algorithm_of, by_id, key_wanted
from toolcell.audit.query import Index, RunSummary, shared_digests
from toolcell.audit.reader import RecordedRun, RecordLocation, StoredRecord, assemble, read_segment
from toolcell.audit.signatures import checkpoint_statement
from toolcell.errors import AuditError

FORMAT: Final = "toolcell receipt 1"


@dataclass(frozen=True, slots=True)
class ReceiptCheck:
    """The result of checking a receipt."""

    ok: bool
    run: RecordedRun | None
    problems: tuple[str, ...]
    key: str = ""
    signed_ns: int | None = None
    """When the checkpoint that covers the run was signed."""
    is_unchecked: bool = False
    """Nothing wrong was found, but the key that signed it was not given."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "ok": self.ok,
            "checked": not self.is_unchecked,
            "run": self.run.id if self.run is not None else None,
            "problems": list(self.problems),
            "key": self.key,
            "signed_ns": self.signed_ns,
        }


def export(index: Index, summary: RunSummary) -> dict[str, Any]:
    """Make the receipt of a run, as plain data for JSON.

    Raises:
        BadInput: no checkpoint covers the run: it still runs, or its log was not signed after it.
        AuditError: its records are damaged.
    """
    own = index.records_of(summary)
    if not own:
        raise AuditError(f"run {summary.id} has no records in {index.directory}")
    shared = [index.shared_record(summary.chain, digest) for digest in shared_digests(own)]
    shown = [*([stored] for stored in shared if stored is not None), own]
    return {
        "format": FORMAT,
        "log": read_log_id(index.directory),
        "chain": summary.chain,
        "run": index.load(summary).to_dict(),
        "ways": [_inclusion_proof(index.directory, summary, each) for each in shown],
    }


def _inclusion_proof(directory: Path, summary: RunSummary, shown: list[StoredRecord]) -> dict[str, Any]:
    """Collect every record from the first of `shown` to the checkpoint after the last one."""
    hashes = {stored.frame.record_hash for stored in shown}
    first = shown[0]
    steps: list[dict[str, str]] = []
    for stored in _read_from(directory / summary.chain, first):
        is_end = stored.record.kind == records.CHECKPOINT and stored.record.seq > shown[-1].record.seq
        steps.append(_step(stored, is_end or stored.frame.record_hash in hashes))
        if is_end:
            return {"before": first.frame.previous_hash.hex(), "first_seq": first.record.seq, "records": steps}
    raise BadInput(f"no checkpoint covers run {summary.id} yet; it takes a second, or its writer was killed")


def _read_from(chain: Path, first: StoredRecord) -> Iterable[StoredRecord]:
    for number, segment in segment_files(chain).items():
        if number == first.location.segment:
            yield from read_segment(segment, chain.name, number, first.location.offset)
        elif number > first.location.segment:
            yield from read_segment(segment, chain.name, number)


def _step(stored: StoredRecord, is_shown: bool) -> dict[str, str]:
    if is_shown:
        return {"body": base64.b64encode(stored.frame.body).decode("ascii")}
    return {"sha256": body_digest(stored.frame.body).hex()}


def write(receipt: Mapping[str, Any], path: str | Path) -> None:
    """Write a receipt to a file.

    Raises:
        BadInput: the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(receipt, indent=1) + "\n", encoding="ascii")
    except OSError as exc:
        raise BadInput(f"cannot write {path}: {exc.strerror}") from exc


def read(path: str | Path) -> dict[str, Any]:
    """Read a receipt from a file.

    Raises:
        BadInput: the file cannot be read, or is not a receipt.
    """
    try:
        receipt = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise BadInput(f"cannot read a receipt from {path}: {exc}") from exc
    if not isinstance(receipt, dict) or receipt.get("format") != FORMAT:
        raise BadInput(f"{path} is no receipt of a run")
    return receipt


def needs_shared_key(receipt: Mapping[str, Any]) -> bool:
    """True when the receipt is signed with an HMAC key: only holders of the signing key can check it."""
    last = records.parse(base64.b64decode(receipt["ways"][-1]["records"][-1]["body"]))
    return algorithm_of(last.fields["signature"]) == HMAC


def check(receipt: Mapping[str, Any], verifiers: Iterable[Verifier]) -> ReceiptCheck:
    """Check a receipt, using only its records and their signature."""
    problems: list[str] = []
    missing_keys: list[str] = []
    keys = by_id(verifiers)
    try:
        proofs = [_verify_hashes(proof, str(receipt["chain"])) for proof in receipt["ways"]]
        for shown in proofs:
            if not (problem := _missing_key(shown[-1], keys)):
                problems += _check_signature(str(receipt["log"]), shown[-1], keys)
            elif problem not in missing_keys:
                missing_keys.append(problem)
        run = _assemble_run(proofs)
        last = proofs[-1][-1].record
        problems += _check_calls(run)
        if json.loads(json.dumps(run.to_dict())) != receipt["run"]:
            problems.append("what it says in words is not what its records say")
        found = (*missing_keys, *problems)
        is_unchecked = bool(missing_keys) and not problems
        return ReceiptCheck(not found, run, found, last.fields["key"], last.at_ns, is_unchecked)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as exc:
        return ReceiptCheck(False, None, (*missing_keys, *problems, f"it is not whole: {type(exc).__name__} {exc}"))


def _verify_hashes(proof: Mapping[str, Any], chain: str) -> list[StoredRecord]:
    """Return the records shown in an inclusion proof, with hashes computed from the proof.

    Raises:
        ValueError: a record is malformed or not in its place.
    """
    record_hash = bytes.fromhex(proof["before"])
    found: list[StoredRecord] = []
    for seq, step in enumerate(proof["records"], start=int(proof["first_seq"])):
        previous_hash = record_hash
        if "body" not in step:
            record_hash = hash_digest(previous_hash, bytes.fromhex(step["sha256"]))
            continue
        body = base64.b64decode(step["body"], validate=True)
        record_hash = hash_record(previous_hash, body)
        record = records.parse(body)
        if record.seq != seq or not records.is_canonical(record):
            raise ValueError(f"record {seq} is not where it was written")
        found.append(StoredRecord(RecordLocation(chain, 0, 0), record, Frame(0, previous_hash, body, record_hash)))
    return found


def _assemble_run(proofs: list[list[StoredRecord]]) -> RecordedRun:
    """Build the run from the records shown in the proofs.

    Raises:
        ValueError: they are the records of no run, or of several.
    """
    shown = [stored.record for proof in proofs for stored in proof]
    kinds = (records.TOOLS, records.SETTINGS)
    shared = {record.fields["digest"]: record.fields for record in shown if record.kind in kinds}
    own = [stored for proof in proofs for stored in proof if stored.record.run]
    run = assemble(own, shared)
    if run is None or {stored.record.run for stored in own} != {run.seq}:
        raise ValueError("it does not hold the records of one run")
    return run


def _check_calls(run: RecordedRun) -> list[str]:
    """Check that no call is hidden: a receipt could show only the digest of a record, as if it were of another run."""
    if not run.end:
        return []
    made = run.end["calls"][0]
    if len(run.calls) != made:
        return [f"it shows {len(run.calls)} of the run's {made} calls"]
    return [f"it does not show how call {call.number} ended" for call in run.calls if not call.is_finished][:1]


def _missing_key(last: StoredRecord, keys: Mapping[str, Verifier]) -> str:
    """Name the key that is needed to check a signature and was not given; empty when none is missing."""
    fields = last.record.fields
    if last.record.kind != records.CHECKPOINT or fields["key"] in keys:
        return ""
    return f"it could not be checked: it is signed with {key_wanted(fields['key'], fields['signature'])}"


def _check_signature(log: str, last: StoredRecord, keys: Mapping[str, Verifier]) -> list[str]:
    record = last.record
    if record.kind != records.CHECKPOINT:
        return ["it does not end with a checkpoint"]
    reason, key, signature = (record.fields[name] for name in ("reason", "key", "signature"))
    chain, previous_hash = last.location.chain, last.frame.previous_hash
    statement = checkpoint_statement(log, chain, record.seq, record.at_ns, previous_hash, reason)
    is_valid = keys[key].is_valid(statement, signature)
    return [] if is_valid else ["its records are not what was signed"]
