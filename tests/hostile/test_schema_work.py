"""A schema of a few kilobytes keeps no host busy: its references are followed before it is used, and each check is counted.

Schemas come from strangers: MCP servers, callers of a service, models that save scripts.
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any

import anyio
import jsonschema_rs
import pytest
from mcp_types import CallToolResult, Tool

import toolcell
from hostile.counting import calls
from rows import each_row
from toolcell import ToolRegistry
from toolcell.errors import RegistrationError, ToolcellError
from toolcell.mcp.answers import as_tool_result
from toolcell.mcp.catalogue import McpCatalogue, Selection
from toolcell.mcp.definitions import read_tool
from toolcell.service.socket.remote_tools import remote_registry
from toolcell.tools import ToolDefinition
from toolcell.tools.arguments import ArgumentChecker, InvalidArguments
from toolcell.tools.options import ToolOptions
from toolcell.tools.parts import Text
from toolcell.tools.problems import ValueCheck, compile_schema
from toolcell.tools.result import ToolResult
from toolcell.tools.schema_patterns import bounded, counted, states_of
from toolcell.tools.schema_work import MAX_RECURSIVE_WEIGHT, MAX_WEIGHT, SchemaWork
from toolcell.tools.stubs import python_stub
from toolcell.tools.text_data import may_be_data

pytestmark = pytest.mark.quick

LEVELS = 28
SOON_S = 2.0
"""A check that is not bounded takes minutes; one that is takes less even on a busy machine."""


def doubled(make: Any, last: Any = True) -> dict[str, Any]:
    """Return a schema whose definitions each name the next one twice."""
    names = [f"D{number}" for number in range(LEVELS)]
    definitions = {name: make({"$ref": f"#/$defs/D{number + 1}"}) for number, name in enumerate(names)}
    definitions[f"D{LEVELS}"] = last
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": definitions}


def twice(keyword: str) -> Any:
    return lambda next_one: {keyword: [next_one, next_one]}


HEAVY: dict[str, dict[str, Any]] = {
    **{keyword: doubled(twice(keyword)) for keyword in ("allOf", "anyOf", "oneOf")},
    "not": doubled(lambda each: {"not": each, "if": each}),
    "if": doubled(lambda each: {"if": each, "then": each, "else": each}),
    "dependentSchemas": doubled(lambda each: {"dependentSchemas": {"a": each, "b": each}}),
    "dependencies": {
        **doubled(lambda each: {"dependencies": {"a": each, "b": each}}),
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    "draft 4": {**doubled(twice("allOf")), "$schema": "http://json-schema.org/draft-04/schema#"},
    "members": doubled(lambda each: {"allOf": [{"properties": {"n": each}}, {"properties": {"n": each}}]}),
    "patterns": doubled(lambda each: {"patternProperties": {"a": each, "a.*": each}}),
    "others": doubled(lambda each: {"additionalProperties": each, "propertyNames": each}),
    "items": doubled(lambda each: {"items": each, "contains": each}),
    "a recursion": doubled(twice("allOf"), {"properties": {"n": {"$ref": "#/$defs/D0"}}}),
    "$dynamicRef": {"$dynamicAnchor": "x", **doubled(twice("allOf"), {"$dynamicRef": "#x"})},
    "an anchor": {
        "type": "object",
        "$ref": "#D0",
        "$defs": {f"D{n}": {"$anchor": f"D{n}", "allOf": [{"$ref": f"#D{n + 1}"}] * 2} for n in range(LEVELS)}
        | {f"D{LEVELS}": {"$anchor": f"D{LEVELS}"}},
    },
    "an id": {
        "type": "object",
        "$ref": "urn:d0",
        "$defs": {f"D{n}": {"$id": f"urn:d{n}", "allOf": [{"$ref": f"urn:d{n + 1}"}] * 2} for n in range(LEVELS)}
        | {f"D{LEVELS}": {"$id": f"urn:d{LEVELS}"}},
    },
    "an escaped pointer": {
        "type": "object",
        "$ref": "#/$defs/D%30",
        "$defs": {f"D{n}": {"allOf": [{"$ref": f"#/%24defs/D{n + 1}"}] * 2} for n in range(LEVELS)}
        | {f"D{LEVELS}": {}},
    },
}


def unevaluated(levels: int) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for _ in range(levels):
        part = {"allOf": [part], "unevaluatedProperties": False}
    return {"type": "object", **part}


HEAVY["unevaluated"] = unevaluated(30)


@each_row("kind", HEAVY)
def test_a_schema_that_makes_countless_checks_of_a_small_one_is_used_nowhere(kind: str) -> None:
    schema, began = HEAVY[kind], time.process_time()
    with pytest.raises(RegistrationError, match=r"one value is checked .* times"):
        compile_schema(schema)
    with pytest.raises(RegistrationError, match=r"one value is checked .* times"):
        ArgumentChecker(ToolDefinition("tool", "A tool under test.", schema))
    with pytest.raises(RegistrationError):
        ValueCheck(schema)
    of_server = Tool(name="t", description="A tool.", input_schema={"type": "object"}, output_schema=schema)
    found = read_tool("s", of_server, "none", ToolOptions())
    assert (
        found.check is None
        and found.options.returns is None
        and "its output schema is not used" in str(found.problems[0])
    )
    assert time.process_time() - began < SOON_S


def doubled_unevaluated(keyword: str, holder: str, levels: int) -> dict[str, Any]:
    whole = doubled(lambda each: {holder: [each, each], keyword: False})
    definitions = {name: whole["$defs"][name] for name in [f"D{number}" for number in range(levels)]}
    return {**whole, "$defs": {**definitions, f"D{levels}": {}}}


COMPILED_SLOWLY = {
    f"{keyword} over {holder}, {levels}": doubled_unevaluated(keyword, holder, levels)
    for keyword in ("unevaluatedProperties", "unevaluatedItems")
    for holder in ("allOf", "anyOf", "oneOf")
    for levels in (18, 23)
}
COMPILED_SLOWLY["ten name all ten"] = {
    "type": "object",
    "$ref": "#/$defs/D0",
    "$defs": {
        f"D{n}": {"allOf": [{"$ref": f"#/$defs/D{m}"} for m in range(10)], "unevaluatedProperties": False}
        for n in range(10)
    },
}


@pytest.mark.parametrize("kind", COMPILED_SLOWLY)
def test_a_schema_is_weighed_before_anything_compiles_it(kind: str) -> None:
    schema, began = COMPILED_SLOWLY[kind], time.process_time()
    of_server = Tool(name="t", description="A tool.", input_schema={"type": "object"}, output_schema=schema)
    offered = [{"name": "t", "description": "A tool of a caller.", "parameters": schema}]
    for used in (
        lambda: ValueCheck(schema),
        lambda: ToolRegistry().register("tool", "A tool that somebody gives.", schema, lambda args: None),
        lambda: remote_registry(offered, ToolRegistry(), with_own=False),
    ):
        with pytest.raises(RegistrationError, match=r"one value is checked .* times"):
            used()
    assert read_tool("s", of_server, "none", ToolOptions()).check is None
    assert time.process_time() - began < SOON_S / 4


ASSERT_NOTHING: dict[str, tuple[dict[str, Any], str]] = {
    **{f"format {name}": ({"format": name}, "/~0" * 500_000) for name in ("json-pointer", "uri", "uri-template")},
    "contentMediaType": ({"contentMediaType": "application/json"}, "[" * 3_000_000),
    "contentEncoding": ({"contentEncoding": "base64"}, "A" * 3_000_001),
}


@pytest.mark.parametrize("kind", ASSERT_NOTHING)
def test_formats_and_content_assert_nothing_and_cost_nothing(kind: str) -> None:
    part, text = ASSERT_NOTHING[kind]
    draft = "http://json-schema.org/draft-07/schema#"
    schema = {"$schema": draft, "type": "object", "properties": {"x": {"allOf": [part] * 300}}}
    began = time.process_time()
    assert ValueCheck(schema).problem({"x": text}) is None
    args = ArgumentChecker(ToolDefinition("tool", "A tool under test.", schema), "off").check({"x": text}).args
    assert args == {"x": text} and time.process_time() - began < SOON_S / 2


LARGE_NUMBERS: dict[str, tuple[dict[str, Any], list[Any], Any]] = {
    "integers": ({"uniqueItems": True}, [2**62 + number for number in range(40_000)], 2**62),
    "floats": ({"uniqueItems": True}, [1e300 + number * 1e290 for number in range(20_000)], 1e300),
    "lists": ({"uniqueItems": True}, [[2**62 + number] for number in range(20_000)], [2**62]),
    "multiples": ({"items": {"multipleOf": 3}}, [2**62 - 1 + 3 * number for number in range(40_000)], 2**62),
    "floats' multiples": ({"items": {"multipleOf": 0.01}}, [1.7e308] * 40_000, 0.005),
}
"""A part of a schema, a list that fits it, and an item that does not fit into the list."""


@pytest.mark.slow
@each_row("kind", LARGE_NUMBERS)
def test_large_numbers_are_compared_in_linear_time_and_no_honest_list_of_them_is_refused(kind: str) -> None:
    part, value, odd = LARGE_NUMBERS[kind]
    schema = {"type": "object", "properties": {"x": part}}
    checker = ArgumentChecker(ToolDefinition("tool", "A tool under test.", schema))
    began = time.process_time()
    assert ValueCheck(schema).problem({"x": value}) is None
    assert checker.check({"x": value}).args == {"x": value}
    with pytest.raises(InvalidArguments, match=r"uniqueItems|non-unique elements|is not a multiple of"):
        checker.check({"x": [*value, odd]})
    assert time.process_time() - began < SOON_S


def test_lists_in_lists_that_are_to_be_unique_on_each_level_are_charged_for_each() -> None:
    schema = {"uniqueItems": True, "items": {"$ref": "#"}}
    value: list[Any] = [*range(20_000)]
    for _ in range(50):
        value = [value]
    assert "is too large for its schema" in str(ValueCheck(schema).problem(value))
    assert ValueCheck(schema).problem([[[each] for each in range(1_000)]]) is None


def test_items_and_multiples_are_told_apart_as_the_library_does() -> None:
    items = [
        None,
        True,
        1,
        1.0,
        0,
        -0.0,
        False,
        "1",
        "n1",
        "",
        [1],
        [1.0],
        ["1"],
        {"a": 1},
        {"a": 1.0},
        {"a": [1]},
        2.5,
    ]
    numbers = [0, 1, -3, 7, 2**53, 0.3, 0.01, -0.75, 1e-7, 33.33, 1e20, 1.7e308, "1", True]
    rows: list[tuple[dict[str, Any], Any]] = [({"uniqueItems": True}, [one, two]) for one in items for two in items]
    rows += [({"multipleOf": said}, one) for said in (1, 3, 0.1, 0.01, 2.0, 1e-7, 2**53) for one in numbers]
    differing = [
        (schema, value)
        for schema, value in rows
        if (ValueCheck(schema).problem(value) is None) is not jsonschema_rs.is_valid(schema, value)
    ]
    assert differing == []


def test_what_all_tools_of_one_caller_keep_in_memory_is_bounded() -> None:
    large = {"type": "object", "properties": {"a": {"enum": [[number] for number in range(7_000)]}}}
    tools = [{"name": f"t{number}", "description": "A tool of a caller.", "parameters": large} for number in range(60)]
    assert len(remote_registry(tools[:2], ToolRegistry(), with_own=False).list()) == 2
    with pytest.raises(RegistrationError, match="all 60 tools together have more than 200000"):
        remote_registry(tools, ToolRegistry(), with_own=False)


@each_row("part", ["parameters", "returns"])
def test_a_caller_of_a_service_offers_no_tool_with_one(part: str) -> None:
    schemas = {"parameters": {"type": "object"}, "returns": {"type": "object"}, part: HEAVY["allOf"]}
    about = {"parameters": schemas["parameters"], "options": {"returns": schemas["returns"]}}
    offered = [{"name": "t", "description": "A tool of a caller.", **about}]
    with pytest.raises(ToolcellError, match="one value is checked"):
        remote_registry(offered, ToolRegistry(), with_own=False)


@each_row("kind", ["allOf", "a recursion", "an id"])
def test_no_registry_and_no_script_takes_one(kind: str) -> None:
    registry = ToolRegistry()

    class Given:
        name, description, parameters = "tool", "A tool that somebody gives.", HEAVY[kind]

        async def execute(self, context: Any, args: Any) -> None: ...

    with pytest.raises(RegistrationError, match="one value is checked"):
        registry.add(Given())
    assert [*registry] == []


LARGE_PATTERNS: dict[str, dict[str, Any]] = {
    "one in another": {"properties": {"a": {"pattern": "((a{1,900}){1,900}){1,9}"}}},
    "many names": {"patternProperties": {rf"(?i)\W{{1,{90 + number}}}": {} for number in range(500)}},
    "many texts": {"properties": {"a": {"allOf": [{"pattern": f".{{{900 + number}}}"} for number in range(100)]}}},
    "short and many": {"patternProperties": {f"^{number}.*y$": {} for number in range(3_000)}},
    "in an array": {"properties": {"a": {"items": {"anyOf": [{"pattern": f"[^x{n}]{{900}}"} for n in range(100)]}}}},
}


@each_row("kind", LARGE_PATTERNS)
def test_patterns_that_are_large_when_their_repetitions_are_written_out_are_compiled_nowhere(kind: str) -> None:
    schema = {"type": "object", **LARGE_PATTERNS[kind]}
    for compiled in (
        lambda: compile_schema(schema),
        lambda: ArgumentChecker(ToolDefinition("tool", "A tool under test.", schema)),
        lambda: ValueCheck(schema),
        lambda: remote_registry(
            [{"name": "t", "description": "A tool.", "parameters": schema}], ToolRegistry(), with_own=False
        ),
        lambda: remote_registry(
            [{"name": "t", "description": "A tool.", "parameters": {"type": "object"}, "options": {"returns": schema}}],
            ToolRegistry(),
            with_own=False,
        ),
    ):
        with pytest.raises(RegistrationError, match=r"patterns .*too large"):
            compiled()


LARGE = {"type": "object", "properties": {"a": {"pattern": "[^a]{2000}"}}}


def test_patterns_of_all_tools_of_one_stranger_are_bounded_together() -> None:
    offered = [
        {"name": f"t{number}", "description": "A tool of a caller.", "parameters": LARGE} for number in range(20)
    ]
    assert len(remote_registry(offered[:2], ToolRegistry(), with_own=False).list()) == 2
    with pytest.raises(RegistrationError, match="of all 20 tools are too large together"):
        remote_registry(offered, ToolRegistry(), with_own=False)

    few = {"type": "object", "properties": {f"p{number}": {"pattern": "^a$"} for number in range(200)}}
    many = [{**each, "parameters": few} for each in offered]
    assert len(remote_registry(many[:5], ToolRegistry(), with_own=False).list()) == 5
    with pytest.raises(RegistrationError, match="of all 20 tools are too large together"):
        remote_registry(many, ToolRegistry(), with_own=False)

    registry = ToolRegistry()
    catalogue = McpCatalogue("s", registry, Selection(), lambda tool: lambda context: None)  # type: ignore[arg-type,return-value]
    tools = [Tool(name=f"t{number}", description="A tool.", input_schema=LARGE) for number in range(20)]
    read = anyio.run(catalogue._read, tools)
    assert 1 < len(read) < 20 and "are too large from" in str(catalogue.problems[0])


@each_row(
    ("pattern", "states"),
    [
        ("", 1),
        ("^abc$", 3),
        (r"\d{4}-\d{2}", 7),
        ("(ab|cd){3}", 12),
        ("(?:a{2}){5}b", 11),
        ("(?P<n>a{5})", 5),
        ("[a{9}]{3}", 3),
        ("[]a]{3}", 3),
        (r"\{9}x", 4),
        ("a{2,}", 2),
        ("a{,9}", 5),
        ("(((", 1),
        (")))", 1),
    ],
)
def test_states_of_a_pattern_are_counted_with_its_repetitions(pattern: str, states: int) -> None:
    assert states_of(pattern) == states


@each_row(
    ("pattern", "text"),
    [
        (r"\S", " " * 2_000_000 + "x"),
        ("^.{1,2000}$", "x" * 2_000),
        ("^[a-z0-9-]{1,64}$", "a-1"),
        (r"^(?!\s*$).+", "x" * 5_000),
        (r"^(?=.*[A-Z])(?=.*\d).{8,64}$", "Passw0rd" * 8),
    ],
)
def test_patterns_of_the_world_take_the_texts_that_they_are_for(pattern: str, text: str) -> None:
    whole = {"type": "object", "properties": {"x": {"pattern": pattern}, "content": {"type": "string"}}}
    args = {"x": text, "content": "x" * 4_000_000}
    assert ArgumentChecker(ToolDefinition("tool", "A tool under test.", whole)).check(args).args == args
    assert ValueCheck(whole).problem(args) is None
    names = {"properties": {"x": {"items": {"pattern": "^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}}}}
    assert ValueCheck(names).problem({"x": ["a-name"] * 10_000}) is None


@each_row("kind", [".", r"[\s\S]", r"(?:.|\n)", r"[^\x00]", r"(.|\s)", r"\p{L}", "[A-Za-z0-9+/=]", "b", r"\w"])
@each_row("counts", ["{1,20000}", "{20000}", "{2,}", "{0,100000}"])
def test_a_repetition_that_is_all_of_a_pattern_is_counted_and_not_written_out(kind: str, counts: str) -> None:
    checks = [ValueCheck({"pattern": f"^{kind}{counts}$"}), ValueCheck({"not": {"pattern": f"^{kind}{counts}$"}})]
    alike = re.compile(f"(?:{kind.replace('p{L}', 'w')}){counts}")
    texts = ("", "b", "bb", "b" * 19_999, "b" * 20_000, "b" * 20_001, "b\n", "\n" * 20_000, "\0" * 2, "b b")
    for text in texts:
        fits = alike.fullmatch(text) is not None
        assert [check.problem(text) is None for check in checks] == [fits, not fits], text[:5]
    assert ValueCheck({"pattern": f"^{kind}{counts}$", "minLength": 3, "maxLength": 4}).problem("b" * 5) is not None
    assert ValueCheck({"pattern": f"^{kind}{counts}$"}).problem(7) is None


@each_row("pattern", ["^.{20000}x$", "^(?:.{1,200}){1,200}$", "^[[a-z]_]{3}$", "^a{9,1}$", "^(ab){3}$", "x{3}$"])
def test_no_other_repetition_is_taken_for_one_of_those(pattern: str) -> None:
    assert counted(pattern).pattern == pattern


def test_a_text_that_is_too_long_for_its_pattern_is_refused_by_its_length() -> None:
    checker = ArgumentChecker(
        ToolDefinition("tool", "A tool under test.", {"type": "object", "properties": {"x": {"pattern": "^(?=a)a+$"}}})
    )
    with pytest.raises(InvalidArguments, match=r"x: has 9999 characters, more than the \d+ that its pattern is"):
        checker.check({"x": "a" * 9_999})


def test_bounds_of_texts_change_nothing_that_is_a_value() -> None:
    value = {"pattern": "(?=a)a", "patternProperties": {"(?=a)a": 1}}
    part = {"const": value, "enum": [value], "default": value, "examples": [value]}
    named = {"properties": {"const": {"pattern": "a"}}, "maxLength": 3, "pattern": "a"}
    assert bounded(part) == part
    assert bounded(named)["maxLength"] == 3 and "maxLength" in bounded(named)["properties"]["const"]


@each_row("reference", ["urn:nowhere", "#/$defs/none", "#none", "https://example.com/x#/y"])
def test_a_reference_that_leads_nowhere_is_refused(reference: str) -> None:
    with pytest.raises(RegistrationError):
        compile_schema({"type": "object", "properties": {"a": {"$ref": reference}}})


JSON = {
    "anyOf": [
        {"type": ["null", "boolean", "number", "string"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "additionalProperties": {"$ref": "#"}},
    ]
}


def test_schemas_of_the_world_are_light() -> None:
    assert SchemaWork(JSON).weight < 20
    nodes = {
        f"N{n}": {"type": "object", "properties": {"k": {"const": n}, "of": {"$ref": "#/$defs/E"}}} for n in range(60)
    }
    tree = {"$ref": "#/$defs/E", "$defs": {"E": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in nodes]}, **nodes}}
    assert SchemaWork(tree).weight < MAX_RECURSIVE_WEIGHT / 2
    wide = {"type": "object", "properties": {f"a{n}": {"allOf": [{"type": "string"}]} for n in range(2_000)}}
    assert SchemaWork(wide).weight < 10 and SchemaWork(doubled(twice("anyOf"))["$defs"]["D28"]).weight == 1
    assert MAX_RECURSIVE_WEIGHT < MAX_WEIGHT


def test_a_schema_whose_many_members_are_like_the_whole_is_light() -> None:
    names = [f"D{number}" for number in range(60)]
    members = {"properties": {name: {"$ref": f"#/$defs/{name}"} for name in names}}
    schema = {"type": "object", **members, "$defs": {name: {"type": "object", **members} for name in names}}
    assert SchemaWork(schema).weight < 200
    ArgumentChecker(ToolDefinition("tool", "A tool under test.", schema))


@each_row("levels", [150, 350, 900])
def test_a_schema_that_is_nested_too_deeply_is_refused_and_raises_nothing_else(levels: int) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(RegistrationError):
        compile_schema(schema)


MANY = 30

NAMED_OFTEN: dict[str, dict[str, Any]] = {
    "anyOf": {"anyOf": [{"$ref": "#/$defs/A"}] * MANY},
    "allOf": {"allOf": [{"$ref": "#/$defs/A"}] * MANY},
    "members": {"type": "object", "properties": {f"p{n}": {"$ref": "#/$defs/A"} for n in range(MANY)}},
    "others": {"anyOf": [{"type": "object", "additionalProperties": {"$ref": "#/$defs/A"}}] * MANY},
    "kinds": {"anyOf": [{"type": ["array", "object"], "items": {"$ref": "#/$defs/A"}}] * MANY},
}


@each_row("kind", NAMED_OFTEN)
def test_whoever_reads_a_type_looks_at_each_part_a_few_times_however_often_it_is_named(kind: str) -> None:
    schema = {"$ref": "#/$defs/A", "$defs": {"A": NAMED_OFTEN[kind]}}
    returned = ToolResult(parts=(Text('{"a": 1}'),))
    arguments = ToolDefinition("tool", "A tool under test.", {"type": "object", "properties": {"x": schema}, **schema})
    assert calls(lambda: may_be_data(ToolOptions(returns=schema), returned)) < 1_000 * MANY
    assert calls(lambda: python_stub(arguments, schema)) < 1_000 * MANY


# An answer against a schema


def union(branches: int) -> dict[str, Any]:
    each = {"type": "object", "properties": {"n": {"$ref": "#/$defs/R"}}}
    parts = [{**each, "required": [f"r{number}"]} for number in range(branches)]
    return {"$ref": "#/$defs/R", "$defs": {"R": {"anyOf": [{"type": "string"}, *parts, each]}}}


def nested(depth: int) -> Any:
    value: Any = [7]
    for _ in range(depth):
        value = {"n": value}
    return value


def of_two_letters(length: int) -> str:
    """Return a text that keeps as many states of a pattern alive as a text can."""
    return f"{random.Random(length).getrandbits(length):0{length}b}".translate({ord("0"): "a", ord("1"): "b"})


LOOKAROUND = "(?=a)(a|b|ab)*c$"
STATES = "[ab]*a[ab]{300}[cd]"

SLOW: dict[str, tuple[dict[str, Any], Any]] = {
    "a text and lookaround": ({"pattern": LOOKAROUND}, of_two_letters(400_000)),
    "texts and lookaround": ({"items": {"pattern": LOOKAROUND}}, [of_two_letters(3_000)] * 300),
    "a text and many states": ({"pattern": STATES}, of_two_letters(2_000_000)),
    "texts and many states": ({"items": {"pattern": STATES}}, [of_two_letters(10_000)] * 200),
    "a text and many patterns": (
        {"allOf": [{"pattern": f"[ab]*a[ab]{{60}}{'e' * number}[cd]"} for number in range(50)]},
        of_two_letters(90_000),
    ),
    "a name and patterns": ({"patternProperties": {STATES: {}}}, {of_two_letters(2_000_000): [7]}),
    "a text in a union": ({"anyOf": [{"type": "integer"}, {"pattern": LOOKAROUND}]}, of_two_letters(400_000)),
    "a text, by reference": (
        {"properties": {"n": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"pattern": LOOKAROUND}}},
        {"n": of_two_letters(400_000)},
    ),
    "a union in a union": (union(3), nested(30)),
    "many values, many options": ({"items": {"enum": [[n] for n in range(5_000)]}}, [[4_999]] * 100_000),
    "unique": ({"uniqueItems": True}, [[n] for n in range(500_000)]),
    "contains": ({"contains": {"anyOf": [{"required": [f"a{n}"]} for n in range(500)]}}, [{}] * 100_000),
    "a costly pattern": ({"items": {"pattern": "^(?=(a+)+$)b"}}, ["a" * 40] * 100_000),
}


@pytest.mark.slow
@each_row("kind", SLOW)
def test_checking_an_answer_is_bounded_whatever_it_is_checked_against(kind: str) -> None:
    schema, value = SLOW[kind]
    answer = CallToolResult(content=[], structured_content={"x": value})
    check = ValueCheck({"type": "object", "properties": {"x": schema}} | {"$defs": schema.get("$defs", {})})
    began = time.process_time()
    result = as_tool_result("s", answer, check)
    assert time.process_time() - began < SOON_S
    assert result.is_error and ("does not fit" in result.message or "too large" in result.message)


@each_row("kind", SLOW)
def test_checking_arguments_is_bounded_and_counted(kind: str) -> None:
    schema, value = SLOW[kind]
    whole = {"type": "object", "properties": {"x": schema}} | {"$defs": schema.get("$defs", {})}
    checker = ArgumentChecker(ToolDefinition("tool", "A tool under test.", whole))
    began = time.process_time()
    with pytest.raises(InvalidArguments) as refused:
        checker.check({"x": value})
    assert time.process_time() - began < 3 * SOON_S and refused.value.steps > 1


def test_what_is_checked_again_on_each_level_is_described_in_linear_time() -> None:
    schema = {"type": "object", "properties": {"x": union(3)}, "$defs": union(3)["$defs"]}
    check = ValueCheck(schema)
    assert str(check.problem({"x": nested(60)})).startswith("x: ")


def test_errors_of_the_library_are_listed_in_one_place_only() -> None:
    """It lists every error of every branch, which is exponential in the value."""
    found = [
        f"{path.name}:{number}"
        for path in Path(toolcell.__file__).parent.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ".iter_errors(" in line
    ]
    assert [each.partition(":")[0] for each in found] == ["problems.py"], found
