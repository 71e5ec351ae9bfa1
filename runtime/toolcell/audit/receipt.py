"""Receipts: one run in one file, which proves itself to whoever has the key to check signatures with.

A receipt holds the run's records as they were written, and the way from the first of them to the next signed checkpoint.
Records of other runs on that way are there as digests only: they say that something was written, not what. What is
there to be read beside the records is for convenience and is checked against them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolcell.audit import frames, layout, records
from toolcell.audit.index import Index, RunLine
from toolcell.audit.keys import Verifier, by_id
from toolcell.audit.reader import Located, Place, read_segment
from toolcell.audit.runs import RecordedRun, assemble
from toolcell.audit.seals import checkpoint_statement
from toolcell.errors import AuditError

FORMAT: Final = "toolcell receipt 1"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What checking a receipt came to."""

    ok: bool
    run: RecordedRun | None
    problems: tuple[str, ...]
    key: str = ""
    signed_ns: int | None = None
    """When the checkpoint was signed that covers the run."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "ok": self.ok,
            "run": self.run.id if self.run is not None else None,
            "problems": list(self.problems),
            "key": self.key,
            "signed_ns": self.signed_ns,
        }


def export(index: Index, line: RunLine) -> dict[str, Any]:
    """The receipt of a run, as plain data for JSON.

    Raises:
        AuditError: no checkpoint covers the run: it is under way, or its log was never signed after it.
    """
    own = index.records_of(line)
    if not own:
        raise AuditError(f"run {line.id} has no records in {index.directory}")
    run = index.load(line)
    fields = own[0].record.fields
    digests = [digest for name in ("terms", "tools") if (digest := fields[name])]
    common = [found for digest in digests if (found := index.common_record(line.chain, digest)) is not None]
    kept = {found.frame.link for found in (*own, *common)}
    first = min((*own, *common), key=lambda found: found.record.seq)
    way = list(_way(index.directory, line, first, own[-1]))
    return {
        "format": FORMAT,
        "log": layout.log_id(index.directory),
        "chain": line.chain,
        "run": run.to_dict(),
        "before": first.frame.before.hex(),
        "first_seq": first.record.seq,
        "records": [_link_in_way(found, found.frame.link in kept or found is way[-1]) for found in way],
    }


def _way(directory: Path, line: RunLine, first: Located, last: Located) -> Iterable[Located]:
    """Every record from the first of the run to the checkpoint after its last one."""
    chain = directory / line.chain
    for number, segment in layout.segments(chain).items():
        if number < first.place.segment:
            continue
        for found in read_segment(segment, line.chain, number):
            if found.record.seq < first.record.seq:
                continue
            yield found
            if found.record.kind == records.CHECKPOINT and found.record.seq > last.record.seq:
                return
    raise AuditError(f"no checkpoint covers run {line.id} yet; it takes a second, or the log was not closed")


def _link_in_way(found: Located, is_shown: bool) -> dict[str, str]:
    if is_shown:
        return {"body": base64.b64encode(found.frame.body).decode("ascii")}
    return {"sha256": frames.body_digest(found.frame.body).hex()}


def write(receipt: Mapping[str, Any], path: str | Path) -> None:
    """Write a receipt to a file.

    Raises:
        AuditError: it cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(receipt, indent=1) + "\n", encoding="ascii")
    except OSError as exc:
        raise AuditError(f"cannot write {path}: {exc.strerror}") from exc


def read(path: str | Path) -> dict[str, Any]:
    """A receipt from a file.

    Raises:
        AuditError: it cannot be read, or is none.
    """
    try:
        receipt = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise AuditError(f"cannot read a receipt from {path}: {exc}") from exc
    if not isinstance(receipt, dict) or receipt.get("format") != FORMAT:
        raise AuditError(f"{path} is no receipt of a run")
    return receipt


def check(receipt: Mapping[str, Any], verifiers: Iterable[Verifier]) -> Verdict:
    """Say whether a receipt holds what was recorded, by its records and the signature over them alone."""
    try:
        way = _Way(receipt)
        last = way.records[-1]
        problems = _check_signature(way, last, by_id(verifiers))
        run = way.run()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as exc:
        return Verdict(False, None, (f"it is not whole: {type(exc).__name__} {exc}",))
    if run is None:
        return Verdict(False, None, (*problems, "it does not hold the first record of a run"))
    if json.loads(json.dumps(run.to_dict())) != receipt["run"]:
        problems.append("what it says in words is not what its records say")
    return Verdict(not problems, run, tuple(problems), last.record.fields["key"], last.record.at_ns)


class _Way:
    """The records of a receipt, linked anew."""

    def __init__(self, receipt: Mapping[str, Any]) -> None:
        self.log, self.chain = str(receipt["log"]), str(receipt["chain"])
        link = bytes.fromhex(receipt["before"])
        seq = int(receipt["first_seq"]) - 1
        self.records: list[Located] = []
        for entry in receipt["records"]:
            seq += 1
            before = link
            if "body" not in entry:
                link = frames.link_of_digest(before, bytes.fromhex(entry["sha256"]))
                continue
            body = base64.b64decode(entry["body"], validate=True)
            link = frames.link(before, body)
            record = records.parse(body)
            if record.seq != seq or not records.is_canonical(record, body):
                raise ValueError(f"record {seq} is not where it was written")
            frame = frames.Frame(0, before, body, link)
            self.records.append(Located(Place(self.chain, 0, 0), record, frame))

    def run(self) -> RecordedRun | None:
        """The run whose records these are."""
        runs = {found.record.run for found in self.records} - {0}
        if len(runs) != 1:
            raise ValueError(f"it holds records of {len(runs)} runs")
        common = {
            found.record.fields["digest"]: found.record.fields
            for found in self.records
            if found.record.kind in (records.TOOLS, records.TERMS)
        }
        return assemble([found for found in self.records if found.record.run], common)


def _check_signature(way: _Way, last: Located, keys: Mapping[str, Verifier]) -> list[str]:
    if last.record.kind != records.CHECKPOINT:
        return ["it does not end with a checkpoint"]
    said = last.record.fields
    verifier = keys.get(said["key"])
    if verifier is None:
        return [f"it is signed with key {said['key']}, which was not given"]
    statement = checkpoint_statement(
        way.log, way.chain, last.record.seq, last.record.at_ns, last.frame.before, said["reason"]
    )
    return [] if verifier.is_valid(statement, said["signature"]) else ["its records are not what was signed"]
