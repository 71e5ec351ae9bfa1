"""Some rows of a table at a time: their columns as polars has them, and single rows as a person reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import islice
from typing import Protocol

import polars as pl

from toolcell.builtin.tables.cells import text_of_cell
from toolcell.builtin.tables.columns import ColumnBatch, text_series
from toolcell.builtin.tables.requests import Record

BATCH_ROWS = 16_384
"""Records in one batch."""


class Batch(Protocol):
    """Rows in their order."""

    def __len__(self) -> int: ...

    def column(self, name: str) -> ColumnBatch:
        """Return the column's cells; all of them are missing when there is no such column."""
        ...

    def shown(self, name: str) -> pl.Series:
        """Return the column's cells as text from which `from_shown` makes them again."""
        ...

    def records(self, indexes: Sequence[int]) -> list[Record]:
        """Return rows by column names. `indexes` ascend."""
        ...


class RecordBatch:
    """Rows that are dictionaries."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def column(self, name: str) -> ColumnBatch:
        """Return the column's cells."""
        cells = [record.get(name) for record in self._records]
        nulls = [cell is None and name in record for cell, record in zip(cells, self._records, strict=True)]
        return ColumnBatch(
            text_series(None if cell is None else text_of_cell(cell) for cell in cells),
            pl.Series(nulls, dtype=pl.Boolean),
        )

    def shown(self, name: str) -> pl.Series:
        """Return the column's cells as JSON."""
        cells = (record.get(name) for record in self._records)
        return pl.Series([None if cell is None else json.dumps(cell, default=str) for cell in cells], dtype=pl.String)

    def records(self, indexes: Sequence[int]) -> list[Record]:
        """Return rows."""
        return [self._records[index] for index in indexes]

    def mapped(self, change: Callable[[Record], Record]) -> RecordBatch:
        """Return other rows, made one from one."""
        return RecordBatch([change(record) for record in self._records])


class RowBatch:
    """Rows of CSV that are lists, of which some may be short; `names` are the columns by position."""

    def __init__(self, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._names = names
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> ColumnBatch:
        """Return the column's cells."""
        return ColumnBatch(self.shown(name))

    def shown(self, name: str) -> pl.Series:
        """Return the column's cells."""
        at = self._names.index(name) if name in self._names else len(self._names)
        return text_series(row[at] if at < len(row) else None for row in self._rows)

    def records(self, indexes: Sequence[int]) -> list[Record]:
        """Return rows."""
        return [dict(zip(self._names, self._rows[index], strict=False)) for index in indexes]


class FrameBatch:
    """Rows of CSV that polars has read, without columns that nobody asked for."""

    def __init__(self, frame: pl.DataFrame, read_rows: Callable[[Sequence[int]], list[Record]] | None = None) -> None:
        """`read_rows`: reads rows with all columns, if the frame lacks any."""
        self._frame = frame
        self._read_rows = read_rows

    def __len__(self) -> int:
        return self._frame.height

    def column(self, name: str) -> ColumnBatch:
        """Return the column's cells."""
        return ColumnBatch(self.shown(name))

    def shown(self, name: str) -> pl.Series:
        """Return the column's cells."""
        if name in self._frame.columns:
            return self._frame[name]
        return pl.repeat(None, len(self), dtype=pl.String, eager=True)

    def records(self, indexes: Sequence[int]) -> list[Record]:
        """Return rows."""
        return self._frame[list(indexes)].rows(named=True) if self._read_rows is None else self._read_rows(indexes)


def batches_of(records: Iterable[Record]) -> Generator[Batch, None, None]:
    """Return rows in batches."""
    rows = iter(records)
    while some := list(islice(rows, BATCH_ROWS)):
        yield RecordBatch(some)
