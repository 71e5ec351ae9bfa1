"""How one cell is read: as a number, as text, or as nothing; how two are compared. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from toolcell.errors import ToolError

MAX_NUMBER_CHARS = 100
MAX_IN_VALUES = 10_000
MAX_CONDITIONS = 100

NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_INTEGER = re.compile(r"[+-]?[0-9]+")

_IDENTIFIER = re.compile(r"[+-]?0[0-9].*|[0-9]+[eE][0-9]+")
"""Text of digits that says more, or something else, than its number."""

_HUGE = 10**MAX_NUMBER_CHARS

Number = int | float


class Missing(Enum):
    """The cell of a row that does not have the column. Not the same as null."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING


def is_empty(cell: Any) -> bool:
    """True when there is no value: the row lacks the column, or it is null."""
    return cell is None or cell is MISSING


def number_of(cell: Any) -> Number | None:
    """Return the cell as a number, text such as `" 1.50"` too; None when it is none. Booleans are none."""
    kind = type(cell)
    if kind is int:
        return int(cell) if -_HUGE < cell < _HUGE else None
    if kind is float:
        return float(cell) if math.isfinite(cell) else None
    if kind is not str or not cell or len(cell) > MAX_NUMBER_CHARS:
        return None
    text = cell.strip()
    if NUMBER.fullmatch(text) is None:
        return None
    if _INTEGER.fullmatch(text):
        return int(text)
    value = float(text)
    return value if math.isfinite(value) else None


def key_of(cell: Any) -> Number | None:
    """Return the number that a cell is compared and grouped by; None for text, and for what only looks like a number.

    `00501` is a postcode and `12E5` a part: neither is the same as 501 or 1200000.
    """
    if type(cell) is str and _IDENTIFIER.fullmatch(cell.strip()):
        return None
    return number_of(cell)


def tidy(number: Number) -> Number:
    """Return a whole float as an integer, and an integer that no JSON reader could hold as a float."""
    if isinstance(number, float):
        return int(number) if number.is_integer() and abs(number) < 2**53 else number
    return number if abs(number) < 2**63 else float(number)


def text_of_cell(cell: Any) -> str:
    """Return the cell as text: numbers as JSON writes them, `true` and `false`, nested values as JSON."""
    if isinstance(cell, str):
        return cell
    if is_empty(cell):
        return ""
    if isinstance(cell, float) and math.isfinite(cell):
        cell = tidy(cell)
    return json.dumps(cell, ensure_ascii=False, default=str)


def sort_key(cell: Any) -> tuple[int, Number, str]:
    """Numbers before text; numbers by value. Null and missing cells have no key: they come last."""
    number = number_of(cell)
    return (1, 0, text_of_cell(cell)) if number is None else (0, number, "")


def group_key(cell: Any) -> tuple[int, Number, str]:
    """Two cells of one group have the same key: 1, 1.0 and "1" are one group, null and missing another.

    "01" and "1e0" are groups of their own.
    """
    if is_empty(cell):
        return (2, 0, "")
    number = key_of(cell)
    return (1, 0, text_of_cell(cell)) if number is None else (0, number, "")


OPERATORS: Final = ("==", "!=", ">", "<", ">=", "<=", "contains", "in")
_ORDER: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of a column with a value."""

    column: str
    op: str
    value: Any
    numbers: frozenset[Number] = field(default=frozenset(), repr=False)
    """Of the value, or of the values of `in`."""
    texts: frozenset[str] = field(default=frozenset(), repr=False)
    """Of those that are no numbers."""
    has_null: bool = False
    text: str = field(default="", repr=False)
    """Of the value, for `contains` folded: a long one is not written out again for each cell."""

    def matches(self, cell: Any) -> bool:
        """True when the cell passes. A missing cell never does, for `!=` neither."""
        if cell is MISSING:
            return False
        if self.op in ("==", "in"):
            return self._is_one(cell)
        if self.op == "!=":
            return not self._is_one(cell)
        if cell is None or self.has_null:
            return False
        if self.op == "contains":
            return self.text in text_of_cell(cell).casefold()
        number = number_of(cell)
        if number is not None and self.numbers:
            return _ORDER[self.op](number, next(iter(self.numbers)))
        return _ORDER[self.op](text_of_cell(cell), self.text)

    def _is_one(self, cell: Any) -> bool:
        if cell is None:
            return self.has_null
        number = key_of(cell)
        return text_of_cell(cell) in self.texts if number is None else number in self.numbers


def condition(column: str, op: str, value: Any) -> Condition:
    """Return a checked condition.

    Raises:
        ToolError: there is no such operator, or the value does not fit it.
    """
    if op not in OPERATORS:
        raise ToolError(f"op {op!r:.40} is unknown; use one of: {', '.join(OPERATORS)}", code="invalid_arguments")
    if op == "in" and not isinstance(value, list):
        raise ToolError(f'"in" needs a list of values for {column!r:.80}, not {value!r:.80}', code="invalid_arguments")
    values: Sequence[Any] = value if op == "in" else [value]
    if len(values) > MAX_IN_VALUES:
        raise ToolError(f'"in" takes at most {MAX_IN_VALUES} values, not {len(values)}', code="invalid_arguments")
    read = key_of if op in ("==", "!=", "in") else number_of
    numbers = [read(each) for each in values]
    texts = frozenset(
        text_of_cell(each) for each, number in zip(values, numbers, strict=True) if number is None and each is not None
    )
    known = frozenset(number for number in numbers if number is not None)
    text = "" if op == "in" else text_of_cell(value)
    text = text.casefold() if op == "contains" else text
    return Condition(
        column, op, value=value, numbers=known, texts=texts, has_null=any(each is None for each in values), text=text
    )
