"""Receipts: one run in one file that anybody with the verification key can check.

A receipt holds the run's events as they were written, the settings and tools that they name by digest, and a proof of
inclusion: the hash chain from the run's first event to the next signed checkpoint. Events of other runs in between
appear as run number and digest only. The number is part of an event's hash, so no event of the run can be hidden as one
of another. The readable summary in a receipt is checked against the events.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.keys import HMAC, Verifier, algorithm_of, by_id, key_wanted
from toolcell.audit.query import Index, RunSummary, readable, shared_digests, shared_fields
from toolcell.audit.reader import RecordedRun, assemble
from toolcell.audit.records import StoredEvent, event_of, hash_digest
from toolcell.audit.signatures import Head
from toolcell.errors import AuditError, BadInput
from toolcell.support.packing import bytes_digest

FORMAT: Final = "toolcell receipt 3"
_MEMBERS: Final = frozenset({"format", "run", "before", "first_seq", "events", "blobs", "head"})


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
        BadInput: no checkpoint covers the run: it still runs, or its record was not signed after it.
        AuditError: its events are damaged.
    """
    with readable(summary):
        return _export(index, summary)


def _export(index: Index, summary: RunSummary) -> dict[str, Any]:
    own = index.events_of(summary)
    if not own or own[0].kind != records.RUN_STARTED:
        raise AuditError(f"run {summary.id} does not begin with its own event in {index.place}")
    head = index.head_after(summary.chain, own[-1].seq)
    if head is None:
        raise BadInput(f"no checkpoint covers run {summary.id} yet; it takes a second, or its writer was killed")
    blobs = {digest: index.blob(digest) for _, digest in shared_digests(own)}
    steps = index.events_between(summary.chain, own[0].seq, head.seq)
    return {
        "format": FORMAT,
        "run": index.load(summary).to_dict() | {"id": own[0].fields["id"]},  # as its event says
        "before": own[0].previous_hash.hex(),
        "first_seq": own[0].seq,
        "events": [_step(event, event.run == summary.seq) for event in steps],
        "blobs": {digest: _text(content) for digest, content in blobs.items() if content is not None},
        "head": head.to_dict(),
    }


def _step(event: StoredEvent, is_shown: bool) -> dict[str, Any]:
    if not is_shown:
        return {"run": event.run, "sha256": event.digest.hex()}
    return {"kind": event.kind, "at_ns": event.at_ns, "salt": event.salt.hex(), "body": _text(event.body)}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


MAX_NAME_CHARS: Final = 100


def file_name(run_id: str) -> str:
    """Return the name of the file for a run's receipt. The id is from a record, and names no other directory."""
    return f"{_NOT_IN_NAMES.sub('_', run_id)[:MAX_NAME_CHARS] or '_'}.receipt.json"


_NOT_IN_NAMES: Final = re.compile(r"^[.-]|[^A-Za-z0-9._-]")


def is_one(path: Path) -> bool:
    """True when a file begins like JSON: it is a receipt, and not a record."""
    try:
        with open(path, "rb") as file:
            return file.read(64).lstrip()[:1] == b"{"
    except OSError:
        return False


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
    return algorithm_of(bytes.fromhex(receipt["head"]["signature"])) == HMAC


