"""The command `toolcell mcp` and a client of the SDK, over stdin and stdout and over HTTP: all that a client can ask."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

from rows import each_row

pytestmark = [pytest.mark.anyio, pytest.mark.isolation]

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
TOOLS = '''
import anyio
from pathlib import Path
from toolcell import ToolRegistry

registry = ToolRegistry()
PLACE = Path(__file__).parent

@registry.tool
def add(a: int, b: int) -> int:
    """Add two numbers and return the sum."""
    return a + b

@registry.tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay an amount of money to somebody."""
    return f"paid {amount}"

@registry.tool
async def wait() -> None:
    """Wait until the call is given up."""
    (PLACE / "begun").touch()
    try:
        await anyio.sleep_forever()
    finally:
        (PLACE / "ended").touch()
'''


@contextmanager
def serving(transport: str, folder: Path) -> Iterator[Any]:
    """Start the command, and yield what `Client` connects to."""
    (folder / "tools_of_a_test.py").write_text(TOOLS)
    command = ["-m", "toolcell", "mcp", "--tools", str(folder / "tools_of_a_test.py")]
    if transport == "stdio":
        yield StdioServerParameters(command=sys.executable, args=command)
        return
    command += ["--http", "127.0.0.1:0"]
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = ""
            while not line.startswith("serving "):
                line = process.stderr.readline()
                assert line, "the server ended"
            yield line.split()[1]
        finally:
            process.terminate()


async def appears(path: Path) -> None:
    with anyio.fail_after(60):
        while not path.exists():
            await anyio.sleep(0.02)


@each_row(("transport", "mode"), [("stdio", "auto"), ("http", "legacy"), ("http", "auto")])
async def test_a_client_lists_calls_hears_progress_sees_pictures_is_asked_and_cancels(
    transport: str, mode: Any, tmp_path: Path
) -> None:
    told = list[str | None]()

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append(message)

    async def ask(ctx: Any, params: Any) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"decision": "approve"})

    script = (
        f"import base64\nopen('chart.png', 'wb').write(base64.b64decode({base64.b64encode(PNG)!r}))\n"
        "progress('half way')\n"
        "set_result([call_tool('add', a=1, b=2), call_tool('pay', amount=3)], files=['chart.png'])"
    )
    with serving(transport, tmp_path) as server:
        async with Client(server, mode=mode, elicitation_callback=ask) as client:
            listed = {tool.name: tool for tool in (await client.list_tools()).tools}
            result = await client.call_tool("execute_code", {"code": script}, progress_callback=note)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(client.call_tool, "execute_code", {"code": "call_tool('wait')"})
                    await appears(tmp_path / "begun")
                    scope.cancel()
            await appears(tmp_path / "ended")
            after = await client.call_tool("execute_code", {"code": "1 + 1"})

    assert listed["execute_code"].output_schema
    assert result.structured_content["value"] == [3, "paid 3"]
    assert [base64.b64decode(each.data) for each in result.content if isinstance(each, types.ImageContent)] == [PNG]
    assert told[0] == "half way"
    assert after.structured_content["value"] == 2
