"""A `set[int]` of large numbers, whichever way it comes in: it is taken, and costs its host linear time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from mcp_client.conftest import a_tool, raw
from toolcell import Limits, Runtime, ToolRegistry
from toolcell.service import Client
from toolcell.tools import ToolResult

from .client_serving import serving

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

COUNT = 20_000
UNIQUE = {"type": "object", "properties": {"ids": {"type": "array", "uniqueItems": True}}}
NUMBERS = [2**62 + number for number in range(COUNT)]
CODE = f"tools.mark(ids=[2**62 + number for number in range({COUNT})])"
ANSWERING = f"""
import json, runpy, sys
script = json.loads(sys.argv.pop())
numbers = [2**62 + number for number in range({COUNT})]
script["answer"] = {{"content": [], "structuredContent": {{"ids": numbers}}}}
sys.argv = [sys.argv[-1], json.dumps(script)]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The server's script with an answer that is longer than a command may be."""
SOON_S = 4.0
"""CPU time of all routes, each. A check of pairs takes 2 to 4 s alone, and ten times that for twice as many."""


def registry() -> ToolRegistry:
    made = ToolRegistry()

    @made.tool
    def mark(ids: set[int]) -> int:
        """Mark all of these as read."""
        return len(ids)

    def listed(args: dict[str, Any]) -> ToolResult:
        return ToolResult.of({"ids": NUMBERS})

    made.register("listed", "List what can be marked.", {"type": "object"}, listed, returns=UNIQUE)
    made.save_script("mark_all", CODE, description="Mark all there are as read.")
    return made


async def test_a_set_of_large_numbers_is_taken_on_every_route_in_linear_time(tmp_path: Path) -> None:
    tools, took, found = registry(), dict[str, float](), dict[str, Any]()
    began = time.process_time()

    def note(route: str, value: Any) -> None:
        nonlocal began
        took[route], found[route] = time.process_time() - began, value
        began = time.process_time()

    python, *server = raw(pages=[[a_tool(outputSchema=UNIQUE)]])
    await tools.add_mcp_server("l", command=[python, "-c", ANSWERING, *server])
    async with Runtime(tools, limits=Limits(wall_s=60, cpu_s=60)) as runtime:
        began = time.process_time()
        note("script", (await runtime.execute_code(CODE)).value)
        note("plan", (await runtime.execute_plan([{"tool": "mark", "args": {"ids": NUMBERS}}]))[0]["result"])
        async with runtime.session() as session:
            note("session", (await session.execute_code(CODE)).value)
        note("saved script", (await runtime.execute_code("tools.mark_all()")).value)
        note("returns", (await runtime.execute_code("len(tools.listed()['ids'])")).value)
        note("an MCP server's answer", (await runtime.execute_code("len(tools.l.t()['ids'])")).value)
    await tools.close()
    async with serving(tmp_path, registry()) as (url, _):
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            note("HTTP", (await http.post("/v1/execute", json={"code": CODE})).json().get("value"))
        async with Client(url, registry=registry()) as client:
            note("a client's own tool", (await client.execute_code(CODE)).value)

    assert found == dict.fromkeys(found, COUNT) and len(found) == 8
    assert {route: seconds for route, seconds in took.items() if seconds > SOON_S} == {}
