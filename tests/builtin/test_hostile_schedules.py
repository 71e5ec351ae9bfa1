"""A script that schedules what it may not call: later, in a run without its rules."""

from __future__ import annotations

import pytest

from rows import each_row
from toolcell import Runtime, ToolRegistry
from toolcell.builtin import SqliteStore
from toolcell.builtin.schedule import Schedule
from toolcell.calls.call import RunScope
from toolcell.calls.options import CallPolicy, Origin
from toolcell.tools import RunContext, ToolResult

pytestmark = pytest.mark.anyio


def tools(store: SqliteStore) -> ToolRegistry:
    registry = ToolRegistry([Schedule(store)])

    @registry.tool
    def send(to: str) -> str:
        """Send a greeting to a person."""
        return to

    return registry


async def schedule(registry: ToolRegistry, tool: str, params: dict[str, object], context: RunContext) -> ToolResult:
    args = {"description": "d", "time": "09:00", "recurrence": "daily", "tools": [{"tool": tool, "params": params}]}
    return await registry.dispatch("schedule_create", args, context=context, origin=Origin.CODE)


@each_row("advertise", [False, True])
async def test_what_the_rules_of_a_run_refuse_cannot_be_scheduled_in_it(advertise: bool) -> None:
    store = SqliteStore(":memory:")
    registry = tools(store)
    policy = CallPolicy(advertise_blocked=advertise)
    policy.blacklist("send", origins=[Origin.CODE])
    refused = await schedule(registry, "send", {"to": "ada"}, RunContext(scope=RunScope(policies=(policy,))))
    assert refused.text == "send cannot be scheduled: this run may not call it"
    assert await store.list_scheduled_actions() == []
    assert not (await schedule(registry, "send", {"to": "ada"}, RunContext())).is_error


async def test_code_cannot_be_scheduled_for_its_calls_could_not_be_checked() -> None:
    store = SqliteStore(":memory:")
    registry = tools(store)
    registry.enable_code_execution(Runtime(registry))
    args = {
        "description": "d",
        "time": "09:00",
        "recurrence": "daily",
        "tools": [{"tool": "execute_code", "params": {"code": "call_tool('send', {'to': 'ada'})"}}],
    }
    refused = await registry.dispatch("schedule_create", args, context=RunContext())
    assert refused.text.startswith("execute_code cannot be scheduled: which tools it will call cannot be checked now")
    assert await store.list_scheduled_actions() == []
