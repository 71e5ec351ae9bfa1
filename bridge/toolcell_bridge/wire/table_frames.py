"""Frames of messages with arrays and tables: the message, the descriptions, and all buffers as they are.

    0xC1 | length of the message | length of the descriptions | message | descriptions | padding | buffers

0xC1 begins nothing in msgpack. Where an array or a table is in a value, the message has an empty extension of type 1. A
buffer begins at a multiple of eight bytes of the frame, so that whoever reads it can use it where it is.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, Final

from toolcell_bridge.wire.columns import Buffer, ColumnReader, padding
from toolcell_bridge.wire.errors import RemoteProtocolError, ValueTooLarge
from toolcell_bridge.wire.framing import FRAME_CURE, HEADER_BYTES, Part
from toolcell_bridge.wire.plain import TABLE, check_plain_in_steps, pack
from toolcell_bridge.wire.tables import AnyTable, padded, read_table
from toolcell_bridge.wire.unpacking import unpack_in_steps

WITH_TABLES: Final = b"\xc1"

PART_BYTES: Final = 64 * 1024
"""What is smaller is joined with its neighbours before it is written."""

_HEAD_BYTES: Final = 9


def frame_with_tables(message: bytes, tables: Sequence[AnyTable], max_frame_bytes: int) -> list[Part]:
    """Return the frame of a packed message and the tables in it, in parts: large buffers are not copied.

    Raises:
        ValueTooLarge: the other end would refuse it.
    """
    headers = pack([each.header() for each in tables], "the description of a table")
    length = _HEAD_BYTES + len(message) + len(headers)
    gap = padding(HEADER_BYTES + length)
    length += gap + sum(each.nbytes for each in tables)
    if length > max_frame_bytes:
        raise ValueTooLarge("message", length, max_frame_bytes, cure=FRAME_CURE)
    head = [length.to_bytes(HEADER_BYTES, "big"), WITH_TABLES]
    head += [len(part).to_bytes(4, "big") for part in (message, headers)]
    return gathered([*head, message, headers, bytes(gap), *padded(tables)])


def gathered(pieces: Iterable[Part]) -> list[Part]:
    """Join small pieces to their neighbours, so that each part is worth a system call."""
    parts: list[Part] = []
    small: list[Part] = []
    for piece in pieces:
        if len(piece) < PART_BYTES:
            small.append(piece)
            continue
        if small:
            parts.append(b"".join(small))
            small = []
        parts.append(piece)
    if small or not parts:
        parts.append(b"".join(small))
    return parts


def unpack_with_tables(body: Buffer, most: int, deepest: int) -> Generator[None, None, object]:
    """Unpack the body of such a frame, in steps. The tables keep the memory of the body.

    Raises:
        RemoteProtocolError, ValueError: it contradicts itself, or holds more than `most` elements.
    """
    start = _HEAD_BYTES + int.from_bytes(body[1:5], "big")
    end = start + int.from_bytes(body[5:9], "big")
    headers: Any = yield from unpack_in_steps(bytes(body[start:end]), most, deepest)
    if type(headers) is not list:
        raise RemoteProtocolError("no list of descriptions")
    yield from check_plain_in_steps(headers, "descriptions", 0, most, deepest)
    reader = ColumnReader(memoryview(body)[end + padding(HEADER_BYTES + end) :])
    tables: list[AnyTable] = []
    for header in headers:
        yield
        tables.append((yield from read_table(header, reader)))
    reader.check_end()
    tables.reverse()

    def next_table(code: int, data: bytes) -> AnyTable:
        if code != TABLE or data or not tables:
            raise RemoteProtocolError(f"extension type {code}")
        return tables.pop()

    values = yield from unpack_in_steps(bytes(body[_HEAD_BYTES:start]), most, deepest, next_table)
    if tables:
        raise RemoteProtocolError(f"{len(tables)} tables that are in no value")
    return values
