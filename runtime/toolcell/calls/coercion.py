"""Mending common mistakes in a model's arguments, guided by the schema and nothing else.

Works on a private copy and records every change. It never makes a value valid that the table does not name;
whether the outcome is valid is for `validation` to say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

from toolcell.calls.options import Coercion, Extras
from toolcell.calls.problems import MAX_REFERENCES, Part, Subschemas
from toolcell.calls.schema import OF_RESULTS
from toolcell.calls.values import (
    MAX_INTEGER,
    MIN_INTEGER,
    BadValue,
    Copied,
    Decoder,
    Path,
    ValueProblem,
    path_text,
)
from toolcell.support.spelling import did_you_mean
from toolcell_bridge.wire.frozen import frozen

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_MAX_NUMBER_CHARS = 400
_MAX_INTEGER_DIGITS = 19

_MISSING = object()

STEPS_PER_NODE = 50
"""Values that are looked at for each value received, before the rest is left as it is. Most schemas take one or two."""
FREE_STEPS = 10_000
MAX_STEPS = 400_000
"""Twice as many as values may be in one set of arguments. They take about a second."""
CHARS_PER_STEP = 64
"""Characters for one step of text that is read as JSON."""
MAX_WARNINGS = 20
MAX_CHANGES = 200
"""Noted of one set of arguments. A change takes a hundred times the memory of the digit that was text."""


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
        return number if whole is None and math.isfinite(number) else _MISSING
    return 0 if lenient and value is None else _MISSING


def as_integer(value: Any, lenient: bool) -> Any:
    """The same as a number, but whole: "3.0" and 3.0 and "1e3" are, "3.7" is not."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return _whole(Decimal(value)) if value.is_integer() else _MISSING
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(value):
        return _whole(Decimal(value))
    return 0 if lenient and value is None else _MISSING


def _whole(number: Decimal) -> Any:
    # "1e9999" must not become an integer of ten thousand digits
    if number and number.adjusted() >= _MAX_INTEGER_DIGITS:
        return _MISSING
    if number != number.to_integral_value() or not MIN_INTEGER <= number <= MAX_INTEGER:
        return _MISSING
    return int(number)


def as_boolean(value: Any, lenient: bool) -> Any:
    """Exactly "true" and "false", as JSON and Python write them, 1 and 0."""
    if value in ("true", "True") or (type(value) in (int, float) and value == 1):
        return True
    if value in ("false", "False") or (type(value) in (int, float) and value == 0):
        return False
    return False if lenient and value is None else _MISSING


