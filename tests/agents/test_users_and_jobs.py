"""What tools show to the user and leave in the background, whoever calls them inside an agent's run."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell import Agent, PoolConfig, Runtime, ToolContext, ToolRegistry, ToolResult
from toolcell.agents.providers.scripted import ScriptedModel, calls

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


def announcing() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def announce(word: str) -> ToolResult:
        """Show a word to the user."""
        return ToolResult(value=word, has_value=True, for_user=f"shown: {word}")

    @registry.tool
    async def whisper(word: str) -> ToolResult:
        """Show nothing to the user."""
        return ToolResult(value=word, has_value=True, for_user=word, silent=True)

    @registry.tool
    async def announce_later(word: str, ctx: ToolContext) -> ToolResult:
        """Show a word to the user from the background."""

        async def work() -> ToolResult:
            return ToolResult(value=word, has_value=True, for_user=f"shown: {word}")

        return ctx.start_job(work)

    return registry


CODE = "call_tool('announce', {'word': 'a'}); call_tool('whisper', {'word': 'b'})"
PLAN = {"steps": [{"tool": "announce", "args": {"word": "a"}}, {"tool": "whisper", "args": {"word": "b"}}]}
BOTH = calls(("announce", {"word": "a"}), ("whisper", {"word": "b"}))
TURNS: dict[str, Any] = {
    "model": BOTH,
    "plan": calls(("execute_plan", PLAN)),
    "code": calls(("execute_code", {"code": CODE})),
    "code in a plan": calls(("execute_plan", {"steps": [{"tool": "execute_code", "args": {"code": CODE}}]})),
    "saved script": calls(("saved", {})),
    "job": calls(("announce_later", {"word": "a"})),
    "job of a plan": calls(("execute_plan", {"steps": [{"tool": "announce_later", "args": {"word": "a"}}]})),
    "job of a script": calls(("execute_code", {"code": "call_tool('announce_later', {'word': 'a'})"})),
}


async def agent_run(turn: Any, registry: ToolRegistry, **options: Any) -> Any:
    model = ScriptedModel([turn, "went on", "went on"])
    async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
        agent = Agent(model, tools=registry, plan_execution=True, code_execution=runtime, **options)
        return await agent.run("go")


@pytest.mark.slow
@pytest.mark.conforms("B7", "G-b2")
@each_row("route", TURNS)
async def test_what_a_tool_shows_to_the_user_reaches_them_once_on_every_route(route: str) -> None:
    shown: list[str] = []
    registry = announcing()
    registry.save_script("saved", CODE)

    await agent_run(TURNS[route], registry, on_user=lambda text, result: shown.append(text))

    assert shown == ["shown: a"]


@pytest.mark.conforms("B7", "N-b3")
@each_row("turn", ["model", "code"])
async def test_what_a_sub_agent_s_tools_show_reaches_the_user_of_the_agent_above(turn: str) -> None:
    shown: list[str] = []
    registry = announcing()
    async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
        inner = Agent(ScriptedModel([TURNS[turn], "done"]), tools=registry, code_execution=runtime)
        model = ScriptedModel([calls(("helper", {"task": "help"})), "went on"])
        outer = Agent(
            model,
            tools=[inner.as_tool("helper", "Helps with everything there is.")],
            on_user=lambda text, result: shown.append(text),
        )
        await outer.run("go")

    assert shown == ["shown: a"]


@pytest.mark.conforms("B7")
async def test_a_listener_of_the_user_that_fails_costs_no_script_its_result() -> None:
    def fail(text: str, result: ToolResult) -> None:
        raise RuntimeError("the user is gone")

    run = await agent_run(
        calls(("execute_code", {"code": "set_result(call_tool('announce', {'word': 'a'}))"})),
        announcing(),
        on_user=fail,
    )

    assert run.messages[2]["content"].startswith('"a"')


@pytest.mark.slow
@pytest.mark.conforms("L1", "L-b1")
@each_row("route", ["job", "job of a plan", "job of a script"])
async def test_an_agent_keeps_background_jobs_without_being_asked_to(route: str) -> None:
    run = await agent_run(TURNS[route], announcing())

    text = json.dumps(run.messages)
    assert run.stop_reason == "final"
    if route == "job":
        assert "Background job job_1 of announce_later finished" in text


@pytest.mark.slow
@pytest.mark.conforms("L1")
@each_row("route", ["plan", "code", "session"])
async def test_plans_and_scripts_of_a_program_keep_background_jobs_too(route: str) -> None:
    registry = announcing()
    source = "set_result(call_tool('announce_later', {'word': 'a'}))"
    async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
        match route:
            case "plan":
                rows = await runtime.execute_plan([{"tool": "announce_later", "args": {"word": "a"}}])
                value = rows[0]["result"]
            case "code":
                value = (await runtime.execute_code(source)).value
            case _:
                async with runtime.session() as session:
                    value = (await session.execute_code(source)).value

    assert value == "a"


@pytest.mark.conforms("L-b1")
@each_row("kind", ["agent", "plan", "code"])
async def test_no_background_job_outlives_its_run(kind: str) -> None:
    ended: list[str] = []
    registry = ToolRegistry(pending_wait_s=0.01)

    @registry.tool
    async def linger(ctx: ToolContext) -> ToolResult:
        """Work for ever in the background."""

        async def work() -> ToolResult:
            try:
                await anyio.sleep_forever()
            finally:
                ended.append("ended")
            return ToolResult.ok("")

        return ctx.start_job(work)

    runs: dict[str, Callable[[Runtime], Awaitable[Any]]] = {
        "agent": lambda runtime: Agent(ScriptedModel([calls(("linger", {})), "went on"]), tools=registry, wall_s=1).run(
            "go"
        ),
        "plan": lambda runtime: runtime.execute_plan([{"tool": "linger", "args": {}}]),
        "code": lambda runtime: runtime.execute_code("call_tool('linger', {})"),
    }
    async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
        with anyio.fail_after(60):
            await runs[kind](runtime)
        assert ended == ["ended"]
