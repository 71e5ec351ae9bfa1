"""What an agent has made can be undone: calls of its model, of plans, of sub-agents, before and after it waited."""

from __future__ import annotations

from typing import Any

import pytest

from toolcell import Agent, ToolRegistry, UsageError
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.tools import Approve

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


class Files:
    """Tools that make and hide files, and can undo it."""

    def __init__(self) -> None:
        self.there: list[str] = []
        self.registry = ToolRegistry()

        def remove(args: Any, _result: Any) -> None:
            self.there.remove(args["name"])

        @self.registry.tool(revert=remove)
        async def create(name: str) -> str:
            """Create a file of that name."""
            self.there.append(name)
            return name

        self.registry.add(create, name="hide", requires_approval=True, revert=remove)


async def test_a_run_of_an_agent_is_reverted_with_what_it_made_after_it_waited() -> None:
    files = Files()
    inner = Agent(ScriptedModel([calls(("create", {"name": "sub"})), "done"]), tools=files.registry)
    plan = {"steps": [{"tool": "create", "args": {"name": "step"}}]}
    replies = [
        calls(("create", {"name": "direct"})),
        calls(("execute_plan", plan)),
        calls(("helper", {"task": "go"})),
        calls(("hide", {"name": "secret"})),
        "end",
    ]
    agent = Agent(ScriptedModel(replies), tools=files.registry, on_approval="suspend", plan_execution=True)
    agent.registry.add(inner.as_tool("helper", "Create a file as a helper."))
    waits = await agent.run("go")
    assert waits.suspension is not None and files.there == ["direct", "step", "sub"]
    (call,) = waits.suspension.calls
    result = await agent.resume(waits.suspension, {call.id: Approve()})
    assert files.there[-1] == "secret" and result.run_id == waits.run_id

    undone = await agent.revert(result)

    assert undone.ok and [each.args["name"] for each in undone.calls] == ["secret", "sub", "step", "direct"]
    assert not files.there and (await agent.revert(result)).calls == ()


async def test_what_an_agent_did_not_make_is_not_reverted() -> None:
    files = Files()
    agent = Agent(ScriptedModel(["nothing to do"]), tools=files.registry)
    with pytest.raises(UsageError, match="nothing of run"):
        await agent.revert(await agent.run("go"))
    with pytest.raises(UsageError, match="result of a run of this agent"):
        await agent.revert("go")  # type: ignore[arg-type]
