"""Some rows of a table at a time. Rows of CSV stay lists: a dictionary for each would take twice as long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from toolcell.builtin.tables.cells import MISSING

BATCH_ROWS = 4096
"""Rows in one batch. Sums are rounded once for each batch, so that every engine has the same total."""

Record = dict[str, Any]


class Batch(Protocol):
    """Rows in their order."""

    chars: int
    """About as many characters are in the rows: what they take in memory."""

    def __len__(self) -> int: ...

    def column(self, name: str) -> Sequence[Any]:
        """Return the column's cells, `MISSING` where a row has none."""
        ...

    def record(self, index: int) -> Record:
        """Return one row by column names."""
        ...


class RecordBatch:
    """Rows that are dictionaries already."""

    def __init__(self, records: Sequence[Record], chars: int = 0) -> None:
        self._records = records
        self.chars = chars

    def __len__(self) -> int:
        return len(self._records)

    def column(self, name: str) -> Sequence[Any]:
        """Return the column's cells."""
        return [record.get(name, MISSING) for record in self._records]

    def record(self, index: int) -> Record:
        """Return one row."""
        return self._records[index]


class RowBatch:
    """Rows of CSV; `names` are the columns by position. Rows may be shorter."""

    def __init__(self, names: Sequence[str], rows: Sequence[Sequence[str]], chars: int) -> None:
        self._names = names
        self._positions = {name: index for index, name in enumerate(names)}
        self._rows = rows
        self.chars = chars

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> Sequence[Any]:
        """Return the column's cells."""
        at = self._positions.get(name)
        if at is None:
            return [MISSING] * len(self._rows)
        return [row[at] if at < len(row) else MISSING for row in self._rows]

    def record(self, index: int) -> Record:
        """Return one row."""
        return dict(zip(self._names, self._rows[index], strict=False))


def batches_of(records: Iterable[Record]) -> Iterator[Batch]:
    """Return rows in batches."""
    rows = iter(records)
    while some := list(islice(rows, BATCH_ROWS)):
        yield RecordBatch(some)
