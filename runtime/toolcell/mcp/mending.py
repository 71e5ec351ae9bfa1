"""Schemas of tools as servers send them, mended where every reader knows what was meant. Pure.

`required` with names that are not among the properties, lists and nulls where an object stands, the names of Python's
types: found in servers that people use.
"""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""Greatest depth of schemas; what is nested deeper stays as it is, and is refused later."""

TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
    "map": "object",
    "none": "null",
}
"""What is written in place of a type of JSON."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_VALUES = ("default", "const", "example", "examples")


def mend_listing(result: dict[str, Any]) -> None:
    """Mend the schemas of the tools of a page, in place."""
    tools = result.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            if isinstance(schema := tool.get("inputSchema"), dict):
                tool["inputSchema"] = mended_input(schema)
            if isinstance(schema := tool.get("outputSchema"), dict):
                tool["outputSchema"] = mended(schema, 0)
            elif "outputSchema" in tool and schema is None:
                del tool["outputSchema"]


def mended_input(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments: always one of an object, each required name among its properties."""
    made = mended(schema, 0)
    kind = made.get("type", "object")
    if kind == "object" or (isinstance(kind, list) and "object" in kind):
        made["type"] = "object"
    required, known = made.get("required"), made.get("properties", {})
    if isinstance(required, list) and isinstance(known, dict):
        missing: dict[str, Any] = {name: {} for name in required if name not in known}
        if missing:
            made["properties"] = {**known, **missing}
    return made


def mended(schema: dict[str, Any], depth: int) -> dict[str, Any]:
    """Return a schema, and those inside it, without what no reader could take as it stands."""
    made = {key: value for key, value in schema.items() if value is not None or key in _VALUES}
    if depth > MAX_DEPTH:
        return made
    if isinstance(kind := made.get("type"), str):
        made["type"] = TYPES.get(kind.lower(), kind)
        if kind.lower() == "any":
            del made["type"]
    if made.get("properties") == []:
        made["properties"] = {}
    for key in _MAPS:
        if isinstance(parts := made.get(key), dict):
            made[key] = {name: _inner(part, depth) for name, part in parts.items()}
    for key in _LISTS:
        if isinstance(parts := made.get(key), list):
            made[key] = [_inner(part, depth) for part in parts]
    for key in _SCHEMAS:
        if key in made:
            made[key] = _inner(made[key], depth)
    return _with_required(made, schema.get("properties"))


def _inner(part: Any, depth: int) -> Any:
    return mended(part, depth + 1) if isinstance(part, dict) else part


def _with_required(made: dict[str, Any], properties: Any) -> dict[str, Any]:
    """Return the schema with its required names as a list, each once: also those that say so of themselves."""
    required = made.get("required")
    names = [required] if isinstance(required, str) else required if isinstance(required, list) else []
    for name, part in properties.items() if isinstance(properties, dict) else ():
        if isinstance(part, dict) and part.get("required") is True:
            names = [*names, name]
    if isinstance(required, bool):
        del made["required"]
    if names:
        made["required"] = list(dict.fromkeys(name for name in names if isinstance(name, str)))
    return made
