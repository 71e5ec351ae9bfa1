"""JSON Schemas as models follow them best: inline, without titles, references or what they need not know of null.

Knows no tool and no registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from toolcell.errors import RegistrationError

Schema = dict[str, Any]


OF_RESULTS: Final = "x-of-results"
"""Key of an object's schema: names that only results have, each with the argument's, or None for a computed field."""


def clean_schema(schema: Mapping[str, Any]) -> Schema:
    """Inline references, drop titles, close objects, and drop null where it means the same as nothing.

    Raises:
        RegistrationError: a type contains itself, so no inline schema can describe it.
    """
    definitions = schema.get("$defs", {})
    cleaned = _clean({key: value for key, value in schema.items() if key != "$defs"}, definitions, ())
    if not isinstance(cleaned, dict):
        raise RegistrationError(f"{schema!r} describes no value")
    return cleaned


_SCHEMA_KEYS = frozenset({"items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else"})
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMA_MAPS = frozenset({"properties", "patternProperties"})
_NO_DEFAULT = object()


def _clean(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    if not isinstance(schema, dict):
        return schema
    if (reference := schema.get("$ref")) is not None:
        return _inline(reference, schema, definitions, inside)
    cleaned: Schema = {}
    for key, value in schema.items():
        if key in _SCHEMA_MAPS:
            cleaned[key] = {name: _clean(part, definitions, inside) for name, part in value.items()}
        elif key in _SCHEMA_LISTS:
            cleaned[key] = [_clean(part, definitions, inside) for part in value]
        elif key in _SCHEMA_KEYS:
            cleaned[key] = _clean(value, definitions, inside)
        elif key not in {"title", "discriminator", "readOnly"}:
            cleaned[key] = value
    return _close_object(cleaned)


def _inline(reference: str, schema: Schema, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    name = reference.removeprefix("#/$defs/")
    if name in inside:
        cycle = " -> ".join((*inside[inside.index(name) :], name))
        raise RegistrationError(
            f"type contains itself ({cycle}), so it has no inline JSON Schema; "
            "take dict[str, Any] and validate it in the tool, or write the schema with $ref and use registry.register()"
        )
    target = definitions.get(name)
    if target is None:
        raise RegistrationError(f"schema refers to {reference!r}, which is not there")
    beside = {key: value for key, value in schema.items() if key != "$ref"}
    return _clean({**target, **beside}, definitions, (*inside, name))


def _close_object(schema: Schema) -> Schema:
    properties = schema.get("properties")
    if schema.get("type") != "object" or properties is None:
        return schema
    required = set(schema.get("required", ()))
    schema["properties"] = {
        name: part if name in required else optional_schema(part) for name, part in properties.items()
    }
    schema.setdefault("additionalProperties", False)
    return schema


def optional_schema(schema: Any) -> Any:
    """Return the schema of a property that may be absent. Where that means null, it says nothing of null."""
    if not isinstance(schema, dict) or schema.get("default", _NO_DEFAULT) is not None:
        return schema
    trimmed = {key: value for key, value in schema.items() if key != "default"}
    branches = trimmed.get("anyOf")
    if not isinstance(branches, list) or {"type": "null"} not in branches:
        return trimmed
    rest = [branch for branch in branches if branch != {"type": "null"}]
    others = {key: value for key, value in trimmed.items() if key != "anyOf"}
    return {**rest[0], **others} if len(rest) == 1 else {**others, "anyOf": rest}


def without_names_of_results(schema: Any) -> Any:
    """Return a schema as models see it: without what is told to `Coercer` alone."""
    if isinstance(schema, dict):
        return {
            key: without_names_of_results(part)
            for key, part in schema.items()
            if key != OF_RESULTS or isinstance(part, dict)
        }
    return [without_names_of_results(part) for part in schema] if isinstance(schema, list) else schema
