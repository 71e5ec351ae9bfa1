"""One broken tool costs a server that tool, and not all of them."""

from __future__ import annotations

from typing import Any

import pytest

from rows import each_row
from toolcell.errors import McpServerError
from toolcell.tools import ToolRegistry

from .conftest import a_tool, raw, until

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

BROKEN: dict[str, Any] = {
    "list": a_tool("list", inputSchema=[]),
    "none": {"name": "none", "description": "It has no schema at all"},
    "text": a_tool("text", description={"en": "What it does"}),
    "hints": a_tool("hints", annotations=[1]),
    "output": a_tool("output", outputSchema="object"),
    "number 2 of its list": a_tool(7),  # type: ignore[arg-type]
}


@pytest.mark.slow
@each_row("name", BROKEN)
async def test_a_broken_tool_is_left_out_and_named(name: str) -> None:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("s", command=raw(pages=[[a_tool("first"), BROKEN[name]], [a_tool("last")]]))
    (problem,) = client.problems
    result = await registry.dispatch("s.last", {})
    await registry.close()

    assert client.state == "closed" and result.output == "done"
    assert (problem.kind, problem.tool) == ("left_out", name)
    assert problem.message.startswith("it is left out: ")


async def test_a_schema_of_answers_that_is_not_of_an_object_is_not_used() -> None:
    registry = ToolRegistry()
    tools = [a_tool("lists", outputSchema={"type": "array"}), a_tool("anything", outputSchema={})]
    client = await registry.add_mcp_server("s", command=raw(pages=[tools]))
    results = [(await registry.dispatch(name, {})).output for name in ("s.lists", "s.anything")]
    await registry.close()

    assert results == ["done", "done"]
    assert sorted((problem.tool, problem.kind) for problem in client.problems) == [
        ("anything", "mended"), ("lists", "mended"),
    ]  # fmt: skip


async def test_what_is_no_object_is_left_out() -> None:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("s", command=raw(pages=[[a_tool(), "tool", None]]))
    names = client.tool_names
    await registry.close()

    assert names == ("s.t",)
    assert [problem.tool for problem in client.problems] == ["number 2 of its list", "number 3 of its list"]


async def test_a_list_that_changes_loses_its_broken_tools_only() -> None:
    registry = ToolRegistry()
    lists = [[[a_tool(), BROKEN["none"], a_tool("new")]]]
    client = await registry.add_mcp_server("s", command=raw(pages=[[a_tool()]], lists=lists, announces=True))
    await registry.dispatch("s.t", {})
    await until(lambda: "s.new" in registry)
    problems = [(problem.kind, problem.tool) for problem in client.problems]
    await registry.close()

    assert problems == [("left_out", "none")]


async def test_a_server_with_a_broken_tool_is_refused_where_its_user_wants_that() -> None:
    registry = ToolRegistry()
    options: dict[str, Any] = {"broken": "refuse", "deny": ["text"]}
    for broken in (BROKEN["none"], a_tool("none", inputSchema={"type": "no such type"})):
        with pytest.raises(McpServerError, match="the tool 'none' cannot be registered"):
            await registry.add_mcp_server("s", command=raw(pages=[[a_tool(), broken]]), **options)
    assert registry.list() == []
    lists = [[[a_tool(), BROKEN["none"], a_tool("new")]]]
    pages = [[a_tool(), BROKEN["text"]]]  # a tool that is not offered refuses nothing
    client = await registry.add_mcp_server("s", command=raw(pages=pages, lists=lists, announces=True), **options)
    await registry.dispatch("s.t", {})
    await until(lambda: bool(client.problems))
    kept, (problem,) = registry.list(), client.problems
    await registry.close()

    assert kept == ["s.t"] and "its list cannot be read again: the tool 'none'" in problem.message
