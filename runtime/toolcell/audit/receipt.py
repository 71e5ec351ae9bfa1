"""Receipts: one run in one file, which proves itself to whoever has the key to check signatures with.

A receipt holds the run's records as they were written, and the way from the first of them to the next signed
checkpoint; the same for the terms it ran under. Records of other runs on the way are there as digests only: they say
that something was written, not what. What is there to be read beside the records is checked against them.
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
from toolcell.audit.keys import HMAC, Verifier, algorithm_of, by_id, key_wanted
from toolcell.audit.reader import Located, RecordLocation, read_segment
from toolcell.audit.runs import RecordedRun, assemble
from toolcell.audit.signatures import checkpoint_statement
from toolcell.errors import AuditError

FORMAT: Final = "toolcell receipt 1"


@dataclass(frozen=True, slots=True)
class ReceiptCheck:
    """What checking a receipt came to."""

    ok: bool
    run: RecordedRun | None
    problems: tuple[str, ...]
    key: str = ""
    signed_ns: int | None = None
    """When the checkpoint was signed that covers the run."""
    is_unchecked: bool = False
    """Nothing is wrong with it, but a key that it is signed with was not given."""

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


def export(index: Index, line: RunLine) -> dict[str, Any]:
    """The receipt of a run, as plain data for JSON.

    Raises:
        BadInput: no checkpoint covers the run: it is under way, or its log was never signed after it.
        AuditError: its records are damaged.
    """
    own = index.records_of(line)
    if not own:
        raise AuditError(f"run {line.id} has no records in {index.directory}")
    start = own[0].record.fields
    digests = [digest for name in ("terms", "tools") if (digest := start[name])]
    common = [found for digest in digests if (found := index.common_record(line.chain, digest)) is not None]
    return {
        "format": FORMAT,
        "log": layout.log_id(index.directory),
        "chain": line.chain,
        "run": index.load(line).to_dict(),
        "ways": [_way(index.directory, line, [each]) for each in common] + [_way(index.directory, line, own)],
    }


def _way(directory: Path, line: RunLine, shown: list[Located]) -> dict[str, Any]:
    """Every record from the first of some to the checkpoint after the last of them."""
    links = {found.frame.link for found in shown}
    steps: list[dict[str, str]] = []
    for found in _from(directory / line.chain, shown[0]):
        is_end = found.record.kind == records.CHECKPOINT and found.record.seq > shown[-1].record.seq
        steps.append(_step(found, is_end or found.frame.link in links))
        if is_end:
            return {"before": shown[0].frame.before.hex(), "first_seq": shown[0].record.seq, "records": steps}
    raise layout.BadInput(f"no checkpoint covers run {line.id} yet; it takes a second, or its writer was killed")


def _from(chain: Path, first: Located) -> Iterable[Located]:
    for number, segment in layout.segments(chain).items():
        if number == first.place.segment:
            yield from read_segment(segment, chain.name, number, first.place.offset)
        elif number > first.place.segment:
            yield from read_segment(segment, chain.name, number)


def _step(found: Located, is_shown: bool) -> dict[str, str]:
    if is_shown:
        return {"body": base64.b64encode(found.frame.body).decode("ascii")}
    return {"sha256": frames.body_digest(found.frame.body).hex()}


def write(receipt: Mapping[str, Any], path: str | Path) -> None:
    """Write a receipt to a file.

    Raises:
        BadInput: it cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(receipt, indent=1) + "\n", encoding="ascii")
    except OSError as exc:
        raise layout.BadInput(f"cannot write {path}: {exc.strerror}") from exc


def read(path: str | Path) -> dict[str, Any]:
    """A receipt from a file.

    Raises:
        BadInput: it cannot be read, or is none.
    """
    try:
        receipt = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise layout.BadInput(f"cannot read a receipt from {path}: {exc}") from exc
    if not isinstance(receipt, dict) or receipt.get("format") != FORMAT:
        raise layout.BadInput(f"{path} is no receipt of a run")
    return receipt


