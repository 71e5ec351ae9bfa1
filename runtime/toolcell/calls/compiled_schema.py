"""Compile a JSON Schema to what says whether a value is valid, in time that is linear in the value.

jsonschema-rs does it (Rust). Only `is_valid` is asked of it: its errors are all collected, each holds a copy of its
value, and a union inside a union is described again for every branch. `schema_walk` says what is wrong. Functions
import the library: a program without tools does not need it.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any, Final

from toolcell.calls.schema import MAPS, dicts_in
from toolcell.calls.values import LARGE_ELEMENTS, MAX_INTEGER, with_leaves
from toolcell.errors import RegistrationError

if TYPE_CHECKING:
    from jsonschema_rs import Validator

BACKTRACK_LIMIT = 20_000
"""Steps a pattern with lookaround may take; about a millisecond, then the value is refused."""
MAX_LEVELS = 200
"""Most levels of dicts and lists in a schema. Whoever reads it calls itself for each of them."""

Part = Mapping[str, Any]


# Of a stranger's schema, what may be compiled and used in this process

MAX_PLAIN: Final = 32
"""Arguments that are copied without counting them all."""
_FLAT_ROOT = frozenset({"type", "properties", "required", "additionalProperties", "description", "title", "$schema"})
_COMPARED = frozenset({
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "default",
})  # fmt: skip
_FLAT = _COMPARED | {"description", "title", "format", "examples"}
MAX_SHORT_CHARS = 1_000


def flat_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a stranger's schema says of arguments that are scalars, as far as using it takes next to nothing.

    What fits it fits the stranger's. It is empty where anything else in the schema might matter for them.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if schema.get("type") != "object" or not isinstance(properties, dict) or len(properties) > MAX_PLAIN:
        return {}
    if not _is_short(required) or any(key not in _FLAT_ROOT and not key.startswith("x-") for key in schema):
        return {}
    flat = {
        name: {key: value for key, value in part.items() if key in _COMPARED}
        for name, part in properties.items()
        if isinstance(part, dict) and part.keys() <= _FLAT
    }
    flat = {name: part for name, part in flat.items() if all(map(_is_short, part.values()))}
    if any("default" in part for name, part in properties.items() if name not in flat and isinstance(part, dict)):
        return {}  # arguments get it, even where they lack the property
    return {"type": "object", "properties": flat, "required": required, "additionalProperties": False}


def _is_short(value: Any) -> bool:
    """True for a scalar, or a few, that comparing with takes next to nothing."""
    some = value if isinstance(value, list) else [value]
    return len(some) <= MAX_PLAIN and all(
        each is None
        or (isinstance(each, str) and len(each) <= MAX_SHORT_CHARS)
        or (isinstance(each, int | float) and abs(each) <= MAX_INTEGER)
        for each in some
    )


def compile_schema(schema: Part) -> Validator:
    """Compile a schema; its own errors show here, not at the first call.

    Patterns run on a linear-time engine. Patterns that need lookaround or backreferences run with a bounded number
    of backtracks. References to other documents are never fetched.

    Raises:
        RegistrationError: the schema is not valid JSON Schema (2020-12, or draft 7 where it says so or
            writes tuples its way), or is nested too deeply.
    """
    _check_levels(schema)
    import jsonschema_rs

    make, counted = _draft(schema), counted_repetitions(schema)
    for regex in (jsonschema_rs.RegexOptions(), jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACK_LIMIT)):
        try:
            validator: Validator = make(
                counted, pattern_options=regex, offline=True, validate_formats=False, keywords=KEYWORDS
            )
        except (jsonschema_rs.ValidationError, ValueError) as exc:
            failure = exc
        else:
            return validator
    path = getattr(failure, "instance_path", ())
    reason = getattr(failure, "message", str(failure))
    if path and path[-1] == "pattern":  # not the one that was compiled in its place
        reason = f'{json.dumps(functools.reduce(operator.getitem, path, schema))} is not a "regex"'
    raise RegistrationError(f"invalid schema at {'/'.join(map(str, path)) or 'root'}: {reason}") from failure


def _check_levels(schema: Any) -> None:
    """Refuse a schema that is nested too deeply, its references aside."""
    level, parts = 0, [schema]
    while parts:
        below = itertools.chain.from_iterable(each.values() if isinstance(each, dict) else each for each in parts)
        parts, level = [each for each in below if isinstance(each, dict | list)], level + 1
        if level > MAX_LEVELS + 1:
            raise RegistrationError(f"invalid schema: it is nested deeper than {MAX_LEVELS} levels")


def _draft(schema: Part) -> Any:
    import jsonschema_rs

    if "$schema" in schema:
        return jsonschema_rs.validator_for
    # Draft 7 wrote tuples as a list of `items`; later drafts do not know that.
    has_tuples = any(isinstance(part.get("items"), list) for part in dicts_in(schema))
    return jsonschema_rs.Draft7Validator if has_tuples else jsonschema_rs.Draft202012Validator


# Keywords that are checked here. jsonschema-rs compares large numbers by pairs, and writes out all their digits. It
# also reads a text for each `contentMediaType` and `contentEncoding`; here they assert nothing.

_EXACT: Final = Context(prec=1_000, Emax=10_000, Emin=-10_000)
"""Of a quotient of two floats: it has up to 640 digits."""


def equality_keys(items: list[Any]) -> Iterable[Any]:
    """Return what two items of a list have in common if they are equal."""
    kinds = {*map(type, items)}
    return items if kinds == {str} else map(str if kinds == {int} else equality_key, items)


def is_unique(items: list[Any]) -> bool:
    """Return whether a list has no item twice."""
    return len({*equality_keys(items)}) == len(items)


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


_ENCODER: Final = json.JSONEncoder(sort_keys=True, default=repr)


def equality_key(value: Any) -> Any:
    """Return what two values have in common when JSON takes them for equal, and only then.

    It is a text, whose hash nobody can guess: numbers that collide would keep a set busy.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return f"s{value}"
    same = with_leaves(value, lambda leaf: int(leaf) if isinstance(leaf, float) and leaf.is_integer() else leaf)
    return f"n{_ENCODER.encode(same)}"


