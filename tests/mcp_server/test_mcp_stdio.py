"""`toolcell mcp` over stdin and stdout: as a client of the SDK, and as one that speaks the protocol badly or vanishes."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

from toolcell.mcp import stdio

pytestmark = [pytest.mark.isolation]

TOOLS = '''
import time
from toolcell import ToolRegistry

print("printed by the file of tools")
registry = ToolRegistry()

@registry.tool
def add(a: int, b: int) -> int:
    """Add two numbers and return the sum."""
    print("printed by a tool")
    return a + b
'''


@pytest.fixture
def tools(tmp_path: Path) -> str:
    path = tmp_path / "tools_of_a_test.py"
    path.write_text(TOOLS)
    return str(path)


@contextmanager
def serving(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "toolcell", "mcp", *flags]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def send(process: subprocess.Popen[str], message: Any) -> None:
    assert process.stdin is not None
    process.stdin.write((message if isinstance(message, str) else json.dumps(message)) + "\n")
    process.stdin.flush()


def receive(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def request(ident: int, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": ident, "method": method, "params": params or {}}


def shake_hands(process: subprocess.Popen[str]) -> None:
    about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    send(process, request(1, "initialize", about))
    assert receive(process)["result"]["serverInfo"]["name"] == "toolcell"
    send(process, {"jsonrpc": "2.0", "method": "notifications/initialized"})


@pytest.mark.anyio
async def test_a_client_of_the_sdk_runs_a_script_and_nothing_else_is_on_stdout(tools: str) -> None:
    parameters = StdioServerParameters(command=sys.executable, args=["-m", "toolcell", "mcp", "--tools", tools])
    async with Client(parameters) as client:
        result = await client.call_tool("execute_code", {"code": "call_tool('add', a=1, b=2)"})

    assert result.structured_content["value"] == 3


@pytest.mark.anyio
async def test_scripts_call_the_tools_of_the_servers_that_it_is_connected_with() -> None:
    tool = {"name": "find-it", "description": "Find something", "inputSchema": {"type": "object"}}
    raw = Path(__file__).parent.parent / "mcp_client" / "raw_server.py"
    command = shlex.join([sys.executable, "-I", "-S", str(raw), json.dumps({"pages": [[tool]]})])
    parameters = StdioServerParameters(
        command=sys.executable, args=["-m", "toolcell", "mcp", "--mcp", f"notes={command}"]
    )
    async with Client(parameters) as client:
        found = await client.call_tool("search_tools", {"query": "find something"})
        result = await client.call_tool("execute_code", {"code": "tools.notes.find_it()"})

    assert "notes.find" in found.content[0].text
    assert result.structured_content["value"] == "done"


def test_a_byte_order_mark_before_the_first_line_does_no_harm(tools: str) -> None:
    with serving("--tools", tools) as process:
        assert process.stdin is not None
        process.stdin.write("\ufeff")
        shake_hands(process)


def test_what_is_no_message_is_answered_and_the_next_one_too(tools: str) -> None:
    with serving("--tools", tools) as process:
        shake_hands(process)
        for line, code, ident in (
            ("{", -32700, None),
            ("[" * 100_000, -32700, None),
            ('{"id": 7}', -32600, 7),
            ("[1]", -32600, None),
            ('{"jsonrpc": "2.0", "id": [1], "method": 3}', -32600, None),
            *(
                (f'{{"jsonrpc": "2.0", "id": {ident}, "method": "ping"}}', -32600, None)
                for ident in ("1.5", "null", "true")
            ),
        ):
            send(process, line)
            answer = receive(process)
            assert (answer["error"]["code"], answer["id"]) == (code, ident)
        send(process, request(2, "no/such/method"))
        assert receive(process)["error"]["code"] == -32601
        send(
            process,
            request(3, "tools/call", {"name": "execute_code", "arguments": {"code": "call_tool('add', a=1, b=2)"}}),
        )
        answer = receive(process)
        out, err = process.communicate()

    assert (answer["id"], answer["result"]["structuredContent"]["value"]) == (3, 3)
    assert (out, process.returncode) == ("", 0)
    assert "printed by the file of tools" in err and "printed by a tool" in err


@pytest.mark.parametrize("end", ["stdin", "SIGTERM"])
def test_a_client_that_vanishes_ends_its_script_and_nothing_is_left(tools: str, end: str) -> None:
    script = {"name": "execute_code", "arguments": {"code": "print('begun')\nwhile True: pass"}}
    with serving("--tools", tools, "--wall-s", "600", "--cpu-s", "600") as process:
        shake_hands(process)
        send(process, request(2, "tools/call", script))
        while receive(process).get("method") != "notifications/message":
            pass
        below = psutil.Process(process.pid).children(recursive=True)
        assert below
        if end == "stdin":
            process.communicate()
        else:
            os.kill(process.pid, signal.SIGTERM)
            process.wait()
        _, alive = psutil.wait_procs(below, timeout=60)

    assert alive == []


def test_without_the_sdk_the_command_says_what_to_install(tmp_path: Path) -> None:
    hidden = "import sys, importlib.util as u; f = u.find_spec\nu.find_spec = lambda n, *a: None if n == 'mcp' else f(n, *a)\n"
    code = f"{hidden}import sys; sys.argv = ['toolcell', 'mcp']; from toolcell.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert "pip install 'toolcell[mcp]'" in ended.stderr


@pytest.mark.anyio
async def test_a_line_that_is_too_long_gets_one_error_and_the_next_line_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stdio, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(stdio, "SKIPPED_BYTES", 7)
    ping = json.dumps(request(1, "ping"))
    written = io.BytesIO()
    lines = stdio._Lines(io.BytesIO(b"x" * 1000 + b"\n" + ping.encode() + b"\n" + b"y" * 500), written)

    assert [line.strip() async for line in lines] == [ping]
    answers = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [(answer["id"], answer["error"]["code"]) for answer in answers] == [(None, -32600)] * 2
