"""Filter, aggregate and transform batches of records with polars. Each reads its records once and keeps what the answer
needs.

A cell is compared as text, and as a number where its text is one: the rules are the expressions below.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from toolcell.builtin.tables.reading import Record, Table
from toolcell.errors import ToolError

# Answers of at most 32 KiB: records are halved until they fit, and the answer says that it was cut and of how many.


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
    return {_valid(name): _plain(cell, 0) for name, cell in row.items()}


def _plain(cell: Any, depth: int) -> Any:
    kind = type(cell)
    if kind is str:
        return _valid(cell)
    if kind is float:
        return cell if math.isfinite(cell) else None
    if kind is int:
        return cell if -(2**63) <= cell < 2**63 else str(cell)
    if kind is list or kind is dict:
        if depth >= MAX_CELL_DEPTH:
            return "..."
        if kind is list:
            return [_plain(each, depth + 1) for each in cell]
        return {_valid(name): _plain(each, depth + 1) for name, each in cell.items()}
    return cell


def _valid(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


MAX_IN_VALUES: Final = 10_000
MAX_GROUPS = 100_000
MAX_SORTED: Final = MAX_ANSWER_BYTES // 4
"""Records that an answer can have at most: `{}, ` is the shortest."""
_EXACT: Final = 2**53
_ADDED: Final = 10**30
"""Whole numbers below are added as integers: as many as there can be in a batch fit into 128 bits."""
_DIGITS: Final = 15
"""Of a sum of fractions. Further ones depend on the order in which they are added."""

_CODE: Final = r"^(?:[+-]?0[0-9]|[0-9]+[eE][0-9]+$|[+-]?[0-9]{39})"
"""Text of digits that says more, or something else, than its number: `00501` is a postcode, and `12E5` a part."""

_ORDERS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}

Batches = Iterable[Sequence[Record]]
Number = int | float


# Cells


def _texts(cells: Iterable[Any]) -> pl.Series:
    """Return cells as text: numbers as JSON writes them, `true` and `false`, nested values as JSON; null is null."""
    return pl.Series([None if cell is None else _text(cell) for cell in cells], dtype=pl.String)


def _sortable(cells: Iterable[Any]) -> pl.Series:
    """Return the same with null for an empty cell, which CSV writes as an empty text: it is sorted last."""
    return _texts(None if cell == "" else cell for cell in cells)


def _text(cell: Any) -> str:
    plain = _tidy(cell) if isinstance(cell, float) else cell
    text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, default=str)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()  # UTF-8 has no lone surrogates


def _tidy(number: Number) -> Number:
    """Return a whole float as an integer, and an integer that no JSON reader could hold as a float."""
    if isinstance(number, float):
        return int(number) if abs(number) < _EXACT and number.is_integer() else number
    return number if abs(number) < 2**63 else float(number)


def _number(text: pl.Expr) -> pl.Expr:
    """The number of a text such as `" 1.50"`; null where it is none."""
    number = text.str.strip_chars().cast(pl.Float64, strict=False)
    return pl.when(number.is_finite()).then(number)


def _whole(text: pl.Expr) -> pl.Expr:
    """The number of a text if it is whole, exactly, of up to 38 digits."""
    number = _number(text)
    whole = pl.when(number == number.floor()).then(number).cast(pl.Int128, strict=False)
    return pl.coalesce(text.str.strip_chars().cast(pl.Int128, strict=False), whole)


def _key(text: pl.Expr) -> pl.Expr:
    """What equal cells have in common: 1, 1.0 and "1" are equal, "01" and "1e0" are not."""
    number = pl.coalesce(_whole(text).cast(pl.String), _number(text).cast(pl.String))
    is_number = number.is_not_null() & ~text.str.strip_chars().str.contains(_CODE)
    return pl.when(is_number).then("#" + number).otherwise("'" + text)


def _order(text: pl.Expr) -> list[pl.Expr]:
    """What cells are sorted by: numbers before text, empty cells last."""
    number = _number(text)
    is_text = number.is_null()
    return [
        text.is_null(),
        is_text,
        number + 0.0,
        _whole(text).fill_null(0),
        pl.when(is_text).then(text),
    ]  # -0.0 is 0.0


# Parse


def parsed(table: Table, batches: Batches, limit: int) -> dict[str, Any]:
    """Return `{records, columns, count}`; `count` is of all rows."""
    found = Collector(limit)
    for batch in batches:
        found.take(batch)
    columns = [_text(name) for name in table.columns]
    rows = found.records()
    while columns and size_of([columns, rows]) > MAX_ANSWER_BYTES:  # a wide table, of which each name is sent twice
        if rows:
            rows = rows[: len(rows) // 2]
        else:
            columns = columns[: len(columns) // 2]
    more = {"skipped": table.skipped} if table.skipped else {}
    return answer("records", rows, found.count, columns=columns, **more)


# Filter


def filtered(batches: Batches, where: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `{records, count}` of the records that meet every condition.

    Raises:
        ToolError: a value does not fit its operator.
    """
    conditions = [(each["column"], _condition(**each)) for each in where]
    found = Collector()
    for batch in batches:
        passing = pl.repeat(True, len(batch), dtype=pl.Boolean, eager=True)
        for column, condition in conditions:
            cells = {"cell": _texts(record.get(column) for record in batch), "exists": [column in row for row in batch]}
            passing &= pl.DataFrame(cells).select(condition.fill_null(False)).to_series()
        found.take(batch[index] for index in passing.arg_true())
    return answer("records", found.records(), found.count)


