"""Programs from npm that nobody here wrote: `.ci/mcp` installs them outside the tree."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from machine import MCP_LOCK, node, npm_packages

HERE = Path(__file__).parent
PATIENCE_S = 300
"""For any one program: a busy machine starts Node in seconds."""


class Programs:
    """The installed packages, and the Node that they need."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder, self.node = folder, node

    def command(self, package: str, script: str) -> list[str]:
        """Return the command of a package's program."""
        path = self._folder / "node_modules" / package / script
        assert path.exists(), path
        return [self.node, str(path)]

    def run(self, command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a program to its end. It finds this Node, and keeps what it keeps in `folder`."""
        env = dict(os.environ, HOME=str(folder), NO_COLOR="1")
        env["PATH"] = f"{Path(self.node).parent}:{env['PATH']}"
        return subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


@pytest.fixture(scope="session")
def programs() -> Programs:
    found = node()
    assert found is not None, "a test that wants these programs carries the mark npm"
    return Programs(npm_packages("mcp-programs", MCP_LOCK), found)


TOOLS = '''
import base64
import anyio
from toolcell import ToolRegistry
from toolcell.tools import ToolContext
from toolcell.calls.result import File
from toolcell.calls.result import ToolResult

registry = ToolRegistry()

@registry.tool
def test_simple_text() -> str:
    """Return a simple text, as the conformance suite wants it."""
    return "This is a simple text response for testing."

@registry.tool
def test_error_handling() -> str:
    """Fail, as the conformance suite wants it."""
    raise ValueError("This tool intentionally returns an error for testing")

registry.register(
    "json_schema_2020_12_tool",
    "Take an address, by a schema with parts of JSON Schema 2020-12",
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}
        },
        "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
        "additionalProperties": False,
    },
    lambda args: "taken",
)

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)

@registry.tool
def test_image_content() -> File:
    """Return a picture, as the conformance suite wants it."""
    return File("p.png", PNG, "image/png")

@registry.tool
def test_audio_content() -> File:
    """Return a sound, as the conformance suite wants it."""
    return File("s.wav", b"RIFF", "audio/wav")

@registry.tool
def test_embedded_resource() -> File:
    """Return a resource, as the conformance suite wants it."""
    return File("t.txt", b"text", "text/plain")

@registry.tool
def test_multiple_content_types() -> ToolResult:
    """Return a text, a picture and a resource, as the conformance suite wants it."""
    files = File("p.png", PNG, "image/png"), File("t.txt", b"text", "text/plain")
    return ToolResult(value="both", has_value=True, files=files)

@registry.tool
async def test_tool_with_progress(ctx: ToolContext) -> str:
    """Report progress three times, as the conformance suite wants it."""
    for done in (0, 50, 100):
        ctx.update(f"{done} of 100")
        await anyio.sleep(0.05)
    return "done"

@registry.tool
def add(a: int, b: int) -> int:
    """Add two numbers and return the sum."""
    return a + b
'''


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools_of_a_test.py"
    path.write_text(TOOLS)
    return path


def toolcell_mcp(*flags: str) -> list[str]:
    return [sys.executable, "-m", "toolcell", "mcp", *flags]


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Serve over HTTP, and yield the URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = toolcell_mcp(*flags, "--http", f"127.0.0.1:{port}")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until_listening(port, process)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()


def until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server has ended"
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the server does not listen")
