"""Bytes in arguments arrive as bytes where a tool declares them, and never as text that nobody asked for."""

from __future__ import annotations

import base64
import copy
import dataclasses
from typing import Annotated, Any, NamedTuple, NotRequired

import pydantic
import pytest
from typing_extensions import TypedDict

from rows import each_row
from toolcell.calls.schema import BASE64
from toolcell.calls.schema_walk import SchemaParts, Walk
from toolcell.calls.values import copy_arguments
from toolcell.tools import Origin, ToolRegistry

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

BLOB = b"\xd7m\xf8\x00\xff\xfe[1]"


@dataclasses.dataclass
class Scan:
    name: str
    data: bytes
    pages: list[bytes] = dataclasses.field(default_factory=list)


class Attachment(pydantic.BaseModel):
    body: bytes | None = pydantic.Field(default=None, alias="Body")
    kind: str = "x"


class Row(TypedDict):
    key: bytes
    more: NotRequired[dict[str, bytes]]


class Pair(NamedTuple):
    left: bytes
    right: int


TYPES: dict[str, tuple[Any, Any, Any]] = {
    "plain": (bytes, BLOB, BLOB),
    "optional": (bytes | None, BLOB, BLOB),
    "none": (bytes | None, None, None),
    "list": (list[bytes], [BLOB, b""], [BLOB, b""]),
    "annotated": (Annotated[bytes, pydantic.Field(min_length=2, description="a file")], BLOB, BLOB),
    "dict": (dict[str, bytes], {"a": BLOB}, {"a": BLOB}),
    "dict of lists": (dict[str, list[bytes | None]], {"a": [BLOB, None]}, {"a": [BLOB, None]}),
    "dataclass": (Scan, {"name": "s", "data": BLOB, "pages": [BLOB]}, Scan("s", BLOB, [BLOB])),
    "dataclasses": (list[Scan], [{"name": "s", "data": BLOB}], [Scan("s", BLOB)]),
    "model": (Attachment, {"Body": BLOB}, Attachment(Body=BLOB)),
    "typed dict": (Row, {"key": BLOB, "more": {"m": BLOB}}, {"key": BLOB, "more": {"m": BLOB}}),
    "named tuple": (Pair, [BLOB, 3], Pair(BLOB, 3)),
    "tuple": (tuple[bytes, int], [BLOB, 3], (BLOB, 3)),
    "union": (int | list[bytes], [BLOB], [BLOB]),
    "text or bytes": (str | bytes, BLOB, BLOB),
    "base64": (pydantic.Base64Bytes, BLOB, BLOB),
    "base64 for URLs": (list[pydantic.Base64UrlBytes], [BLOB], [BLOB]),
}
"""A parameter's type, what a script sends, what the tool gets."""


def taking(kind: Any, got: list[Any]) -> Any:
    def take(x):  # type: ignore[no-untyped-def]
        """Keep what it was given."""
        got.append(x)
        return x

    take.__annotations__ = {"x": kind}
    return take


def as_model_writes(value: Any) -> Any:
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case dict():
            return {key: as_model_writes(item) for key, item in value.items()}
        case list():
            return [as_model_writes(item) for item in value]
        case _:
            return value


@each_row("case", TYPES)
async def test_bytes_arrive_intact_and_come_back_intact_on_every_route(case: str) -> None:
    kind, sent, expected = TYPES[case]
    got: list[Any] = []
    registry = ToolRegistry()
    registry.tool(taking(kind, got), name="take", blocking=False)
    registry.enable_plan_execution()

    results = [await registry.dispatch("take", {"x": sent}, origin=origin) for origin in (Origin.CODE, Origin.PLAN)]
    results += await registry.execute_batch([("take", {"x": sent})])
    plan = await registry.execute("execute_plan", {"steps": [{"tool": "take", "args": {"x": sent}}]})
    if case != "text or bytes":  # where text may be text, JSON cannot say that it is not
        results.append(await registry.execute("take", {"x": as_model_writes(sent)}))

    assert got == [expected] * len(got)
    assert len(got) == len(results) + 1, [result.text for result in results]
    values = [result.guest_value() for result in results]
    assert values == [values[0]] * len(results)
    assert plan.value[0]["result"] == values[0]


