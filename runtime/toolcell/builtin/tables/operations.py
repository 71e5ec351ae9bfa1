"""Parse, filter, aggregate and transform batches of rows. Each reads its rows once and keeps what the answer needs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from toolcell.builtin.tables.answers import MAX_ANSWER_BYTES, Collector, answer, plain_cells, size_of
from toolcell.builtin.tables.batches import Batch, Record
from toolcell.builtin.tables.cells import (
    MISSING,
    Condition,
    Number,
    group_key,
    is_empty,
    sort_key,
    tidy,
)
from toolcell.builtin.tables.engines import ColumnEngine
from toolcell.builtin.tables.readers import Table
from toolcell.errors import ToolError

MAX_GROUPS: Final = 100_000
MAX_METRICS: Final = 100
KEPT_ROWS: Final = 20_000
KEPT_CHARS: Final = 32 * 1024 * 1024
"""Rows and characters that sorting holds before it drops what can no longer be in the answer. Two answers have fewer
rows: otherwise every further row would sort them again."""

Batches = Iterable[Batch]


def parsed(table: Table, batches: Batches, limit: int) -> dict[str, Any]:
    """Return `{records, columns, count}`; `count` is of all rows."""
    found = Collector(limit)
    for batch in batches:
        taken = _take(found, batch, range(len(batch)))
        found.skip(len(batch) - taken)
    columns = [name.encode("utf-8", "replace").decode() for name in table.columns]
    rows = found.records()
    while columns and size_of([columns, rows]) > MAX_ANSWER_BYTES:  # a wide table, of which each name is sent twice
        if rows:
            rows = rows[: len(rows) // 2]
        else:
            columns = columns[: len(columns) // 2]
    more = {"skipped": table.skipped} if table.skipped else {}
    return answer("records", rows, found.count, columns=columns, **more)


def filtered(batches: Batches, conditions: Sequence[Condition], engine: ColumnEngine) -> dict[str, Any]:
    """Return `{records, count}` of the rows that pass every condition."""
    found = Collector()
    for batch in batches:
        passing: Sequence[bool] = engine.matching(batch.column(conditions[0].column), conditions[0])
        for condition in conditions[1:]:
            others = engine.matching(batch.column(condition.column), condition)
            passing = [a and b for a, b in zip(passing, others, strict=True)]
        hits = [index for index, passes in enumerate(passing) if passes]
        found.skip(len(hits) - _take(found, batch, hits))
    return answer("records", found.records(), found.count)


def _take(found: Collector, batch: Batch, indexes: Sequence[int]) -> int:
    """Give rows to a collector as long as it wants them; return how many it got."""
    for taken, index in enumerate(indexes):
        if not found.wants_more:
            return taken
        found.add(batch.record(index))
    return len(indexes)


# Aggregates


@dataclass(frozen=True, slots=True)
class Metric:
    """One column of an aggregate's answer."""

    column: str
    op: str

    @property
    def name(self) -> str:
        """Its key."""
        return f"{self.op}_{self.column}"


class Total:
    """Of one column in one group. Whole numbers are added exactly, others with one rounding for each batch."""

    __slots__ = ("cells", "fractions", "largest", "numbers", "smallest", "whole")

    def __init__(self) -> None:
        self.cells = 0
        """That are neither missing nor null."""
        self.numbers = 0
        self.whole = 0
        self.fractions = 0.0
        self.smallest: Number | None = None
        self.largest: Number | None = None

    def add(self, cells: int, numbers: Sequence[Number]) -> None:
        """Add the cells of a batch.

        Raises:
            ToolError: the sum is too large for a number.
        """
        self.cells += cells
        if not numbers:
            return
        self.numbers += len(numbers)
        self.whole += sum(each for each in numbers if type(each) is int)
        fractions = [each for each in numbers if type(each) is float]
        try:
            self.fractions = math.fsum((self.fractions, *fractions)) if fractions else self.fractions
        except OverflowError:
            raise ToolError("a sum is larger than a number can be") from None
        low, high = min(numbers), max(numbers)
        self.smallest = low if self.smallest is None else min(self.smallest, low)
        self.largest = high if self.largest is None else max(self.largest, high)

    def result(self, op: str) -> Number | None:
        """Return the value of an operation; None of no numbers."""
        if op == "count":
            return self.cells
        if op == "sum":
            return tidy(self._sum())
        if not self.numbers:
            return None
        found = self._average() if op == "avg" else self.smallest if op == "min" else self.largest
        return None if found is None else tidy(found)

    def _average(self) -> Number:
        if not self.fractions and self.whole % self.numbers == 0:
            return self.whole // self.numbers
        return self._sum() / self.numbers

    def _sum(self) -> Number:
        try:
            return self.whole + self.fractions if self.fractions else self.whole
        except OverflowError:
            raise ToolError("a sum is larger than a number can be") from None


@dataclass(slots=True)
class _Group:
    shown: list[Any]
    totals: dict[str, Total] = field(default_factory=lambda: defaultdict(Total))


