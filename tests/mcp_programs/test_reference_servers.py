"""One script uses three servers that nobody here wrote, in parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from toolcell import Limits, Runtime, ToolRegistry

from .conftest import PATIENCE_S, Programs

pytestmark = [pytest.mark.npm, pytest.mark.isolation, pytest.mark.anyio]


SCRIPT = """
entity = {"name": "Ada", "entityType": "person", "observations": ["wrote a program"]}
echo, total, _, listing, text = call_tools_parallel([
    ("everything.echo", {"message": "hello"}),
    ("everything.get-sum", {"a": 2, "b": 3}),
    ("memory.create_entities", {"entities": [entity]}),
    ("files.list_directory", {"path": folder}),
    ("files.read_text_file", {"path": folder + "/notes.txt"}),
])
picture = tools.everything.get_tiny_image()
graph = tools.memory.search_nodes(query="program")
try:
    tools.files.read_text_file(path="/etc/passwd")
    outside = ""
except ToolError as error:
    outside = str(error)
is_picture = any(part.get("media_type") == "image/png" for part in picture if isinstance(part, dict))
set_result([echo, total, listing, text, graph, outside, is_picture])
"""


async def test_one_script_uses_three_servers_in_parallel(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("what to do")
    registry, folder = ToolRegistry(), str(tmp_path.resolve())
    servers: dict[str, dict[str, Any]] = {
        "everything": {"command": programs.command("@modelcontextprotocol/server-everything", "dist/index.js")},
        "files": {"command": [*programs.command("@modelcontextprotocol/server-filesystem", "dist/index.js"), folder]},
        "memory": {
            "command": programs.command("@modelcontextprotocol/server-memory", "dist/index.js"),
            "env": {"MEMORY_FILE_PATH": str(tmp_path / "memory.json")},
        },
    }
    try:
        async with anyio.create_task_group() as tasks:
            for name, options in servers.items():
                tasks.start_soon(lambda name=name, options=options: registry.add_mcp_server(name, **options))
        problems = {name: client.problems for name, client in registry.mcp_servers().items()}
        async with Runtime(registry, limits=Limits(wall_s=PATIENCE_S)) as runtime:
            result = await runtime.execute_code(SCRIPT, inputs={"folder": folder})
    finally:
        await registry.close()

    assert result.ok, result.error
    echo, total, listing, text, graph, outside, is_picture = result.value
    assert "hello" in str(echo) and "5" in str(total)
    assert "notes.txt" in str(listing) and "what to do" in str(text)
    assert "Ada" in str(graph) and is_picture
    assert "Access denied" in outside
    assert {call.name.partition(".")[0] for call in result.calls} == set(servers)
    left_out = {each.tool for found in problems.values() for each in found}
    assert left_out == {"simulate-research-query"}  # it can only be called as a task
