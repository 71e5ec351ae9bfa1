"""The events of a record: their kinds, their canonical encoding, and the hash that links each to the one before.

A body is msgpack of the kind's fields in order; `shapes` has the table of kinds and fields. The hash of an event is
over the hash before it, the number of its run, and a digest of everything else with a salt. So a receipt can show
number and digest of an event of another run, which says nothing of it, and cannot pass one of its own run off as
another's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from toolcell.audit.shapes import MAX_INTEGER, SHAPES, anything
from toolcell.support.packing import Unrecordable, pack_fields, thread_packer, unpack

OPENED = "opened"
PRUNED = "pruned"
RUN_STARTED = "run_started"
CALL_STARTED = "call_started"
CALL_ENDED = "call_ended"
RUN_ENDED = "run_ended"
KEY_CHANGED = "key_changed"

FIELDS: Final = {kind: tuple(shapes) for kind, shapes in SHAPES.items()}
"""Fields of each kind's body, in order."""

RUN_KINDS: Final = frozenset({RUN_STARTED, CALL_STARTED, CALL_ENDED, RUN_ENDED})

GENESIS: Final = bytes(32)
"""The hash before the first event of a chain."""
SALT_BYTES: Final = 16

_sha256 = hashlib.sha256


@dataclass(slots=True)  # not frozen: making one would take several times as long
class StoredEvent:
    """One event as it is stored. `is_intact` and `fields_of` say whether it is one that toolcell wrote."""

    chain: str
    """The writer's: each process that opens a record writes its own chain."""
    seq: int
    """Number in its chain, from 1."""
    run: int
    """Seq of the run's first event; 0 where it belongs to no run."""
    kind: str
    at_ns: int
    """Wall clock, since the epoch."""
    salt: bytes
    body: bytes
    previous_hash: bytes
    record_hash: bytes

    @property
    def digest(self) -> bytes:
        """Stands for the event in its hash."""
        return event_digest(self.chain, self.seq, self.run, self.kind, self.at_ns, self.salt + self.body)

    @property
    def is_intact(self) -> bool:
        """True when its hash fits what it says."""
        return hash_digest(self.previous_hash, self.run, self.digest) == self.record_hash

    @property
    def fields(self) -> dict[str, Any]:
        """The body by name, each field of its shape.

        Raises:
            ValueError: no writer writes such a body.
        """
        return fields_of(self.kind, self.body)


def event_digest(chain: str, seq: int, run: int, kind: str, at_ns: int, salted_body: bytes) -> bytes:
    """Return the digest of everything in an event but the hash before it."""
    head: bytes = thread_packer.pack((chain, seq, run, kind, at_ns))
    return _sha256(head + salted_body).digest()


def hash_digest(previous_hash: bytes, run: int, digest: bytes) -> bytes:
    """Return the hash of an event of which only the run and the digest are known."""
    return _sha256(previous_hash + run.to_bytes(8, "big") + digest).digest()


# Reading

COLUMNS: Final[dict[str, type]] = {
    "writer": str, "n": int, "run": int, "kind": str, "at": int, "salt": bytes, "body": bytes, "prev": bytes,
    "hash": bytes,
}  # fmt: skip
"""Columns of the table of events, and their types."""
_TYPES: Final = tuple(COLUMNS.values())
SCANNED: Final = ", ".join([*COLUMNS][1:])
"""What is read of the events of one writer."""
SCANNED_TYPES: Final = tuple(bytearray if each is str else each for each in _TYPES[1:])
"""The types of these columns as `ChainCheck` takes them: text is a `bytearray`, not decoded, so that it is no blob."""
KIND_OF: Final = {kind.encode(): kind for kind in FIELDS}


def event_of(row: tuple[Any, ...]) -> StoredEvent:
    """Return the event in a row of the table: a column holds whatever somebody put there.

    Raises:
        ValueError: a column is of another type or size than a writer writes.
    """
    if tuple(map(type, row)) != _TYPES:
        raise ValueError(WRONG_TYPE)
    event = StoredEvent(*row)
    check_place(event.seq, event.run, event.kind, event.at_ns)
    if len(event.previous_hash) != 32 or len(event.salt) != SALT_BYTES:
        raise ValueError(WRONG_SIZE)
    return event


WRONG_TYPE: Final = "a column of an event has another type"
WRONG_SIZE: Final = "a hash or salt of an event has another size"


def check_place(seq: int, run: int, kind: str | None, at_ns: int) -> None:
    """Check the numbers of an event.

    Raises:
        ValueError: no writer writes such an event.
    """
    if not (0 < seq <= MAX_INTEGER and 0 <= run <= seq and 0 <= at_ns <= MAX_INTEGER):
        raise ValueError("a number of an event is out of range")
    if kind not in FIELDS or (kind in RUN_KINDS) != (run > 0):
        raise ValueError(f"an event of kind {kind!r:.40} in run {run}")
    if (kind == RUN_STARTED) != (run == seq):
        raise ValueError(f"event {seq} claims to be of run {run}")


CHECKED: Final = {
    kind: tuple(
        (index, name, frozenset(type(each) for each in ("", b"", None, True) if fits(each)), fits)
        for index, (name, fits) in enumerate(shapes.items())
        if fits is not anything
    )
    for kind, shapes in SHAPES.items()
}
"""Kind of an event to the fields that have a shape: position, name, types of which every value fits, shape."""


def fields_of(kind: str, body: bytes) -> dict[str, Any]:
    """Decode a body, and check that this program writes such a one.

    Raises:
        ValueError: it does not encode to itself again, or a field has another shape.
    """
    values = signed_values_of(kind, body)
    if not _is_canonical(values, body):
        raise ValueError(f"the body of a {kind} was not written by this program")
    if type(values[-1]) is Unrecordable:  # a writer's own: it holds what could not be encoded
        values[-1] = {"unrecordable": values[-1].text}
    for index, name, fitting, fits in CHECKED[kind]:
        if type(values[index]) not in fitting and not fits(values[index]):
            raise ValueError(f"the {name} of a {kind} is a {type(values[index]).__name__} of another shape")
    return dict(zip(FIELDS[kind], values, strict=True))


def signed_values_of(kind: str, body: bytes) -> list[Any]:
    """Decode a body that is covered by a signature, as the values of its fields: who has the key wrote it.

    Raises:
        ValueError: it is not a list of the fields.
    """
    values: list[Any] = unpack(body)
    if type(values) is not list or len(values) != len(FIELDS[kind]):
        raise ValueError(f"the body of a {kind} is not a list of its fields")
    return values


def _is_canonical(values: list[Any], body: bytes) -> bool:
    try:  # the fields, packed together, are the same bytes; one that needs a conversion cannot be packed
        return bool(thread_packer.pack(values) == body)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return pack_fields(tuple(values)) == body
