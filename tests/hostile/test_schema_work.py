"""No schema and no value of a stranger keeps a host busy: what is not small is checked where it can be killed.

Schemas come from strangers: MCP servers, callers of a service.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from mcp_types import CallToolResult, Tool

import toolcell
from hostile.counting import calls
from hostile.loop_silence import watched
from rows import each_row
from toolcell import Limits, ToolRegistry
from toolcell.calls import checker_process
from toolcell.calls.arguments import ArgumentChecker, InvalidArguments
from toolcell.calls.call import RunScope
from toolcell.calls.compiled_schema import compile_schema, counted, counted_repetitions
from toolcell.calls.finalize import may_be_data, with_data
from toolcell.calls.options import ToolOptions
from toolcell.calls.result import Text, ToolResult
from toolcell.calls.schema_walk import ValueCheck
from toolcell.errors import RegistrationError, UsageError
from toolcell.mcp.answers import as_tool_result, mismatch_of
from toolcell.mcp.catalogue import McpCatalogue, Selection
from toolcell.run.run import Script
from toolcell.service.socket.remote_tools import remote_registry
from toolcell.support.host_work import HostWork
from toolcell.support.vocabulary import words
from toolcell.tools import RunContext, ToolDefinition
from toolcell.tools.pipeline import check_arguments
from toolcell.tools.stubs import is_identifier, python_stubs

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

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


LARGE_PATTERNS: dict[str, dict[str, Any]] = {
    "one in another": {"properties": {"a": {"pattern": "((a{1,900}){1,900}){1,9}"}}},
    "many names": {"patternProperties": {rf"(?i)\W{{1,{90 + number}}}": {} for number in range(500)}},
    "many texts": {"properties": {"a": {"allOf": [{"pattern": f".{{{900 + number}}}"} for number in range(100)]}}},
    "short and many": {"patternProperties": {f"^{number}.*y$": {} for number in range(3_000)}},
    "in an array": {"properties": {"a": {"items": {"anyOf": [{"pattern": f"[^x{n}]{{900}}"} for n in range(100)]}}}},
}


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


@each_row("pattern", ["a.{2,4}", r"[^\x00]{1,1020}", "ab|b{2,3}", r"(x|-){2,}", r"a\.{0,2047}", "(?=a)[abx]{2,3}"])
def test_of_a_repetition_that_ends_a_pattern_the_least_is_compiled_and_the_same_texts_match(pattern: str) -> None:
    assert counted(pattern)[0] == pattern[: pattern.rindex(",")] + "}"
    is_valid = compile_schema({"pattern": pattern}).is_valid
    texts = ["".join(each) for length in range(6) for each in itertools.product("abx.-", repeat=length)]
    assert [text for text in texts if is_valid(text) is not (re.search(pattern, text) is not None)] == []


KEYWORDS = [
    "additionalItems",
    "contentSchema",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "components",
]


@each_row("keyword", KEYWORDS)
def test_a_repetition_is_counted_below_every_keyword_and_not_in_data(keyword: str) -> None:
    part = {"pattern": "^[a-z]{1,60000}$"}
    made = counted_repetitions({keyword: {"a": part, "b": [part]}})[keyword]
    assert made["a"] == made["b"][0] == {"pattern": "^[a-z]*$", "minLength": 1, "maxLength": 60_000}
    compared: dict[str, Any] = {"enum": [part], "const": part}
    assert counted_repetitions(compared) == compared
    named = counted_repetitions({"properties": compared})["properties"]
    assert named["const"]["pattern"] == named["enum"][0]["pattern"] == "^[a-z]*$"


@each_row(
    "pattern",
    [
        "^.{20000}x$", "^(?:.{1,200}){1,200}$", "^[[a-z]_]{3}$", "^a{9,1}$", "^(ab){3}$", "x{3}$", r"a\{1,9}", "a{9,1}",
        r"\x{1,9}", r"\u{1,9}", r"\U{1,9}", r"\p{1,9}", r"\P{1,9}", "a{\u0661,9}",
    ],
)  # fmt: skip
def test_no_other_repetition_is_taken_for_one_of_those(pattern: str) -> None:
    assert counted(pattern)[0] == pattern


def test_a_refusal_names_the_pattern_as_it_was_sent() -> None:
    with pytest.raises(RegistrationError, match=re.escape('"(a{1,9}" is not a "regex"')):
        compile_schema({"properties": {"a": {"pattern": "(a{1,9}"}}})


@each_row("reference", ["urn:nowhere", "#/$defs/none", "#none", "https://example.com/x#/y"])
def test_a_reference_that_leads_nowhere_is_refused(reference: str) -> None:
    with pytest.raises(RegistrationError):
        compile_schema({"type": "object", "properties": {"a": {"$ref": reference}}})


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
    assert calls(lambda: python_stubs([(arguments, schema)])) < 1_000 * MANY


MARKS = "a" + "\u0300\u0323" * 50_000
"""Accents in an order that has to be changed: `unicodedata.normalize` takes seven seconds for it."""


def name_of_an_input(name: str) -> None:
    with pytest.raises(UsageError, match="which Python reads as"):
        Script(source="1", limits=Limits(), inputs={name: 1}).message(1)


@each_row(
    "read", [is_identifier, words, name_of_an_input], ids=["a property's name", "words of a search", "an input's name"]
)
def test_accents_on_accents_take_linear_time(read: Callable[[str], object]) -> None:
    began = time.process_time()
    read(MARKS)
    assert time.process_time() - began < SOON_S


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


# Every route by which a stranger's schema comes in


HOSTILE = {**HEAVY, **COMPILED_SLOWLY, **{kind: {"type": "object", **part} for kind, part in LARGE_PATTERNS.items()}}
OBJECTS = {"type": "object"}
SILENT_S = 0.1
HOST_S = 0.5
"""Processor time of the host for one schema or value and everything that is said of it."""


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_process, "CPU_S", 0.1)


def catalogue(registry: ToolRegistry) -> McpCatalogue:
    async def answer(context: Any) -> Any:
        return await context.call_tool("nobody")

    return McpCatalogue("s", registry, Selection(), lambda tool: answer)


async def offered_by_a_caller(schema: dict[str, Any]) -> ToolRegistry | None:
    about = {"description": "A tool of a caller.", "callable_from": ["model", "code", "plan"]}
    try:
        return await remote_registry([{"name": "t", "parameters": schema, **about}], ToolRegistry(), with_own=False)
    except RegistrationError:
        return None


async def through_a_caller(schema: dict[str, Any], value: Any) -> Any:
    registry = await offered_by_a_caller(schema)
    return registry and await registry.dispatch("t", value, context=RunContext())


async def through_the_results_of_a_caller(schema: dict[str, Any], value: Any) -> Any:
    options = {"returns": schema}
    offered = [{"name": "t", "description": "A tool of a caller.", "parameters": OBJECTS, "options": options}]
    try:
        await remote_registry(offered, ToolRegistry(), with_own=False)
    except RegistrationError:
        return None
    text = ToolResult(parts=(Text(json.dumps(value)),))
    return await with_data("t", ToolOptions(returns=schema), text, is_foreign=True)


async def through_a_server(schema: dict[str, Any], value: Any) -> Any:
    registry = ToolRegistry()
    made = catalogue(registry)
    read = await made._read([Tool(name="t", description="A tool.", input_schema=schema)])
    made._register(await made._usable([*read.values()]))
    return await registry.dispatch("s.t", value, context=RunContext()) if registry.has("s.t") else made.problems[0]


async def through_a_servers_answer(schema: dict[str, Any], value: Any) -> Any:
    answer = CallToolResult(content=[], structured_content=value)
    return as_tool_result("s", answer, await mismatch_of(answer, schema))


async def through_an_action_for_later(schema: dict[str, Any], value: Any) -> Any:
    try:
        return await check_arguments(ToolDefinition("t", "A tool under test.", schema), value)
    except InvalidArguments as exc:
        return exc


ROUTES = {
    route.__name__.removeprefix("through_"): route
    for route in (
        through_a_caller,
        through_the_results_of_a_caller,
        through_a_server,
        through_a_servers_answer,
        through_an_action_for_later,
    )
}


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
@each_row("route", ROUTES)
async def test_no_schema_of_a_stranger_keeps_the_event_loop(route: str) -> None:
    first = [*ROUTES].index(route)  # each route tries other kinds
    kinds = dict([*HOSTILE.items()][first :: 2 if route == "a_servers_answer" else 16])
    for kind, schema in kinds.items():
        found = await watched(ROUTES[route](schema, {"a": {"n": 1}}))
        assert (found.silent_s < SILENT_S, found.took_s < HOST_S) == (True, True), (kind, found)


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
@each_row("route", [*ROUTES, "a_tool_of_ours"])
async def test_no_value_keeps_the_event_loop_whatever_it_is_checked_against(route: str) -> None:
    async def ours(schema: dict[str, Any], value: Any) -> Any:
        registry = ToolRegistry()
        registry.register("tool", "A tool under test.", schema, lambda args: len(args))
        return await registry.dispatch("tool", value, context=RunContext())

    kinds = SLOW if route == "a_tool_of_ours" else dict([*SLOW.items()][::6])
    for kind, (schema, value) in kinds.items():
        whole = {"type": "object", "properties": {"x": schema}} | {"$defs": schema.get("$defs", {})}
        found = await watched(ROUTES.get(route, ours)(whole, {"x": value}))
        assert (found.silent_s < SILENT_S, found.took_s < HOST_S) == (True, True), (kind, found.silent_s, found.took_s)


@pytest.mark.usefixtures("_short")
async def test_a_check_past_its_bound_is_refused_with_the_limit_and_charged_to_its_run() -> None:
    work = HostWork(1 << 30)
    registry = await offered_by_a_caller(HEAVY["allOf"])
    assert registry is not None
    scope = RunScope(work=work)
    result = await registry.dispatch("t", {"a": 1}, context=RunContext(scope=scope))
    assert result.is_error and "0.1 s of processor time" in result.text and "send less" in result.text
    assert work.used > 64 * 0.1 * 100_000


async def test_a_schema_that_is_wrong_is_refused_when_it_is_offered() -> None:
    offered = [{"name": "t", "description": "A tool.", "parameters": {**OBJECTS, "properties": {"a": {"type": "no"}}}}]
    with pytest.raises(RegistrationError, match=r"tool 't': invalid schema at properties/a/type"):
        await remote_registry(offered, ToolRegistry(), with_own=False)
    of_server = Tool(name="t", description="A tool.", input_schema=OBJECTS, output_schema={"type": "no"})
    made = catalogue(ToolRegistry())
    (tool,) = await made._usable([*(await made._read([of_server])).values()])
    assert tool.output_schema is None and tool.options.returns is None
    assert "its output schema is not used: invalid schema" in str(made.problems[0])


async def test_what_all_tools_of_one_caller_keep_in_memory_is_bounded() -> None:
    large = {"type": "object", "properties": {"a": {"enum": [[number] for number in range(7_000)]}}}
    tools = [{"name": f"t{number}", "description": "A tool of a caller.", "parameters": large} for number in range(60)]
    assert len((await remote_registry(tools[:2], ToolRegistry(), with_own=False)).list()) == 2
    with pytest.raises(RegistrationError, match="all 60 tools together have more than 200000"):
        await remote_registry(tools, ToolRegistry(), with_own=False)


def test_what_is_checked_again_on_each_level_is_described_in_linear_time() -> None:
    schema = {"type": "object", "properties": {"x": union(3)}, "$defs": union(3)["$defs"]}
    check = ValueCheck(schema)
    assert str(check.problem({"x": nested(60)})).startswith("x: ")


def test_the_library_lists_no_errors() -> None:
    """It lists every error of every branch, which is exponential in the value."""
    found = [
        f"{path.name}:{number}"
        for path in Path(toolcell.__file__).parent.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ".iter_errors(" in line
    ]
    assert found == []
