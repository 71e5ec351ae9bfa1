"""One tool call by each route on which a tool can be called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolcell import Runtime
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.tools import RunContext, ToolRegistry

SCRIPT = """
try:
    set_result({"value": call_tool(NAME, ARGS)})
except ToolError as error:
    set_result({"error": str(error)})
"""


async def by_code(runtime: Runtime, registry: ToolRegistry, name: str, args: Mapping[str, Any], **run: Any) -> Any:
    """Call it in a sandbox: {"value": ...} or {"error": ...}."""
    context = RunContext(**run) if run else None
    result = await runtime.execute_code(
        SCRIPT, inputs={"NAME": name, "ARGS": dict(args)}, tools=registry, context=context
    )
    assert result.error is None, result.error
    return result.value


async def by_plan(registry: ToolRegistry, name: str, args: Mapping[str, Any]) -> Any:
    """Call it as a step of a plan: the value that the next step could use, or the error's text."""
    planned = registry.merged()
    planned.enable_plan_execution()
    plan = await planned.dispatch("execute_plan", {"steps": [{"tool": name, "args": dict(args)}]})
    (row,) = plan.value
    return {"value": row["result"]} if row["status"] == "ok" else {"error": row["error"]}


async def by_model(registry: ToolRegistry, name: str, args: Mapping[str, Any]) -> str:
    """Have a model call it in an agent's loop: the text that the model reads."""
    model = ScriptedModel([calls((name, dict(args))), "done"])
    await Agent(model, tools=registry).run("go")
    return str(model.requests[-1].messages[-1]["content"])
