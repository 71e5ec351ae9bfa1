"""Schemas and names of tools that servers in use have, and that the letter of a specification would refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rows import each_row
from toolcell.errors import UsageError
from toolcell.mcp.broken_tools import MAX_DEPTH, mended_input
from toolcell.tools import ToolRegistry

from .conftest import a_tool, raw

pytestmark = pytest.mark.anyio

TAKEN: dict[str, dict[str, Any]] = {
    "a required name that is not a property": {"properties": {"a": {"type": "string"}}, "required": ["a", "b"]},
    "a list of properties": {"type": "object", "properties": []},
    "null for properties": {"type": "object", "properties": None},
    "null for required": {"type": "object", "required": None},
    "no type": {"properties": {"a": {}}},
    "nothing": {},
    "one required name": {"type": "object", "properties": {"a": {}}, "required": "a"},
    "a name twice": {"type": "object", "properties": {"a": {}}, "required": ["a", "a"]},
    "a property that says it is required": {"type": "object", "properties": {"a": {"required": True}}},
    "an object or null": {"type": ["object", "null"], "properties": {"a": {}}},
    "types of Python": {"type": "dict", "properties": {"a": {"type": "str"}, "c": {"type": "list", "items": None}}},
    "any type": {"type": "object", "properties": {"a": {"type": "any"}}},
    "null for other words": {"type": "object", "additionalProperties": None, "properties": {"a": {"enum": None}}},
}


@each_row("name", TAKEN)
async def test_a_schema_that_everybody_understands_is_taken(name: str) -> None:
    registry = ToolRegistry()
    command = raw(pages=[[a_tool(inputSchema=TAKEN[name])]])
    client = await registry.add_mcp_server("s", command=command, approve="none")
    result = await registry.dispatch("s.t", {"a": "x", "b": 1})
    problems = client.problems
    await client.close()

    assert (result.output, problems) == ("done", ()), result


def test_required_names_are_still_required() -> None:
    assert mended_input(TAKEN["a property that says it is required"])["required"] == ["a"]
    assert mended_input(TAKEN["a required name that is not a property"])["required"] == ["a", "b"]


def test_values_of_a_schema_stay_and_depth_is_bounded() -> None:
    schema = {"type": "object", "properties": {"a": {"default": None, "enum": [None, 1], "const": None}}}
    assert mended_input(schema) == schema
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH * 20):
        deep = {"items": deep}
    assert mended_input(deep)["type"] == "object"


async def test_a_page_that_ends_with_an_empty_cursor_is_the_last() -> None:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("s", command=raw(pages=[[a_tool()]], cursor=""))
    assert (client.tool_names, client.problems) == (("s.t",), ())
    await client.close()


async def test_tools_with_names_in_other_letters_have_names_of_their_own() -> None:
    registry = ToolRegistry()
    tools = [a_tool(name) for name in ("\u67e5\u8be2", "\u5929\u6c14", "\u67e5\u8be2_weather", "caf\u00e9")]
    client = await registry.add_mcp_server("s", command=raw(pages=[tools]), approve="none")
    names = client.tool_names
    results = [(await registry.dispatch(name, {})).output for name in names]
    await client.close()

    assert len(set(names)) == 4 and results == ["done"] * 4 and all(name.isascii() for name in names)


@each_row("name", ["${env:TOKEN}", "${TOKEN}", "${ TOKEN }", "${{TOKEN}}", "${env:TOKEN", "${ENV:TOKEN}"])
@each_row("where", ["headers", "env"])
async def test_a_token_is_never_sent_as_the_name_of_its_variable(where: str, name: str) -> None:
    place: dict[str, Any] = {"url": "https://x.example"} if where == "headers" else {"command": ["x"]}
    with pytest.raises(UsageError, match=f"holds {re.escape(name)}, and nothing replaces that here"):
        await ToolRegistry().add_mcp_server("s", **place, **{where: {"k": f"Bearer {name}"}})
