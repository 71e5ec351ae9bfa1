"""One tool call on every route there is, and what those who made it can read of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp.client.client import Client

from toolcell import Agent, PoolConfig, Runtime, ToolRegistry
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.mcp.server import McpServer

SCRIPT = """
try:
    answer = call_tool(name, arguments)
except ToolError as error:
    answer = f"ToolError: {error}"
set_result(answer)
"""

ROUTES = ("direct", "batch", "plan", "code", "session", "agent", "mcp")


async def answer_by(route: str, registry: ToolRegistry, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Return what the caller of one tool is given: a result as plain data, a row, a script's value, a message."""
    args = dict(arguments or {})
    match route:
        case "direct":
            return (await registry.execute(name, args)).to_dict()
        case "batch":
            return (await registry.execute_batch([(name, args)]))[0].to_dict()
        case "agent":
            run = await Agent(ScriptedModel([calls((name, args)), "went on"]), tools=registry).run("go")
            return run.messages[2]["content"]
    async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
        if route == "plan":
            return (await runtime.execute_plan([{"tool": name, "args": args}]))[0]
        inputs = {"name": name, "arguments": args}
        if route == "code":
            return (await runtime.execute_code(SCRIPT, inputs=inputs)).value
        if route == "session":
            async with runtime.session() as session:
                return (await session.execute_code(SCRIPT, inputs=inputs)).value
        assert route == "mcp"
        source = f"name, arguments = {name!r}, {args!r}\n{SCRIPT}"
        async with McpServer(runtime, has_one_client=True) as server, Client(server.server) as client:
            return (await client.call_tool("execute_code", {"code": source})).model_dump()
