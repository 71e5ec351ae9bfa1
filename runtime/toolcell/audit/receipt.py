"""Receipts: one run in one file that anybody with the verification key can check.

A receipt holds the run's records as they were written, and inclusion proofs: the hash chain from the run's first record
to the next signed checkpoint, and the same for the run's settings and tools. Records of other runs in between appear as
run number and digest only. The number is part of a record's hash, so no record of the run can be hidden as one of
another. The readable summary in a receipt is checked against the records.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.format import BadInput, Frame, begun_segments, body_digest, hash_digest, hash_record, read_log_id
from toolcell.audit.keys import HMAC, Verifier, algorithm_of, by_id, key_wanted
from toolcell.audit.query import Index, RunSummary, shared_digests
from toolcell.audit.reader import RecordedRun, RecordLocation, StoredRecord, assemble, read_segment
from toolcell.audit.signatures import checkpoint_statement
from toolcell.errors import AuditError
from toolcell.support.atomic import write_named

FORMAT: Final = "toolcell receipt 2"


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
    missing: tuple[str, ...] = ()
    """What of the run the receipt does not hold. Nothing is wrong with what it holds."""

    @property
    def is_partial(self) -> bool:
        """True when the receipt holds a part of the run only."""
        return bool(self.missing)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "ok": self.ok,
            "checked": not self.is_unchecked,
            "run": self.run.id if self.run is not None else None,
            "problems": list(self.problems),
            "missing": list(self.missing),
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
    if not own or own[0].record.kind != records.RUN_STARTED:
        raise AuditError(f"run {summary.id} does not begin with its own record in {index.directory}")
    shared = [index.shared_record(summary, digest) for digest in shared_digests(own)]
    shown = [*([stored] for stored in shared if stored is not None), own]
    made: dict[str, Any] = {
        "format": FORMAT,
        "log": read_log_id(index.directory),
        "chain": summary.chain,
        "run": index.load(summary).to_dict() | {"id": own[0].record.fields["id"]},  # as its record says
        "ways": [_inclusion_proof(index.directory, summary, each) for each in shown],
    }
    if redactions := index.redaction_records(summary):
        proofs = ((each.location.chain, _inclusion_proof(index.directory, summary, [each])) for each in redactions)
        made["redactions"] = [{"chain": chain, **proof} for chain, proof in proofs]
    return made


def _inclusion_proof(directory: Path, summary: RunSummary, shown: list[StoredRecord]) -> dict[str, Any]:
    """Collect every record from the first of `shown` to the checkpoint after the last one."""
    hashes = {stored.frame.record_hash for stored in shown}
    first = shown[0]
    steps: list[dict[str, Any]] = []
    for stored in _read_from(directory / first.location.chain, first):
        is_end = stored.record.kind == records.CHECKPOINT and stored.record.seq > shown[-1].record.seq
        steps.append(_step(stored, is_end or stored.frame.record_hash in hashes))
        if is_end:
            return {"before": first.frame.previous_hash.hex(), "first_seq": first.record.seq, "records": steps}
    raise BadInput(f"no checkpoint covers run {summary.id} yet; it takes a second, or its writer was killed")


def _read_from(chain: Path, first: StoredRecord) -> Iterable[StoredRecord]:
    for number, segment in begun_segments(chain).items():
        if number == first.location.segment:
            yield from read_segment(segment, chain.name, number, first.location.offset)
        elif number > first.location.segment:
            yield from read_segment(segment, chain.name, number)


def _step(stored: StoredRecord, is_shown: bool) -> dict[str, Any]:
    if is_shown:
        return {"body": base64.b64encode(stored.frame.body).decode("ascii")}
    return {"run": stored.record.run, "sha256": body_digest(stored.frame.body).hex()}


MAX_NAME_CHARS: Final = 100


def file_name(run_id: str) -> str:
    """Return the name of the file for a run's receipt. The id is from a record, and names no other directory."""
    return f"{_NOT_IN_NAMES.sub('_', run_id)[:MAX_NAME_CHARS] or '_'}.receipt.json"


_NOT_IN_NAMES: Final = re.compile(r"^[.-]|[^A-Za-z0-9._-]")