# Patterns: those that only count characters are counted, and those that take long are named. jsonschema-rs compiles
# `\w{1,900}` to a megabyte.

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
_COUNTED = re.compile(rf"(?s)\^({_KIND}|\((?:\?:)?{_KIND}(?:\|{_KIND})*\))\{{([0-9]{{1,9}})(,?)([0-9]{{0,9}})\}}\$")
"""So many characters of one kind, and nothing else. The engines write the repetition out."""
_LAST = re.compile(r"(?<!\\)(?<!\\[xuUpP])\{([0-9]{1,9}),([0-9]{0,9})\}\Z")
"""A repetition that ends a pattern. A text that matches with more of it matches with the least of it too."""


def counted(pattern: str) -> tuple[str, int, int]:
    """Return a pattern without a repetition that can be counted, and without a most that decides nothing.

    Shape: (the pattern as it is compiled, the least and the most characters of the texts that it may match).
    """
    if (last := _LAST.search(pattern)) is not None and int(last[1]) <= int(last[2] or MAX_CHARS):
        return f"{pattern[: last.start()]}{{{last[1]}}}", 0, MAX_CHARS
    if (found := _COUNTED.fullmatch(pattern)) is not None:
        least = int(found[2])
        most = least if not found[3] else int(found[4]) if found[4] else MAX_CHARS
        if least <= most <= MAX_CHARS:
            return f"^{found[1]}*$", least, most
    return pattern, 0, MAX_CHARS


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


_DATA: Final = frozenset({"enum", "const"})
"""Keywords whose values are compared, so they are left as they are."""


def counted_repetitions(schema: Any, *, is_named: bool = False) -> Any:
    """Return a schema in which a repetition that is all that a pattern has became `minLength` and `maxLength`, and one
    that ends a pattern has no most. `is_named`: its keys are names of parts, and no keywords."""
    if isinstance(schema, list):
        return [*map(counted_repetitions, schema)]
    if not isinstance(schema, dict):
        return schema
    data, maps = (frozenset(), frozenset()) if is_named else (_DATA, MAPS)
    # A reference may point below any keyword, also one that JSON Schema does not know.
    made = {
        name: part if name in data else counted_repetitions(part, is_named=name in maps)
        for name, part in schema.items()
    }
    if not isinstance(pattern := schema.get("pattern"), str) or (how := counted(pattern))[0] == pattern:
        return made
    given, least = made.get("maxLength", MAX_CHARS), made.get("minLength", 0)
    made["pattern"] = how[0]
    if isinstance(given, int | float) and isinstance(least, int | float):
        made |= {"maxLength": min(given, how[2]), "minLength": max(least, how[1])}
    return made
