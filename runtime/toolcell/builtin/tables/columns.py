"""The rules of cells over whole columns, in polars: the same as of one cell in `cells`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Final

import polars as pl

from toolcell.builtin.tables.cells import IDENTIFIER, MAX_NUMBER_CHARS
from toolcell.builtin.tables.requests import Condition

EXACT: Final = 2**53
"""Whole numbers below are exact as a float; those from here on are compared and added as integers."""
SUMMED: Final = 10**30
"""Whole numbers below are added exactly: as many as there can be fit into 128 bits."""

_ORDERS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


def text_series(cells: Iterable[str | None]) -> pl.Series:
    """Return a column of text. Lone surrogates, which no UTF-8 has, become question marks."""
    values = list(cells)
    try:
        return pl.Series(values, dtype=pl.String)
    except UnicodeEncodeError:
        plain = [None if cell is None else cell.encode("utf-8", "replace").decode() for cell in values]
        return pl.Series(plain, dtype=pl.String)


class ColumnBatch:
    """The cells of a column: as text, as numbers, as keys."""

    def __init__(self, text: pl.Series, nulls: pl.Series | None = None) -> None:
        """`text` is null where a row has no value; `nulls` says which of these rows have the column, with a null."""
        self.text = text
        self._nulls = nulls

    def __len__(self) -> int:
        return len(self.text)

    @cached_property
    def number(self) -> pl.Series:
        """Each cell as a number; null where it is not one."""
        number = self._read[1]
        is_number = number.is_finite()
        if (self.text.str.len_bytes().max() or 0) > MAX_NUMBER_CHARS:  # type: ignore[operator]
            is_number &= self.text.str.len_chars() <= MAX_NUMBER_CHARS
        return number if is_number.all() else _where(is_number, number)

    @cached_property
    def key(self) -> pl.Series:
        """The number that a cell is compared and grouped by; null for text, and for what only looks like a number."""
        return _where(~self._stripped.str.contains(IDENTIFIER), self.number)

    @cached_property
    def whole(self) -> pl.Series:
        """Whole numbers of up to 38 digits, exactly; null elsewhere."""
        return _where(self.number.is_not_null(), self._stripped.cast(pl.Int128, strict=False))

    def matches(self, condition: Condition) -> pl.Series:
        """Return which cells pass. A missing cell never does, for `!=` neither; a null only where it is asked for."""
        if condition.op in ("==", "!=", "in"):
            found = self._equals(condition)
        elif condition.has_null:
            found = _constant(False, len(self))
        elif condition.op == "contains":
            found = self._contains(condition.text)
        else:
            found = self._compares(condition)
        found = found.fill_null(False)
        if condition.op == "!=":
            found = ~found
        found &= self.text.is_not_null()
        is_sought = {"==": condition.has_null, "in": condition.has_null, "!=": not condition.has_null}
        return found | self._nulls if self._nulls is not None and is_sought.get(condition.op) else found

    @cached_property
    def _read(self) -> tuple[pl.Series, pl.Series]:
        """The text and its number, without the space around it where there is any around a number."""
        number = self.text.cast(pl.Float64, strict=False)
        if number.null_count() == self.text.null_count():
            return self.text, number
        stripped = self.text.str.strip_chars()
        return stripped, stripped.cast(pl.Float64, strict=False)

    @property
    def _stripped(self) -> pl.Series:
        return self._read[0]

    @cached_property
    def _is_whole(self) -> pl.Series:
        return self._stripped.str.contains(r"^[+-]?[0-9]+$")

    def _equals(self, condition: Condition) -> pl.Series:
        found = self.text.is_in(list(condition.texts)) if condition.texts else _constant(False, len(self))
        exact = [float(number) for number in condition.numbers if abs(number) < EXACT]
        large = [number for number in condition.numbers if abs(number) >= EXACT]
        if exact:
            found |= self.key.is_in(exact)
        if large:
            digits = self._stripped.str.strip_prefix("+")
            is_large = self._is_whole & digits.is_in([str(int(number)) for number in large])
            as_float = [float(number) for number in large if int(float(number)) == number]
            found |= self.key.is_not_null() & (is_large | (~self._is_whole & self.key.is_in(as_float)))
        return found

    def _contains(self, text: str) -> pl.Series:
        """Ignore case as Python's `casefold` does, which is what polars does too where all characters are ASCII."""
        found = self.text.str.to_lowercase().str.contains(text, literal=True)
        is_odd = self.text.str.len_bytes() != self.text.str.len_chars()
        if not is_odd.any():
            return found
        odd = pl.Series([text in cell.casefold() for cell in self.text.filter(is_odd)], dtype=pl.Boolean)
        return found.scatter(is_odd.arg_true(), odd)

    def _compares(self, condition: Condition) -> pl.Series:
        compare = _ORDERS[condition.op]
        if not condition.numbers:
            return compare(self.text, condition.text)  # type: ignore[no-any-return]
        [number] = condition.numbers
        found: pl.Series = compare(self.number, float(number))
        if abs(number) >= EXACT:
            is_near = self.number == float(number)
            found = compare(self._order(int(number)), 0).zip_with(is_near.fill_null(False), found)
        if self.number.null_count():
            found = found.zip_with(self.number.is_not_null(), compare(self.text, condition.text))
        return found

    def _order(self, number: int) -> pl.Series:
        """Return 1 for cells above a number, 0 for equal ones, -1 for cells below; only for cells of about its size."""
        digits = self._stripped.str.strip_chars_start("+-0")
        wanted = str(abs(number))
        length = digits.str.len_bytes()
        is_larger = (length > len(wanted)) | ((length == len(wanted)) & (digits > wanted))
        order = is_larger.cast(pl.Int8) * 2 + (digits == wanted).cast(pl.Int8) - 1
        near = int(float(number))
        other = pl.repeat((near > number) - (near < number), len(self), dtype=pl.Int8, eager=True)
        return (order if number > 0 else -order).zip_with(self._is_whole, other)

    def order_keys(self) -> list[pl.Series]:
        """Return what cells are sorted by: numbers before text, numbers by value."""
        number = self.number.fill_null(0.0) + 0.0  # -0.0 is 0.0
        near = _where(number.abs() >= EXACT, number).cast(pl.Int128, strict=False)
        is_text = self.number.is_null()
        exact = self.whole.zip_with(near.is_not_null() & self.whole.is_not_null(), near).fill_null(0)
        return [is_text, number, exact, _where(is_text, self.text)]


