"""Keywords that are checked here: jsonschema-rs compares large numbers by pairs, and writes out all their digits.

It also reads a text for each `contentMediaType` and `contentEncoding`; here they assert nothing.

The library calls these classes in place of its own checks. What they refuse is what it refuses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Context, Decimal
from typing import Any, Final

_EXACT: Final = Context(prec=1_000, Emax=10_000, Emin=-10_000)
"""Of a quotient of two floats: it has up to 640 digits."""


class _UniqueItems:
    def __init__(self, part: Mapping[str, Any], said: object, path: object) -> None:
        self._is_asked = said is True

    def validate(self, value: Any) -> None:
        """Raise ValueError for a list that has an item twice."""
        if not self._is_asked or not isinstance(value, list):
            return
        kinds = {*map(type, value)}
        keys = value if kinds == {str} else map(str if kinds == {int} else _key, value)
        if len({*keys}) < len(value):
            raise ValueError("has non-unique elements")


class _MultipleOf:
    def __init__(self, part: Mapping[str, Any], said: float, path: object) -> None:
        self._said = said
        self._exact = Decimal(repr(said))

    def validate(self, value: Any) -> None:
        """Raise ValueError for a number that is no multiple."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if isinstance(value, int) and isinstance(self._said, int):
            is_multiple = value % self._said == 0
        else:
            is_multiple = _EXACT.remainder(Decimal(repr(value)), self._exact) == 0
        if not is_multiple:
            raise ValueError(f"{value} is not a multiple of {self._said}")


class _Annotation:
    def __init__(self, part: Mapping[str, Any], said: object, path: object) -> None: ...

    def validate(self, value: Any) -> None:
        """Assert nothing."""


KEYWORDS: Final[dict[str, Any]] = {
    "uniqueItems": _UniqueItems,
    "multipleOf": _MultipleOf,
    "contentMediaType": _Annotation,
    "contentEncoding": _Annotation,
}
"""By their names, as the library asks for them."""


def _key(value: Any) -> Any:
    """Return what two values have in common when JSON takes them for equal, and only then.

    It is a text, whose hash nobody can guess: numbers that collide would keep a set busy.
    """
    match value:
        case None | bool():
            return value
        case str():
            return f"s{value}"
        case int():
            return f"n{value}"
    pieces = ["c"]
    _spell(value, pieces)
    return "".join(pieces) if isinstance(value, list | dict) else f"n{pieces[1][:-1]}"


def _spell(value: Any, pieces: list[str]) -> None:
    match value:
        case dict():
            pieces.append("{")
            for name in sorted(value):
                _spell(name, pieces)
                _spell(value[name], pieces)
            pieces.append("}")
        case list():
            pieces.append("[")
            for each in value:
                _spell(each, pieces)
            pieces.append("]")
        case str():
            pieces.append(json.dumps(value))
        case float() if value.is_integer():
            pieces.append(f"{int(value)},")
        case _:
            pieces.append(f"{value!r},")
