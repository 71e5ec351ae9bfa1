"""The common mistakes in a model's arguments: for each type of JSON Schema, what is taken for a value of it.

`schema_walk` applies the table where a value has another type, and records every change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from toolcell.calls.values import MAX_INTEGER, MIN_INTEGER
from toolcell_bridge.wire.frozen import frozen

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_MAX_NUMBER_CHARS = 400
_MAX_INTEGER_DIGITS = 19

MISSING = object()


@frozen
class Change:
    """One value that was mended, for the record."""

    path: str
    before: Any
    after: Any

    def to_dict(self) -> dict[str, Any]:
        """Shape: {"path", "from", "to"}."""
        return {"path": self.path, "from": self.before, "to": self.after}


def as_number(value: Any, lenient: bool) -> Any:
    """A numeric string, or a boolean; null only when lenient."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(value):
        number = float(value)
        whole = int(value) if value.lstrip("+-").isdigit() else None
        if whole is not None and MIN_INTEGER <= whole <= MAX_INTEGER:
            return whole
        return number if whole is None and math.isfinite(number) else MISSING
    return 0 if lenient and value is None else MISSING


def as_integer(value: Any, lenient: bool) -> Any:
    """The same as a number, but whole: "3.0" and 3.0 and "1e3" are, "3.7" is not."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return _whole(Decimal(value)) if value.is_integer() else MISSING
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(value):
        return _whole(Decimal(value))
    return 0 if lenient and value is None else MISSING


def _whole(number: Decimal) -> Any:
    # "1e9999" must not become an integer of ten thousand digits
    if number and number.adjusted() >= _MAX_INTEGER_DIGITS:
        return MISSING
    if number != number.to_integral_value() or not MIN_INTEGER <= number <= MAX_INTEGER:
        return MISSING
    return int(number)


def as_boolean(value: Any, lenient: bool) -> Any:
    """Exactly "true" and "false", as JSON and Python write them, 1 and 0."""
    if value in ("true", "True") or (type(value) in (int, float) and value == 1):
        return True
    if value in ("false", "False") or (type(value) in (int, float) and value == 0):
        return False
    return False if lenient and value is None else MISSING


def as_string(value: Any, lenient: bool) -> Any:
    """A number in decimal without exponent, or a boolean."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = format(Decimal(repr(value)), "f")
        return text.removesuffix(".0")
    return "" if lenient and value is None else MISSING


def as_null(value: Any, lenient: bool) -> Any:
    """An empty string, zero or false."""
    return None if type(value) in (str, int, float, bool) and not value else MISSING


CONVERSIONS: Mapping[str, Callable[[Any, bool], Any]] = {
    "number": as_number,
    "integer": as_integer,
    "boolean": as_boolean,
    "string": as_string,
    "null": as_null,
}

DECODED: Mapping[str, type] = {"object": dict, "array": list}
"""Types that text is decoded for, when it is JSON."""

MATCHES: Mapping[str, Callable[[Any], bool]] = {
    "number": lambda value: type(value) in (int, float),
    "integer": lambda value: type(value) is int,
    "boolean": lambda value: type(value) is bool,
    "string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}