async def test_base64_is_read_as_models_write_it_and_refused_with_its_path() -> None:
    got: list[Any] = []
    registry = ToolRegistry()
    registry.tool(taking(list[bytes], got), name="take", blocking=False)

    ok = await registry.execute("take", {"x": ["_-8", "+/8=\n", "YQ"]})
    wrong = await registry.execute("take", {"x": ["YQ==", "not base64!"]})

    assert not ok.is_error
    assert got == [[b"\xff\xef", b"\xfb\xff", b"a"]]
    assert "x[1]: is not base64" in wrong.text


RAW: dict[str, tuple[Any, Any]] = {
    "encoded": ({"type": "string", "contentEncoding": "base64"}, base64.b64encode(BLOB).decode()),
    "open api": ({"type": "string", "format": "byte"}, base64.b64encode(BLOB).decode()),
    "binary": ({"type": "string", "format": "binary"}, BLOB),
    "anything": ({}, BLOB),
    "text": ({"type": "string"}, None),
    "text or nothing": ({"type": ["string", "null"]}, None),
    "number": ({"type": "integer"}, None),
    "union": ({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "."}]}, None),
}
"""The schema of x and what the tool gets; None: the call is refused."""


@each_row("case", RAW)
async def test_a_schema_written_by_hand_gets_what_it_asks_for_and_never_text_in_place_of_bytes(case: str) -> None:
    part, expected = RAW[case]
    got: list[Any] = []
    registry = ToolRegistry()
    nested = {"type": "object", "properties": {"x": {"type": "object", "properties": {"y": {"items": part}}}}}
    registry.register("flat", "Keep what it was given", {"type": "object", "properties": {"x": part}}, got.append)
    registry.register("nested", "Keep what it was given", nested, got.append)

    flat = await registry.execute("flat", {"x": b"\xd7m\xf8" if expected is None else BLOB})
    deep = await registry.execute("nested", {"x": {"y": [BLOB]}})

    if expected is None:
        assert got == []
        assert "x: " in flat.text
        assert ("is bytes" in flat.text, "base64.b64encode" in flat.text) == (True, True)
        assert "x.y[0]: " in deep.text
    else:
        assert got == [{"x": expected}, {"x": {"y": [expected]}}]


async def test_bytes_without_a_schema_stay_bytes() -> None:
    got: list[Any] = []
    registry = ToolRegistry()
    registry.register("free", "Keep what it was given", None, got.append)
    registry.tool(taking(dict[str, Any], got), name="open", blocking=False)

    await registry.execute("free", {"a": [BLOB, {"b": bytearray(BLOB)}]})
    await registry.execute("open", {"x": {"a": memoryview(BLOB)}})

    assert got == [{"a": [BLOB, {"b": BLOB}]}, {"a": BLOB}]


def test_stubs_say_bytes() -> None:
    registry = ToolRegistry()
    registry.tool(taking(dict[str, list[bytes]], []), name="take")

    assert "def take(*, x: dict[str, list[bytes]])" in registry.to_python()


def test_bytes_deep_in_a_schema_of_two_like_branches_are_found_in_few_steps() -> None:
    node = {"type": "object", "properties": {"child": {"$ref": "#/$defs/U"}, "data": dict(BASE64)}}
    union = {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    schema = {
        "type": "object",
        "properties": {"root": union},
        "$defs": {"A": node, "B": copy.deepcopy(node), "U": union},
    }
    depth = 50
    value: dict[str, Any] = {"data": BLOB}
    for _ in range(depth):
        value = {"child": value}

    walk = Walk(SchemaParts(schema), copy_arguments({"root": value}), "safe", "drop")
    placed = walk.arguments()

    text = placed.args["root"]
    for _ in range(depth):
        text = text["child"]
    assert (text, placed.problems) == ({"data": base64.b64encode(BLOB).decode()}, [])
    assert walk.steps < 20 * depth
