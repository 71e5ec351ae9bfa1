"""The text of an exception on every route: who wrote a script or a plan is told its class, a model that calls the tool reads both."""

from __future__ import annotations

from typing import Any

import pytest
from mcp.client.client import Client

from rows import each_row
from toolcell import Runtime, ToolRegistry
from toolcell.mcp.server import McpServer
from toolcell.tools import Approve, Call

from ..tool_routes import answer_by

pytestmark = [pytest.mark.quick, pytest.mark.anyio, pytest.mark.isolation]

TEXT = "database password=hunter2 is wrong"


def raising() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def connect() -> None:
        """Connect to the database of the host."""
        raise ConnectionError(TEXT)

    async def prepare(args: dict[str, Any]) -> dict[str, Any]:
        raise ConnectionError(TEXT)

    @registry.tool(prepare=prepare)
    async def prepared() -> None:
        """Have arguments that are looked up."""

    @registry.tool
    async def guarded() -> None:
        """Have a hook that looks it up."""

    @registry.tool(requires_approval=True)
    async def pay() -> str:
        """Pay what is due to somebody."""
        return "paid"

    @registry.before_call
    async def guard(call: Call) -> None:
        if call.name == "guarded":
            raise ConnectionError(TEXT)

    return registry


NAMES = ("connect", "prepared", "guarded")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("route", ["plan", "code", "session", "mcp"])
async def test_whoever_wrote_a_script_or_a_plan_is_not_told_the_text_of_an_exception(route: str, name: str) -> None:
    told = str(await answer_by(route, raising(), name))

    assert "ConnectionError" in told and "hunter2" not in told


@pytest.mark.parametrize("name", NAMES)
async def test_a_model_whose_loop_this_program_runs_reads_class_and_message(name: str) -> None:
    told = str(await answer_by("agent", raising(), name))

    assert f"ConnectionError: {TEXT}" in told


@pytest.mark.parametrize("name", NAMES)
async def test_nor_is_a_client_of_a_server_that_exposes_its_tools(name: str) -> None:
    async with (
        Runtime(raising()) as runtime,
        McpServer(runtime, exposes_tools=True, has_one_client=True) as server,
        Client(server.server) as client,
    ):
        told = str((await client.call_tool(name, {})).model_dump())

    assert "ConnectionError" in told and "hunter2" not in told


@pytest.mark.slow
@each_row("name", NAMES)
async def test_nor_is_a_plan_or_script_that_waited_in_between(name: str, tmp_path: Any) -> None:
    async with Runtime(raising(), record=tmp_path / "runs.db") as runtime:
        rows = await runtime.execute_plan([{"tool": name}, {"tool": "pay"}], on_approval="suspend")
        assert rows.suspension is not None
        resumed = await runtime.resume(rows.suspension, {each.id: Approve() for each in rows.suspension.calls})
        script = f"""
try:
    call_tool({name!r})
except ToolError as exc:
    said = str(exc)
set_result([said, call_tool("pay")])
"""
        waits = await runtime.execute_code(script, on_approval="suspend")
        assert waits.suspension is not None
        result = await runtime.resume(waits.suspension, {each.id: Approve() for each in waits.suspension.calls})
    for told in (str(rows), str(resumed.value), str(result.value)):
        assert "ConnectionError" in told and "hunter2" not in told
    assert "paid" in str(result.value)