def aggregated(
    batches: Batches, metrics: Sequence[Metric], group_by: Sequence[str], engine: ColumnEngine
) -> dict[str, Any]:
    """Return `{groups, count}`, sorted by the group's columns.

    Raises:
        ToolError: there are too many groups.
    """
    groups: dict[tuple[Any, ...], _Group] = {}
    if not group_by:
        groups[()] = _Group([])
    columns = dict.fromkeys(metric.column for metric in metrics)
    for batch in batches:
        members = _members(batch, group_by, groups)
        for column in columns:
            _add_column(column, batch, members, groups, engine)
    found = Collector()
    for key in sorted(groups):
        group = groups[key]
        named = dict(zip(group_by, group.shown, strict=True))
        found.add(named | {metric.name: group.totals[metric.column].result(metric.op) for metric in metrics})
    return answer("groups", found.records(), found.count)


def _members(
    batch: Batch, group_by: Sequence[str], groups: dict[tuple[Any, ...], _Group]
) -> Mapping[tuple[Any, ...], Sequence[int]]:
    """Return the rows of each group; groups that are new are noted with the cells of their first row."""
    if not group_by:
        return {(): range(len(batch))}
    members: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    columns = [batch.column(name) for name in group_by]
    for index, cells in enumerate(zip(*columns, strict=True)):
        key = _group_key(cells, known)
        members[key].append(index)
        if key not in groups:
            groups[key] = _Group([None if cell is MISSING else cell for cell in cells])
            if len(groups) > MAX_GROUPS:
                raise ToolError(f"there are more than {MAX_GROUPS} groups; filter first, or group by other columns")
    return members


def _group_key(cells: tuple[Any, ...], known: dict[tuple[Any, ...], tuple[Any, ...]]) -> tuple[Any, ...]:
    if not all(type(cell) is str for cell in cells):  # True equals 1, and lists have no hash
        return tuple(map(group_key, cells))
    if cells not in known:
        known[cells] = tuple(map(group_key, cells))
    return known[cells]


def _add_column(
    column: str,
    batch: Batch,
    members: Mapping[tuple[Any, ...], Sequence[int]],
    groups: Mapping[tuple[Any, ...], _Group],
    engine: ColumnEngine,
) -> None:
    cells: Sequence[Any] = [None] * len(batch) if column == "*" else batch.column(column)
    numbers = engine.numbers(cells)
    for key, indexes in members.items():
        there = indexes if column == "*" else [at for at in indexes if not is_empty(cells[at])]
        found = [number for at in indexes if (number := numbers[at]) is not None]
        groups[key].totals[column].add(len(there), found)


# Transform


@dataclass(frozen=True, slots=True)
class Transform:
    """Select, rename, sort, limit: in this order."""

    select: Sequence[str] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    sort_by: str | None = None
    sort_desc: bool = False
    limit: int | None = None

    def row(self, record: Record) -> Record:
        """Return one row with the selected columns, in their order, under their new names."""
        if self.select is not None:
            record = {name: record[name] for name in self.select if name in record}
        if not self.rename:
            return record
        made: Record = {}
        for name, cell in record.items():
            new = self.rename.get(name, name)
            if new not in made or name in self.rename:  # a renamed column replaces one that had the name
                made[new] = cell
        return made


def transformed(batches: Batches, how: Transform) -> dict[str, Any]:
    """Return `{records, count}`."""
    found = Collector(how.limit)
    if how.sort_by is None:
        for batch in batches:
            for index in range(len(batch)):
                if not found.wants_more:
                    found.skip(len(batch) - index)
                    break
                found.add(how.row(batch.record(index)))
        return _limited(found, how.limit)
    ordered = _Sorted(how.sort_by, how.sort_desc)
    for batch in batches:
        chars = batch.chars // len(batch)
        for index in range(len(batch)):
            ordered.add(how.row(batch.record(index)), chars)
    best = ordered.rows()
    for row in best:
        found.add(row)
    found.skip(ordered.count - len(best))
    return _limited(found, how.limit)


def _limited(found: Collector, limit: int | None) -> dict[str, Any]:
    return answer("records", found.records(), found.count if limit is None else min(found.count, limit))


class _Sorted:
    """The first rows of an order, as many as an answer can have. Rows that have no value come last."""

    def __init__(self, column: str, descending: bool) -> None:
        self.count = 0
        self._column = column
        self._descending = descending
        self._rows: list[Record] = []
        self._chars = 0

    def add(self, row: Record, chars: int) -> None:
        self.count += 1
        self._rows.append(row)
        self._chars += chars
        if len(self._rows) >= KEPT_ROWS or self._chars >= KEPT_CHARS:
            self._rows = self._first(self._order(self._rows))
            self._chars = 0

    def rows(self) -> list[Record]:
        return self._order(self._rows)

    def _order(self, rows: list[Record]) -> list[Record]:
        valued = [row for row in rows if row.get(self._column) is not None]
        others = [row for row in rows if row.get(self._column) is None]
        valued.sort(key=lambda row: sort_key(row[self._column]), reverse=self._descending)
        return valued + others

    def _first(self, rows: list[Record]) -> list[Record]:
        room = MAX_ANSWER_BYTES
        for index, row in enumerate(rows):
            room -= size_of(plain_cells(row)) + 2
            if room < 0:
                return rows[: index + 1]
        return rows
