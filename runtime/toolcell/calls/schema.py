"""JSON Schemas as models follow them best: inline, without titles, references or what they need not know of null.

Knows no tool and no registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from toolcell.calls.values import values_in
from toolcell.errors import RegistrationError
from toolcell_bridge.wire.tables import TABLES

Schema = dict[str, Any]


OF_RESULTS: Final = "x-of-results"
"""Key of an object's schema: names that only results have, each with the argument's, or None for a computed field."""


BASE64: Final[Mapping[str, str]] = {"type": "string", "contentEncoding": "base64"}
"""The schema of `bytes`."""
_BASE64_FORMATS: Final = frozenset({"byte", "base64", "base64url"})
"""What other schemas write for base64 text."""


def is_base64(part: Mapping[str, Any]) -> bool:
    """Return whether a part asks for base64 text."""
    return part.get("contentEncoding") == "base64" or part.get("format") in _BASE64_FORMATS


def mentions_bytes(schema: Any) -> bool:
    """Return whether a value of this schema may be, or hold, base64 text that stands for `bytes`."""
    return any("contentEncoding" in part for part in dicts_in(schema))


TABLE_MEDIA_TYPE: Final = "application/vnd.toolcell.table"
"""`contentMediaType` of a parameter that is an array or a table. A script sends one, a model rows or lists."""


def table_names(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters that are arrays and frames."""
    properties = schema.get("properties") or {}
    return frozenset(
        name
        for name, each in properties.items()
        if isinstance(each, dict) and each.get("contentMediaType") == TABLE_MEDIA_TYPE
    )


def without_tables(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for a validator, which knows neither arrays nor tables; nothing is to be checked in them."""
    return {name: {} if type(each) in TABLES else each for name, each in args.items()}


def closed_properties(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The properties a schema names when it is silent about others; None when it is not silent."""
    if "properties" not in schema or _SPEAKS_OF_OTHERS & schema.keys():
        return None
    return frozenset(schema["properties"])


_SPEAKS_OF_OTHERS = frozenset({
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "anyOf", "oneOf", "allOf",
    "if", "dependentSchemas", "$ref",
})  # fmt: skip


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


_PARTS = frozenset({
    "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
    "propertyNames", "contentSchema", "not", "if", "then", "else",
})  # fmt: skip
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_NO_DEFAULT = object()


def with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> Schema:
    """Return a schema with each schema right below it changed."""
    made: Schema = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            made[key] = {name: change(part) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            made[key] = [change(part) for part in value]
        else:
            made[key] = change(value) if key in _PARTS and isinstance(value, dict) else value
    return made


def dicts_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """Iterate over every object in plain data, in its order: of a schema, over its parts and some more."""
    return values_in(value, dict | Mapping)


def pointed(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference inside it names; None where there is none."""
    part = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list):
            part = part[int(name)] if name.isdecimal() and int(name) < len(part) else None
        else:
            part = part.get(name) if isinstance(part, Mapping) else None
    return part


def _clean(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    if not isinstance(schema, dict):
        return schema
    if (reference := schema.get("$ref")) is not None:
        return _inline(reference, schema, definitions, inside)
    kept = {key: value for key, value in schema.items() if key not in {"title", "discriminator", "readOnly"}}
    if "prefixItems" in kept:  # the titles of a named tuple are the names of its fields, and nothing else says them
        kept["prefixItems"] = [
            {"description": part["title"], **part} if isinstance(part, dict) and "title" in part else part
            for part in kept["prefixItems"]
        ]
    return _close_object(with_parts(kept, lambda part: _clean(part, definitions, inside)))


def _inline(reference: str, schema: Schema, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    name = reference.removeprefix("#/$defs/")
    if name in inside:
        cycle = " -> ".join((*inside[inside.index(name) :], name))
        raise RegistrationError(
            f"type contains itself ({cycle}), so it has no inline JSON Schema; "
            "take dict[str, Any] and validate it in the tool, or write the schema with $ref and use registry.register()"
        )
    beside = {key: value for key, value in schema.items() if key != "$ref"}
    return _clean({**definitions[name], **beside}, definitions, (*inside, name))


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
    """Return a schema as models see it: without the names that only results have."""
    if isinstance(schema, dict):
        return {
            key: without_names_of_results(part)
            for key, part in schema.items()
            if key != OF_RESULTS or isinstance(part, dict)
        }
    return [without_names_of_results(part) for part in schema] if isinstance(schema, list) else schema
