"""How one cell is read: as a number, as text, or as nothing. `columns` has the same rules for whole columns."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

MAX_NUMBER_CHARS: Final = 100
SPACE: Final = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""May stand around a number: Unicode's White_Space."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"[+-]?[0-9]+")

IDENTIFIER: Final = r"^(?:[+-]?0[0-9]|[0-9]+[eE][0-9]+$)"
"""Text of digits that says more, or something else, than its number. A pattern for Python and for polars."""
_IDENTIFIER = re.compile(IDENTIFIER)

_HUGE = 10**MAX_NUMBER_CHARS

Number = int | float


def number_of(cell: Any) -> Number | None:
    """Return the cell as a number, text such as `" 1.50"` too; None when it is none. Booleans are none."""
    kind = type(cell)
    if kind is int:
        return int(cell) if -_HUGE < cell < _HUGE else None
    if kind is float:
        return float(cell) if math.isfinite(cell) else None
    if kind is not str or not cell or len(cell) > MAX_NUMBER_CHARS:
        return None
    text = cell.strip(SPACE)
    if _NUMBER.fullmatch(text) is None:
        return None
    if _INTEGER.fullmatch(text):
        return int(text)
    value = float(text)
    return value if math.isfinite(value) else None


def key_of(cell: Any) -> Number | None:
    """Return the number that a cell is compared and grouped by; None for text, and for what only looks like a number.

    `00501` is a postcode and `12E5` a part: neither is the same as 501 or 1200000.
    """
    if type(cell) is str and _IDENTIFIER.search(cell.strip(SPACE)):
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
    if cell is None:
        return ""
    if isinstance(cell, float) and math.isfinite(cell):
        cell = tidy(cell)
    return json.dumps(cell, ensure_ascii=False, default=str)


def group_key(cell: Any) -> tuple[int, Number, str]:
    """Two cells of one group have the same key: 1, 1.0 and "1" are one group, null another.

    "01" and "1e0" are groups of their own.
    """
    if cell is None:
        return (2, 0, "")
    number = key_of(cell)
    return (1, 0, text_of_cell(cell)) if number is None else (0, number, "")
