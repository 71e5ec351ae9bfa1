"""Tools go to each provider in a form that it takes, and a model may still send all that the tool takes."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from rows import each_row
from toolcell import ToolDefinition, ToolRegistry
from toolcell.calls.arguments import ArgumentChecker, decode_tool_call
from toolcell.calls.checker_program import _checker
from toolcell.calls.definition import DialectName
from toolcell.calls.options import Coercion
from toolcell.calls.schema_walk import ValueCheck
from toolcell.tools import Origin, Tool

TEXT = {"type": "string"}
WHOLE = {"type": "integer"}
NULL = {"type": "null"}
PLAIN = {"anyOf": [TEXT, {"type": "number"}, {"type": "boolean"}]}
PROPERTY = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
OPENAI_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


CASES: dict[str, tuple[dict[str, Any], dict[DialectName, dict[str, Any]]]] = {
    "no properties": ({"type": "object"}, dict.fromkeys(get_args(DialectName), of())),
    "names that need others": (
        of(a=TEXT, b=TEXT) | {"dependencies": {"a": ["b"]}},
        {
            **dict.fromkeys(("openai", "anthropic", "mistral"), of(a=TEXT, b=TEXT) | {"dependencies": {"a": ["b"]}}),
            "gemini": of(a=TEXT, b=TEXT),
        },
    ),
    "a required name that is none": (
        of(a=TEXT) | {"required": ["a", {}], "anyOf": [{"required": [[]]}]},
        {"openai": of(a=TEXT) | {"required": ["a"]}},
    ),
    "names of properties": (
        of(
            **{
                "$top": WHOLE,
                "a[b]": TEXT,
                "a(b)": True,
                "名": TEXT | {"description": "A name"},
                "x" * 65: TEXT,
                "ok": TEXT,
            }
        )
        | {"required": ["ok", "$top"]},
        {
            "anthropic": of(
                _top={"description": "$top"} | WHOLE,
                a_b_={"description": "a[b]"} | TEXT,
                a_b__cce46ea1=True,
                __51a5d681=TEXT | {"description": "A name"},
                **{"x" * 64: {"description": "x" * 65} | TEXT},
                ok=TEXT,
            )
            | {"required": ["ok", "_top"]},
            "openai": of(
                **{"$top": WHOLE, "a[b]": TEXT, "a(b)": True, "名": TEXT | {"description": "A name"}, "x" * 65: TEXT},
                ok=TEXT,
            )
            | {"required": ["ok", "$top"]},
        },
    ),
    "no items": (
        of(a={"type": "array"}),
        {"openai": of(a={"type": "array", "items": {}}), "anthropic": of(a={"type": "array"})},
    ),
    "a tuple": (
        of(a={"type": "array", "prefixItems": [WHOLE, WHOLE], "maxItems": 2}),
        {"openai": of(a={"type": "array", "maxItems": 2, "items": WHOLE})},
    ),
    "choices": (
        {
            "type": "object",
            "anyOf": [of(a=TEXT) | {"required": ["a"]}, {"$ref": "#/$defs/B"}],
            "$defs": {"B": of(b=TEXT)},
        },
        {
            "openai": of(a=TEXT, b=TEXT) | {"$defs": {"B": of(b=TEXT)}},
            "anthropic": of(a=TEXT, b=TEXT) | {"$defs": {"B": of(b=TEXT)}},
            "gemini": of(a=TEXT, b=TEXT),
        },
    ),
    "several types": (
        of(a={"type": ["string", "integer", "null"], "default": None}, b={"type": ["integer", "null"]}),
        {
            "gemini": of(
                a={"anyOf": [TEXT | {"nullable": True}, WHOLE | {"nullable": True}]}, b=WHOLE | {"nullable": True}
            ),
        },
    ),
    "references": (
        of(a={"$ref": "#/$defs/Tree"})
        | {"$defs": {"Tree": of(below={"type": "array", "items": {"$ref": "#/$defs/Tree"}})}},
        {"gemini": of(a=of(below={"type": "array", "items": {"type": "object"}}))},
    ),
    "keywords": (
        of(a=WHOLE | {"exclusiveMinimum": 0}, b={"const": "x"}, c={"enum": [1, 2]}, d=TEXT | {"format": "uri"})
        | {"additionalProperties": False, "$schema": "x"},
        {
            "gemini": of(a=WHOLE, b=TEXT | {"enum": ["x"]}, c=WHOLE, d=TEXT),
            "openai": of(a=WHOLE | {"exclusiveMinimum": 0}, b={"const": "x"}, c={"enum": [1, 2]}, d=TEXT)
            | {"additionalProperties": False, "$schema": "x"},
        },
    ),
    "anything": (
        of(a={"description": "x"}) | {"required": ["a"]},
        {
            "openai-strict": of(a=PLAIN | {"description": "x"}) | {"required": ["a"], "additionalProperties": False},
            "gemini": of(a={"anyOf": [{**each, "description": "x"} for each in PLAIN["anyOf"]]}) | {"required": ["a"]},
        },
    ),
    "optional": (
        of(a=TEXT, b=WHOLE | {"default": 1}, c=of(d=TEXT)) | {"required": ["a"]},
        {
            "openai-strict": of(
                a=TEXT,
                b={"anyOf": [WHOLE, NULL]},
                c={
                    "anyOf": [
                        of(d={"anyOf": [TEXT, NULL]}) | {"required": ["d"], "additionalProperties": False},
                        NULL,
                    ]
                },
            )
            | {"required": ["a", "b", "c"], "additionalProperties": False},
        },
    ),
    "an optional choice": (
        of(a={"anyOf": [TEXT, WHOLE]}),
        {"openai-strict": of(a={"anyOf": [TEXT, WHOLE, NULL]}) | {"required": ["a"], "additionalProperties": False}},
    ),
    "an optional object": (
        of(a={"anyOf": [{"$ref": "#/$defs/Cat"}, NULL], "description": "To buy"}, b={"anyOf": [{}, NULL]})
        | {"$defs": {"Cat": of(name=TEXT) | {"description": "A cat"}}},
        {
            "gemini": of(
                a=of(name=TEXT) | {"nullable": True, "description": "To buy\nA cat"},
                b={"anyOf": [{**each, "nullable": True} for each in PLAIN["anyOf"]]},
            ),
        },
    ),
    "choices with descriptions": (
        of(a={"anyOf": [{"$ref": "#/$defs/Cat"}, TEXT | {"description": "A name"}, WHOLE], "description": "To buy"})
        | {"$defs": {"Cat": of(name=TEXT) | {"title": "Cat", "description": "A cat"}}},
        {
            "gemini": of(
                a={
                    "anyOf": [
                        of(name=TEXT) | {"title": "Cat", "description": "A cat\nTo buy"},
                        TEXT | {"description": "A name\nTo buy"},
                        WHOLE | {"description": "To buy"},
                    ]
                }
            ),
        },
    ),
    "keywords of other types": (
        of(
            a={"type": ["array", "string"], "items": WHOLE, "maxItems": 2},
            b={"type": "array", "items": {"type": "object", "required": ["x"]}, "properties": {"c": TEXT}},
            c=of(d=TEXT) | {"required": ["d", "e"]},
        ),
        {
            "gemini": of(
                a={"anyOf": [{"type": "array", "items": WHOLE, "maxItems": 2}, TEXT]},
                b={"type": "array", "items": {"type": "object"}},
                c=of(d=TEXT) | {"required": ["d"]},
            ),
        },
    ),
    "all of several": (
        of(a={"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]})
        | {"required": ["a"], "$defs": {"A": of(a=TEXT), "B": of(b=TEXT) | {"allOf": [of(c=TEXT)]}}},
        {"gemini": of(a=of(a=TEXT, b=TEXT, c=TEXT)) | {"required": ["a"]}},
    ),
    "choices that only constrain": (
        of(a=of(b=TEXT, c=TEXT) | {"anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, d=True, e={"required": ["f"]})
        | {"required": ["a", "d", "e"]},
        {
            "gemini": of(
                a={"anyOf": [of(b=TEXT, c=TEXT) | {"required": [each]} for each in ("b", "c")]},
                d=PLAIN,
                e={"type": "object"},
            )
            | {"required": ["a", "d", "e"]},
            "openai-strict": of(
                a={
                    "anyOf": [
                        of(b=TEXT, c={"anyOf": [TEXT, NULL]}) | {"required": ["b", "c"], "additionalProperties": False},
                        of(b={"anyOf": [TEXT, NULL]}, c=TEXT) | {"required": ["b", "c"], "additionalProperties": False},
                    ]
                },
                d=PLAIN,
                e={"type": "object", "additionalProperties": True},
            )
            | {"required": ["a", "d", "e"], "additionalProperties": False},
        },
    ),
}


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Iterate over a schema and those in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions", "patternProperties"):
            for each in value.values():
                yield from parts_of(each)
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            for each in value:
                yield from parts_of(each)
        elif key in ("items", "additionalProperties", "not"):
            yield from parts_of(value)


def refusal(dialect: DialectName, schema: dict[str, Any]) -> str:
    """Return for what a server would refuse this schema, as reported of it."""
    if schema.get("type") != "object" or not isinstance(schema.get("properties"), dict):
        return "object schema missing properties"
    if {"oneOf", "anyOf", "allOf", "enum", "not"} & schema.keys():
        return "choices at the top level"
    if dialect == "anthropic" and any(not PROPERTY.fullmatch(name) for name in schema["properties"]):
        return "property keys should match the pattern"
    for part in parts_of(schema):
        if dialect != "anthropic" and part.get("type") == "array" and not isinstance(part.get("items"), dict):
            return "array schema missing items"
        if dialect.startswith("openai") and part.get("format", "date") not in OPENAI_FORMATS:
            return f"{part['format']!r} is not a valid format"
        if dialect in ("openai-strict", "gemini") and not {"type", "anyOf", "enum", "const"} & part.keys():
            return "schema must have a 'type' key"
        if dialect == "gemini":
            if "anyOf" in part and len(part) > 1:
                return "when using any_of, it must be the only field set"
            if unknown := part.keys() & {"$ref", "$defs", "additionalProperties", "const", "oneOf", "exclusiveMinimum"}:
                return f"unknown name {unknown}"
            if not isinstance(part.get("type", ""), str):
                return "proto field is not repeating"
            if (part.get("type") != "object" and "properties" in part) or (
                part.get("type") != "array" and "items" in part
            ):
                return "only allowed for OBJECT type"
            if {*part.get("required", ())} - {*part.get("properties", ())}:
                return "property is not defined"
            if not all(isinstance(each, str) for each in part.get("enum", ())):
                return "enum: only text"
    return ""


@pytest.mark.quick
@pytest.mark.conforms("E6")
def test_each_provider_gets_a_schema_in_the_form_that_it_takes() -> None:
    made = {
        (case, dialect): ToolDefinition("act", "Do something.", schema).adapted(dialect)
        for case, (schema, expected) in CASES.items()
        for dialect in expected
    }
    expected = {(case, dialect): each for case, (_, of_case) in CASES.items() for dialect, each in of_case.items()}
    expected["no properties", "openai-strict"] = {"type": "object", "additionalProperties": True}
    assert made == expected


@pytest.mark.quick
@pytest.mark.anyio
@each_row("coercion", ["safe", "off"])
@each_row("is_open", [False, True])
async def test_a_call_has_the_tool_s_own_names_of_properties_whoever_wrote_it(
    coercion: Coercion, is_open: bool
) -> None:
    schema = of(**{"a[b]": TEXT, "c": of(**{"d e": TEXT})}) | {"additionalProperties": is_open, "required": ["a[b]"]}
    registry = ToolRegistry(coercion=coercion)
    registry.register("act", "Return what it was sent.", schema, lambda args: args)
    (definition,) = registry.definitions()
    sent, own = {"a_b_": "x", "c": {"d e": "y"}}, {"a[b]": "x", "c": {"d e": "y"}}

    for strict in (False, True):
        function = definition.to_openai("anthropic/claude-5", strict=strict)["function"]
        assert [*function["parameters"]["properties"]] == [*sent] and not function.get("strict")
    both = await registry.dispatch("act", {**own, "a_b_": "mine"})
    assert both.is_error or both.value["a[b]"] == "x"
    assert [
        (await registry.dispatch("act", args, origin=origin)).value for args in (sent, own) for origin in Origin
    ] == [own for _ in range(2 * len(Origin))]
    rows = await registry.run_plan({"steps": [{"tool": "act", "args": sent}]}, registry.new_run())
    assert rows.value[0]["result"] == own
    assert decode_tool_call(definition, ("act", json.dumps(sent))) == own
    assert _checker(json.loads(ArgumentChecker(definition, coercion).spec_text)).check(sent).args == own


@pytest.mark.slow
def test_every_real_schema_is_taken_by_every_provider_and_takes_its_valid_call() -> None:
    packed = gzip.decompress((Path(__file__).parent / "real_schemas.json.gz").read_bytes())
    rows: list[Any] = json.loads(packed)
    assert len(rows) > 2_000
    refused, lost = list[Any](), list[Any]()
    for row in rows:
        name, schema, call = row["name"], row["parameters"], row["call"]
        definition = ToolDefinition(name, "Do something.", schema)
        for dialect in get_args(DialectName):
            function = definition.to_openai(strict=True)["function"]
            is_sent = dialect != "openai-strict" or function["strict"]
            adapted = definition.adapted(dialect if is_sent else "openai")
            if why := refusal(dialect if is_sent else "openai", adapted):
                refused.append((dialect, name, why))
            if dialect in ("openai", "gemini") and ValueCheck(adapted).problem(call) is not None:
                lost.append((dialect, name))
    assert refused == []
    assert lost == []


def test_openais_own_package_finds_nothing_to_change_in_a_strict_schema() -> None:
    from openai.lib._pydantic import _ensure_strict_json_schema

    for schema, _ in CASES.values():
        strict = ToolDefinition("act", "Do something.", schema).adapted("openai-strict")
        again = _ensure_strict_json_schema(json.loads(json.dumps(strict)), path=(), root=strict)
        assert again == strict


@pytest.mark.quick
def test_a_builder_and_a_tool_without_schema_are_taken_as_they_are_registered() -> None:
    registry = ToolRegistry([Tool("act", "Do something useful.").param("a", "array", "A list").call(lambda args: "")])
    registry.register("other", "Do something else.", {"type": "object"}, lambda args: "")

    for definition in registry.to_provider_defs():
        assert refusal("openai", definition["function"]["parameters"]) == ""
    strict = registry.definitions()[0].to_openai(strict=True)["function"]
    assert (strict["strict"], strict["parameters"]["required"]) == (True, ["a"])
    gemini = registry.definitions()[0].to_openai("google/gemini-3-pro")["function"]["parameters"]
    assert "additionalProperties" not in gemini


FREE: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "an object in it": of(a={"type": "object", "description": "Any fields."}),
    "an object or null": of(a={"type": ["object", "null"]}),
    "named and other properties": of(a=of(b=TEXT) | {"additionalProperties": TEXT}),
    "names by a pattern": of(a={"type": "object", "patternProperties": {"^x": TEXT}, "additionalProperties": False}),
    "one form of several": of(a={"oneOf": [of(b=TEXT), {"type": "object", "additionalProperties": {}}]}),
}
CLOSED: dict[str, dict[str, Any]] = {
    "no arguments": of(),
    "an object or null": of(a={"type": ["object", "null"], "properties": {"b": TEXT}}) | {"required": ["a"]},
    "several forms": of(a={"oneOf": [of(b=TEXT), WHOLE]}),
    "an empty object": of(a={"type": "object", "additionalProperties": False}),
}


@pytest.mark.quick
def test_a_tool_that_takes_objects_with_any_properties_is_not_sent_as_strict() -> None:
    for schema in FREE.values():
        function = ToolDefinition("act", "Do something.", schema).to_openai(strict=True)["function"]
        assert function["strict"] is False
        assert function["parameters"] == ToolDefinition("act", "Do something.", schema).adapted("openai")
        for model in ("gemini-2.5-pro", "mistral-large"):
            sent, plain = (
                ToolDefinition("act", "Do something.", schema).to_openai(model, strict=each) for each in (True, False)
            )
            assert sent["function"] == {**plain["function"], "strict": False}
    for schema in CLOSED.values():
        function = ToolDefinition("act", "Do something.", schema).to_openai(strict=True)["function"]
        assert function["strict"] is True
        objects = [part for part in parts_of(function["parameters"]) if "properties" in part or "oneOf" in part]
        assert [(each["additionalProperties"], each["required"]) for each in objects] == [
            (False, [*each["properties"]]) for each in objects
        ]


@pytest.mark.quick
def test_references_that_stand_for_more_than_can_be_written_are_bounded() -> None:
    doubling: dict[str, Any] = {
        f"L{at}": of(a={"$ref": f"#/$defs/L{at + 1}"}, b={"$ref": f"#/$defs/L{at + 1}"}) for at in range(40)
    }
    schema = of(a={"$ref": "#/$defs/L0"}) | {"$defs": doubling | {"L40": TEXT}}

    adapted = ToolDefinition("act", "Do something.", schema).adapted("gemini")

    assert refusal("gemini", adapted) == ""
    assert sum(1 for _ in parts_of(adapted)) <= 40_000


@pytest.mark.quick
def test_choices_and_conjunctions_that_contain_themselves_are_bounded() -> None:
    loops = {"A": {"anyOf": [{"$ref": "#/$defs/A"}, NULL]}, "B": {"allOf": [{"$ref": "#/$defs/B"}] * 2}}
    wide = {"W": {"allOf": [{"$ref": f"#/$defs/N{at}"} for at in range(300)]}}
    wide |= {f"N{at}": {"minimum": at} for at in range(300)}
    chain = {f"C{at}": {"anyOf": [{"$ref": f"#/$defs/C{at + 1}"}, NULL]} for at in range(1000)}
    named = {each: {"$ref": f"#/$defs/{each}"} for each in ("A", "B", "C0")}
    many = {f"w{at}": {"$ref": "#/$defs/W"} for at in range(1000)}
    schema = of(**named, **many) | {"$defs": loops | wide | chain | {"C1000": TEXT}}

    adapted = ToolDefinition("act", "Do something.", schema).adapted("gemini")

    assert refusal("gemini", adapted) == ""
    assert adapted["properties"]["C0"] == TEXT | {"nullable": True}


@pytest.mark.quick
@pytest.mark.parametrize("dialect", get_args(DialectName))
def test_parts_that_are_nested_very_deep_are_bounded(dialect: DialectName) -> None:
    deep: dict[str, Any] = TEXT
    for _ in range(400):
        deep = of(a=deep)
    named = {f"L{at}": of(a={"$ref": f"#/$defs/L{at + 1}"}) for at in range(400)} | {"L400": TEXT}

    for schema in (deep, of(a={"$ref": "#/$defs/L0"}) | {"$defs": named}):
        assert refusal(dialect, ToolDefinition("act", "Do something.", schema).adapted(dialect)) == ""
