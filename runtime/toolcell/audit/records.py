"""What records say: one table of kinds and their fields, and their canonical encoding.

A body is seq, at and run (8 bytes each, big-endian), the kind's number (1 byte), and content: msgpack of the kind's
fields in order. `pack` is the only way to write a content: bytes that do not encode to themselves again were not
written here. This module knows nothing of files, keys or redaction.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from toolcell_bridge.guest.values import to_plain

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

FIELDS: Final[dict[str, tuple[str, ...]]] = {
    SEGMENT: ("format", "log", "chain", "number", "more"),
    OPENED: ("host", "pid", "toolcell", "python", "key", "algorithm", "torn", "more"),
    CHECKPOINT: ("reason", "key", "signature"),
    PRUNED: ("first", "last", "seq", "link", "reason", "more"),
    TOOLS: ("digest", "definitions", "more"),
    SETTINGS: ("digest", "limits", "policy", "isolation", "more"),
    RUN_STARTED: (
        "id", "sort", "source", "sha256", "inputs", "inputs_sha256", "files", "tools", "terms", "lint", "seed", "clock",
        "sandbox", "who", "more",
    ),
    CALL_STARTED: ("number", "call", "parent", "tool", "origin", "line", "args", "more"),
    CALL_ENDED: ("number", "status", "duration_us", "value", "code", "more"),
    RUN_ENDED: (
        "outcome", "value", "has_value", "value_sha256", "logs", "logs_bytes", "files", "error", "usage", "calls",
        "more",
    ),
}  # fmt: skip
"""Fields of each kind's content, in order. The names are part of the format. New fields go to the end; a reader gives
None to those that are missing.

`tools` and `terms` (the run settings: limits, policy, isolation) are the same for many runs, so each is recorded once
per segment, and a run names its digest. `sort` is the run's kind. `more` holds what few records of a kind have:
redactions, digests of values that were left out, coercions, agents.
"""

NUMBERS: Final[dict[str, int]] = {kind: number for number, kind in enumerate(FIELDS, start=1)}
"""A number is never given to another kind: new kinds go to the end of the table."""

_KINDS: Final = {number: kind for kind, number in NUMBERS.items()}
HEAD: Final = struct.Struct(">QQQB")

_BIG_INT, _STAND_IN = 1, 2
"""Extension types. The bridge has none, so no guest can put one into a record."""

_MAX_REPR_CHARS = 200


@dataclass(frozen=True, slots=True)
class Unrecordable:
    """Stands for a value that cannot be recorded."""

    type: str
    text: str


@dataclass(frozen=True, slots=True)
class Record:
    """One decoded record."""

    seq: int
    at_ns: int
    """Wall clock when the record was written, since the epoch."""
    kind: str
    run: int
    """Seq of the run's first record. 0: the record belongs to no run."""
    content: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """The content by name."""
        names = FIELDS[self.kind]
        values = unpack(self.content)
        return {name: values[index] if index < len(values) else None for index, name in enumerate(names)}


# Encoding


class _ThreadPacker(threading.local):
    """One packer for each thread. To make a packer costs more than most of what it packs."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer(unicode_errors="surrogatepass").pack


thread_packer: Final = _ThreadPacker()
"""`thread_packer.pack` is fast, and raises for values that `pack` converts."""


def pack(value: object) -> bytes:
    """Encode plain data. Other values are converted as for a guest, or become an `Unrecordable`."""
    try:
        packed: bytes = thread_packer.pack(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        packed = _pack_converted(value)
    return packed


def _pack_converted(value: object) -> bytes:
    try:
        packed: bytes = msgpack.Packer(unicode_errors="surrogatepass", default=_convert).pack(value)
    except (ValueError, OverflowError, RecursionError) as exc:  # nested too deep, or a conversion that fails
        packed = pack(Unrecordable(type(value).__name__, f"{type(exc).__name__}: {exc}"[:_MAX_REPR_CHARS]))
    return packed


def pack_fields(fields: tuple[Any, ...]) -> bytes:
    """Encode a content field by field: a value that cannot be recorded does not cost the other fields."""
    return bytes([0x90 | len(fields)]) + b"".join(map(pack, fields))


def unpack(data: bytes) -> Any:
    """Decode what `pack` wrote.

    Raises:
        ValueError: `pack` did not write it.
    """
    try:
        return msgpack.unpackb(data, unicode_errors="surrogatepass", ext_hook=_decode_extension, strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as exc:
        raise ValueError(f"not a record: {type(exc).__name__} {exc}") from exc


def encode_body(seq: int, at_ns: int, run: int, kind: str, content: bytes) -> bytes:
    """Encode a record whose content is encoded already."""
    return HEAD.pack(seq, at_ns, run, NUMBERS[kind]) + content


def parse(body: bytes) -> Record:
    """Decode a body. Its content is decoded when its fields are asked for.

    Raises:
        ValueError: it is not a record.
    """
    if len(body) < HEAD.size:
        raise ValueError("too short for a record")
    seq, at_ns, run, number = HEAD.unpack_from(body)
    if number not in _KINDS:
        raise ValueError(f"unknown kind {number}")
    return Record(seq, at_ns, _KINDS[number], run, body[HEAD.size :])


def is_canonical(record: Record) -> bool:
    """True when `pack_fields` would write this content in the same way."""
    try:
        values = unpack(record.content)
    except ValueError:
        return False
    fits = isinstance(values, list) and len(values) <= len(FIELDS[record.kind])
    return fits and pack_fields(tuple(values)) == record.content


def _convert(value: Any) -> Any:
    if isinstance(value, int):
        return msgpack.ExtType(_BIG_INT, str(value).encode())
    if isinstance(value, Unrecordable):
        return _stand_in(value.type, value.text)
    try:
        return to_plain(value)
    except Exception:  # whatever a stranger's class does while it is converted
        return _stand_in(type(value).__name__, _repr_of(value))


def _stand_in(kind: str, text: str) -> msgpack.ExtType:
    return msgpack.ExtType(_STAND_IN, pack([kind, text]))


def _repr_of(value: object) -> str:
    try:
        return repr(value)[:_MAX_REPR_CHARS]
    except Exception:
        return ""


def _decode_extension(code: int, data: bytes) -> Any:
    if code == _BIG_INT:
        return int(data)
    if code == _STAND_IN:
        kind, text = unpack(data)
        return Unrecordable(str(kind), str(text))
    raise ValueError(f"extension type {code}")


# Digests


def value_digest(value: Any) -> str:
    """Return the sha256 of a value as it is recorded (of its canonical msgpack), in hex."""
    return bytes_digest(pack(value))


def text_digest(text: str) -> str:
    """Return the sha256 of a text's UTF-8, in hex."""
    return bytes_digest(text.encode("utf-8", "surrogatepass"))


def bytes_digest(data: bytes) -> str:
    """Return the sha256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()
