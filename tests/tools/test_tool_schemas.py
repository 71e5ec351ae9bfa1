"""Group C, first half: schemas derived from Python types and signatures."""

from __future__ import annotations

import copy
import enum
import itertools
import json
import math
import re
import typing
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, WithJsonSchema
from typing_extensions import TypedDict, Unpack

from rows import each_row
from toolcell.calls.pydantic_types import described_schema
from toolcell.calls.type_schema import type_schema
from toolcell.compat import new_tool
from toolcell.errors import RegistrationError
from toolcell.tools import ErrorCode, ToolContext, ToolDefinition, ToolRegistry, ToolResult
from toolcell_bridge.wire.tables import Table

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


class Inner(BaseModel):
    title: str
    note: str | None = None


class Outer(BaseModel):
    inner: Inner
    many: list[Inner] = []
    by_name: dict[str, Inner] = {}


@dataclass
class Plain:
    name: str
    count: int = 3


class Typed(TypedDict):
    name: str


class Tree(BaseModel):
    children: list[Tree] = []


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.conforms("C2")
def test_static_declarations_raise_and_dynamic_ones_answer() -> None:
    definition, problem = new_tool("search", "Search the documentation", Plain)
    nothing, why = new_tool("search", "Search the documentation", str)

    assert definition == ToolDefinition.from_model("search", "Search the documentation", Plain)
    assert problem == ""
    assert nothing is None
    assert "not a record" in why


@pytest.mark.conforms("C3")
@each_row(("name", "record"), [("", Plain), ("  ", Plain), ("ok", str), ("ok", list[int]), ("ok", int)])
def test_a_blank_name_or_a_type_that_is_no_record_gives_no_definition(name: str, record: Any) -> None:
    with pytest.raises(RegistrationError):
        ToolDefinition.from_model(name, "Search the documentation", record)


@pytest.mark.conforms("C1", "C5")
@each_row("record", [Plain, Typed, Inner])
def test_models_dataclasses_and_typed_dicts_all_describe_arguments(record: Any) -> None:
    schema = ToolDefinition.from_model("x", "Takes a record of some kind", record).parameters

    assert schema["type"] == "object"
    assert schema["required"] == [next(iter(schema["properties"]))]


@pytest.mark.conforms("C4")
def test_every_constraint_reaches_the_schema() -> None:
    class Limits(BaseModel):
        a: str = Field(description="what", min_length=1, max_length=9, pattern="^x")
        b: int = Field(ge=1, le=5)
        c: float = Field(gt=0, lt=1)
        d: list[int] = Field(min_length=1, max_length=3)
        e: Literal["x", "y"]
        f: Colour

    properties = ToolDefinition.from_model("x", "Takes constrained arguments", Limits).parameters["properties"]

    assert properties == {
        "a": {"description": "what", "maxLength": 9, "minLength": 1, "pattern": "^x", "type": "string"},
        "b": {"maximum": 5, "minimum": 1, "type": "integer"},
        "c": {"exclusiveMaximum": 1.0, "exclusiveMinimum": 0.0, "type": "number"},
        "d": {"items": {"type": "integer"}, "maxItems": 3, "minItems": 1, "type": "array"},
        "e": {"enum": ["x", "y"], "type": "string"},
        "f": {"enum": ["red", "blue"], "type": "string"},
    }


@pytest.mark.conforms("C6", "C-b3", "EX-18")
def test_nested_records_are_inline_and_closed_at_every_level() -> None:
    schema = ToolDefinition.from_model("x", "Takes nested records", Outer).parameters
    text = json.dumps(schema)

    for word in ("$schema", "$id", "$ref", "$defs", 'title":', "anyOf", "null"):
        assert word not in text.replace('"title": {"type": "string"}', "")
    inner = schema["properties"]["inner"]
    assert inner["additionalProperties"] is False
    assert schema["properties"]["many"]["items"] == inner == schema["properties"]["by_name"]["additionalProperties"]
    assert inner["properties"]["note"] == {"type": "string"}


@pytest.mark.conforms("C-b3")
def test_a_property_that_happens_to_be_called_title_is_kept() -> None:
    assert "title" in type_schema(Inner)["properties"]