def totals(name: str, ops: Iterable[str], column: ColumnBatch) -> list[pl.Series]:
    """Return what the metrics of a column are computed from, as columns `<name>:<part>`;
    `merging` makes one of two.

    Fractions are in two columns, `high` and `low`, whose sums are rounded nowhere or far behind the point: added
    alone, a million prices would be off in a place that is seen.
    """
    parts = {"cells": column.text.is_not_null()}
    wanted = set(ops) - {"count"}
    if wanted:
        number = column.number
        if (number.abs().max() or 0) < EXACT:  # type: ignore[operator]
            whole = _where(number == number.floor(), number).cast(pl.Int128)
        else:
            whole = _where(column.whole.abs() < SUMMED, column.whole)
        fraction = _where(whole.is_null(), number)
        parts["numbers"] = number.is_not_null()
        if wanted & {"sum", "avg"}:
            parts["whole"] = whole
            parts["high"] = high = _high(fraction)
            parts["low"] = fraction - high
        if "min" in wanted:
            parts |= {"whole_min": whole, "fraction_min": fraction}
        if "max" in wanted:
            parts |= {"whole_max": whole, "fraction_max": fraction}
    return [part.alias(f"{name}:{key}") for key, part in parts.items()]


def merging(column: str) -> pl.Expr:
    """Return how a part of two totals becomes one."""
    if column.endswith(("cells", "numbers")):
        return pl.col(column).sum().cast(pl.Int64)
    if column.endswith("_min"):
        return pl.col(column).min()
    return pl.col(column).max() if column.endswith("_max") else pl.col(column).sum()


def _high(fraction: pl.Series) -> pl.Series:
    """Return the leading bits of each number: as many that the sum of a billion of them is exact.

    Adding and subtracting `pivot` rounds a number to a multiple of the pivot's last bit. A billion such multiples stay
    below the pivot.
    """
    largest = fraction.abs().max()
    if not largest or largest > 2.0**900:  # type: ignore[operator]
        return fraction
    pivot = math.ldexp(1.0, math.frexp(largest)[1] + 31)  # type: ignore[arg-type]
    return (fraction + pivot) - pivot


def _where(keep: pl.Series, values: pl.Series) -> pl.Series:
    """Return the values where `keep` is true, null elsewhere."""
    return pl.select(pl.when(keep).then(values)).to_series()


def _constant(value: bool, length: int) -> pl.Series:
    return pl.repeat(value, length, dtype=pl.Boolean, eager=True)
