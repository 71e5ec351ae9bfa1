"""Keywords that are checked here: jsonschema-rs compares large numbers by pairs, and writes out all their digits.

It also reads a text for each `contentMediaType` and `contentEncoding`; here they assert nothing.

The library calls these classes in place of its own checks. What they refuse is what it refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Context, Decimal
from typing import Any, Final

_EXACT: Final = Context(prec=1_000, Emax=10_000, Emin=-10_000)
"""Of a quotient of two floats: it has up to 640 digits."""


def is_unique(items: list[Any]) -> bool:
    """Return whether a list has no item twice."""
    kinds = {*map(type, items)}
    keys = items if kinds == {str} else map(str if kinds == {int} else equality_key, items)
    return len({*keys}) == len(items)


def is_multiple(of: float) -> Callable[[Any], bool]:
    """Return what says whether a number is a multiple."""
    exact = Decimal(repr(of))

    def check(number: Any) -> bool:
        if isinstance(number, int) and isinstance(of, int):
            return number % of == 0
        return _EXACT.remainder(Decimal(repr(number)), exact) == 0

    return check


def _keyword(kinds: tuple[type, ...], make: Callable[[Any], Callable[[Any], bool]]) -> Any:
    """Return a keyword as the library asks for it: a class whose `validate` raises for a value that does not fit."""

    class Keyword:
        def __init__(self, part: Mapping[str, Any], said: Any, path: object) -> None:
            self._fits = make(said)

        def validate(self, value: Any) -> None:
            if type(value) in kinds and not self._fits(value):
                raise ValueError("does not fit")

    return Keyword


KEYWORDS: Final[dict[str, Any]] = {
    "uniqueItems": _keyword((list,), lambda said: lambda value: said is not True or is_unique(value)),
    "multipleOf": _keyword((int, float), is_multiple),
    "contentMediaType": _keyword((), lambda said: bool),
    "contentEncoding": _keyword((), lambda said: bool),
}
"""By their names, as the library asks for them."""


def equality_key(value: Any) -> Any:
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