def check(receipt: Mapping[str, Any], verifiers: Iterable[Verifier]) -> ReceiptCheck:
    """Check a receipt, using only its events and their signature."""
    problems: list[str] = []
    missing_keys: list[str] = []
    try:
        head = Head.from_dict(receipt["head"])
        shown, last_hash = _follow(receipt, head.chain)
        if (head.seq, head.record_hash) != (receipt["first_seq"] + len(receipt["events"]) - 1, last_hash):
            problems.append("its events are not those that were signed")
        if (verifier := by_id(verifiers).get(head.key)) is None:
            missing_keys.append(f"it could not be checked: it is signed with {key_wanted(head.key, head.signature)}")
        elif not head.is_signed_by(verifier):
            problems.append("its signature is not of this checkpoint")
        run = _assemble_run(shown, receipt["blobs"])
        problems += _find_unsigned(receipt, head, shown)
        problems += _find_hidden(receipt, run.seq)
        problems += _check_calls(run)
        plain = json.loads(json.dumps(run.to_dict()))
        if json.dumps(plain, sort_keys=True) != json.dumps(receipt["run"], sort_keys=True):  # else 1 equals true
            problems.append("what it says in words is not what its events say")
        found = (*missing_keys, *problems)
        return ReceiptCheck(
            not found,
            run,
            problems=found,
            key=head.key,
            signed_ns=head.at_ns,
            is_unchecked=bool(missing_keys) and not problems,
            missing=() if found else tuple(_find_missing(run)),
        )
    except (
        KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError, AuditError
    ) as exc:  # fmt: skip
        return ReceiptCheck(False, None, (*missing_keys, *problems, f"it is not whole: {type(exc).__name__} {exc}"))


def _follow(receipt: Mapping[str, Any], chain: str) -> tuple[list[StoredEvent], bytes]:
    """Return the events that are shown, and the hash of the last one of all, shown or not.

    Raises:
        ValueError: an event is malformed.
    """
    record_hash, first = bytes.fromhex(receipt["before"]), receipt["first_seq"]
    if type(first) is not int or record_hash.hex() != receipt["before"]:
        raise ValueError(f"it begins with {first!r:.40} after {receipt['before']!r:.80}")
    found: list[StoredEvent] = []
    for seq, step in enumerate(receipt["events"], start=first):
        previous = record_hash
        if "body" not in step:
            record_hash = hash_digest(previous, step["run"], bytes.fromhex(step["sha256"]))
            continue
        body = base64.b64decode(step["body"], validate=True)
        row = (chain, seq, first, step["kind"], step["at_ns"], bytes.fromhex(step["salt"]), body, previous, b"")
        event = event_of(row)
        event.record_hash = record_hash = hash_digest(previous, event.run, event.digest)
        found.append(event)
    return found, record_hash


def _assemble_run(shown: list[StoredEvent], blobs: Mapping[str, str]) -> RecordedRun:
    """Build the run from its events and blobs.

    Raises:
        ValueError: they are the events of no run, or a blob is not what its digest says.
    """
    shared = {}
    named = shared_digests(shown)
    if blobs.keys() - {digest for _, digest in named}:
        raise ValueError("it holds a blob that the run does not name")
    for name, digest in named:
        if digest in blobs:
            content = base64.b64decode(blobs[digest], validate=True)
            if bytes_digest(content) != digest:
                raise ValueError(f"its {name} are not those of the run")
            shared[digest] = shared_fields(name, content)
    run = assemble(shown, shared)
    if run is None:
        raise ValueError("it does not hold the events of a run")
    return run


def _find_unsigned(receipt: Mapping[str, Any], head: Head, shown: list[StoredEvent]) -> Iterator[str]:
    """Find members that nothing signs: somebody who reads the file would take them for proven."""
    if extra := receipt.keys() - _MEMBERS:
        yield f"nobody signed its {_named(extra)}"
    if receipt["head"] != head.to_dict():
        yield "its head says more than was signed"
    steps = iter(shown)
    for seq, step in enumerate(receipt["events"], start=receipt["first_seq"]):
        signed = _step(next(steps), True) if "body" in step else {"run": step["run"], "sha256": step["sha256"]}
        if step != signed:
            yield f"event {seq} says more than was signed: {_named(step.keys() - signed.keys())}"


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"{name!r:.60}" for name in sorted(names)[:3]) or "spelling"


def _find_hidden(receipt: Mapping[str, Any], run: int) -> Iterator[str]:
    """Find events of the run that are hidden."""
    for seq, step in enumerate(receipt["events"], start=receipt["first_seq"]):
        if step.get("run") == run:
            yield f"event {seq} belongs to the run and is hidden"


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
