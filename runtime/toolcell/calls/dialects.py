"""Parameters as each provider takes them: what it would refuse is written in another way, or left out.

Arguments are checked against the tool's own schema all the same. A schema that a provider takes stays as it is.
Sources: the providers' pages on function calling, and public reports of the requests that their servers refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, Literal

from toolcell.calls.schema import pointed, with_parts
from toolcell_bridge.wire.frozen import frozen

Part = dict[str, Any]
DialectName = Literal["openai", "openai-strict", "anthropic", "gemini", "mistral"]

MAX_PARTS: Final = 10_000
"""Parts of one schema that are written. References may stand for more; the rest may be anything."""


def with_items(part: Part) -> Part:
    """Servers say `array schema missing items`, or `items: missing field`."""
    is_array = part.get("type") == "array" or (isinstance(part.get("type"), list) and "array" in part["type"])
    items = part.get("items")
    if not is_array or isinstance(items, dict):
        return part
    first = items if isinstance(items, list) else part.get("prefixItems") or ()
    return {**{key: value for key, value in part.items() if key != "prefixItems"}, "items": _any_of([*first])}


def with_properties(part: Part) -> Part:
    """ "object schema missing properties"."""
    return (
        part if part.get("type") != "object" or isinstance(part.get("properties"), dict) else part | {"properties": {}}
    )


def merged(part: Part) -> Part:
    """Servers say `must not have 'oneOf'/'anyOf'/... at the top level`: what the choices name stands in one object."""
    made = {key: value for key, value in part.items() if key not in _CHOICES}
    properties, required = dict(part.get("properties") or {}), list(part.get("required") or ())
    for keyword in ("allOf", "anyOf", "oneOf"):
        for choice in [each for each in part.get(keyword) or () if isinstance(each, dict)]:
            properties = {**(choice.get("properties") or {}), **properties}
            required += [*(choice.get("required") or ())] if keyword == "allOf" else []
    if len(made) == len(part):
        return part
    needed = [name for name in dict.fromkeys(required) if name in properties]
    return {**made, "properties": properties, **({"required": needed} if needed else {})}


def all_in_one(part: Part) -> Part:
    """Write `allOf` as one schema, as far as it can be."""
    if not isinstance(part.get("allOf"), list):
        return part
    made = {key: value for key, value in part.items() if key != "allOf"}
    for each in part["allOf"]:
        for key, value in each.items() if isinstance(each, dict) else ():
            known = made.get(key)
            made[key] = {**value, **known} if isinstance(known, dict) and isinstance(value, dict) else known or value
    return made


def one_type(part: Part) -> Part:
    """Servers say `Proto field is not repeating`: a list of types is `anyOf`, and null is `nullable`."""
    if part.get("default", part) is None:
        part = {key: value for key, value in part.items() if key != "default"}
    kinds = part.get("type")
    if isinstance(kinds, list):
        rest = {key: value for key, value in part.items() if key != "type"}
        some = [{**rest, "type": kind} for kind in kinds if kind != "null"] or [{**rest, "type": "string"}]
        part = {**(some[0] if len(some) == 1 else {"anyOf": some}), **({"nullable": True} if "null" in kinds else {})}
    choices = part.get("anyOf", part.get("oneOf"))
    if not isinstance(choices, list):
        return part
    some = [each for each in choices if each != {"type": "null"}]
    rest = {key: value for key, value in part.items() if key not in ("anyOf", "oneOf")}
    rest |= {"nullable": True} if len(some) < len(choices) else {}
    return {**some[0], **rest} if len(some) == 1 and isinstance(some[0], dict) else {**rest, "anyOf": some}


def text_choices(part: Part) -> Part:
    """Only text may be enumerated, and only some formats are known."""
    made = dict(part)
    values = [made.pop("const")] if "const" in made else made.pop("enum", None)
    if isinstance(values, list) and values and all(isinstance(each, str) and each for each in values):
        made |= {"type": "string", "enum": values}
    elif isinstance(values, list) and values and "type" not in made:
        made["type"] = _KINDS.get(type(values[0]), "string")
    if made.get("format") not in _GEMINI_FORMATS:
        made.pop("format", None)
    return made


def closed(part: Part) -> Part:
    """Strict mode: every property is required, null where it may be left out, and there are no others."""
    if part.get("type") != "object":
        return {**part, "anyOf": part["oneOf"]} if "oneOf" in part and "anyOf" not in part else part
    properties, required = part.get("properties") or {}, part.get("required") or ()
    made = {name: each if name in required else _or_null(each) for name, each in properties.items()}
    return part | {"properties": made, "required": [*made], "additionalProperties": False}


def _or_null(part: Any) -> Part:
    choices = part.get("anyOf") if isinstance(part, dict) else None
    if isinstance(choices, list):
        return part if {"type": "null"} in choices else {**part, "anyOf": [*choices, {"type": "null"}]}
    return {"anyOf": [part if isinstance(part, dict) else {}, {"type": "null"}]}


def _any_of(parts: list[Any]) -> Part:
    known = [part for at, part in enumerate(parts) if isinstance(part, dict) and part not in parts[:at]]
    return known[0] if len(known) == 1 else {"anyOf": known} if known else {}


_CHOICES = frozenset({"anyOf", "oneOf", "allOf", "enum", "not", "if", "then", "else"})
_KINDS: Mapping[type, str] = {bool: "boolean", int: "integer", float: "number"}
_GEMINI_FORMATS = frozenset({None, "enum", "date-time", "int32", "int64", "float", "double"})
_GEMINI_KEYS = frozenset({
    "type", "format", "title", "description", "nullable", "enum", "items", "properties", "required", "minItems",
    "maxItems", "minimum", "maximum", "minLength", "maxLength", "minProperties", "maxProperties", "pattern", "anyOf",
    "default", "example", "propertyOrdering",
})  # fmt: skip
_NOT_STRICT = frozenset({
    "default", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "patternProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "minProperties", "maxProperties",
    "contains", "minContains", "maxContains", "uniqueItems", "contentEncoding", "contentMediaType",
})  # fmt: skip


@frozen
class Dialect:
    """What one provider takes."""

    root: tuple[Callable[[Part], Part], ...]
    """What is done with the schema itself,"""
    parts: tuple[Callable[[Part], Part], ...]
    """and with each part of it, outer ones first."""
    known: frozenset[str] | None = None
    """Keywords that it knows. None: all."""
    refused: frozenset[str] = frozenset()
    inlines: bool = False
    """It takes no references."""


DIALECTS: Mapping[DialectName, Dialect] = {
    "openai": Dialect((with_properties, merged), (with_items,)),
    "openai-strict": Dialect(
        (with_properties, merged), (all_in_one, with_items, closed), refused=_NOT_STRICT, inlines=True
    ),
    "anthropic": Dialect((with_properties, merged), ()),
    "gemini": Dialect(
        (with_properties, merged), (all_in_one, with_items, one_type, text_choices), known=_GEMINI_KEYS, inlines=True
    ),
    "mistral": Dialect((with_properties, merged), (with_items,)),
}


def dialect_of(model: str) -> DialectName:
    """Return the dialect behind a server with OpenAI's API, by the name of its model, such as `google/gemini-3`."""
    name = model.lower()
    return "gemini" if "gemini" in name else "mistral" if "mistral" in name else "openai"


