"""Schedules from a script, a plan and a model; due actions through a real runtime, under its rules, in its audit log."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolcell import Runtime, ToolRegistry
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.audit.query import Index
from toolcell.builtin import SqliteStore
from toolcell.builtin.schedule import Schedule
from toolcell.builtin.scheduler import Scheduler
from toolcell.config import PoolConfig
from toolcell.tools import RunContext

pytestmark = [pytest.mark.anyio, pytest.mark.isolation]

MORNING = 1_801_468_800.0  # 2027-02-01 08:00 UTC
DAY = 86_400

SCRIPT = """
made = call_tool("schedule_create", {
    "description": "Say hello", "time": "09:00", "recurrence": "daily",
    "tools": [{"tool": "send", "params": {"to": "ada"}}, {"tool": "pay", "params": {"euros": 5}}],
})
listed = call_tool("schedule_list")
try:
    call_tool("schedule_delete", {"description_query": " "})
except ToolError as exc:
    refused = str(exc)
set_result([made["next_run_local"], [each["id"] == made["id"] for each in listed], refused])
"""


def tools(store: SqliteStore, sent: list[str]) -> ToolRegistry:
    registry = ToolRegistry()
    registry.add(Schedule(store, clock=lambda: MORNING))

    @registry.tool
    def send(to: str) -> str:
        """Send a greeting to a person."""
        sent.append(to)
        return f"sent to {to}"

    @registry.tool(requires_approval=True)
    def pay(euros: int) -> str:
        """Pay so many euros to somebody."""
        sent.append("money")
        return "paid"

    return registry


@pytest.mark.conforms("S1", "S-b2", "S-b6")
async def test_an_action_is_scheduled_by_code_seen_by_a_plan_moved_by_a_model_and_made(tmp_path: Path) -> None:
    store, sent = SqliteStore(":memory:"), list[str]()
    registry = tools(store, sent)
    async with Runtime(registry, record=tmp_path / "audit", pool=PoolConfig(warm=0)) as runtime:
        scripted = await runtime.execute_code(SCRIPT)
        local, seen, refused = scripted.value
        assert (local, seen) == ("2027-02-01 09:00", [True])
        assert refused.endswith("description_query is required: a part of the action's description")

        (row,) = await runtime.execute_plan([{"tool": "schedule_list", "args": {}}])
        assert row["result"][0]["schedule"] == "09:00 daily"

        model = ScriptedModel([calls(("schedule_update", {"description_query": "hello", "time": "10:00"})), "Moved."])
        run = await Agent(model, tools=registry).run("Say hello an hour later.")
        told = [message["content"] for message in run.messages if message["role"] == "tool"]
        assert told == ['Updated "Say hello": schedule updated']

        scheduler = Scheduler(
            runtime, store, clock=lambda: MORNING + DAY, context_of=lambda action: RunContext(user_id="bob")
        )
        (made,) = await scheduler.run_due()
        assert await scheduler.run_due() == []

    assert sent == ["ada"]  # nobody was there to approve of the payment
    assert made.status == "failed"
    assert "sent to ada" in made.detail
    assert "approv" in made.detail
    with Index(tmp_path / "audit") as index:
        recorded = next(each for each in index.runs() if each.id == made.id)
    assert (recorded.user, recorded.calls) == ("bob", 2)