def _condition(column: str, op: str, value: Any) -> pl.Expr:
    """Return which cells meet a condition. A missing one never does, for `!=` neither; a null only equals null."""
    if op == "in" and not isinstance(value, list):
        raise ToolError(f'"in" needs a list of values for {column!r:.80}, not {value!r:.80}', code="invalid_arguments")
    values = value if op == "in" else [value]
    if len(values) > MAX_IN_VALUES:
        raise ToolError(f'"in" takes at most {MAX_IN_VALUES} values, not {len(values)}', code="invalid_arguments")
    cell, given = pl.col("cell"), pl.DataFrame({"given": _texts(values)})
    if op in ("==", "!=", "in"):
        keys = given.select(_key(pl.col("given"))).to_series()
        equals = _key(cell).is_in(keys.drop_nulls().implode()).fill_null(False)
        if keys.null_count():
            equals |= cell.is_null()
        return pl.col("exists") & (~equals if op == "!=" else equals)
    if value is None:
        return pl.lit(False)
    text = given.item()
    if op == "contains":
        folded = text.casefold()
        return cell.map_elements(lambda each: folded in each.casefold(), return_dtype=pl.Boolean, skip_nulls=True)
    compare = _ORDERS[op]
    number, whole = given.select(_number(pl.col("given")).alias("number"), _whole(pl.col("given")).alias("whole")).row(
        0
    )
    if number is None:
        return compare(cell, pl.lit(text))  # type: ignore[no-any-return]
    by_number = compare(_number(cell), number)
    exactly = pl.coalesce(compare(_whole(cell), pl.lit(whole, dtype=pl.Int128)), by_number)
    near = pl.when(_number(cell) == number).then(exactly).otherwise(by_number)
    return pl.when(_number(cell).is_null()).then(compare(cell, pl.lit(text))).otherwise(near)


# Aggregate


_Total = dict[str, Any]
"""A column in one group, as `_parts` computes it."""


def _least(numbers: Iterable[Number]) -> Number | None:
    return min(numbers, default=None)


def _largest(numbers: Iterable[Number]) -> Number | None:
    return max(numbers, default=None)


_MERGED: Final[Mapping[str, Callable[[list[Any]], Any]]] = {
    "cells": sum, "numbers": sum, "whole": sum, "fraction": sum,
    "whole_min": _least, "fraction_min": _least, "whole_max": _largest, "fraction_max": _largest,
}  # fmt: skip
"""How the parts of two batches become those of both."""


def _merged(*totals: _Total) -> _Total:
    return {name: how([total[name] for total in totals if total[name] is not None]) for name, how in _MERGED.items()}


def _result(total: _Total, op: str) -> Number | None:
    """Return the value of an operation; None of no numbers.

    Raises:
        ToolError: the sum is too large for a number.
    """
    if op == "count":
        return int(total["cells"])
    if op in ("min", "max"):
        found = _MERGED[f"whole_{op}"](
            [part for kind in ("whole", "fraction") if (part := total[f"{kind}_{op}"]) is not None]
        )
        return None if found is None else _tidy(found)
    if not (numbers := total["numbers"]):
        return 0 if op == "sum" else None
    value = total["whole"] + total["fraction"] if total["fraction"] else total["whole"]
    if not math.isfinite(value):
        raise ToolError("a sum is larger than a number can be")
    if op == "avg":
        value = value // numbers if value % numbers == 0 else value / numbers
    rounded = float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
    return _tidy(rounded if math.isfinite(rounded) else value)  # the largest number is rounded to infinity


def _parts(column: str) -> pl.Expr:
    """Compute the total of a column in each group of a batch. Whole numbers are added as such."""
    number, whole = pl.col(f"number {column}"), pl.col(f"whole {column}")
    fraction = number.filter(whole.is_null())
    return pl.struct(
        cells=pl.col(column).count(),
        numbers=number.count(),
        whole=whole.sum(),
        fraction=fraction.sum(),
        whole_min=whole.min(),
        whole_max=whole.max(),
        fraction_min=fraction.min(),
        fraction_max=fraction.max(),
    ).alias(f"total {column}")


