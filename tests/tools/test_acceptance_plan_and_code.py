"""The examples of plan and code execution, as their document shows them."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
import trio
from trio.testing import MockClock

from rows import each_row
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.errors import ToolError
from toolcell.tools import Block, Call, ToolRegistry, ToolResult
from tools.toolkit import Crowd, FakeRuntime, Meeting

pytestmark = pytest.mark.anyio

SEARCHES = ["Go error handling", "Go concurrency patterns", "Go testing best practices"]
PLAN = {"steps": [{"tool": "web_search", "args": {"query": query}} for query in SEARCHES]}


def searching(meeting: Meeting | None = None, failing: str = "") -> ToolRegistry:
    async def web_search(query: str) -> str:
        """Search the web for information."""
        if meeting is not None:
            await meeting.join()
        if query == failing:
            raise ToolError("timeout")
        return f"about {query}"

    registry = ToolRegistry([web_search])
    registry.enable_plan_execution()
    return registry


@pytest.mark.conforms("EX-7", "P3", "P4", "P5", "P6", "P7", "P12", "V-7")
async def test_a_plan_reports_each_step_in_order_and_a_failed_one_fails_alone() -> None:
    meeting = Meeting(3)

    out = await searching(meeting, failing=SEARCHES[2]).execute("execute_plan", PLAN)

    assert json.loads(out.text) == [
        {"step": 0, "tool": "web_search", "status": "ok", "result": "about Go error handling"},
        {"step": 1, "tool": "web_search", "status": "ok", "result": "about Go concurrency patterns"},
        {"step": 2, "tool": "web_search", "status": "error", "error": "timeout"},
    ]
    assert meeting.most == 3
    assert out.is_error is False


@pytest.mark.conforms("EX-8", "P9", "P10", "P11", "P13", "F-b1")
async def test_a_plan_has_fifty_steps_at_most_ten_at_once_and_no_plan_inside() -> None:
    crowd = Crowd()

    async def visit() -> str:
        """Be counted while running."""
        await crowd.visit()
        return "visited"

    registry = ToolRegistry([visit])
    registry.enable_plan_execution()
    step = {"tool": "visit", "args": {}}

    too_many = await registry.execute("execute_plan", {"steps": [step] * 51})
    nested = await registry.execute("execute_plan", {"steps": [step, {"tool": "execute_plan", "args": {"steps": []}}]})
    none = await registry.execute("execute_plan", {"steps": []})
    before = crowd.visits
    fifty = await registry.execute("execute_plan", {"steps": [step] * 50})
    stray = await registry.execute("execute_plan", {"steps": [step, {"tool": "nope", "args": {}}, step]})

    assert too_many.is_error
    assert too_many.text == "execute_plan limited to 50 steps, got 51"
    assert [row["status"] for row in nested.value] == ["ok", "error"]
    assert nested.value[1]["error"] == "execute_plan steps cannot call execute_plan"
    assert none.is_error
    assert none.text == "execute_plan requires at least one step"
    assert before == 1
    assert (len(fifty.value), crowd.most) == (50, 10)
    assert [row["status"] for row in stray.value] == ["ok", "error", "ok"]
    assert "unknown tool: nope" in stray.value[1]["error"]


@pytest.mark.conforms("EX-9", "P15", "R-b3")
async def test_three_searches_take_four_samplings_one_by_one_and_two_as_a_plan() -> None:
    registry = searching()
    one_by_one = ScriptedModel([*(calls(("web_search", {"query": query})) for query in SEARCHES), "done"])
    as_plan = ScriptedModel([calls(("execute_plan", PLAN)), "done"])

    await Agent(one_by_one, tools=registry).run("research")
    await Agent(as_plan, tools=registry).run("research")

    assert (one_by_one.samplings, as_plan.samplings) == (4, 2)


@pytest.mark.conforms("R-b3")
def test_a_plan_takes_as_long_as_its_longest_step() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def work(seconds: float) -> float:
        """Work for so many seconds."""
        await anyio.sleep(seconds)
        return seconds

    registry.enable_plan_execution()
    steps = [{"tool": "work", "args": {"seconds": seconds}} for seconds in (0.2, 0.3, 0.4)]

    async def timed() -> tuple[list[float], float]:
        started = anyio.current_time()
        result = await registry.execute("execute_plan", {"steps": steps})
        return [row["result"] for row in result.value], anyio.current_time() - started

    results, took_s = trio.run(timed, clock=MockClock(autojump_threshold=0))  # a clock that moves when all wait

    assert results == [0.2, 0.3, 0.4]
    assert took_s == pytest.approx(0.4)  # one after another they take 0.9


@pytest.mark.conforms("EX-11", "R5", "R6", "P16")
async def test_plan_and_code_are_both_on_offer_and_neither_can_be_called_from_code() -> None:
    async def script(call_tool: Any) -> Any:
        refused = []
        for name in ("execute_code", "execute_plan"):
            try:
                await call_tool(name, {})
            except ToolError as exc:
                refused.append(str(exc))
        return refused

    model = ScriptedModel([calls(("execute_code", {"code": "..."})), "done"])
    agent = Agent(model, tools=searching(), plan_execution=True, code_execution=FakeRuntime(script))

    run = await agent.run("go")

    assert model.requests[0].tool_names == ["web_search", "execute_plan", "execute_code"]
    assert json.loads(run.messages[2]["content"]) == [
        "execute_code cannot be called from within execute_code",
        "execute_plan cannot be called from within execute_code",
    ]
    assert run.content == "done"


@pytest.mark.conforms("EX-27", "G1", "G2", "G3", "G-b2")
async def test_a_hook_that_blocks_a_tool_blocks_it_on_every_path(tmp_path: Any) -> None:
    file = tmp_path / "precious.txt"
    file.write_text("keep me")

    async def delete_file(path: str) -> str:
        """Delete a file from the disk."""
        file.unlink()
        return "deleted"

    async def script(call_tool: Any) -> Any:
        return await call_tool("delete_file", {"path": "precious.txt"})

    registry = ToolRegistry([delete_file])
    registry.enable_plan_execution()
    registry.enable_code_execution(FakeRuntime(script))
    reason = "file deletion is disabled in this session"

    @registry.before_call
    def guard(call: Call) -> Block | None:
        return Block(reason) if call.name == "delete_file" else None

    step = {"tool": "delete_file", "args": {"path": "precious.txt"}}
    model = ScriptedModel([calls(("delete_file", {"path": "precious.txt"})), "could not"])
    run = await Agent(model, tools=registry).run("delete it")
    plan = await registry.execute("execute_plan", {"steps": [step]})
    code = await registry.execute("execute_code", {"code": "..."})

    assert run.messages[2]["content"] == reason
    assert run.content == "could not"
    assert plan.value == [{"step": 0, "tool": "delete_file", "status": "error", "error": reason}]
    assert reason in code.text
    assert file.exists()


@pytest.mark.conforms("EX-34", "M1", "M2", "M3", "M-b1", "M-b2", "V-12")
@each_row("early", [True, False])
async def test_a_blacklisted_tool_is_not_executed_alone_in_a_batch_in_a_plan_or_from_code(early: bool) -> None:
    deleted: list[str] = []

    async def delete_files(path: str) -> str:
        """Delete files from the disk."""
        deleted.append(path)
        return "deleted"

    async def look() -> ToolResult:
        """Look at what is there."""
        return ToolResult.ok("all there")

    async def script(call_tool: Any) -> Any:
        return await call_tool("delete_files", {"path": "/"})

    wanted = ("delete_files", {"path": "/"})
    step = {"tool": "delete_files", "args": {"path": "/"}}
    model = ScriptedModel(
        [
            calls(wanted),
            calls(("look", {}), wanted, ("look", {})),
            calls(("execute_plan", {"steps": [step, {"tool": "look", "args": {}}]})),
            calls(("execute_code", {"code": "..."})),
            "gave up",
        ]
    )
    registry = ToolRegistry([delete_files, look])
    if early:
        registry.blacklist("delete_files")
    agent = Agent(model, tools=registry, plan_execution=True, code_execution=FakeRuntime(script))
    if not early:
        agent.blacklist("delete_files")

    run = await agent.run("clean up")
    answers = [message["content"] for message in run.messages if message["role"] == "tool"]

    refusal = 'tool "delete_files" is not permitted'
    assert answers[:4] == [refusal, "all there", refusal, "all there"]
    assert [row["status"] for row in json.loads(answers[4])] == ["error", "ok"]
    assert refusal in answers[5]
    assert deleted == []
    assert (run.content, run.stop_reason) == ("gave up", "final")
    assert registry.has("delete_files")
    assert all("delete_files" not in request.tool_names for request in model.requests)
