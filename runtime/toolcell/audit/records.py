"""How records are encoded, in the one canonical way. `shapes` has the table of their kinds and fields.

A body is seq, at and run (8 bytes each, big-endian), the kind's number (1 byte), and content: msgpack of the kind's
fields in order. Records of runs end in a salt, so that the digest of a body tells nothing of it. `packing.pack` is the
only way to write a content: bytes that do not encode to themselves again were not written here. This module knows
nothing of files, keys or redaction.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from toolcell.audit.format import REDACTED_BODY
from toolcell.audit.shapes import MAX_INTEGER, SHAPES, anything
from toolcell.support.packing import Unrecordable, pack_fields, thread_packer, unpack

SEGMENT = "segment"
OPENED = "opened"
CHECKPOINT = "checkpoint"
PRUNED = "retired"
TOOLS = "tools"
SETTINGS = "terms"
RUN_STARTED = "run_started"
CALL_STARTED = "call_started"
CALL_ENDED = "call_ended"
RUN_ENDED = "run_ended"
REDACTED = "redacted"
KEY_CHANGED = "key_changed"

FIELDS: Final = {kind: tuple(shapes) for kind, shapes in SHAPES.items()}
"""Fields of each kind's content, in order."""

NUMBERS: Final = {kind: number for number, kind in enumerate(SHAPES, start=1)}

_KINDS: Final = {number: kind for kind, number in NUMBERS.items()}
HEAD: Final = struct.Struct(">QQQB")

RUN_KINDS: Final = frozenset({RUN_STARTED, CALL_STARTED, CALL_ENDED, RUN_ENDED})
"""Kinds whose records are salted. Their content could be removed once, and logs in which it was still verify."""

SALTED: Final = 0x80
"""This bit of the kind's number says that a salt ends the body."""

REDACTED_HEAD: Final = struct.Struct(">32sHI")
"""Beginning of a redacted body, after its head: digest of what was there, bits of what was removed, size of what is
left."""

SALT_BYTES: Final = REDACTED_HEAD.size
"""As long as what a redacted record has in addition: so what is left of a record always fits into its place."""


REMOVABLE: Final = ("source", "inputs", "files", "who", "args", "results", "value", "output", "error")
"""What older versions could remove from a recorded run. The order is part of the format: a redacted record holds one
bit for each."""

_REMOVED_NOTES: Final[dict[str, dict[str, str]]] = {
    RUN_STARTED: {"source": "source_cut", "inputs": "inputs_cut", "files": "files_cut", "who": "who_cut"},
    CALL_STARTED: {"args": "args_cut"},
    CALL_ENDED: {"results": "value_cut"},
    RUN_ENDED: {
        "files": "files_cut",
        "value": "value_cut",
        "source": "source_cut",
        "output": "logs_cut",
        "error": "error_cut",
    },
}
"""Kind of a record and part, by the name of the note that says that the part was removed."""

WHY: Final = "redacted"


@dataclass(slots=True)  # not frozen: making one would take several times as long
class Record:
    """One decoded record."""

    seq: int
    at_ns: int
    """Wall clock when the record was written, since the epoch."""
    kind: str
    run: int
    """Seq of the run's first record. 0: the record belongs to no run."""
    content: bytes
    fields: dict[str, Any]
    """The content by name. Each field has its shape, so readers need not look again."""
    original: bytes = b""
    """Digest of the body before it was redacted; empty for a record as it was written."""


# Encoding


def encode_body(seq: int, at_ns: int, run: int, kind: str, content: bytes, salt: bytes = b"") -> bytes:
    """Encode a record whose content is encoded already."""
    return HEAD.pack(seq, at_ns, run, NUMBERS[kind] | (SALTED if salt else 0)) + content + salt