@lru_cache(2048)
def adapted_json(schema: str, dialect: DialectName) -> str:
    """Return a schema as a provider takes it, both as JSON text."""
    given = json.loads(schema)
    return json.dumps(_Writer(DIALECTS[dialect], given).root())


class _Writer:
    """Writes one schema in one dialect."""

    def __init__(self, dialect: Dialect, schema: Part) -> None:
        self._dialect, self._schema = dialect, schema
        self._left = MAX_PARTS

    def root(self) -> Part:
        part = self._resolved(self._schema, (), inlines=True)[0]
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(some := part.get(key), list):
                each = [one if isinstance(one, dict) else {} for one in some]
                part = part | {key: [self._resolved(one, (), inlines=True)[0] for one in each]}
        for change in self._dialect.root:
            part = change(part)
        made: Part = self._part(part, ())
        return made

    def _part(self, part: Any, inside: tuple[str, ...]) -> Any:
        self._left -= 1
        if not isinstance(part, dict):
            return part if self._dialect.known is None else {}
        if self._left < 0:
            return {}
        part, inside = self._resolved(part, inside)
        for change in self._dialect.parts:
            part = change(part)
        refused, known = self._dialect.refused, self._dialect.known
        kept = {key: each for key, each in part.items() if key not in refused and (known is None or key in known)}
        return with_parts(kept, lambda each: self._part(each, inside))

    def _resolved(self, part: Part, inside: tuple[str, ...], *, inlines: bool = False) -> tuple[Part, tuple[str, ...]]:
        """Put what references name in their place. What contains itself may be anything there."""
        while (inlines or self._dialect.inlines) and isinstance(reference := part.get("$ref"), str):
            beside = {key: value for key, value in part.items() if key != "$ref"}
            target = None if reference in inside else pointed(self._schema, reference)
            inside = (*inside, reference)
            part = {**(target if isinstance(target, dict) and target is not self._schema else {}), **beside}
        if self._dialect.inlines:
            part = {key: value for key, value in part.items() if key not in ("$defs", "definitions")}
        return part, inside
