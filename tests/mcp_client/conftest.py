"""One honest server over stdio for all tests of this folder, and how to write a dishonest one."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from toolcell.mcp.client import McpClient
from toolcell.tools import ToolRegistry

HERE = Path(__file__).parent
HONEST = [sys.executable, str(HERE / "honest_server.py")]
RAW = [sys.executable, "-I", "-S", str(HERE / "raw_server.py")]


class Connected:
    """A registry with one server."""

    def __init__(self, registry: ToolRegistry, client: McpClient) -> None:
        self.registry, self.client = registry, client


@pytest.fixture(scope="module")
async def honest(anyio_backend: str) -> AsyncIterator[Connected]:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("h", command=HONEST, env={"GIVEN": "value"}, labels="weather", timeout_s=60)
    yield Connected(registry, client)
    await registry.close()


def raw(**script: Any) -> list[str]:
    """Return the command of a server that does what `script` says; see `raw_server.py`."""
    return [*RAW, json.dumps(script)]


def a_tool(name: str = "t", **more: Any) -> dict[str, Any]:
    return {"name": name, "description": "What it does", "inputSchema": {"type": "object"}, **more}


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    with anyio.fail_after(60):
        while not condition():
            await anyio.sleep(0.01)
