"""Patterns of a JSON Schema: those that only count characters are counted, and those that take long are told.

jsonschema-rs compiles `\\w{1,900}` to a megabyte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from toolcell.calls.schema import dicts_in
from toolcell.calls.values import LARGE_ELEMENTS
from toolcell_bridge.wire.frozen import frozen

MAX_CHARS: Final = 100_000_000
"""More than any text has."""
LARGE_WITH_PATTERNS: Final = LARGE_ELEMENTS // 8
"""Values, or as many times 32 characters, that are matched in the event loop. Source: on random text, an expression
takes 15 nanoseconds for each of its states and each character; those of people have fewer than a hundred."""
LARGE_WITH_LOOKAROUND: Final = 16
"""The same where a text may take `BACKTRACK_LIMIT` steps, a millisecond."""

_BACKTRACKS = re.compile(r"\(\?<?[=!]|\(\?>|\\[1-9k]|[*+?}]\+")
"""What needs the engine that goes back: lookaround, backreferences, atomic groups."""
_KIND = r"(?:\[(?:[^\\\[\]]|\\.)+\]|\\[dDwWsSnrt]|\\[pP]\{\w+\}|[^\\\[\](){}*+?|^$])"
"""One character of a kind. A class in a class is not read."""
_COUNTED = re.compile(rf"\^({_KIND}|\((?:\?:)?{_KIND}(?:\|{_KIND})*\))\{{(\d{{1,9}})(,?)(\d{{0,9}})\}}\$", re.DOTALL)
"""So many characters of one kind, and nothing else. The engines write the repetition out."""


@frozen
class Counted:
    """A pattern as it is compiled, and how many characters the texts have that it may match."""

    pattern: str
    least: int = 0
    most: int = MAX_CHARS


def counted(pattern: str) -> Counted:
    """Return a pattern whose repetition is counted instead of written out, where it is all that the pattern has."""
    found = _COUNTED.fullmatch(pattern)
    if found is None:
        return Counted(pattern)
    least = int(found[2])
    most = least if not found[3] else int(found[4]) if found[4] else MAX_CHARS
    return Counted(f"^{found[1]}*$", least, most) if least <= most <= MAX_CHARS else Counted(pattern)


def large_from(schema: Any) -> int:
    """Return how many values, or as many times 32 characters, are too many to be checked in the event loop."""
    most = LARGE_ELEMENTS
    for pattern in _patterns(schema):
        if _BACKTRACKS.search(pattern):
            return LARGE_WITH_LOOKAROUND
        most = LARGE_WITH_PATTERNS
    return most


def _patterns(schema: Any) -> Iterator[str]:
    for part in dicts_in(schema):
        if isinstance(pattern := part.get("pattern"), str):
            yield pattern
        if isinstance(names := part.get("patternProperties"), dict):
            yield from names


_VALUES: Final = ("const", "enum", "default", "examples")
"""Keywords that hold values, and no schemas."""
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords that hold schemas by names, which may be any."""


def counted_repetitions(schema: Any) -> Any:
    """Return a schema in which a repetition that is all that a pattern has became `minLength` and `maxLength`."""
    if isinstance(schema, list):
        return [counted_repetitions(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key, each in schema.items():
        if key in _NAMED and isinstance(each, dict):
            made[key] = {name: counted_repetitions(part) for name, part in each.items()}
        elif key not in _VALUES and isinstance(each, dict | list):
            made[key] = counted_repetitions(each)
    if not isinstance(pattern := schema.get("pattern"), str) or (how := counted(pattern)).pattern == pattern:
        return made
    given, least = made.get("maxLength", MAX_CHARS), made.get("minLength", 0)
    made["pattern"] = how.pattern
    if isinstance(given, int | float) and isinstance(least, int | float):
        made |= {"maxLength": min(given, how.most), "minLength": max(least, how.least)}
    return made