@pytest.mark.conforms("C-b3")
def test_a_type_that_contains_itself_is_refused_and_the_cycle_named() -> None:
    with pytest.raises(RegistrationError, match=r"Tree -> Tree.*take dict\[str, Any\].*registry.register"):
        ToolDefinition.from_model("x", "Takes a tree of trees", Tree)
    with pytest.raises(RegistrationError, match=r"has no JSON Schema: '#/\$defs/Gone'"):
        type_schema(Annotated[int, WithJsonSchema({"$ref": "#/$defs/Gone"})], "validation")


@pytest.mark.conforms("C1", "A-b2")
async def test_a_signature_is_a_schema_and_its_types_are_what_the_function_gets() -> None:
    got: list[Any] = []

    async def book(
        who: Inner,
        when: date,
        colour: Colour,
        seats: Annotated[int, Field(ge=1, description="How many")] = 2,
        data: bytes = b"",
        notes: str | None = None,
        ctx: ToolContext = None,  # type: ignore[assignment]
        **more: Any,
    ) -> str:
        """Book a table somewhere."""
        got.append((who, when, colour, seats, data, notes, ctx.tool, more))
        return "booked"

    registry = ToolRegistry([book])
    parameters = registry.definitions()[0].parameters
    args = {"who": {"title": "Ada"}, "when": "2024-02-03", "colour": "blue", "data": b"\x01", "window": True}

    result = await registry.execute("book", args)

    assert result.text == "booked"
    assert got == [(Inner(title="Ada"), date(2024, 2, 3), Colour.BLUE, 2, b"\x01", None, "book", {"window": True})]
    assert parameters["required"] == ["who", "when", "colour"]
    assert parameters["properties"]["seats"] == {
        "type": "integer",
        "minimum": 1,
        "description": "How many",
        "default": 2,
    }
    assert parameters["properties"]["notes"] == {"type": "string"}
    assert "ctx" not in parameters["properties"]
    assert parameters["additionalProperties"] is True


@pytest.mark.conforms("C9")
async def test_rules_only_the_python_type_knows_are_invalid_arguments_too() -> None:
    ran: list[date] = []

    async def on(day: date) -> str:
        """Do something on a day."""
        ran.append(day)
        return "done"

    result = await ToolRegistry([on]).execute("on", {"day": "2024-02-31"})

    assert result.error is not None
    assert result.error.code == "invalid_arguments"
    assert ran == []


