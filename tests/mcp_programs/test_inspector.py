"""The official Inspector's command line lists and calls the tools of `toolcell mcp`, over stdio and HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from .conftest import Programs, serving, toolcell_mcp

pytestmark = [pytest.mark.npm, pytest.mark.isolation]

SCRIPT = """
open("chart.png", "wb").write(bytes.fromhex("89504e470d0a1a0a"))
set_result({"sum": call_tool("add", a=1, b=2)}, files=["chart.png"])
"""


@contextmanager
def inspecting(programs: Programs, tools: Path, transport: str) -> Iterator[Any]:
    """Yield a function that asks the Inspector and returns what it printed."""
    http = serving("--tools", str(tools)) if transport == "http" else nullcontext("")
    with http as url:
        command, *args = toolcell_mcp("--tools", str(tools))
        server = {"type": "streamable-http", "url": url} if url else {"command": command, "args": args}
        config = tools.with_name("servers.json")
        config.write_text(json.dumps({"mcpServers": {"toolcell": server}}))
        inspector = programs.command("@modelcontextprotocol/inspector", "clients/launcher/build/index.js")

        def ask(method: str, *more: str) -> Any:
            about = ["--cli", "--config", str(config), "--server", "toolcell", "--method", method, *more]
            ended = programs.run([*inspector, *about], tools.parent)
            assert ended.stdout.startswith("{"), ended.stdout + ended.stderr
            return json.loads(ended.stdout)

        yield ask


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_the_inspector_lists_tools_and_calls_them(programs: Programs, tools: Path, transport: str) -> None:
    with inspecting(programs, tools, transport) as ask:
        listed = {tool["name"] for tool in ask("tools/list")["tools"]}
        ran = ask("tools/call", "--tool-name", "execute_code", "--tool-arg", f"code={SCRIPT}")
        found = ask("tools/call", "--tool-name", "search_tools", "--tool-arg", "query=add numbers")
        failed = ask("tools/call", "--tool-name", "execute_code", "--tool-arg", "code=1/0")

    assert {"execute_code", "search_tools", "describe_tools"} <= listed
    assert ran["structuredContent"]["value"] == {"sum": 3}
    assert [block["type"] for block in ran["content"]] == ["text", "image"]
    assert found["content"][0]["text"].startswith("add(")
    assert failed["isError"] and failed["structuredContent"]["error"]["type"] == "ZeroDivisionError"
