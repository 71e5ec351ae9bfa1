"""Remove a script from a recorded run in place, as older versions did: `audit redact`. Its records still verify."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from toolcell.audit import records
from toolcell.audit.format import REDACTED_BODY, Frame, body_digest, split_segment
from toolcell.audit.log import AuditLog
from toolcell.support.packing import pack_fields

SOURCE_BIT = 1


def without_source(body: bytes) -> bytes:
    """Return the start of a run without its script, in as many bytes."""
    record = records.parse(body)
    assert record.kind == records.RUN_STARTED
    content = pack_fields(tuple((record.fields | {"source": None, "sha256": None}).values()))
    head = records.HEAD.pack(record.seq, record.at_ns, record.run, records.NUMBERS[record.kind] | REDACTED_BODY)
    made = head + records.REDACTED_HEAD.pack(body_digest(body), SOURCE_BIT, len(content)) + content
    assert len(made) <= len(body)
    return made.ljust(len(body), b"\0")


def start_of(path: Path, run: str) -> Frame:
    """The first record of a run."""
    pieces = (each for each in split_segment(path.read_bytes()) if isinstance(each, Frame))
    return next(each for each in pieces if records.parse(each.body).fields.get("id") == run)


def said_of(path: Path, run: str) -> tuple[Any, ...]:
    """Return the fields of the record that says that the script of a run was removed."""
    body = start_of(path, run).body
    original, left = hashlib.sha256(body).digest(), hashlib.sha256(without_source(body)).digest()
    return (path.parent.name, records.parse(body).seq, run, original, left, ["source"], "ada", "asked", {})


def overwrite(path: Path, run: str) -> None:
    """Remove the script of a run from its segment, and record it nowhere."""
    body = start_of(path, run).body
    path.write_bytes(path.read_bytes().replace(body, without_source(body)))


def redact(log: AuditLog, path: Path, run: str) -> None:
    """Remove the script of a run from its segment, with a signed record in an open log."""
    log.append(records.REDACTED, 0, said_of(path, run))
    log.checkpoint()
    overwrite(path, run)