def as_string(value: Any, lenient: bool) -> Any:
    """A number in decimal without exponent, or a boolean."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = format(Decimal(repr(value)), "f")
        return text.removesuffix(".0")
    return "" if lenient and value is None else _MISSING


def as_null(value: Any, lenient: bool) -> Any:
    """An empty string, zero or false."""
    return None if type(value) in (str, int, float, bool) and not value else _MISSING


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


@frozen
class Mended:
    """Arguments after mending, and what was done to them."""

    args: Any
    changes: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = ()


class Coercer:
    """One pass over one set of arguments.

    Nothing is changed in place: every pair of a part of the schema and a container of the arguments is mended once,
    and its outcome serves all branches of all unions above. Past a number of steps that is linear in what was
    received, values are left as they are.
    """

    def __init__(
        self, schemas: Subschemas, copied: Copied, coercion: Coercion, extras: Extras, *, fill: bool = True
    ) -> None:
        self._schemas = schemas
        self._copied = copied
        self._converts = coercion != "off"
        self._lenient = coercion == "lenient"
        self._extras = extras
        self._fill = fill
        """Fill in defaults."""
        self._decoder = Decoder(copied)
        self._steps = 0
        self._unions = 0
        """Unions that the value is inside of: there, nobody knows which properties are extras."""
        self.unknown: list[ValueProblem] = []
        """Properties that the schema does not name, where it is silent about others: the first of them."""
        self._unknown_count = 0
        self._changes = 0
        """Values that were mended, noted or not, but for those in branches of unions that did not fit."""
        self._known_facts: dict[int, _ObjectFacts] = {}
        """What is known of parts of the schema, by identity."""
        self._active: set[int] = set()
        """Pairs that are being mended. A part that refers to itself for the same value adds nothing."""
        self._outcomes: dict[int, Any] = {}
        """Outcomes of containers inside unions, by identity of part and container: the outcome and the container, or
        the container alone where nothing was mended. It is kept, so that its identity stays its own."""

    @property
    def steps(self) -> int:
        """Values that were looked at, those that text was decoded to included."""
        return self._steps + self._decoder.nodes + self._decoder.chars // CHARS_PER_STEP

    def arguments(self) -> Mended:
        """Mend the whole set of arguments.

        Raises:
            BadValue: text that had to be decoded holds something that no argument can be.
        """
        mended, changes = self._value(self._schemas.root, self._copied.args, (), 0)
        warnings = [f"{problem.message} was dropped" for problem in self.unknown]
        if self._unknown_count > MAX_WARNINGS:
            warnings.append(f"{self._unknown_count - MAX_WARNINGS} more unknown properties were dropped")
        if self._changes > MAX_CHANGES:
            warnings.append(f"{self._changes - MAX_CHANGES} more values were mended")
        return Mended(mended, changes[:MAX_CHANGES], tuple(warnings))

    def _value(self, part: Any, value: Any, path: Path, depth: int) -> _Outcome:
        """Mend a value; `depth` counts the parts above that speak about the same value."""
        part = self._schemas.resolved(part)
        self._steps += 1
        key = (id(part) << 64 | id(value)) << 1 | (self._unions > 0)  # a tuple would take three times the memory
        if not isinstance(part, Mapping) or depth > MAX_REFERENCES or key in self._active or self._is_exhausted():
            return value, ()
        if key in self._outcomes:
            known = self._outcomes[key]
            return known[:2] if type(known) is tuple else (value, ())
        self._active.add(key)
        try:
            outcome = self._mended(part, value, path, depth)
        finally:
            self._active.discard(key)
        if self._unions and isinstance(value, dict | list):  # elsewhere nobody asks again
            self._outcomes[key] = value if outcome[0] is value and not outcome[1] else (*outcome, value)
        return outcome

    def _is_exhausted(self) -> bool:
        return self._steps > min(FREE_STEPS + STEPS_PER_NODE * self._decoder.nodes, MAX_STEPS)

    def _mended(self, part: Part, value: Any, path: Path, depth: int) -> _Outcome:
        value, changes = self._to_type(part, value, path) if self._converts else (value, ())
        self._unions += 1
        for keyword in ("anyOf", "oneOf"):
            if isinstance(branches := part.get(keyword), list):
                value, more = self._first_valid(branches, value, path, depth)
                changes += more
        for each in part.get("allOf") or ():
            value, more = self._value(each, value, path, depth + 1)
            changes += more
        self._unions -= 1
        if isinstance(value, dict):
            value, more = self._members(part, value, path)
        elif isinstance(value, list):
            value, more = self._items(part, value, path)
        else:
            more = ()
        return value, changes + more

    def _to_type(self, part: Part, value: Any, path: Path) -> _Outcome:
        wanted = part.get("type")
        kinds = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []
        if any(kind in MATCHES and MATCHES[kind](value) for kind in kinds):
            return value, ()
        for kind in kinds:
            converted = self._converted(kind, value, path)
            if converted is not _MISSING:
                return converted, self._note(path, value, converted)
        if "integer" in kinds and isinstance(value, float) and value.is_integer():
            raise BadValue(ValueProblem(path, "must be an integer of at most 64 bits"))
        return value, ()

    def _note(self, path: Path, before: Any, after: Any) -> tuple[Change, ...]:
        self._changes += 1
        return (Change(path_text(path), before, after),) if self._changes <= MAX_CHANGES else ()

    def _converted(self, kind: str, value: Any, path: Path) -> Any:
        if kind in CONVERSIONS:
            return CONVERSIONS[kind](value, self._lenient)
        if kind not in DECODED or not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
            return _MISSING
        try:
            decoded = self._decoder.decode(value, path)
        except BadValue:
            raise
        except ValueError:
            return _MISSING
        return decoded if isinstance(decoded, DECODED[kind]) else _MISSING

    def _first_valid(self, branches: list[Any], value: Any, path: Path, depth: int) -> _Outcome:
        """The first branch whose outcome validates; the changes of the others do not count."""
        if any(self._is_valid(branch, value) for branch in branches):
            return value, ()
        before, unions = self._changes, self._unions
        for branch in branches:
            self._changes, self._unions = before, unions
            try:
                outcome, changes = self._value(branch, value, path, depth + 1)
            except BadValue:
                continue
            if outcome is not value and self._is_valid(branch, outcome):
                return outcome, changes
        self._changes, self._unions = before, unions
        return value, ()

    def _is_valid(self, branch: Any, value: Any) -> bool:
        self._steps += 1 + (len(value) if isinstance(value, dict | list) else 0)
        return self._schemas.is_valid(branch, value)

    def _members(self, part: Part, members: dict[str, Any], path: Path) -> _Outcome:
        properties, facts = part.get("properties") or {}, self._facts(part)
        extra = part.get("additionalProperties")
        closed = None if self._unions or self._extras == "allow" else facts.closed
        changes: list[Change] = []
        mended: dict[str, Any] = {}
        given = self._by_names_of_arguments(part, members, path, changes) if OF_RESULTS in part else members
        for name, member in given.items():
            if closed is not None and name not in closed:
                self._take_unknown(path, name, (each for each in closed if each not in members))
                continue
            below = properties.get(name, extra)
            if member is None and name not in facts.required and self._means_omitted(properties.get(name)):
                changes += self._note((*path, name), None, "(omitted)")
                continue
            mended[name], more = self._value(below, member, (*path, name), 0)
            changes += more
        for name in facts.with_default if self._fill else ():
            if name not in mended:
                mended[name] = self._decoder.copy(properties[name]["default"], (*path, name))
        return _unless_same(members, mended), tuple(changes)

    def _facts(self, part: Part) -> _ObjectFacts:
        if (found := self._known_facts.get(id(part))) is None:
            properties = part.get("properties") or {}
            self._known_facts[id(part)] = found = _ObjectFacts(
                closed_properties(part),
                frozenset(part.get("required") or ()),
                tuple(name for name, below in properties.items() if self._schemas.has_default(below)),
            )
        return found

    def _by_names_of_arguments(
        self, part: Part, members: dict[str, Any], path: Path, changes: list[Change]
    ) -> dict[str, Any]:
        """Take out what only results of the type have; what has another name there gets its own."""
        others, given = part[OF_RESULTS], dict(members)
        for other in others if isinstance(others, list) else ():
            match other:
                case [str(of_result), name] if of_result in given:
                    value = given.pop(of_result)
                    changes += self._note((*path, of_result), value, "(omitted)" if name is None else f"({name})")
                    if isinstance(name, str):
                        given.setdefault(name, value)
        return given

    def _take_unknown(self, path: Path, name: str, absent: Iterable[str]) -> None:
        self._unknown_count += 1
        if len(self.unknown) < MAX_WARNINGS:
            shown = path_text((*path, name))
            self.unknown.append(ValueProblem(path, f"unknown property {shown!r}{did_you_mean(name, absent)}"))

    def _means_omitted(self, part: Any) -> bool:
        """Null for an optional property that cannot be null stands for leaving it out."""
        return (
            self._converts
            and not self._lenient
            and isinstance(part, Mapping)
            and not self._schemas.is_valid(part, None)
        )

    def _items(self, part: Part, items: list[Any], path: Path) -> _Outcome:
        each, first = part.get("items"), part.get("prefixItems") or ()
        if isinstance(each, list):
            each, first = part.get("additionalItems"), each
        changes: list[Change] = []
        mended: list[Any] = []
        for index, item in enumerate(items):
            below = first[index] if index < len(first) else each
            outcome, more = self._value(below, item, (*path, index), 0)
            mended.append(outcome)
            changes += more
        return _unless_same(items, mended), tuple(changes)


@frozen
class _ObjectFacts:
    """What a schema says of an object, found out once for all objects under it."""

    closed: frozenset[str] | None
    """As from `closed_properties`."""
    required: frozenset[str]
    with_default: tuple[str, ...]
    """Properties that are filled in."""


_Outcome = tuple[Any, tuple[Change, ...]]
"""A mended value, and what was done to it. The value itself where nothing was."""


def _unless_same(before: Any, after: Any) -> Any:
    """`before` where mending changed nothing, so that what was found out about it stays known."""
    if len(before) != len(after):
        return after
    if isinstance(before, dict):
        is_same = all(name in before and before[name] is value for name, value in after.items())
    else:
        is_same = all(old is new for old, new in zip(before, after, strict=True))
    return before if is_same else after


def closed_properties(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The properties a schema names when it is silent about others; None when it is not silent."""
    if "properties" not in schema or _SPEAKS_OF_OTHERS & schema.keys():
        return None
    return frozenset(schema["properties"])


_SPEAKS_OF_OTHERS = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "propertyNames",
    "anyOf",
    "oneOf",
    "allOf",
    "if",
    "dependentSchemas",
    "$ref",
}
