"""Records as rows of a database: which columns a record has, and how each is written and read."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final, TypeVar

from toolcell.builtin.stores.records import (
    Chunk,
    Document,
    Message,
    ScheduledAction,
    ScheduledRun,
    Skill,
    Vector,
)

R = TypeVar("R", Document, Chunk, Message, ScheduledAction, ScheduledRun, Skill)

_JSON: Final = frozenset({"metadata", "tools", "tags", "references"})


def vector_bytes(vector: Vector) -> bytes:
    """Shape: 32-bit floats, little-endian, as numpy reads them."""
    return struct.pack(f"<{len(vector)}f", *vector)


def columns(kind: type[Any], *without: str) -> list[str]:
    """Return the columns of a kind of record, in the order of `to_row`."""
    return [each.name for each in fields(kind) if each.name not in without]


def quoted(names: Sequence[str]) -> str:
    """Return column names for SQL. `references` is a word of SQL, so all are quoted."""
    return ", ".join(f'"{name}"' for name in names)


def to_row(record: Any, *without: str) -> tuple[Any, ...]:
    """Return a record's values as a database takes them."""
    return tuple(_to_column(name, getattr(record, name)) for name in columns(type(record), *without))


def _to_column(name: str, value: Any) -> Any:
    if name == "embedding":
        return None if value is None else vector_bytes(value)
    if name in _JSON:
        return json.dumps(value if isinstance(value, tuple | list) else dict(value), ensure_ascii=False)
    return int(value) if isinstance(value, bool) else value


def from_row(kind: type[R], row: Sequence[Any], *without: str) -> R:
    """Return the record of a row whose columns are `columns(kind, *without)`."""
    names = columns(kind, *without)
    return kind(**{name: _from_column(name, value) for name, value in zip(names, row, strict=True)})


def _from_column(name: str, value: Any) -> Any:
    if name == "embedding":
        return None if value is None else list(struct.unpack(f"<{len(value) // 4}f", value))
    if name in _JSON:
        return json.loads(value)
    return bool(value) if name == "enabled" else value
