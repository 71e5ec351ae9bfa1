"""The example of a registry in which a tool takes the place of another."""

from __future__ import annotations

from typing import Any

import pytest

from toolcell.compat import get_summaries, register_or_replace
from toolcell.tools import ToolContext, ToolRegistry, ToolResult

pytestmark = pytest.mark.anyio


class ReadFile:
    def name(self) -> str:
        return "read_file"

    def description(self) -> str:
        return "Read the contents of a file at the given path."

    def parameters(self) -> dict[str, Any]:
        path = {"type": "string", "description": "Path to the file to read"}
        return {"type": "object", "properties": {"path": path}, "required": ["path"]}

    async def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        return ToolResult.ok(f"Hello from {args['path']}\n")


@pytest.mark.conforms("EX-40", "E3", "E4", "E5", "V-6")
async def test_replacing_keeps_one_tool_of_a_name() -> None:
    class Newer(ReadFile):
        async def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
            return ToolResult.ok("newer")

    registry, newer = ToolRegistry([ReadFile()]), Newer()

    register_or_replace(registry, newer)

    assert registry.count() == 1
    assert (await registry.execute("read_file", {"path": "/tmp/foo"})).text == "newer"
    assert registry.get("read_file") == (newer, True)
    assert registry.get("x") == (None, False)
    assert get_summaries(registry) == ["- `read_file` - Read the contents of a file at the given path."]
