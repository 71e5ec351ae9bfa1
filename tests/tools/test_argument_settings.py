"""What `coercion`, `validate` and `extras` say holds for every set of arguments, however small, and at every depth."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rows import each_row
from toolcell.calls.arguments import ArgumentChecker, InvalidArguments
from toolcell.calls.call import Call
from toolcell.tools import ToolDefinition, ToolRegistry

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "limit": {"type": "integer", "default": 10},
        "where": {"type": "object", "properties": {"deep": {"type": "integer", "default": 1}}},
        "rows": {"type": "array", "items": {"type": "object", "properties": {"a": {}, "b": {}}}},
    },
    "required": ["n"],
}
LONG_WAY = {"rows": []}
"""Sent too, it keeps arguments from the shortcut for a few plain values."""


class Taking:
    """A tool that keeps what it was given, and the record of its last call."""

    def __init__(self, schema: dict[str, Any] = SCHEMA, **options: Any) -> None:
        self.registry = ToolRegistry()
        self.got: list[Any] = []
        self.calls: list[Call] = []
        self.registry.register("take", "Keep what it was given", schema, self.got.append, blocking=False, **options)
        self.registry.add_hook(after=lambda call, result: self.calls.append(call))

    async def __call__(self, args: Any) -> str:
        return (await self.registry.execute("take", args)).text


@each_row("more", [{}, LONG_WAY], ids=["short way", "long way"])
async def test_without_coercion_nothing_is_mended_but_defaults_and_extras_are_as_ever(more: dict[str, Any]) -> None:
    take = Taking(coercion="off")

    refused = await take({"n": "3"} | more)
    await take({"n": 3, "zzz": 1} | more)

    assert "n: must be integer" in refused
    assert take.got == [{"n": 3, "limit": 10} | more]
    assert take.calls[-1].warnings == ("unknown property 'zzz' was dropped",)


@each_row("more", [{}, LONG_WAY], ids=["short way", "long way"])
async def test_without_validation_arguments_are_mended_where_they_can_be_and_never_refused(more: Any) -> None:
    take = Taking(validate=False)

    for n in ("3", "three", 3.0, None):
        await take({"n": n} | more)

    assert [got["n"] for got in take.got] == [3, "three", 3, None]
    assert all(got["limit"] == 10 for got in take.got)


@each_row("coercion", ["safe", "off", "lenient"])
async def test_extras_are_dropped_at_every_depth_and_the_record_names_their_paths(coercion: Any) -> None:
    take = Taking(coercion=coercion)

    await take({"n": 1, "where": {"deep": 2, "depp": 3}, "rows": [{"a": 1}, {"c": 2}]})

    assert take.got == [{"n": 1, "limit": 10, "where": {"deep": 2}, "rows": [{"a": 1}, {}]}]
    assert take.calls[-1].warnings == (
        "unknown property 'where.depp' was dropped",
        "unknown property 'rows[1].c' was dropped",
    )


async def test_extras_are_refused_at_every_depth_where_that_is_asked_for() -> None:
    take = Taking(extras="forbid")

    said = await take({"n": 1, "where": {"depp": 3}, "rows": [{"a": 1, "c": 2}]})

    assert take.got == []
    assert "where: unknown property 'where.depp' (did you mean `deep`?)" in said
    assert "rows[0]: unknown property 'rows[0].c'" in said


async def test_extras_are_kept_at_every_depth_where_that_is_asked_for() -> None:
    take = Taking(extras="allow")
    args = {"n": 1, "where": {"deep": 2, "depp": 3}, "rows": [{"c": 2}], "zzz": 1, "limit": 3}

    await take(args)

    assert take.got == [args]


SPEAKS_OF_OTHERS: list[dict[str, Any]] = [
    {"properties": {"a": {}}, "additionalProperties": True},
    {"properties": {"a": {}}, "patternProperties": {"^z": {}}},
    {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["zzz"]}]},
    {"anyOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {"type": "integer"}}}]},
    {"allOf": [{"properties": {"a": {}}}, {"properties": {"zzz": {}}}]},
]


@each_row("extras", ["drop", "forbid"])
@each_row("part", SPEAKS_OF_OTHERS)
async def test_nothing_is_an_extra_where_a_schema_speaks_of_others_or_in_a_union(part: Any, extras: Any) -> None:
    take = Taking({"type": "object", "properties": {"x": part}}, extras=extras)

    await take({"x": {"a": 1, "zzz": 2}})

    assert take.got == [{"x": {"a": 1, "zzz": 2}}]


async def test_a_misspelt_argument_gets_a_suggestion_under_a_silent_schema() -> None:
    take = Taking()

    missing = await take({"m": 1, "limt": 3})
    await take({"n": 1, "limt": 3})

    assert "unknown property 'limt' (did you mean `limit`?)" in missing
    assert 'missing required property "n"' in missing
    assert take.calls[-1].warnings == ("unknown property 'limt' (did you mean `limit`?) was dropped",)


DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "null for text": ({"properties": {"x": {"type": "string", "default": None}}}, {}, {}),
    "beside one that fits": (
        {"properties": {"x": {"type": "string", "default": None}, "y": {"type": "integer", "default": 3}}},
        {},
        {"y": 3},
    ),
    "text for a number": ({"properties": {"x": {"type": "number", "default": "1"}}}, {}, {}),
    "not in its enum": ({"properties": {"x": {"enum": ["a"], "default": ""}}}, {}, {}),
    "nested": (
        {"properties": {"o": {"properties": {"x": {"type": "integer", "default": "no"}, "y": {"default": 1}}}}},
        {"o": {}},
        {"o": {"y": 1}},
    ),
    "only together": (
        {"properties": {"x": {"default": 1}, "y": {}}, "dependentRequired": {"x": ["y"]}},
        {"z": 1},
        {},
    ),
    "too many": ({"properties": {"x": {"default": 1}, "y": {}}, "maxProperties": 1}, {"y": 2}, {"y": 2}),
    "required": ({"properties": {"x": {"default": 1}}, "required": ["x"]}, {}, {"x": 1}),
    "required and unfit": ({"properties": {"x": {"type": "string", "default": 1}}, "required": ["x"]}, {}, None),
}


@each_row("validate", [True, False])
@each_row("coercion", ["safe", "off", "lenient"])
@each_row("case", DEFAULTS)
async def test_a_default_that_does_not_fit_is_not_filled_in(case: str, coercion: Any, validate: bool) -> None:
    schema, args, expected = DEFAULTS[case]
    take = Taking({"type": "object", **schema}, coercion=coercion, validate=validate)

    said = await take(args)

    if expected is None and validate:
        assert 'missing required property "x"' in said
    elif expected is not None and validate:
        assert take.got == [expected]
    else:  # nothing is validated, so only what a default breaks by itself counts
        assert take.got[0].get("x") in (None, 1)


@each_row("extras", ["drop", "forbid"])
async def test_an_extra_is_one_after_a_union_in_which_a_number_could_not_be_mended(extras: Any) -> None:
    one = {"properties": {"n": {"allOf": [{"type": "integer"}]}, "m": {"type": "integer"}}, "required": ["n", "m"]}
    other = {"properties": {"n": {"type": "string"}, "m": {"type": "string"}}, "required": ["n", "m"]}
    union = {"anyOf": [{"type": "object", **one}, {"type": "object", **other}]}
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    checker = ArgumentChecker(
        ToolDefinition("t", "A tool", {"type": "object", "properties": {"x": union, "y": closed}}), extras=extras
    )
    args = {"x": {"n": 1e300, "m": "text"}, "y": {"a": 1, "b": 2}}

    if extras == "forbid":
        with pytest.raises(InvalidArguments, match=r"unknown property 'y\.b'"):
            checker.check(args)
    else:
        assert checker.check(args).args["y"] == {"a": 1}


class User(BaseModel):
    user_name: str = Field(alias="userName")


class UserByName(User):
    model_config = ConfigDict(populate_by_name=True)


@each_row("kind", [User, UserByName])
async def test_a_field_with_an_alias_is_called_by_it(kind: type[User]) -> None:
    def greet(user):  # type: ignore[no-untyped-def]
        """Greet a user by name."""
        return user.user_name

    greet.__annotations__ = {"user": kind}
    registry = ToolRegistry([greet])

    assert (await registry.execute("greet", {"user": {"userName": "Ann"}})).text == "Ann"
    refused = await registry.execute("greet", {"user": {"user_name": "Ann"}})
    assert 'user: unknown property "user_name" (did you mean `userName`?)' in refused.text


def refuse_with(exc: Exception) -> Any:
    def refuse(value: Any) -> Any:
        raise exc

    return AfterValidator(refuse)


@pytest.mark.parametrize("exc", [TypeError("a wrong type"), RecursionError("too deep"), ValueError("a wrong value")])
async def test_what_a_type_of_its_own_raises_is_told_with_the_name_of_the_argument(exc: Exception) -> None:
    registry = ToolRegistry()

    def cut(sizes: Any) -> int:
        """Cut a piece of each of these sizes."""
        return len(sizes)

    cut.__annotations__["sizes"] = Annotated[list[int], refuse_with(exc)]
    registry.tool(cut)

    result = await registry.execute("cut", {"sizes": [1]})

    assert f"  - sizes: {exc}" in result.message.replace("Value error, ", "")
