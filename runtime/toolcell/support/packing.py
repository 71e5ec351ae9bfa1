"""Canonical encoding of what is written down, in the audit log and in journals, and its digests.

`pack` takes any value and never raises: equal values give equal bytes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any, Final

import msgpack

from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.tables import TABLES, Array, Table, from_bytes

_BIG_INT, _STAND_IN, _TABLE = 1, 2, 3
"""Extension types. A guest cannot put one into a record: what it sends has none but the empty place of a table."""

_MAX_REPR_CHARS = 200


@frozen
class Unrecordable:
    """Stands for a value that cannot be recorded."""

    type: str
    text: str


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
    return joined_fields([*map(pack, fields)])


def joined_fields(parts: Sequence[bytes]) -> bytes:
    """Return a content whose fields are encoded already."""
    return bytes([0x90 | len(parts)]) + b"".join(parts)


def unpack(data: bytes) -> Any:
    """Decode what `pack` wrote.

    Raises:
        ValueError: `pack` did not write it.
    """
    try:
        return msgpack.unpackb(data, unicode_errors="surrogatepass", ext_hook=_decode_extension, strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as exc:
        raise ValueError(f"not a record: {type(exc).__name__} {exc}") from exc


# Values that are not plain data


def _convert(value: Any) -> Any:
    if isinstance(value, int):
        return msgpack.ExtType(_BIG_INT, str(value).encode())
    if isinstance(value, Unrecordable):
        return _stand_in(value.type, value.text)
    try:
        plain = value if type(value) in TABLES else to_plain(value)
        return msgpack.ExtType(_TABLE, plain.to_bytes()) if isinstance(plain, Array | Table) else plain
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
        kind, text = msgpack.unpackb(data, unicode_errors="surrogatepass", ext_hook=_refuse_extension)
        if type(kind) is str and type(text) is str:
            return Unrecordable(kind, text)
    if code == _TABLE:
        return from_bytes(data)
    raise ValueError(f"extension type {code}")


def _refuse_extension(code: int, data: bytes) -> Any:
    """Refuse an extension inside another: to decode one in each of many layers would copy the data that often."""
    raise ValueError(f"extension type {code} inside another")


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
