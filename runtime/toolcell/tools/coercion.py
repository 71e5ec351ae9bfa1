"""Mending common mistakes in a model's arguments, guided by the schema and nothing else.

Works on a private copy and records every change. It never makes a value valid that the table does not name;
whether the outcome is valid is for `validation` to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from toolcell.tools.values import path_text

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_MAX_NUMBER_CHARS = 400
_MAX_INTEGER_DIGITS = 19
_MAX_EMBEDDED_CHARS = 1_000_000
_MAX_REFERENCES = 16

_MISSING = object()

Path = tuple[str | int, ...]
IsValid = Callable[[Mapping[str, Any], Any], bool]


@dataclass(frozen=True, slots=True)
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
        return int(value) if value.lstrip("+-").isdigit() else number
    return 0 if lenient and value is None else _MISSING


def as_integer(value: Any, lenient: bool) -> Any:
    """The same as a number, but whole: "3.0" and 3.0 and "1e3" are, "3.7" is not."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else _MISSING
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(value):
        return _whole(Decimal(value))
    return 0 if lenient and value is None else _MISSING


def _whole(number: Decimal) -> Any:
    # "1e9999" must not become an integer of ten thousand digits
    if number and number.adjusted() >= _MAX_INTEGER_DIGITS:
        return _MISSING
    return int(number) if number == number.to_integral_value() else _MISSING


def as_boolean(value: Any, lenient: bool) -> Any:
    """Exactly "true", "false", 1 and 0."""
    if value == "true" or (type(value) in (int, float) and value == 1):
        return True
    if value == "false" or (type(value) in (int, float) and value == 0):
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


def as_object(value: Any, lenient: bool) -> Any:
    """A string that holds a JSON object."""
    return _embedded(value, dict)


def as_array(value: Any, lenient: bool) -> Any:
    """A string that holds a JSON array."""
    return _embedded(value, list)


def _embedded(value: Any, kind: type) -> Any:
    if not isinstance(value, str) or len(value) > _MAX_EMBEDDED_CHARS:
        return _MISSING
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return _MISSING
    return parsed if isinstance(parsed, kind) else _MISSING


CONVERSIONS: Mapping[str, Callable[[Any, bool], Any]] = {
    "number": as_number,
    "integer": as_integer,
    "boolean": as_boolean,
    "string": as_string,
    "null": as_null,
    "object": as_object,
    "array": as_array,
}

MATCHES: Mapping[str, Callable[[Any], bool]] = {
    "number": lambda value: type(value) in (int, float),
    "integer": lambda value: type(value) is int,
    "boolean": lambda value: type(value) is bool,
    "string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}


class Coercer:
    """One pass over one set of arguments."""

    def __init__(
        self, root: Mapping[str, Any], is_valid: IsValid, *, lenient: bool = False, drop_extras: bool = False
    ) -> None:
        self._root = root
        self._is_valid = is_valid
        self._lenient = lenient
        self._drop_extras = drop_extras
        self.changes: list[Change] = []
        self.warnings: list[str] = []

    def arguments(self, args: Any) -> Any:
        """Mend a whole set of arguments. `args` is changed in place where it can be."""
        mended = self._value(self._root, args, ())
        if self._drop_extras and isinstance(mended, dict):
            self._drop(mended)
        return mended

    def _drop(self, args: dict[str, Any]) -> None:
        known = closed_properties(self._root)
        if known is None:
            return
        for name in [name for name in args if name not in known]:
            self.warnings.append(f"unknown property {name!r} was dropped")
            del args[name]

    def _value(self, schema: Any, value: Any, path: Path) -> Any:
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping):
            return value
        value = self._to_type(schema, value, path)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(keyword), list):
                value = self._first_valid(branches, value, path)
        for part in schema.get("allOf") or ():
            value = self._value(part, value, path)
        if isinstance(value, dict):
            return self._members(schema, value, path)
        if isinstance(value, list):
            return self._items(schema, value, path)
        return value

    def _resolved(self, schema: Any) -> Any:
        """Follow references inside the same schema; one that leads nowhere or in circles mends nothing."""
        for _ in range(_MAX_REFERENCES):
            if not (isinstance(schema, Mapping) and "$ref" in schema):
                return schema
            target: Any = self._root
            for step in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
                target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
            schema = target
        return None

    def _to_type(self, schema: Mapping[str, Any], value: Any, path: Path) -> Any:
        wanted = schema.get("type")
        kinds = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []
        if any(kind in MATCHES and MATCHES[kind](value) for kind in kinds):
            return value
        for kind in kinds:
            converted = CONVERSIONS[kind](value, self._lenient) if kind in CONVERSIONS else _MISSING
            if converted is not _MISSING:
                self.changes.append(Change(path_text(path), value, converted))
                return converted
        return value

    def _first_valid(self, branches: list[Any], value: Any, path: Path) -> Any:
        """The first branch whose outcome validates; its changes count, those of the others do not."""
        if any(isinstance(branch, Mapping) and self._is_valid(branch, value) for branch in branches):
            return value
        for branch in branches:
            attempt = Coercer(self._root, self._is_valid, lenient=self._lenient)
            outcome = attempt._value(branch, json_copy(value), path)
            if isinstance(branch, Mapping) and self._is_valid(branch, outcome):
                self.changes += attempt.changes
                return outcome
        return value

    def _members(self, schema: Mapping[str, Any], members: dict[str, Any], path: Path) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        extra = schema.get("additionalProperties")
        for name in list(members):
            part = properties.get(name, extra)
            if members[name] is None and name not in required and self._means_omitted(properties.get(name)):
                self.changes.append(Change(path_text((*path, name)), None, "(omitted)"))
                del members[name]
            elif isinstance(part, Mapping):
                members[name] = self._value(part, members[name], (*path, name))
        for name, part in properties.items():
            if name not in members and isinstance(part, Mapping) and "default" in part:
                members[name] = json_copy(part["default"])
        return members

    def _means_omitted(self, schema: Any) -> bool:
        """Null for an optional property that cannot be null stands for leaving it out."""
        return not self._lenient and isinstance(schema, Mapping) and not self._is_valid(schema, None)

    def _items(self, schema: Mapping[str, Any], items: list[Any], path: Path) -> list[Any]:
        each, first = schema.get("items"), schema.get("prefixItems") or ()
        if isinstance(each, list):
            each, first = schema.get("additionalItems"), each
        for index, item in enumerate(items):
            part = first[index] if index < len(first) else each
            items[index] = self._value(part, item, (*path, index))
        return items


def closed_properties(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The properties a schema names when it is silent about others; None when it is not silent."""
    if "properties" not in schema or _SPEAKS_OF_OTHERS & schema.keys():
        return None
    return frozenset(schema["properties"])


_SPEAKS_OF_OTHERS = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames",
    "anyOf", "oneOf", "allOf", "if", "dependentSchemas", "$ref",
}  # fmt: skip


def json_copy(value: Any) -> Any:
    """A copy of plain JSON data."""
    if isinstance(value, dict):
        return {key: json_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_copy(item) for item in value]
    return value