def write(receipt: Mapping[str, Any], path: str | Path) -> None:
    """Write a receipt to a file.

    Raises:
        BadInput: the file cannot be written.
    """
    try:
        write_named(path, [json.dumps(receipt, indent=1), "\n"])
    except OSError as exc:
        raise BadInput(f"cannot write {path}: {exc.strerror}") from exc


def read(path: str | Path) -> dict[str, Any]:
    """Read a receipt from a file.

    Raises:
        BadInput: the file cannot be read, or is not a receipt.
    """
    try:
        receipt = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
    except (OSError, ValueError, RecursionError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise BadInput(f"cannot read a receipt from {path}: {why}") from exc
    if not isinstance(receipt, dict) or receipt.get("format") != FORMAT:
        raise BadInput(f"{path} is not a receipt of a run")
    return receipt


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose names differ: of two members with one name, another reader may take the other."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


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
        problems += _find_hidden(receipt["ways"], proofs, run.seq)
        problems += _check_calls(run)
        problems += _check_redactions(receipt, proofs, keys)
        plain = json.loads(json.dumps(run.to_dict()))
        if json.dumps(plain, sort_keys=True) != json.dumps(receipt["run"], sort_keys=True):  # else 1 equals true
            problems.append("what it says in words is not what its records say")
        found = (*missing_keys, *problems)
        is_unchecked = bool(missing_keys) and not problems
        missing = () if found else tuple(_find_missing(run))
        return ReceiptCheck(
            not found,
            run,
            problems=found,
            key=last.fields["key"],
            signed_ns=last.at_ns,
            is_unchecked=is_unchecked,
            missing=missing,
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as exc:
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
            record_hash = hash_digest(previous_hash, step["run"], bytes.fromhex(step["sha256"]))
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


def _find_hidden(ways: list[Mapping[str, Any]], proofs: list[list[StoredRecord]], run: int) -> Iterator[str]:
    """Find records of the run that are hidden. All of its records are in the last proof, which has no gap."""
    if any(stored.record.run for proof in proofs[:-1] for stored in proof):
        yield "records of the run stand in several proofs, and between them others could be hidden"
    for seq, step in enumerate(ways[-1]["records"], start=ways[-1]["first_seq"]):
        if step.get("run") == run:
            yield f"record {seq} belongs to the run and is hidden"


def _check_redactions(
    receipt: Mapping[str, Any], proofs: list[list[StoredRecord]], keys: Mapping[str, Verifier]
) -> Iterator[str]:
    """Find records that were redacted without a signed record that says so."""
    signed = set()
    for proof in receipt.get("redactions") or ():
        shown = _verify_hashes(proof, str(proof["chain"]))
        if problem := _missing_key(shown[-1], keys):
            yield problem  # anybody can sign a redaction with a key that nobody knows
            continue
        yield from _check_signature(str(receipt["log"]), shown[-1], keys)
        found = [each.record.fields for each in shown if each.record.kind == records.REDACTED]
        signed |= {tuple(fields[name] for name in ("chain", "seq", "original", "left")) for fields in found}
    for stored in (each for proof in proofs for each in proof if each.record.original):
        left = hashlib.sha256(stored.frame.body).digest()
        if (stored.location.chain, stored.record.seq, stored.record.original, left) not in signed:
            yield f"content of record {stored.record.seq} was removed, and no signed record says what is left of it"


def _check_calls(run: RecordedRun) -> list[str]:
    """Check that the calls are as many as the run's end says, and that each has ended."""
    if not run.end:
        return []
    made = run.end["calls"][0]
    if len(run.calls) != made:
        return [f"it shows {len(run.calls)} of the run's {made} calls"]
    return [f"it does not show how call {call.number} ended" for call in run.calls if not call.is_finished][:1]


def _find_missing(run: RecordedRun) -> Iterator[str]:
    """Say what a receipt, which is right as far as it goes, leaves out."""
    if not run.end:
        yield "it does not show the run's end: calls may have followed, or the run was not finished when it was signed"
    for name, found in (("terms", run.settings), ("tools", run.tools)):
        if run.start.get(name) and not found:
            yield f"it does not show the run's {'settings' if name == 'terms' else name}"


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