def parse(body: bytes) -> Record:
    """Decode a body.

    Raises:
        ValueError: it is not a record, or a field of it holds what no writer writes there.
    """
    if len(body) < HEAD.size:
        raise ValueError("too short for a record")
    seq, at_ns, run, number = HEAD.unpack_from(body)
    kind, flags = _KINDS.get(number & ~REDACTED_BODY, ""), number & REDACTED_BODY
    if not kind or (flags and kind not in RUN_KINDS):
        raise ValueError(f"unknown kind {number}")
    if flags == REDACTED_BODY:
        return _parse_redacted(body, seq, at_ns, run, kind)
    if flags == 0x40 or (flags and len(body) < HEAD.size + SALT_BYTES):
        raise ValueError(f"a {kind} with a salt of another size")
    content = body[HEAD.size : len(body) - SALT_BYTES] if flags else body[HEAD.size :]
    return _parsed(seq, at_ns, run, kind, content)


def _parse_redacted(body: bytes, seq: int, at_ns: int, run: int, kind: str) -> Record:
    if len(body) < HEAD.size + REDACTED_HEAD.size:
        raise ValueError("too short for a redacted record")
    original, bits, size = REDACTED_HEAD.unpack_from(body, HEAD.size)
    rest = body[HEAD.size + REDACTED_HEAD.size :]
    if rest[size:].strip(b"\0") or size > len(rest):
        raise ValueError("something is left behind a redacted record")
    record = _parsed(seq, at_ns, run, kind, rest[:size])
    fields = _with_notes(kind, record.fields, _removed_parts(kind, bits))
    return replace(record, fields=fields, original=original)


def _with_notes(kind: str, fields: Mapping[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a redacted record as readers get them: `more` notes what was removed."""
    notes = {_REMOVED_NOTES[kind][part]: {"why": WHY} for part in parts}
    return dict(fields) | {"more": (fields["more"] or {}) | notes}


def _removed_parts(kind: str, bits: int) -> tuple[str, ...]:
    """Return the parts that bits stand for.

    Raises:
        ValueError: there are none, or a record of this kind does not have them.
    """
    parts = tuple(part for number, part in enumerate(REMOVABLE) if bits >> number & 1)
    if not parts or bits >> len(REMOVABLE) or not _REMOVED_NOTES.get(kind, {}).keys() >= set(parts):
        raise ValueError(f"a {kind} has no parts {bits:#x} that could have been removed")
    return parts


def _parsed(seq: int, at_ns: int, run: int, kind: str, content: bytes) -> Record:
    if max(seq, at_ns, run) > MAX_INTEGER:
        raise ValueError(f"the numbers of a {kind} are too large")
    if kind == RUN_STARTED and run != seq:
        raise ValueError(f"record {seq} claims to start run {run}")
    return Record(seq, at_ns, kind=kind, run=run, content=content, fields=_fields_of(kind, content))


CHECKED: Final = {
    kind: tuple(
        (index, name, frozenset(type(each) for each in ("", b"", None, True) if fits(each)), fits)
        for index, (name, fits) in enumerate(shapes.items())
        if fits is not anything
    )
    for kind, shapes in SHAPES.items()
}
"""Kind of a record to the fields that have a shape: position, name, types of which every value fits, shape."""


def _fields_of(kind: str, content: bytes) -> dict[str, Any]:
    values, names = unpack(content), FIELDS[kind]
    if type(values) is not list or len(values) > len(names):
        raise ValueError(f"the content of a {kind} is not a list of its fields")
    if len(values) < len(names):
        values += [None] * (len(names) - len(values))
    if type(values[-1]) is Unrecordable:  # a writer's own: it holds what could not be encoded
        values[-1] = {"unrecordable": values[-1].text}
    for index, name, fitting, fits in CHECKED[kind]:
        if type(values[index]) not in fitting and not fits(values[index]):
            raise ValueError(f"the {name} of a {kind} is a {type(values[index]).__name__} of another shape")
    return dict(zip(names, values, strict=True))


def is_canonical(record: Record) -> bool:
    """True when `pack_fields` would write this content in the same way."""
    content = record.content
    try:  # the fields, packed together, are the same bytes unless one of them needs a conversion
        if thread_packer.pack([*record.fields.values()][: content[0] & 0xF]) == content:
            return True
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    return pack_fields(tuple(unpack(content))) == content
