"""Answers of at most 32 KiB: records are halved until they fit, and the answer says that it was cut and of how many."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final

from toolcell.builtin.tables.reading import Record

MAX_ANSWER_BYTES: Final = 32 * 1024
MAX_CELL_DEPTH: Final = 32
_FRAME_BYTES: Final = 200
"""What is around the records: the other keys, counts and brackets."""


class Collector:
    """Keeps those rows that can be in an answer, and counts the others. Memory is bounded by the answer's size."""

    def __init__(self, limit: int | None = None, room: int = MAX_ANSWER_BYTES - _FRAME_BYTES) -> None:
        self.count = 0
        """All rows, also those beyond `limit`."""
        self._limit = limit
        self._room = room
        self._rows: list[Record] = []
        self._is_full = False

    def take(self, rows: Iterable[Record]) -> None:
        """Take the next rows; count those for which there is no room."""
        for row in rows:
            self.count += 1
            if self._is_full or (self._limit is not None and len(self._rows) >= self._limit):
                continue
            plain = plain_cells(row)
            self._room -= size_of(plain) + 2
            self._is_full = self._room < 0
            if not self._is_full:
                self._rows.append(plain)

    def records(self) -> list[Record]:
        kept = self.count if self._limit is None else min(self.count, self._limit)
        while kept > len(self._rows):
            kept //= 2
        return self._rows[:kept]


def answer(name: str, rows: list[Record], count: int, **more: Any) -> dict[str, Any]:
    """Return `{name: rows, ..., "count": count}`, with `truncated` and `total` when rows are missing."""
    made: dict[str, Any] = {name: rows, **more, "count": count}
    return made | ({"truncated": True, "total": count} if len(rows) < count else {})


def size_of(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())


def plain_cells(row: Record) -> Record:
    """Return a row that is valid JSON for every reader: files have numbers and characters that are not."""
    return {_text(name): _plain(cell, 0) for name, cell in row.items()}


def _plain(cell: Any, depth: int) -> Any:
    kind = type(cell)
    if kind is str:
        return _text(cell)
    if kind is float:
        return cell if math.isfinite(cell) else None
    if kind is int:
        return cell if -(2**63) <= cell < 2**63 else str(cell)
    if kind is list or kind is dict:
        if depth >= MAX_CELL_DEPTH:
            return "..."
        if kind is list:
            return [_plain(each, depth + 1) for each in cell]
        return {_text(name): _plain(each, depth + 1) for name, each in cell.items()}
    return cell


def _text(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