def needs_shared_key(receipt: Mapping[str, Any]) -> bool:
    """True when only those can check it who could have signed it: the key is an HMAC key."""
    last = records.parse(base64.b64decode(receipt["ways"][-1]["records"][-1]["body"]))
    return algorithm_of(last.fields["signature"]) == HMAC


def check(receipt: Mapping[str, Any], verifiers: Iterable[Verifier]) -> ReceiptCheck:
    """Say whether a receipt holds what was recorded, by its records and the signature over them alone."""
    problems: list[str] = []
    wanted: list[str] = []
    keys = by_id(verifiers)
    try:
        ways = [_walk(way, str(receipt["chain"])) for way in receipt["ways"]]
        for way in ways:
            if not (lack := _lacking_key(way[-1], keys)):
                problems += _check_signature(str(receipt["log"]), way[-1], keys)
            elif lack not in wanted:
                wanted.append(lack)
        run = _run_in(ways)
        last = ways[-1][-1].record
        problems += _check_whole(run)
        if json.loads(json.dumps(run.to_dict())) != receipt["run"]:
            problems.append("what it says in words is not what its records say")
        said = (*wanted, *problems)
        return ReceiptCheck(
            not said, run, said, last.fields["key"], last.at_ns, is_unchecked=bool(wanted) and not problems
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as exc:
        return ReceiptCheck(False, None, (*wanted, *problems, f"it is not whole: {type(exc).__name__} {exc}"))


def _walk(way: Mapping[str, Any], chain: str) -> list[Located]:
    """The records shown on a way, linked anew.

    Raises:
        ValueError: they are not such records.
    """
    link = bytes.fromhex(way["before"])
    found: list[Located] = []
    for seq, step in enumerate(way["records"], start=int(way["first_seq"])):
        before = link
        if "body" not in step:
            link = frames.link_of_digest(before, bytes.fromhex(step["sha256"]))
            continue
        body = base64.b64decode(step["body"], validate=True)
        link = frames.link(before, body)
        record = records.parse(body)
        if record.seq != seq or not records.is_canonical(record):
            raise ValueError(f"record {seq} is not where it was written")
        found.append(Located(RecordLocation(chain, 0, 0), record, frames.Frame(0, before, body, link)))
    return found


def _run_in(ways: list[list[Located]]) -> RecordedRun:
    """The run whose records these are.

    Raises:
        ValueError: they are of none, or of several.
    """
    shown = [found for way in ways for found in way]
    common = {
        found.record.fields["digest"]: found.record.fields
        for found in shown
        if found.record.kind in (records.TOOLS, records.TERMS)
    }
    own = [found for found in shown if found.record.run]
    run = assemble(own, common)
    if run is None or {found.record.run for found in own} != {run.seq}:
        raise ValueError("it does not hold the records of one run")
    return run


def _check_whole(run: RecordedRun) -> list[str]:
    """A record of the run could be passed off as somebody else's by showing its digest alone."""
    if not run.end:
        return []
    made = run.end["calls"][0]
    if len(run.calls) != made:
        return [f"it shows {len(run.calls)} of the run's {made} calls"]
    return [f"it does not show how call {call.number} ended" for call in run.calls if not call.is_finished][:1]


def _lacking_key(last: Located, keys: Mapping[str, Verifier]) -> str:
    """Which key it takes to check a signature, where that was not given; empty where nothing is lacking."""
    said = last.record.fields
    if last.record.kind != records.CHECKPOINT or said["key"] in keys:
        return ""
    return f"it could not be checked: it is signed with {key_wanted(said['key'], said['signature'])}"


def _check_signature(log: str, last: Located, keys: Mapping[str, Verifier]) -> list[str]:
    record = last.record
    if record.kind != records.CHECKPOINT:
        return ["it does not end with a checkpoint"]
    said = record.fields
    statement = checkpoint_statement(log, last.place.chain, record.seq, record.at_ns, last.frame.before, said["reason"])
    is_valid = keys[said["key"]].is_valid(statement, said["signature"])
    return [] if is_valid else ["its records are not what was signed"]
