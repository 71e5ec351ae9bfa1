"""Large data on its way through the host keeps no event loop: inputs, arguments, results and their records, on each route."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp.client.client import Client as Mcp
from mcp_types import CallToolResult

from hostile.loop_silence import watched
from service.client_serving import serving
from toolcell import Runtime, ToolRegistry
from toolcell.mcp.server import McpServer
from toolcell.service import Client

pytestmark = [pytest.mark.isolation, pytest.mark.parametrize("anyio_backend", ["asyncio"]), pytest.mark.anyio]

SILENCE_S = 0.05
"""What is promised. One thread has the interpreter for 5 ms; one step in C, such as packing all of the data, takes up to 10 ms."""

ORDER = "call_tool('order', value=x)"
SCRIPT = "set_result(len(call_tool('echo', value=x)))"
DATA: dict[str, Any] = {
    "numbers": [2**62 + number for number in range(50_000)],
    "rows": [{"a": number, "b": "x" * 10, "token": "y"} for number in range(10_000)],
    "a text": "abc de " * 600_000,
}

Send = Callable[[Any], Awaitable[Any]]


def registry() -> ToolRegistry:
    made = ToolRegistry()

    @made.tool
    def echo(value: Any) -> Any:
        """Return what was sent."""
        return value

    @made.tool(requires_approval=True)
    def order(value: Any) -> str:
        """Order what was sent."""
        return "ordered"

    return made


@asynccontextmanager
async def sender(route: str, folder: Path) -> AsyncIterator[Send]:
    """Yield what sends a value through a tool and back."""
    if route in ("http", "websocket"):
        async with serving(folder, registry()) as (url, _):
            if route == "websocket":
                async with Client(url) as client:
                    yield lambda value: client.execute_code(SCRIPT, inputs={"x": value})
            else:
                async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                    yield lambda value: http.post("/v1/execute", json={"code": SCRIPT, "inputs": {"x": value}})
        return
    async with Runtime(registry(), record=folder / "runs.db") as runtime:
        if route == "code":
            yield lambda value: runtime.execute_code(SCRIPT, inputs={"x": value})
        elif route == "dry run":
            yield lambda value: runtime.execute_code(ORDER, inputs={"x": value}, dry_run=True)
        elif route == "suspended":
            yield lambda value: runtime.execute_code(ORDER, inputs={"x": value}, on_approval="suspend")
        elif route in ("MCP", "MCP's tool"):
            async with (
                McpServer(runtime, has_one_client=True, exposes_tools=True) as server,
                Mcp(server.server) as client,
            ):
                if route == "MCP":
                    yield lambda value: client.call_tool(
                        "execute_code", {"code": "set_result(x[:1_000_000])", "inputs": {"x": value}}
                    )
                else:
                    yield lambda value: client.call_tool("echo", {"value": value})
        elif route == "plan":
            yield lambda value: runtime.execute_plan([{"tool": "echo", "args": {"value": value}}])
        else:
            async with runtime.session() as session:
                yield lambda value: session.execute_code(SCRIPT, inputs={"x": value})


def is_right(answer: Any, value: Any) -> bool:
    match answer:
        case httpx.Response():
            return bool(answer.json()["value"] == len(value))
        case list():
            return bool(answer[0]["status"] == "ok")
        case CallToolResult():
            return not answer.is_error
        case _ if answer.suspension is not None or answer.effects:
            return True
    return bool(answer.value == len(value))


@pytest.mark.parametrize(
    "route", ["plan", "code", "session", "dry run", "suspended", "MCP", "MCP's tool", "http", "websocket"]
)
async def test_large_data_keeps_no_event_loop(route: str, tmp_path: Path) -> None:
    silent = {}
    async with sender(route, tmp_path) as send:
        await send("small")
        for kind, value in DATA.items():
            for _ in range(3):  # a neighbour may have taken our caches
                found = await watched(send(value))
                assert is_right(found.outcome, value), kind
                silent[kind] = found.silent_s
                if found.silent_s < SILENCE_S:
                    break
    assert {kind: seconds for kind, seconds in silent.items() if seconds >= SILENCE_S} == {}
