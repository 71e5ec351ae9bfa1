"""Parse, filter, aggregate and transform batches of rows. Each reads its rows once and keeps what the answer needs."""

from __future__ import annotations

import json
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from toolcell.builtin.tables.answers import MAX_ANSWER_BYTES, Collector, answer, plain_cells, size_of
from toolcell.builtin.tables.batches import Batch, RecordBatch
from toolcell.builtin.tables.cells import Number, group_key, tidy
from toolcell.builtin.tables.columns import EXACT, ColumnBatch, merging, totals
from toolcell.builtin.tables.readers import TextTable
from toolcell.builtin.tables.requests import Condition, Metric, Record, Transform
from toolcell.errors import ToolError

MAX_GROUPS: Final = 100_000
MAX_SORTED: Final = MAX_ANSWER_BYTES // 4
"""Rows that an answer can have at most: `{}, ` is the shortest."""
_TAKEN: Final = 256

Batches = Iterable[Batch]


def parsed(table: TextTable, batches: Batches, limit: int) -> dict[str, Any]:
    """Return `{records, columns, count}`; `count` is of all rows."""
    found = Collector(limit)
    for batch in batches:
        _take(found, batch, range(len(batch)))
    columns = [name.encode("utf-8", "replace").decode() for name in table.columns]
    rows = found.records()
    while columns and size_of([columns, rows]) > MAX_ANSWER_BYTES:  # a wide table, of which each name is sent twice
        if rows:
            rows = rows[: len(rows) // 2]
        else:
            columns = columns[: len(columns) // 2]
    more = {"skipped": table.skipped} if table.skipped else {}
    return answer("records", rows, found.count, columns=columns, **more)


def filtered(batches: Batches, conditions: Sequence[Condition]) -> dict[str, Any]:
    """Return `{records, count}` of the rows that pass every condition."""
    found = Collector()
    for batch in batches:
        columns = {each.column: batch.column(each.column) for each in conditions}
        passing = pl.repeat(True, len(batch), dtype=pl.Boolean, eager=True)
        for condition in conditions:
            passing &= columns[condition.column].matches(condition)
        _take(found, batch, passing.arg_true())
    return answer("records", found.records(), found.count)


def _take(
    found: Collector, batch: Batch, indexes: Sequence[int] | pl.Series, row: Callable[[Record], Record] | None = None
) -> None:
    """Give rows to a collector, those that it does not want as a number."""
    taken = 0
    while found.wants_more and taken < len(indexes):
        some = list(indexes[taken : taken + _TAKEN])
        for record in batch.records(some):
            found.add(record if row is None else row(record))
        taken += len(some)
    found.skip(len(indexes) - taken)


# Aggregates


@dataclass(slots=True)
class Total:
    """Total of one column in one group. Whole numbers are added exactly, of up to 30 digits."""

    parts: dict[str, Any] = field(default_factory=dict)

    def add(self, parts: dict[str, Any]) -> None:
        """Add another total."""
        for name, value in parts.items():
            have = self.parts.get(name)
            if have is None or value is None:
                self.parts[name] = value if have is None else have
            elif name.endswith("_min"):
                self.parts[name] = min(have, value)
            else:
                self.parts[name] = max(have, value) if name.endswith("_max") else have + value

    def result(self, op: str) -> Number | None:
        """Return the value of an operation; None of no numbers.

        Raises:
            ToolError: the sum is too large for a number.
        """
        if op == "count":
            return self.parts.get("cells") or 0
        count = self.parts.get("numbers") or 0
        if op == "sum":
            return tidy(self._sum()) if count else 0
        if not count:
            return None
        if op == "avg":
            total = self._sum()
            return total // count if isinstance(total, int) and total % count == 0 else tidy(total / count)
        found = [self.parts[f"{kind}_{op}"] for kind in ("whole", "fraction") if self.parts[f"{kind}_{op}"] is not None]
        return tidy(min(found) if op == "min" else max(found))

    def _sum(self) -> Number:
        whole = self.parts["whole"] or 0
        fractions = (self.parts["high"] or 0.0, self.parts["low"] or 0.0)
        try:
            total = math.fsum((whole, *fractions)) if any(fractions) else whole
        except (OverflowError, ValueError):
            total = math.inf
        if not math.isfinite(total):
            raise ToolError("a sum is larger than a number can be")
        return total


def aggregated(batches: Batches, metrics: Sequence[Metric], group_by: Sequence[str]) -> dict[str, Any]:
    """Return `{groups, count}`, sorted by the group's columns; `not_numbers` counts the cells that were left out.

    Raises:
        ToolError: there are too many groups.
    """
    ops: dict[str, list[str]] = defaultdict(list)
    for metric in metrics:
        ops[metric.column].append(metric.op)
    groups = _Groups(group_by)
    for batch in batches:
        groups.add(batch, ops)
    found = Collector()
    left_out: dict[str, int] = defaultdict(int)
    for shown, totals_ in groups.in_order(list(ops)):
        found.add(
            dict(zip(group_by, shown, strict=True))
            | {metric.name: totals_[metric.column].result(metric.op) for metric in metrics}
        )
        for column, total in totals_.items():
            if "numbers" in total.parts:
                left_out[column] += total.parts["cells"] - total.parts["numbers"]
    texts = {column: count for column, count in left_out.items() if count}
    return answer("groups", found.records(), found.count, **({"not_numbers": texts} if texts else {}))


class _Groups:
    """The totals of each group. polars groups by text as it stands; what is one group by the rules is merged after."""

    def __init__(self, group_by: Sequence[str]) -> None:
        self._group_by = group_by
        self._keys = [f"group {index}" for index in range(len(group_by))]
        self._frames: list[pl.DataFrame] = []
        self._rows = 0
        self._is_json = False

    def add(self, batch: Batch, ops: dict[str, list[str]]) -> None:
        """Add the rows of a batch."""
        self._is_json = isinstance(batch, RecordBatch)
        series = [batch.shown(name).alias(key) for name, key in zip(self._group_by, self._keys, strict=True)]
        for index, (column, wanted) in enumerate(ops.items()):
            if column == "*":
                rows = pl.repeat(True, len(batch), dtype=pl.Boolean, eager=True)
                series.append(rows.alias(f"{index}:cells"))
            else:
                series += totals(str(index), wanted, batch.column(column))
        first = pl.int_range(self._rows, self._rows + len(batch), dtype=pl.Int64, eager=True)
        self._rows += len(batch)
        self._frames.append(self._merged(pl.DataFrame([first.alias("first_min"), *series])))
        if sum(frame.height for frame in self._frames) > 2 * MAX_GROUPS:
            self._frames = [self._merged(pl.concat(self._frames))]
            if self._frames[0].height > MAX_GROUPS:
                self._frames = [self._canonical(self._frames[0])]

    def in_order(self, columns: Sequence[str]) -> Iterable[tuple[list[Any], dict[str, Total]]]:
        """Return the cells of each group's first row, and its totals."""
        if not self._group_by and not self._frames:
            yield [], {column: Total() for column in columns}
        if not self._frames:
            return
        groups: dict[tuple[Any, ...], tuple[list[Any], dict[str, Total]]] = {}
        for row in self._merged(pl.concat(self._frames)).sort("first_min").iter_rows(named=True):
            shown = [self._cell(row[key]) for key in self._keys]
            group = groups.setdefault(tuple(map(group_key, shown)), (shown, {column: Total() for column in columns}))
            for index, total in enumerate(group[1].values()):
                start = f"{index}:"
                total.add({name.removeprefix(start): row[name] for name in row if name.startswith(start)})
        self._check(len(groups))
        for key in sorted(groups):
            yield groups[key]

    def _merged(self, frame: pl.DataFrame) -> pl.DataFrame:
        merged = [merging(name) for name in frame.columns if name not in self._keys]
        if not self._keys:
            return frame.select(merged)
        return frame.lazy().group_by(self._keys).agg(merged).collect(engine="streaming")

    def _canonical(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Write each group as its first row does, so that memory is bounded by groups and not by spellings."""
        first: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        ordered = frame.sort("first_min")
        written = [
            first.setdefault(tuple(group_key(self._cell(cell)) for cell in row), row)
            for row in ordered.select(self._keys).iter_rows()
        ]
        self._check(len(first))
        keys = pl.DataFrame(written, schema=dict.fromkeys(self._keys, pl.String), orient="row")
        return self._merged(ordered.with_columns(keys.get_columns()))

    def _cell(self, shown: str | None) -> Any:
        return json.loads(shown) if self._is_json and shown is not None else shown

    def _check(self, count: int) -> None:
        if count > MAX_GROUPS:
            raise ToolError(f"there are more than {MAX_GROUPS} groups; filter first, or group by other columns")


# Transform


def transformed(batches: Batches, how: Transform) -> dict[str, Any]:
    """Return `{records, count}`."""
    found = Collector(how.limit)
    if how.sort_by is None:
        for batch in batches:
            _take(found, batch, range(len(batch)), how.row)
    else:
        ordered = _Sorted(how)
        for batch in batches:
            ordered.add(batch)
        for row, _ in ordered.rows:
            found.add(row)
        found.skip(ordered.count - len(ordered.rows))
    return answer("records", found.records(), found.count if how.limit is None else min(found.count, how.limit))


class _Sorted:
    """The first rows of an order, as many as an answer can have. Rows that have no value come last."""

    def __init__(self, how: Transform) -> None:
        self.count = 0
        self.rows: list[tuple[Record, int]] = []
        """Each with the bytes that it takes in an answer."""
        self._how = how
        self._most = MAX_SORTED if how.limit is None else min(how.limit, MAX_SORTED)
        self._best: pl.DataFrame | None = None
        """Keys of `rows`: the first has the number -1, the second -2."""
        self._is_full = False

    def add(self, batch: Batch) -> None:
        """Add the rows of a batch."""
        column = self._column(batch)
        promising = self._promising(column)
        text = column.text.gather(promising)
        keys = pl.DataFrame(ColumnBatch(text).order_keys(), schema=["is_text", "number", "exact", "text"])
        keys = keys.with_columns(is_empty=text.is_null(), row=promising.cast(pl.Int64))
        self.count += len(batch)
        best = self._ordered(keys if self._best is None else pl.concat([self._best, keys]))
        new = sorted(at for at in best["row"] if at >= 0)
        read = dict(zip(new, batch.records(new), strict=True))
        rows: list[tuple[Record, int]] = []
        room = MAX_ANSWER_BYTES
        for at in best["row"]:
            rows.append(self._measured(read[at]) if at >= 0 else self.rows[-1 - at])
            room -= rows[-1][1]
            if room < 0:
                break
        self.rows = rows
        self._best = best.head(len(rows)).with_columns(row=-1 - pl.int_range(pl.len(), dtype=pl.Int64))
        self._is_full = room < 0 or len(rows) == self._most

    def _measured(self, record: Record) -> tuple[Record, int]:
        row = self._how.row(record)
        return row, size_of(plain_cells(row)) + 2

    def _column(self, batch: Batch) -> ColumnBatch:
        """Return what a batch is sorted by, which may have had another name."""
        assert self._how.sort_by is not None
        if isinstance(batch, RecordBatch):
            return batch.mapped(self._how.row).column(self._how.sort_by)
        sources = [batch.shown(name) for name in self._how.sort_sources]
        if not sources:
            return batch.column("")
        return ColumnBatch(
            sources[0] if len(sources) == 1 else sources[0].zip_with(sources[0].is_not_null(), sources[1])
        )

    def _promising(self, column: ColumnBatch) -> pl.Series:
        """Return the numbers of rows that may come before the last one that there is. One that is equal does not."""
        if self._best is None or not self._best.height or not self._is_full:
            return pl.int_range(len(column), eager=True)
        last = self._best.row(-1, named=True)
        is_number, is_text = column.number.is_not_null(), column.number.is_null() & column.text.is_not_null()
        before = operator.gt if self._how.sort_desc else operator.lt
        if last["is_empty"]:
            found = is_number | is_text
        elif last["is_text"]:
            found = is_text & before(column.text, last["text"])
            found = found if self._how.sort_desc else found | is_number
        else:
            found = before(column.number, last["number"])
            if abs(last["number"]) >= EXACT:
                found |= column.number == last["number"]
            found = found | is_text if self._how.sort_desc else found
        return found.arg_true()

    def _ordered(self, keys: pl.DataFrame) -> pl.DataFrame:
        by = ["is_empty", "is_text", "number", "exact", "text"]
        descending = [False, *[self._how.sort_desc] * 4]
        ordered = keys.lazy().sort(by, descending=descending, maintain_order=True).head(self._most)
        return ordered.collect()
