"""Make a tool's own Python types out of validated JSON values. pydantic does it, so this module is imported late.

Of values whose hashes are equal, a set or a dict takes quadratic time, in one call that nothing interrupts. Whoever
sends numbers, UUIDs or tuples can choose such values: each is counted before it is put in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator, core_schema

from toolcell.support.checks import brief

MOST_OF_ONE_HASH: Final = 64
"""Different values with one hash. Of honest numbers up to 33 have the same: powers of two that are 61 apart."""

_UNGUESSED: Final = frozenset({"any", "bool", "enum", "float", "literal", "none", "str"})
"""Types of which nobody can send many values with one hash. Texts have random hashes."""
_PARTS: Final = frozenset({"choices", "definitions", "fields", "steps"})
"""Members of pydantic's schemas that are schemas, besides those whose name says it."""

_seen: ContextVar[dict[int, list[Any]]] = ContextVar("_seen")
"""The values of sets, and the keys of dicts, that one conversion has made so far, by their hashes."""


class _EqualHashes(Exception):
    """Too many. Not a ValueError, of which pydantic makes a list."""


def converter(hint: Any) -> Callable[[Any], Any]:
    """Return what makes a type out of a validated value. It raises a ValueError for a value that does not fit."""
    adapter = TypeAdapter(hint)
    schema, found = _counting(adapter.core_schema)
    if not found:
        return adapter.validate_python
    validate = _validator(schema).validate_python

    def convert(value: Any) -> Any:
        token = _seen.set({})
        try:
            return validate(value)
        except _EqualHashes as exc:
            limit = f"limit {MOST_OF_ONE_HASH}"
            raise ValueError(f"a set or dict was sent too many values with one hash, {limit}: {exc}") from None
        finally:
            _seen.reset(token)

    return convert


def _validator(schema: Any) -> SchemaValidator:
    try:  # not with what the classes of models have ready
        return SchemaValidator(schema, None, _use_prebuilt=False)
    except TypeError:  # pydantic before 2.12
        return SchemaValidator(schema)


def _counting(part: Any) -> tuple[Any, bool]:
    """Return a schema of pydantic in which values of sets and keys of dicts are counted, and whether there are any."""
    if isinstance(part, list | tuple):
        members = [_counting(each) for each in part]
        return type(part)(each for each, _ in members), any(found for _, found in members)
    if not isinstance(part, dict):
        return part, False
    kind = part.get("type")
    made, any_found = {**part}, False
    for name, each in part.items():
        if name.endswith("schema") or name in _PARTS or not isinstance(kind, str):  # or fields and choices by name
            made[name], found = _counting(each)
            any_found |= found
    counted = "items_schema" if kind in ("set", "frozenset") else "keys_schema"
    if isinstance(kind, str) and made.get(counted, {}).get("type", "any") not in _UNGUESSED:
        made[counted], any_found = core_schema.no_info_after_validator_function(_count, made[counted]), True
    return made, any_found


def _count(value: Any) -> Any:
    try:
        known = _seen.get().setdefault(hash(value), [])
    except TypeError:  # pydantic says what is wrong with it
        return value
    if value not in known:
        if len(known) == MOST_OF_ONE_HASH:
            raise _EqualHashes(brief(value))
        known.append(value)
    return value
