"""Compile a JSON Schema to what says whether a value is valid, in time that is linear in the value.

jsonschema-rs does it (Rust). Only `is_valid` is asked of it: its errors are all collected, each holds a copy of its
value, and a union inside a union is described again for every branch. `schema_walk` says what is wrong. Functions
import the library: a program without tools does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from toolcell.calls.schema_keywords import KEYWORDS
from toolcell.calls.schema_patterns import counted_repetitions
from toolcell.errors import RegistrationError

if TYPE_CHECKING:
    from jsonschema_rs import Validator

BACKTRACK_LIMIT = 20_000
"""Steps a pattern with lookaround may take; about a millisecond, then the value is refused."""
MAX_LEVELS = 200
"""Most levels of dicts and lists in a schema. Whoever reads it calls itself for each of them."""

Part = Mapping[str, Any]


def compile_schema(schema: Part) -> Validator:
    """Compile a schema; its own errors show here, not at the first call.

    Patterns run on a linear-time engine. Patterns that need lookaround or backreferences run with a bounded number
    of backtracks. References to other documents are never fetched.

    Raises:
        RegistrationError: the schema is not valid JSON Schema (2020-12, or draft 7 where it says so or
            writes tuples its way), or is nested too deeply.
    """
    check_levels(schema)
    chosen, counted = _draft(schema), counted_repetitions(schema)
    import jsonschema_rs

    try:
        return _compile(chosen, counted, jsonschema_rs.RegexOptions())
    except (jsonschema_rs.ValidationError, ValueError):
        pass
    try:
        return _compile(chosen, counted, jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACK_LIMIT))
    except (jsonschema_rs.ValidationError, ValueError) as exc:
        path = getattr(exc, "instance_path", ())
        reason = getattr(exc, "message", str(exc))
        raise RegistrationError(f"invalid schema at {'/'.join(map(str, path)) or 'root'}: {reason}") from exc


def check_levels(schema: Any) -> None:
    """Refuse a schema that is nested too deeply, its references aside.

    Raises:
        RegistrationError: it is.
    """
    level, parts = 0, [schema]
    while parts := [inner for each in parts for inner in _inner(each) if isinstance(inner, dict | list)]:
        level += 1
        if level > MAX_LEVELS:
            raise RegistrationError(f"invalid schema: it is nested deeper than {MAX_LEVELS} levels")


def _inner(part: Any) -> Iterable[Any]:
    return part.values() if isinstance(part, dict) else part


def _compile(chosen: Any, schema: Part, regex: Any) -> Validator:
    validator: Validator = chosen(
        schema, pattern_options=regex, offline=True, validate_formats=False, keywords=KEYWORDS
    )
    return validator


def _draft(schema: Part) -> Any:
    import jsonschema_rs

    if "$schema" in schema:
        return jsonschema_rs.validator_for
    return jsonschema_rs.Draft7Validator if _has_tuple_items(schema) else jsonschema_rs.Draft202012Validator


def _has_tuple_items(schema: Any) -> bool:
    """Draft 7 wrote tuples as a list of `items`; later drafts do not know that."""
    if isinstance(schema, dict):
        return isinstance(schema.get("items"), list) or any(map(_has_tuple_items, schema.values()))
    return isinstance(schema, list) and any(map(_has_tuple_items, schema))