@each_row("kind", ["positional only", "variable", "unresolved", "no schema"])
def test_a_function_that_cannot_be_called_by_name_is_refused(kind: str) -> None:
    def positional(query: str, /) -> str:
        """Take an argument by position only."""
        return query

    def variable(*query: str) -> str:
        """Take any number of arguments."""
        return ""

    def unresolved(query: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
        """Take an argument of an unknown type."""
        return ""

    def unschemable(query: type) -> str:
        """Take an argument that is not data."""
        return ""

    made = {"positional only": positional, "variable": variable, "unresolved": unresolved, "no schema": unschemable}

    with pytest.raises(RegistrationError):
        ToolRegistry([made[kind]])


@each_row("mode", ["validation", "serialization"])
@each_row(
    "annotation",
    [str, bytes, object, Any, None, list, dict[str, int], list[str] | None, str | int, int | str, dict[str, list[Any]]],
    ids=str,
)
def test_the_schema_of_a_type_is_the_same_each_time_whatever_its_caller_does_to_it(annotation: Any, mode: Any) -> None:
    first = type_schema(annotation, mode)
    made = copy.deepcopy(first)
    for part in (first, *(each for each in first.values() if isinstance(each, dict))):
        part["description"] = "changed"
    for branch in first.get("anyOf", []):
        branch["description"] = "changed"

    assert type_schema(annotation, mode) == made


BUILT_IN = st.recursive(
    st.sampled_from([str, int, float, bool, bytes, list, dict, object, Any, None]),
    lambda inner: st.one_of(
        inner.map(lambda each: list[each]),  # type: ignore[valid-type]
        st.tuples(st.sampled_from([str, int, bytes, bool, Any]), inner).map(lambda pair: dict[pair]),  # type: ignore[misc, valid-type]
        st.lists(inner, min_size=1, max_size=3).map(lambda each: Union[tuple(each)]),  # noqa: UP007
    ),
    max_leaves=6,
)


@given(BUILT_IN, st.sampled_from(["validation", "serialization"]))
def test_types_made_of_built_in_ones_have_the_schemas_that_pydantic_makes(annotation: Any, mode: Any) -> None:
    assert json.dumps(type_schema(annotation, mode)) == json.dumps(described_schema(annotation, mode))


@each_row("returns", [Any, ToolResult])
def test_what_says_nothing_of_the_data_that_a_tool_returns_is_no_schema(returns: Any) -> None:
    async def find(query: str) -> Any:
        """Find pages of the documentation."""

    find.__annotations__["return"] = returns
    registry = ToolRegistry()
    registry.add(find)
    assert registry.returns("find") is None


def test_unions_in_another_order_have_their_own_schemas() -> None:
    orders = [type_schema(each)["anyOf"] for each in (int | str, str | int, int | str)]

    assert orders[0] == orders[2] == [*reversed(orders[1])]


NOT_GIVEN = object()
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
DEFAULTS: dict[str, tuple[Any, Any, Any]] = {
    # annotation, default, and what a schema says of it (NOT_GIVEN: nothing)
    "a mark of the author's own": (Any, NOT_GIVEN, NOT_GIVEN),
    "such a mark for a number": (int, NOT_GIVEN, NOT_GIVEN),
    "a function": (Any, print, NOT_GIVEN),
    "a tuple without a type": (Any, (1, 2), NOT_GIVEN),
    "a date without a type": (Any, date(2026, 1, 1), NOT_GIVEN),
    "a date": (date, date(2026, 1, 1), "2026-01-01"),
    "bytes that are no text": (bytes, b"\xff", NOT_GIVEN),
    "infinity": (float, math.inf, NOT_GIVEN),
    "a large number": (int, 2**70, NOT_GIVEN),
    "half a character": (str, "\ud800", NOT_GIVEN),
    "a list in itself": (list[Any], ENDLESS, NOT_GIVEN),
    "a list": (list[int], [1], [1]),
}


@each_row("kind", DEFAULTS)
async def test_a_default_arrives_as_its_author_wrote_it_whether_or_not_a_schema_can_have_it(kind: str) -> None:
    annotation, default, shown = DEFAULTS[kind]
    seen = []

    def take(x: Any = default) -> None:
        """Take a value or the default."""
        seen.append(x)

    take.__annotations__ = {} if annotation is Any else {"x": annotation}
    registry = ToolRegistry([take])
    await registry.execute("take", {})
    definition = json.dumps(registry.to_provider_defs(), allow_nan=False)

    assert seen[0] is default or (seen == [default] and type(seen[0]) is type(default))
    assert registry.definitions()[0].parameters["properties"]["x"].get("default", NOT_GIVEN) == shown
    assert "object at" not in definition


async def test_a_default_of_a_field_is_its_value() -> None:
    def take(limit: int | None = Field(None, ge=1), most: float = Field(math.inf), least: int = Field(1)) -> str:
        """Take values or their defaults."""
        return f"{limit} {most} {least}"

    assert (await ToolRegistry([take]).execute("take", {})).text == "None inf 1"


async def test_a_default_of_a_field_may_stand_in_the_annotation_and_a_factory_is_called_for_each_call() -> None:
    ids = itertools.count()

    def take(
        limit: Annotated[int, Field(ge=1), Field(default=7)],
        tags: Annotated[list[str], Field(default_factory=list)],
        ident: int = Field(default_factory=lambda: next(ids)),
        own: Annotated[int, Field(default=1)] = 2,
        needed: Annotated[int, Field(description="Has no default")] = Field(),
    ) -> list[object]:
        """Take values or their defaults."""
        tags.append("x")
        return [limit, len(tags), ident, own, needed]

    registry = ToolRegistry([take])
    schema = registry.definitions()[0].parameters

    assert schema["required"] == ["needed"]
    assert {name: each.get("default") for name, each in schema["properties"].items()} == {
        "limit": 7, "tags": None, "ident": None, "own": 2, "needed": None,
    }  # fmt: skip
    assert [(await registry.execute("take", {"needed": 0})).value for _ in range(2)] == [
        [7, 1, 0, 2, 0],
        [7, 1, 1, 2, 0],
    ]
    assert (await registry.execute("take", {"needed": 0, "ident": 9, "limit": 1})).value == [1, 1, 9, 2, 0]


async def test_a_factory_that_fails_is_no_fault_of_the_arguments_and_one_that_needs_others_is_refused() -> None:
    def fail() -> int:
        raise ValueError("no ids left")

    def take(ident: int = Field(default_factory=fail)) -> int:
        """Take an id of its own."""
        return ident

    def after(n: int, twice: int = Field(default_factory=lambda data: 2 * data["n"])) -> int:
        """Take a number and its double."""
        return twice

    def frames(**frames: Table) -> int:
        """Take some frames by name."""
        return len(frames)

    result = await ToolRegistry([take]).execute("take", {})
    assert result.error is not None and result.error.code == ErrorCode.EXCEPTION and "default of ident" in result.text
    for function in (after, frames):
        with pytest.raises(RegistrationError, match="takes no"):
            ToolRegistry([function])


def test_the_schema_of_a_flag_has_each_flag_and_takes_several() -> None:
    class Bare(enum.Flag):
        READ = 1
        WRITE = 2

    class Told(enum.Flag):
        """What one may do."""

        READ = 1
        WRITE = 2

    assert type_schema(Bare) == {
        "type": "integer", "description": "the sum of any of 1 (READ), 2 (WRITE)", "examples": [1, 2],
    }  # fmt: skip
    assert type_schema(Told) == {"type": "integer", "description": "What one may do.", "examples": [1, 2]}


class Odd(BaseModel):
    number: float = math.nan
    large: int = 2**70


def test_defaults_in_models_that_json_does_not_have_are_not_in_schemas_and_the_model_has_them() -> None:
    def take(odd: Odd) -> str:
        """Take a model of odd numbers."""
        return f"{odd.number} {odd.large}"

    registry = ToolRegistry([take])

    assert "default" not in json.dumps(registry.to_provider_defs(), allow_nan=False)
    assert registry.execute_sync("take", {"odd": {}}).text == f"nan {2**70}"


@each_row("pattern", ["(a|b)" * 201, "(" * 900, "["])
async def test_a_pattern_that_takes_long_to_compile_is_refused_before_it_is_compiled(pattern: str) -> None:
    registry = ToolRegistry()

    @registry.tool
    def find(pattern: re.Pattern[str], more: list[re.Pattern[str]] | None = None) -> str:
        """Find a pattern in a text."""
        return pattern.pattern

    result = await registry.dispatch("find", {"pattern": "x", "more": [pattern]})

    assert result.error is not None and result.error.code == "invalid_arguments"
    assert (await registry.dispatch("find", {"pattern": "(a|b)" * 200, "more": []})).text == "(a|b)" * 200
    described = next(each for each in registry.definitions() if each.name == "find").parameters["properties"]
    assert described["pattern"]["maxLength"] == 1000


class Options(TypedDict):
    day: date


async def test_what_two_stars_take_is_checked_and_made_as_declared() -> None:
    registry = ToolRegistry()

    @registry.tool
    def each(day: str = "", **days: date) -> str:
        """Take days under any names."""
        return repr((day, days))

    @registry.tool
    def free(**anything) -> str:  # type: ignore[no-untyped-def]
        """Take whatever there is."""
        return repr(anything)

    calls: list[tuple[str, dict[str, Any]]] = [
        ("each", {"day": "2026-01-02", "b": "2026-01-02"}),
        ("each", {"b": "soon"}),
        ("each", {"b": 1.5}),
        ("free", {"b": "2026-01-02"}),
    ]
    made = [(await registry.execute(name, args)).text for name, args in calls]

    assert (made[0], made[3]) == ("('2026-01-02', {'b': datetime.date(2026, 1, 2)})", "{'b': '2026-01-02'}")
    assert all("- b: " in made[at] for at in (1, 2)), made


@each_row("unpack", [typing.Unpack, Unpack])
def test_the_keys_of_a_typed_dict_are_refused_as_what_two_stars_take(unpack: Any) -> None:
    def options(**options: Any) -> str:
        """Take the options of a TypedDict."""
        return ""

    options.__annotations__["options"] = unpack[Options]
    with pytest.raises(RegistrationError, match=r"\*\*options takes no .*give each of them a parameter"):
        ToolRegistry([options])
