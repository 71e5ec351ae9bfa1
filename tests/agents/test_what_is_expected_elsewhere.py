"""What people write who know other libraries is answered with what to write here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio.lowlevel
import pytest

from rows import each_row
from toolcell import Runtime, ToolRegistry, ToolResult, UsageError
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.options import Origin
from toolcell.tools import Status

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


def agent(**options: Any) -> Agent:
    return Agent(ScriptedModel(["done"]), **options)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a text as error": (lambda: ToolResult(error="no"), r"ToolResult\.fail\('no'\)"),  # type: ignore[arg-type]
    "error()": (lambda: ToolResult.error("no"), r"write ToolResult\.fail\(text\)"),  # type: ignore[operator, misc]
    "silent()": (lambda: ToolResult.silent("no"), r"write ToolResult\.silenced\(text\)"),  # type: ignore[operator]
    "sequential=": (lambda: agent(sequential=True), "parallel_tools=False"),
    "blacklist=": (lambda: agent(blacklist=["x"]), r"agent\.blacklist\("),
    "tool_execution=": (lambda: agent(tool_execution="sequential"), "parallel_tools=False"),
    "task=": (lambda: agent(task="x"), r"agent\.run\(task\)"),
    "hooks=": (lambda: agent(hooks=[print]), r"agent\.registry\.add_hook\("),
    "before_tool_call=": (lambda: agent(before_tool_call=print), r"agent\.registry\.add_hook\("),
    "an agent as a tool": (lambda: agent(tools=[agent()]), r"\.as_tool\(name, description\)"),
    "an agent as a sub-agent": (lambda: agent().add_subagent(agent()), r"\.as_tool\(name, description\)"),
    "error_style=": (lambda: agent(error_style="anything"), "error_style must be one of 'plain'"),
}


@pytest.mark.conforms("B8", "F12", "M1")
@each_row("name", MISTAKES)
def test_a_name_of_another_library_is_answered_with_ours(name: str) -> None:
    make, says = MISTAKES[name]
    with pytest.raises(UsageError, match=says):
        make()


@pytest.mark.conforms("B8", "B13")
def test_results_have_no_error_and_are_not_silent_unless_they_say_so() -> None:
    assert (ToolResult.ok("x").error, ToolResult.ok("x").silent) == (None, False)
    assert ToolResult.fail("x").error is not None and ToolResult.silenced("x").silent


@pytest.mark.conforms("F-b7")
@each_row(("origin", "refused"), [(None, 0), (Origin.MODEL, 36)])
async def test_the_most_calls_of_one_response_are_a_models_and_not_the_programs(origin: Any, refused: int) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def double(x: int) -> int:
        """Return twice the number that is given."""
        return 2 * x

    results = await registry.execute_batch([("double", {"x": x}) for x in range(100)], origin=origin)

    assert [result.status for result in results].count(Status.BLOCKED) == refused


@pytest.mark.conforms("G11")
async def test_a_call_that_nobody_approved_says_what_decides_about_it() -> None:
    registry = ToolRegistry()

    @registry.tool(requires_approval=True)
    async def pay(euros: int) -> str:
        """Pay so many euros to whoever has asked."""
        return f"paid {euros}"

    refused = await registry.dispatch("pay", {"euros": 1})
    assert "approval_hook(...)" in refused.message and 'on_approval="suspend"' in refused.message


PING = {"type": "object", "properties": {"host": {"type": "string"}}, "required": ["host"]}


def ping(host: str) -> str:
    """Check whether a host can be reached."""
    return f"{host} is reachable"


def ping_of_dict(args: Any) -> str:
    return f"{args['host']} is reachable"


REGISTERED: dict[str, Callable[[ToolRegistry], object]] = {
    "a function": lambda registry: registry.add(ping),
    "a decorator": lambda registry: registry.tool(ping),
    "a decorator with names": lambda registry: registry.tool(name="ping", description="Reach a host by name.")(ping),
    "everything by keyword": lambda registry: registry.register(
        name="ping", description="Reach a host by name.", schema=PING, function=ping_of_dict
    ),
    "everything by position": lambda registry: registry.register("ping", "Reach a host by name.", PING, ping_of_dict),
}


@pytest.mark.conforms("E3", "E12")
@each_row("name", REGISTERED)
def test_a_tool_is_registered_by_position_by_keyword_and_as_a_decorator(name: str) -> None:
    registry = ToolRegistry()

    REGISTERED[name](registry)

    assert registry.definitions()[0].parameters["required"] == ["host"]
    assert registry.execute_sync("ping", {"host": "8.8.8.8"}).text == "8.8.8.8 is reachable"


@pytest.mark.conforms("E12")
def test_programs_without_an_event_loop_call_tools_and_run_agents() -> None:
    registry, loops = ToolRegistry([ping]), set[Any]()

    @registry.tool
    async def loop() -> str:
        """Note the event loop that runs this."""
        loops.add(anyio.lowlevel.current_token())
        return "noted"

    @registry.tool
    def ping_twice(host: str) -> str:
        """Ping a host twice, from the thread of a tool."""
        return "".join(registry.execute_sync("ping", {"host": host}).text for _ in range(2))

    model = ScriptedModel([calls(("ping_twice", {"host": "a"}), ("loop", {})), "done"], repeat=True)
    run = Agent(model, tools=registry).run_sync("go")
    registry.execute_sync("loop")

    assert run.content == "done" and "a is reachablea is reachable" in run.steps[0].output
    assert len(loops) == 1  # clients that belong to an event loop can be used again


@pytest.mark.conforms("E12")
async def test_a_blocking_call_in_an_event_loop_says_what_to_await() -> None:
    registry = ToolRegistry([ping])
    with pytest.raises(UsageError, match=r"write `await registry\.execute\(\.\.\.\)`"):
        registry.execute_sync("ping", {"host": "a"})
    with pytest.raises(UsageError, match=r"write `await agent\.run\(\.\.\.\)`"):
        agent().run_sync("go")


@pytest.mark.slow
@pytest.mark.conforms("Q1")
@pytest.mark.isolation
def test_a_blocking_agent_opens_its_runtime_for_each_run() -> None:
    registry = ToolRegistry([ping])
    model = ScriptedModel([calls(("execute_code", {"code": "tools.ping(host='b')"})), "done"] * 2)
    talking = Agent(model, tools=registry, code_execution=Runtime(registry))

    outputs = [talking.run_sync("go").steps[0].output for _ in range(2)]

    assert ["b is reachable" in each for each in outputs] == [True, True]


@pytest.mark.conforms("J-b5")
async def test_identical_calls_of_one_response_count_as_one_failure_and_have_one_hint() -> None:
    registry = ToolRegistry(max_batch=4)

    @registry.tool
    async def fails() -> str:
        """Fail, whatever it is given."""
        raise ValueError("no")

    model = ScriptedModel([*[calls(*[("fails", {})] * 6)] * 3, "gave up"])

    run = await Agent(model, tools=registry).run("go")

    answers = [message["content"] for message in run.messages if message["role"] == "tool"]
    hinted = ["change its arguments" in answer for answer in answers]
    assert (hinted.index(True), sum(hinted)) == (12, 1) and "failed 3 times" in answers[12]
    assert all("ask for this one again" in answer for answer in answers[4:6] + answers[10:12] + answers[16:18])
