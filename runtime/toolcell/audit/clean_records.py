"""Pass over the records of a segment that are as a writer writes them: nearly all of them, and quickly.

What is passed over here is what `ChainCheck` would find nothing in. Anything else, and every record that is about the
log itself, is left to it: so this module reports nothing and decides nothing.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from toolcell.audit.format import HASH_BYTES, MAX_BODY_BYTES, OVERHEAD_BYTES, RUN
from toolcell.audit.records import CHECKED, FIELDS, HEAD, NUMBERS, RUN_KINDS, RUN_STARTED, SALT_BYTES, SALTED
from toolcell.audit.shapes import MAX_INTEGER, Shape
from toolcell.journal.frames import HEADER, INVERT
from toolcell.support.packing import thread_packer, unpack


def _empty(fits: Shape) -> frozenset[type]:
    """Return the containers that may be empty."""
    return frozenset(kind for kind in (dict, list) if fits(kind()))


_STARTED: Final = NUMBERS[RUN_STARTED] | SALTED
_SHAPES: Final = {
    NUMBERS[kind] | SALTED: (
        len(FIELDS[kind]),
        [(at, fitting, fits(0) and fits(MAX_INTEGER), _empty(fits), fits) for at, _, fitting, fits in CHECKED[kind]],
    )
    for kind in RUN_KINDS
}
"""Number of a salted kind to how many fields it has, and of those with a shape: position, types of which every value
fits, whether counts fit, types of which the empty value fits, shape. What is frequent needs no call of the shape."""

_LEAST_BYTES: Final = HEAD.size + SALT_BYTES + 1

_BEGINNING: Final = struct.Struct(f"{HEADER.format}{HASH_BYTES}s{HEAD.format[1:]}")
"""Beginning of a frame: its header, the previous hash, and the beginning of its body."""


@dataclass(frozen=True, slots=True)
class CleanRecords:
    """Records that follow each other as they should."""

    end: int
    """Offset of what comes after them."""
    hashes: list[bytes]
    """Hashes of the records, in order."""
    runs: int
    """How many of them start a run."""


def pass_clean(data: bytes, offset: int, seq: int, last_hash: bytes) -> CleanRecords:
    """Pass over the clean records from `offset` on. `seq` and `last_hash` are those of the record before them."""
    hashes: list[bytes] = []
    runs, size_of_data = 0, len(data)
    beginning_at, sha256, pack = _BEGINNING.unpack_from, hashlib.sha256, thread_packer.pack
    while offset + OVERHEAD_BYTES + _LEAST_BYTES <= size_of_data:
        size, inverted, previous_hash, number_of, at_ns, run, kind = beginning_at(data, offset)
        start = offset + HEADER.size + HASH_BYTES
        end = offset + OVERHEAD_BYTES + size
        if size ^ INVERT != inverted or not _LEAST_BYTES <= size <= MAX_BODY_BYTES or end > size_of_data:
            break
        if kind not in _SHAPES or number_of != seq + 1 or at_ns > MAX_INTEGER or run > MAX_INTEGER:
            break
        if previous_hash != last_hash or (kind == _STARTED and run != number_of):
            break
        body = data[start : start + size]
        record_hash = data[end - HASH_BYTES : end]
        if sha256(last_hash + body[RUN] + sha256(body).digest()).digest() != record_hash:
            break
        content = body[HEAD.size : -SALT_BYTES]
        count, shapes = _SHAPES[kind]
        try:
            values = unpack(content)
            if type(values) is not list or len(values) != count or pack(values) != content:
                break
        except (TypeError, ValueError, OverflowError, RecursionError):
            break
        for at, fitting, has_counts, empty, fits in shapes:  # a loop: a generator would take twice as long
            value = values[at]
            if (found := type(value)) in fitting:
                continue
            if (has_counts and found is int and 0 <= value <= MAX_INTEGER) or (found in empty and not value):
                continue
            if not fits(value):
                return CleanRecords(offset, hashes, runs)
        hashes.append(record_hash)
        runs += kind == _STARTED
        seq, last_hash, offset = number_of, record_hash, end
    return CleanRecords(offset, hashes, runs)
