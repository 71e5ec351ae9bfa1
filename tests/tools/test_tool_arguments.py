"""Group C, second half: coercing and validating the arguments that a model sent."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell.agents import Agent
from toolcell.agents.providers.provider import ModelResponse
from toolcell.agents.providers.scripted import ScriptedModel
from toolcell.calls.arguments import ArgumentChecker, InvalidArguments, ParseMode, parse_json
from toolcell.calls.schema_walk import SchemaParts, Walk
from toolcell.calls.values import copy_arguments
from toolcell.errors import RegistrationError, UsageError
from toolcell.tools import (
    Call,
    Feature,
    Origin,
    Rewrite,
    RunContext,
    ToolCall,
    ToolContext,
    ToolDefinition,
    ToolRegistry,
    ToolResult,
    decode_tool_call,
)
from tools.toolkit import QUERY_SCHEMA, FakeRuntime

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


def checker(properties: dict[str, Any], coercion: Any = "safe", extras: Any = "drop", **more: Any) -> ArgumentChecker:
    schema = {"type": "object", "properties": properties, **more}
    return ArgumentChecker(ToolDefinition("tool", "A tool under test", schema), coercion, extras)


def coerced(kind: Any, value: Any, coercion: Any = "lenient") -> Any:
    return checker({"x": {"type": kind}}, coercion, required=["x"]).check({"x": value}).args["x"]


TABLE: list[tuple[str, Any, Any]] = [
    ("number", "3", 3), ("number", "3.5", 3.5), ("number", "-1e3", -1000.0), ("number", True, 1), ("number", False, 0),
    ("number", None, 0),
    ("integer", "3", 3), ("integer", "3.0", 3), ("integer", "1e3", 1000), ("integer", 3.0, 3), ("integer", True, 1),
    ("integer", None, 0),
    ("boolean", "true", True), ("boolean", "false", False), ("boolean", "True", True), ("boolean", "False", False),
    ("boolean", 1, True), ("boolean", 0, False),
    ("boolean", None, False),
    ("string", 3, "3"), ("string", 1e21, "1000000000000000000000"), ("string", 0.1, "0.1"), ("string", 3.0, "3"),
    ("string", True, "true"), ("string", False, "false"), ("string", None, ""),
    ("null", "", None), ("null", 0, None), ("null", False, None),
]  # fmt: skip

REFUSED: list[tuple[str, Any]] = [
    ("number", ""), ("number", " "), ("number", " 3 "), ("number", "three"), ("number", "0x10"), ("number", "1_000"),
    ("number", "nan"), ("number", "inf"), ("number", "٣"), ("number", []), ("number", {}),
    ("integer", "3.7"), ("integer", 3.7), ("integer", " 3"), ("integer", "1e999"), ("integer", "1e9999"),
    ("boolean", "yes"), ("boolean", "on"), ("boolean", "t"), ("boolean", "TRUE"), ("boolean", "1"), ("boolean", 2),
    ("boolean", ""),
    ("string", []), ("string", {}), ("null", "null"), ("null", 1), ("null", True),
    ("array", "x"), ("array", '{"a": 1}'), ("object", "[1]"), ("object", "x"), ("array", 3), ("object", 3),
]  # fmt: skip


@pytest.mark.conforms("C10", "C8", "C-b2", "C-b4")
@each_row(("kind", "value", "expected"), TABLE, ids=repr)
def test_what_the_table_names_is_mended(kind: str, value: Any, expected: Any) -> None:
    mended = coerced(kind, value)

    assert mended == expected
    assert type(mended) is type(expected)


@pytest.mark.conforms("C10", "C11", "C-b2")
@each_row(("kind", "value"), REFUSED, ids=repr)
def test_what_the_table_does_not_name_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(InvalidArguments, match=r"  - x: must be"):
        coerced(kind, value)


@pytest.mark.conforms("C11")
def test_members_of_objects_and_arrays_are_mended_where_they_are() -> None:
    integers = {"type": "integer"}
    properties = {
        "deep": {"type": "object", "properties": {"n": integers}, "additionalProperties": {"type": "boolean"}},
        "list": {"type": "array", "items": integers},
        "pair": {"type": "array", "prefixItems": [integers, {"type": "string"}]},
        "old": {"type": "array", "items": [integers, {"type": "string"}]},
    }
    given_ = {"deep": {"n": "1", "flag": "true"}, "list": ["1", 2.0], "pair": ["1", 2], "old": ["1", 2]}
    expected = {"deep": {"n": 1, "flag": True}, "list": [1, 2], "pair": [1, "2"], "old": [1, "2"]}

    for name in given_:
        assert checker({name: properties[name]}).check({name: given_[name]}).args == {name: expected[name]}


@pytest.mark.conforms("C12")
def test_a_list_of_types_leaves_what_matches_alone_and_else_takes_the_first_that_can_be_made() -> None:
    assert coerced(["integer", "string"], "7") == "7"
    assert coerced(["integer", "boolean"], "true") is True
    assert coerced(["boolean", "integer"], "7") == 7
    assert coerced(["string", "null"], None) is None


@pytest.mark.conforms("C13")
@each_row("union", ["anyOf", "oneOf"])
def test_of_alternatives_the_first_that_validates_after_mending_is_used(union: str) -> None:
    branches = [{"type": "integer", "minimum": 10}, {"type": "boolean"}]
    check = checker({"x": {union: branches}}).check

    assert check({"x": "12"}).args == {"x": 12}
    assert check({"x": "true"}).args == {"x": True}
    assert check({"x": 1}).args == {"x": True}
    with pytest.raises(InvalidArguments, match="fits none of the allowed forms") as caught:
        check({"x": "five"})
    assert '"five"' in str(caught.value)


KEYWORDS: list[tuple[dict[str, Any], Any, Any]] = [
    ({"type": "integer"}, 1, "x"),
    ({"type": "object", "required": ["a"]}, {"a": 1}, {}),
    ({"type": "object", "properties": {"a": {"minimum": 1}}}, {"a": 1}, {"a": 0}),
    ({"type": "object", "additionalProperties": False}, {}, {"a": 1}),
    ({"type": "object", "additionalProperties": {"type": "boolean"}}, {"a": True}, {"a": []}),
    ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    ({"type": "array", "items": {"type": "integer"}}, [1], ["x"]),
    ({"type": "array", "minItems": 1}, [1], []),
    ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    ({"type": "array", "uniqueItems": True}, [1, 2], [1, 1]),
    ({"type": "string", "minLength": 2}, "éé", "é"),
    ({"type": "string", "maxLength": 2}, "😀😀", "😀😀😀"),
    ({"type": "string", "pattern": "b+"}, "abba", "aaa"),
    ({"type": "number", "minimum": 1}, 1, 0),
    ({"type": "number", "maximum": 1}, 1, 2),
    ({"type": "number", "exclusiveMinimum": 1}, 2, 1),
    ({"type": "number", "exclusiveMaximum": 1}, 0, 1),
    ({"enum": [1, "a"]}, "a", "b"),
    ({"const": 5}, 5, 6),
    ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, 2, 4),
    ({"anyOf": [{"minimum": 5}, {"maximum": 1}]}, 6, 3),
    ({"oneOf": [{"minimum": 5}, {"maximum": 6}]}, 7, 5),
    ({"not": {"const": 1}}, 2, 1),
]


@pytest.mark.conforms("C14")
@each_row(("schema", "good", "bad"), KEYWORDS, ids=lambda value: json.dumps(value)[:40])
def test_every_keyword_is_checked(schema: dict[str, Any], good: Any, bad: Any) -> None:
    check = checker({"x": schema}, "off").check

    assert check({"x": good}).args == {"x": good}
    with pytest.raises(InvalidArguments, match=r"  - x"):
        check({"x": bad})


@pytest.mark.conforms("C15", "C-b10")
def test_all_problems_are_told_each_with_its_path_and_a_wrong_type_only_once() -> None:
    item = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "enum": [1, 2]}}, "required": ["n"]}
    properties = {"a": {"type": "object", "properties": {"b": {"type": "array", "items": item}}}, "c": {"minLength": 3}}

    with pytest.raises(InvalidArguments) as caught:
        checker(properties, required=["d"], additionalProperties=False).check(
            {"a": {"b": [{"n": 1}, {}, {"n": "many"}]}, "c": "x", "quary": 1}
        )

    lines = str(caught.value).partition("\n\n")[0].splitlines()[1:]
    assert sorted(lines) == [
        '  - a.b[1]: missing required property "n"',
        '  - a.b[2].n: must be integer, not string ("many")',
        '  - c: "x" is shorter than 3 characters',
        '  - root: missing required property "d"',
        '  - root: unknown property "quary"',
    ]


def test_a_name_of_a_property_is_refused_with_its_reasons() -> None:
    names = {"anyOf": [{"pattern": "^a"}, {"pattern": "^b"}]}
    with pytest.raises(InvalidArguments, match=r'property name "zz" .*\^a.*\^b'):
        checker({"x": {"type": "object", "propertyNames": names}}).check({"x": {"zz": 1}})
    with pytest.raises(InvalidArguments, match="nested deeper than"):
        checker({"x": {"propertyNames": {"type": "array"}}}).check({"x": {"[" * 200 + "]" * 200: 1}})


@pytest.mark.conforms("C16", "EX-19", "C7")
async def test_the_message_lists_problems_and_what_was_received() -> None:
    registry = ToolRegistry()
    registry.register("search", "Search the web for things", QUERY_SCHEMA, lambda args: "")

    result = await registry.execute("search", {"query": [1]})

    assert result.message == (
        'invalid tool arguments: validation failed for tool "search":\n'
        "  - query: must be string, not array\n"
        "\n"
        "Received arguments:\n"
        '{\n  "query": [\n    1\n  ]\n}'
    )
    assert result.error is not None
    assert result.error.details == {"fields": {"query": "must be string, not array"}}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@pytest.mark.conforms("C17", "D-b1")
@given(args=st.dictionaries(st.sampled_from(["n", "l", "o", "x"]), json_values))
def test_what_was_received_is_never_touched_whatever_comes_of_it(args: dict[str, Any]) -> None:
    properties = {
        "n": {"type": "integer", "default": 4},
        "l": {"type": "array", "items": {"type": "string"}},
        "o": {"type": "object", "properties": {"b": {"type": "boolean", "default": True}}},
    }
    before = copy.deepcopy(args)
    check = checker(properties)

    with contextlib.suppress(InvalidArguments):
        accepted = check.check(args).args
        assert check.is_valid(accepted)
        assert json.loads(json.dumps(accepted)) == accepted
    assert repr(args) == repr(before)


@pytest.mark.conforms("C18", "A-b1")
async def test_without_a_schema_arguments_pass_and_what_is_no_object_is_told_so() -> None:
    received: list[Any] = []
    registry = ToolRegistry()
    registry.register("free", "Takes anything there is", None, received.append)
    registry.register("search", "Search the web for things", QUERY_SCHEMA, lambda args: "")

    await registry.execute("free", {"a": [1, {"b": None}]})
    listed = await registry.execute("search", "[1, 2]")

    assert received == [{"a": [1, {"b": None}]}]
    assert "  - root: must be an object, not list" in listed.text
    assert '  - root: missing required property "query"' in listed.text
    with pytest.raises(RegistrationError, match="invalid schema"):
        registry.register("bad", "A schema that is none", {"type": "object", "properties": {"x": {"type": 5}}}, None)


@pytest.mark.conforms("C19")
def test_decoding_refuses_a_call_of_another_tool() -> None:
    search = ToolDefinition("search", "Search the web for things", QUERY_SCHEMA)

    assert decode_tool_call(search, ToolCall("1", "search", '{"query": 5}')) == {"query": "5"}
    with pytest.raises(UsageError, match="call of 'delete', not of 'search'"):
        decode_tool_call(search, ToolCall("1", "delete", {"query": "x"}))


RECOVERED: list[tuple[str, Any, ParseMode]] = [
    ('{"a": 1}', {"a": 1}, ParseMode.STRICT),
    ('```json\n{"a": 1}\n```', {"a": 1}, ParseMode.REPAIRED),
    ('  ```\n\n{"a": "```"}```  ', {"a": "```"}, ParseMode.REPAIRED),
    ('{"a": [1, 2,], }', {"a": [1, 2]}, ParseMode.REPAIRED),
    ('{"a": "line\nbreak"}', {"a": "line\nbreak"}, ParseMode.REPAIRED),
    ('{"a": 1, "b": "hal', {"a": 1, "b": "hal"}, ParseMode.PARTIAL),
    ('{"a": 1, "b', {"a": 1}, ParseMode.PARTIAL),
    ('{"a": 1, "b":', {"a": 1}, ParseMode.PARTIAL),
    ('{"a": [1, {"c": tr', {"a": [1, {}]}, ParseMode.PARTIAL),
    ('{"a": "x\\u00', {"a": "x"}, ParseMode.PARTIAL),
    ("", None, ParseMode.INVALID),
    ('\ufeff{"a": 1}', {"a": 1}, ParseMode.REPAIRED),
    ("no json at all", None, ParseMode.INVALID),
    ("}", None, ParseMode.INVALID),
]


@pytest.mark.conforms("C20")
@each_row(("text", "value", "mode"), RECOVERED, ids=lambda value: str(value)[:20])
def test_streamed_arguments_are_recovered_and_the_way_is_told(text: str, value: Any, mode: ParseMode) -> None:
    assert parse_json(text) == (value, mode)


def test_blank_lines_after_a_fence_are_read_once() -> None:
    assert parse_json("```" + "\n" * 200_000 + "x") == (
        None,
        ParseMode.INVALID,
    )  # took hours, when each was a beginning


@pytest.mark.conforms("C20")
@given(value=json_values.filter(lambda value: isinstance(value, dict)), cut=st.integers(0, 200))
def test_any_beginning_of_json_is_read_without_an_error(value: Any, cut: int) -> None:
    text = json.dumps(value)
    read, mode = parse_json(text[:cut])

    assert mode is not ParseMode.REPAIRED
    if mode is ParseMode.STRICT:
        assert cut >= len(text)
    if mode is ParseMode.PARTIAL:
        assert isinstance(read, dict)


@pytest.mark.conforms("C20")
@each_row("text", ['```json\n{"n": "a\nb",}\n```', '{"n": "a\nb"}', '{"n": "a\\nb",}'])
async def test_small_mistakes_in_json_are_mended_on_every_route(text: str) -> None:
    got: list[Any] = []
    registry = ToolRegistry()
    schema = {"type": "object", "properties": {"n": {"type": "string"}}}
    registry.register("take", "Keeps what it was given", schema, got.append, blocking=False)

    await registry.execute("take", text)
    await registry.execute_batch([("take", text), {"name": "take", "arguments": text}])
    await registry.dispatch("take", text, origin=Origin.PLAN)
    model = ScriptedModel([ModelResponse("", (ToolCall("1", "take", text),), "tool_calls"), "done"])
    await Agent(model, tools=registry).run("go")
    decoded = decode_tool_call(registry.state.tools["take"].definition, {"name": "take", "input": text})

    assert [*got, decoded] == [{"n": "a\nb"}] * 6


def _lowered(call: ToolCall) -> ToolCall:
    return dataclasses.replace(call, arguments={**cast("dict[str, Any]", call.arguments), "n": 1})


def _lowered_in_place(call: ToolCall) -> ToolCall:
    cast("dict[str, Any]", call.arguments)["n"] = 1
    return call


@each_row("change", [_lowered, _lowered_in_place])
async def test_a_call_that_was_changed_stands_in_transcripts_as_it_is_made(
    change: Callable[[ToolCall], ToolCall],
) -> None:
    parsed = ToolCall("1", "take", '{ "n": 500 }').parsed()
    assert parsed.to_openai()["function"]["arguments"] == parsed.arguments_json == '{ "n": 500 }'

    changed = change(parsed)
    assert changed.to_openai()["function"]["arguments"] == changed.arguments_json == '{"n": 1}'


@each_row("levels", [100, 600, 900, 100_000])
def test_arguments_of_any_depth_are_read(levels: int) -> None:
    text = '{"a": ' + "[" * levels + "]" * levels + "}"
    call = ToolCall("1", "take", text).parsed_if_safe()
    assert call.arguments_json == text and call.to_openai()["function"]["name"] == "take"


def test_a_change_below_the_first_level_of_arguments_stands_in_transcripts() -> None:
    parsed = ToolCall("1", "pay", '{"to": {"name": "ann"}}').parsed()
    assert isinstance(parsed.arguments, dict)
    parsed.arguments["to"]["name"] = "bob"
    assert parsed.arguments_json == parsed.to_openai()["function"]["arguments"] == '{"to": {"name": "bob"}}'


def test_a_call_that_was_given_as_a_mapping_stays_one() -> None:
    call = ToolCall("1", "take", {"n": 1}, mode=ParseMode.PARTIAL)

    assert call.parsed_if_safe() == call
    assert set(dataclasses.asdict(call)) == {"id", "name", "arguments", "mode"}


@pytest.mark.conforms("C20", "C22")
@each_row("arguments", ['{"query": "delete every', "no json", '{"query": "x"} trailing'])
async def test_a_call_whose_arguments_broke_off_is_declined(arguments: str) -> None:
    ran: list[Any] = []
    registry = ToolRegistry()
    registry.register("search", "Search the web for things", QUERY_SCHEMA, ran.append)

    [result] = await registry.execute_batch([ToolCall("1", "search", arguments).parsed_if_safe()])

    assert result.text.startswith("invalid args: ")
    assert ran == []


@pytest.mark.conforms("C24", "C22")
@each_row("arguments", ["", "  ", "{}", {}])
async def test_no_arguments_may_be_written_in_several_ways(arguments: Any) -> None:
    async def now() -> str:
        """Tell what time it is."""
        return "noon"

    assert (await ToolRegistry([now]).execute("now", arguments)).text == "noon"


@pytest.mark.conforms("C-b1", "V-3")
async def test_hand_written_schemas_are_enforced_too_unless_a_tool_opts_out() -> None:
    received: list[Any] = []
    registry = ToolRegistry()
    registry.register("strict", "Takes a query it needs", QUERY_SCHEMA, received.append)
    registry.register("loose", "Takes whatever it is given", QUERY_SCHEMA, received.append, validate=False)

    refused = await registry.execute("strict", {})
    await registry.execute("loose", {})

    assert refused.is_error
    assert received == [{}]


@pytest.mark.conforms("C-b4", "C-b11")
async def test_a_boolean_for_a_number_is_mended_knowingly_and_written_down() -> None:
    seen: list[Call] = []

    class Observer(Feature):
        def call_started(self, call: Call) -> None:
            seen.append(call)

        def call_ended(self, call: Call) -> None:
            pass

    async def page(limit: int, flag: bool = False) -> int:
        """Return the limit it was given."""
        assert type(limit) is int
        return limit

    result = await ToolRegistry([page]).dispatch("page", {"limit": True}, context=RunContext().having(Observer()))

    assert result.value == 1
    assert seen[0].coerced == [{"path": "limit", "from": True, "to": 1}]


@pytest.mark.conforms("C-b5")
def test_null_for_an_optional_property_means_left_out_and_for_a_required_one_is_an_error() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "integer", "default": 7}, "n": {"type": ["integer", "null"]}}
    safe = checker(properties, required=["a"])

    checked = safe.check({"a": 1, "b": None, "n": None})

    assert checked.args == {"a": 1, "b": 7, "n": None}
    assert [change.path for change in checked.changes] == ["b"]
    with pytest.raises(InvalidArguments, match="a: must be integer, not null"):
        safe.check({"a": None})
    assert checker(properties, "lenient").check({"a": None, "b": None}).args["a"] == 0


@pytest.mark.conforms("C-b6")
def test_json_in_a_string_is_read_where_an_object_or_array_is_wanted() -> None:
    properties = {"ids": {"type": "array", "items": {"type": "integer"}}, "where": {"type": "object"}}

    checked = checker(properties).check({"ids": '[1, "2"]', "where": '{"a": 1}'})

    assert checked.args == {"ids": [1, 2], "where": {"a": 1}}


@pytest.mark.conforms("C-b7", "C21")
def test_defaults_of_the_schema_are_filled_in_at_every_depth_and_never_shared() -> None:
    properties = {
        "limit": {"type": "integer", "default": 10},
        "tags": {"type": "array", "default": []},
        "page": {"type": "object", "properties": {"size": {"type": "integer", "default": 5}}},
    }
    check = checker(properties)

    first, second = check.check({"page": {}}).args, check.check({}).args
    first["tags"].append("mine")

    assert first == {"limit": 10, "tags": ["mine"], "page": {"size": 5}}
    assert second == {"limit": 10, "tags": []}


@pytest.mark.conforms("C-b7", "C21")
def test_a_default_belongs_to_its_call_alone_whatever_else_the_schema_has() -> None:
    flat = {"tags": {"type": "array", "default": []}, "where": {"type": "object", "default": {"deep": []}}}
    nested = {**flat, "page": {"type": "object", "properties": {"size": {"type": "integer", "default": 5}}}}
    for properties in (flat, nested):
        check = checker(properties)

        first = check.check({}).args
        first["tags"].append("mine")
        first["where"]["deep"].append("mine")

        assert check.check({}).args == {"tags": [], "where": {"deep": []}}
        assert (properties["tags"]["default"], properties["where"]["default"]) == ([], {"deep": []})


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


HOSTILE: list[tuple[Any, str]] = [
    ({"x": {"y": [float("nan")]}}, "x.y[0]: nan is not a JSON number; send None"),
    ({"x": float("inf")}, "x: inf is not a JSON number"),
    ({"x": [2**63]}, "x[0]: integer has more than 64 bits"),
    ({"x": -(2**70)}, "x: integer has more than 64 bits"),
    ({"x": {"y": "\ud800"}}, "x.y: contains a lone surrogate"),
    ({"x": "a\udfff"}, "x: contains a lone surrogate"),
    ({"x": {"\udfff": 1}}, "x: contains a lone surrogate"),
    ({"x": deep(100)}, "nested deeper than 64 levels"),
    ({"x": [0] * 200_001}, "x: too many values"),
    ({"x": "a" * (16 * 1024 * 1024 + 1)}, "x: text is too long"),
    ({"x": object()}, "x: object is not data"),
    ({"x": {(1, 2): 2}}, "x: a key is tuple, and keys have to be text"),
    ({"x": {1: 2, "1": 3}}, "x: two keys become"),
]


ANY_X = {"type": "object", "properties": {"x": {}}}
"""Names its property, so that a plain value of it takes the shortcut past the full check."""


@pytest.mark.conforms("C-b8")
@each_row("schema", [None, ANY_X], ids=["no schema", "schema"])
@each_row(("args", "problem"), HOSTILE, ids=[problem for _, problem in HOSTILE])
async def test_values_that_would_break_later_are_refused_with_their_path(args: Any, problem: str, schema: Any) -> None:
    registry = ToolRegistry()
    registry.register("free", "Takes anything there is", schema, lambda args: "never")

    result = await registry.execute("free", args)

    assert result.error is not None
    assert result.error.code == "invalid_arguments"
    assert problem in result.text
    result.text.encode("utf-8")


@pytest.mark.conforms("C-b8")
@each_row("route", ["model", "plan", "code", "tool", "hook"])
@each_row(("args", "problem"), HOSTILE[:8], ids=[problem for _, problem in HOSTILE[:8]])
async def test_such_values_are_refused_wherever_they_come_from(args: Any, problem: str, route: str) -> None:
    ran: list[Any] = []
    registry = ToolRegistry()
    registry.register("free", "Takes anything there is", ANY_X, ran.append)

    async def script(call_tool: Any) -> Any:
        return await call_tool("free", args)

    @registry.tool
    async def relay(ctx: ToolContext) -> ToolResult:
        """Call the free tool with values of its own."""
        return await ctx.call_tool("free", args)

    registry.enable_plan_execution()
    registry.enable_code_execution(FakeRuntime(script))
    if route == "hook":
        registry.add_hook(before=lambda call: Rewrite(args) if call.name == "free" else None)
    asked: dict[str, tuple[str, Any]] = {
        "model": ("free", json.dumps(args)),
        "plan": ("execute_plan", {"steps": [{"tool": "free", "args": args}]}),
        "code": ("execute_code", {"code": "..."}),
        "tool": ("relay", {}),
        "hook": ("free", {}),
    }

    name, given = asked[route]
    [result] = await registry.execute_batch([ToolCall("call_0", name, given)])

    assert problem in result.text
    assert ran == []
    result.text.encode("utf-8")


@pytest.mark.conforms("C-b8", "C-b9")
@each_row("pattern", ["^(a+)+$", "^(a|a)*$", r"^(\w+\s?)*$", "^(?=(a+)+$)b", r"^(a*)*\1$"])
async def test_a_hostile_pattern_meets_a_hostile_text_and_nothing_hangs(pattern: str) -> None:
    registry = ToolRegistry()
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
    registry.register("match", "Takes a text of some form", schema, lambda args: "never")

    result = await registry.execute("match", {"x": "a" * 50_000 + "!"})

    assert result.is_error
    assert "x: " in result.text


@pytest.mark.conforms("C-b10", "EX-17", "C23", "A16")
async def test_a_near_miss_is_helped_along() -> None:
    async def search_documents(query: str, mode: str = "brief") -> str:
        """Search the documents for something."""
        return query

    schema = {"type": "object", "properties": {"mode": {"enum": ["brief", "detailed"]}}}
    registry = ToolRegistry([search_documents])
    registry.register("show", "Show something in a mode", schema, lambda args: "")
    whole = {"type": "object", "properties": {"item": {"type": "object"}}, "required": ["item"]}
    registry.register("put", "Put an item somewhere", whole, lambda args: "")

    misspelt = await registry.execute("search_documents", {"qurey": "x"})
    wrong_tool = await registry.execute("search_document", {"query": "x"})
    wrong_case = await registry.execute("show", {"mode": "detaild"})

    assert 'unknown property "qurey" (did you mean `query`?)' in misspelt.text
    assert "unknown tool: search_document (did you mean `search_documents`?)" in wrong_tool.text
    assert "(did you mean `detailed`?)" in wrong_case.text and "brief" in wrong_case.text
    for args, is_bare in (({"n": 1}, True), ({"itm": {"n": 1}}, False)):
        assert ("write item=..." in (await registry.execute("put", args)).text) == is_bare


@pytest.mark.conforms("V-18")
async def test_extras_are_dropped_with_a_warning_unless_the_schema_or_a_setting_says_otherwise() -> None:
    received: dict[str, Any] = {}
    registry = ToolRegistry()
    kinds: dict[str, Any] = {"silent": {}, "allowing": {"extras": "allow"}, "strict": {"extras": "forbid"}}
    for name, options in kinds.items():
        registry.register(name, "Takes a query and no more", QUERY_SCHEMA, lambda args: args, **options)
    seen: list[Call] = []
    registry.add_hook(after=lambda call, result: seen.append(call))
    args = {"query": "x", "zzz": 1}

    for name in registry:
        received[name] = (await registry.execute(name, args)).value

    assert received == {"silent": {"query": "x"}, "allowing": args, "strict": None}
    assert seen[0].warnings == ("unknown property 'zzz' was dropped",)


def test_references_inside_a_schema_are_followed_and_circles_mend_nothing() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/count"}, "loop": {"$ref": "#/properties/loop"}},
        "$defs": {"count": {"type": "integer"}},
    }

    mended = Walk(SchemaParts(schema), copy_arguments({"n": "3", "loop": "x"}), "safe", "allow").arguments()

    assert mended.args == {"n": 3, "loop": "x"}