@dataclass(slots=True)
class _Group:
    """Records with equal cells."""

    cells: list[Any]
    """As its first record has them."""
    totals: list[_Total]
    rows: int = 0


def aggregated(batches: Batches, metrics: Sequence[Mapping[str, Any]], group_by: Sequence[str]) -> dict[str, Any]:
    """Return `{groups, count}`, sorted by the group's columns; `not_numbers` counts the cells that were left out.

    Raises:
        ToolError: there are too many groups.
    """
    columns = list(dict.fromkeys(each["column"] for each in metrics))
    keys = [f"key {index}" for index in range(len(group_by))]
    numbered = [str(index) for index in range(len(columns))]
    keyed = [_key(pl.col(key)).alias(key) for key in keys]
    read = [_number(pl.col(each)).alias(f"number {each}") for each in numbered]
    read += [_whole(pl.col(each)).alias(f"whole {each}") for each in numbered]
    wholes = [pl.col(f"whole {each}") for each in numbered]
    added = [pl.when(whole.abs() < _ADDED).then(whole) for whole in wholes]
    totals = [pl.len().alias("rows"), pl.col("row").min(), *map(_parts, numbered)]
    groups: dict[tuple[Any, ...], _Group] = {}
    if not group_by:
        groups[()] = _Group([], [_merged()] * len(columns))
    for batch in batches:
        named = [(str(index), name) for index, name in enumerate(columns)] + list(zip(keys, group_by, strict=True))
        cells = {key: _texts(record.get(name) for record in batch) for key, name in named}
        frame = pl.DataFrame({"row": range(len(batch)), **cells}).with_columns(*keyed, *read).with_columns(*added)
        for found in (frame.group_by(keys).agg(totals) if keys else frame.select(totals)).iter_rows(named=True):
            key = tuple(found[each] for each in keys)
            if (group := groups.get(key)) is None:
                shown = [batch[found["row"]].get(name) for name in group_by]
                groups[key] = group = _Group(shown, [_merged()] * len(columns))
            group.rows += found["rows"]
            group.totals = [_merged(total, found[f"total {index}"]) for index, total in enumerate(group.totals)]
        if len(groups) > MAX_GROUPS:
            raise ToolError(f"there are more than {MAX_GROUPS} groups; filter first, or group by other columns")
    collected = Collector()
    collected.take(
        dict(zip(group_by, group.cells, strict=True))
        | {
            f"{op}_{column}": group.rows if column == "*" and op == "count" else _result(total, op)
            for op, column, total in (
                (each["op"], each["column"], group.totals[columns.index(each["column"])]) for each in metrics
            )
        }
        for group in _sorted(list(groups.values()), len(group_by))
    )
    counted = {each["column"] for each in metrics if each["op"] != "count"}
    texts = {
        column: sum(group.totals[index]["cells"] - group.totals[index]["numbers"] for group in groups.values())
        for index, column in enumerate(columns)
        if column in counted
    }
    texts = {column: count for column, count in texts.items() if count}
    return answer("groups", collected.records(), collected.count, **({"not_numbers": texts} if texts else {}))


def _sorted(groups: list[_Group], columns: int) -> Iterable[_Group]:
    frame = pl.DataFrame({str(at): _sortable(group.cells[at] for group in groups) for at in range(columns)})
    by = [expression for at in range(columns) for expression in _order(pl.col(str(at)))]
    order = frame.with_row_index("row").sort(by)["row"] if columns else [0]
    return (groups[at] for at in order)


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
        """Return one record with the selected columns, in their order, under their new names."""
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
    first: list[Record] = []
    count = 0
    for batch in batches:
        count += len(batch)
        rows = [how.row(record) for record in batch]
        if how.sort_by is None:
            found.take(rows)
        else:
            first = _first([*first, *rows], how)
    if how.sort_by is not None:
        found.take(first)
        found.count = count
    return answer("records", found.records(), count if how.limit is None else min(count, how.limit))


def _first(rows: Sequence[Record], how: Transform) -> list[Record]:
    """Return the first records of an order, as many as an answer can have."""
    cells = pl.DataFrame({"cell": _sortable(row.get(how.sort_by or "") for row in rows)}).with_row_index("row")
    order = _order(pl.col("cell"))
    descending = [False, *[how.sort_desc] * (len(order) - 1)]  # empty cells are last
    ordered = cells.sort(order, descending=descending, maintain_order=True)["row"]
    first: list[Record] = []
    room = MAX_ANSWER_BYTES
    for at in ordered.head(MAX_SORTED if how.limit is None else min(how.limit, MAX_SORTED)):
        first.append(rows[at])
        room -= size_of(plain_cells(rows[at])) + 2
        if room < 0:
            break
    return first
