"""The tool for LangChain, in LangChain's own agent loop, with LangChain's scripted model."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest

from integrations.conftest import needs, run_example
from integrations.refusing_tools import check_refusals, refusing_registry
from toolcell import Limits, Runtime, SyncRuntime, ToolRegistry
from toolcell.errors import Misconfigured, UsageError

needs("langchain.agents")

from langchain.agents import create_agent  # noqa: E402
from langchain.tools import tool  # noqa: E402
from langgraph.checkpoint.memory import InMemorySaver  # noqa: E402
from langgraph.types import Command, interrupt  # noqa: E402

from integrations.langchain_agents import SENT, answers, broken, model, weather, worded  # noqa: E402
from toolcell.integrations.langchain import code_execution_tool  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.anyio]

THREAD: Any = {"configurable": {"thread_id": "1"}}
ASK: Any = {"messages": [("user", "Do it.")]}


@pytest.fixture(autouse=True)
def _nothing_sent() -> None:
    SENT.clear()


def registry_with_double(seen: list[str]) -> ToolRegistry:
    registry = ToolRegistry()
    registry.before_call(lambda call: seen.append(call.name))

    @registry.tool
    def double(n: int) -> int:
        """Double a whole number."""
        return 2 * n

    return registry


TWO_TOOLS = "w = call_tool('weather', city='Oslo', days='2')\nset_result([w, call_tool('double', n=w['temp'])])"


async def test_the_agents_loop_runs_code_that_calls_two_tools() -> None:
    seen: list[str] = []
    async with Runtime(registry_with_double(seen)) as runtime:
        agent = create_agent(model(TWO_TOOLS), tools=[code_execution_tool(runtime, tools=[weather])])
        result = await agent.ainvoke(ASK)
    (answer,) = answers(result)
    assert answer.content == '[{"city": "Oslo", "days": 2, "temp": 20, "messages": 2}, 40]'
    assert answer.status == "success" and answer.artifact["outcome"] == "ok"
    assert [call["name"] for call in answer.artifact["calls"]] == seen == ["weather", "double"]
    assert result["messages"][-1].content == "done"


def test_a_blocking_agent_has_a_blocking_runtime() -> None:
    with SyncRuntime(registry_with_double([])) as runtime:
        agent = create_agent(model(TWO_TOOLS), tools=[code_execution_tool(runtime, tools=[weather])])
        assert answers(agent.invoke(ASK))[0].artifact["value"][1] == 40


async def test_a_runtime_of_the_wrong_kind_says_which_one_it_should_be() -> None:
    async with Runtime() as runtime:
        with pytest.raises(UsageError, match="give it a SyncRuntime"):
            create_agent(model("1"), tools=[code_execution_tool(runtime)]).invoke(ASK)
    with SyncRuntime() as blocking, pytest.raises(UsageError, match="give it a Runtime"):
        await create_agent(model("1"), tools=[code_execution_tool(blocking)]).ainvoke(ASK)
    with pytest.raises(Misconfigured, match="not open"):
        await create_agent(model("1"), tools=[code_execution_tool(Runtime())]).ainvoke(ASK)


async def test_outside_of_an_agent_it_is_an_ordinary_tool() -> None:
    async with Runtime() as runtime:
        made = code_execution_tool(runtime, name="python", tools=[weather])
        assert made.name == "python" and "def weather(" in made.description
        assert await made.ainvoke({"code": "6 * 7"}) == "42"
        assert "needs the state of a graph" in await made.ainvoke({"code": "call_tool('weather', city='Oslo')"})


def asking(seen: list[str]) -> ToolRegistry:
    """A registry under whose rules `notify` needs approval."""
    registry = registry_with_double(seen)

    @registry.tool(requires_approval=True)
    def notify(who: str) -> str:
        """Notify somebody of something."""
        SENT.append((who, ""))
        return f"notified {who}"

    return registry


NOTIFY = "n = call_tool('double', n=1)\n[n, call_tool('notify', who='ann'), call_tool('notify', who='bob')]"


async def test_calls_that_need_approval_interrupt_the_graph_and_nothing_is_done_twice() -> None:
    seen: list[str] = []
    async with Runtime(asking(seen)) as runtime:
        tools = [code_execution_tool(runtime)]
        agent = create_agent(model(NOTIFY), tools=tools, checkpointer=InMemorySaver())
        result = await agent.ainvoke(ASK, THREAD)
        asked = result["__interrupt__"][0].value
        assert asked["action_requests"][0]["name"] == "notify" and asked["action_requests"][0]["args"] == {"who": "ann"}
        assert asked["review_configs"] == [
            {"action_name": "notify", "allowed_decisions": ["approve", "edit", "reject"]}
        ]
        edited = {"type": "edit", "edited_action": {"name": "notify", "args": {"who": "eve"}}}
        result = await agent.ainvoke(Command(resume={"decisions": [edited]}), THREAD)
        assert result["__interrupt__"][0].value["action_requests"][0]["args"] == {"who": "bob"}
        result = await agent.ainvoke(Command(resume={"decisions": [{"type": "approve"}]}), THREAD)
    assert answers(result)[0].content == '[2, "notified eve", "notified bob"]'
    assert [who for who, _ in SENT] == ["eve", "bob"]
    assert seen.count("double") == 1


def test_a_blocking_agent_is_interrupted_too_and_a_rejected_call_is_an_error_of_the_script() -> None:
    with SyncRuntime(asking([])) as runtime:
        tools = [code_execution_tool(runtime)]
        agent = create_agent(model(NOTIFY), tools=tools, checkpointer=InMemorySaver())
        assert "__interrupt__" in agent.invoke(ASK, THREAD)
        result = agent.invoke(Command(resume={"decisions": [{"type": "reject", "message": "leave her"}]}), THREAD)
    assert answers(result)[0].status == "error" and "leave her" in answers(result)[0].text
    assert SENT == []


@pytest.mark.parametrize("answer", ["yes", {"decisions": []}, {"decisions": [{"type": "respond", "message": "x"}]}])
async def test_an_answer_that_is_no_decision_is_refused_and_the_call_is_not_made(answer: Any) -> None:
    async with Runtime(asking([])) as runtime:
        agent = create_agent(model(NOTIFY), tools=[code_execution_tool(runtime)], checkpointer=InMemorySaver())
        await agent.ainvoke(ASK, THREAD)
        with pytest.raises(UsageError, match="decision"):
            await agent.ainvoke(Command(resume=answer), THREAD)
    assert SENT == []


@pytest.mark.parametrize("on_approval", ["ask", "deny"])
async def test_without_interrupts_a_call_that_needs_approval_is_refused(on_approval: Any) -> None:
    async with Runtime(asking([])) as runtime:
        agent = create_agent(model(NOTIFY), tools=[code_execution_tool(runtime, on_approval=on_approval)])
        (answer,) = answers(await agent.ainvoke(ASK))
    assert answer.status == "error" and "approv" in answer.text and SENT == []


async def test_with_a_session_names_stay() -> None:
    async with Runtime() as runtime, runtime.session() as session:
        agent = create_agent(model("x = 40", "x + 2"), tools=[code_execution_tool(session)])
        assert answers(await agent.ainvoke(ASK))[1].content == "42"


async def test_pictures_are_shown_to_the_model() -> None:
    source = (
        "open('dot.png', 'wb').write(bytes.fromhex('89504e470d0a1a0a') + b'rest')\nset_result(1, files=['dot.png'])"
    )
    async with Runtime() as runtime:
        agent = create_agent(model(source), tools=[code_execution_tool(runtime)])
        (answer,) = answers(await agent.ainvoke(ASK))
    assert [block["type"] for block in answer.content] == ["text", "image"]
    assert answer.content[1]["mime_type"] == "image/png"


@tool
def asks() -> str:
    """Ask a person in the middle of a tool."""
    return str(interrupt("may I?"))


@tool
def leaves() -> Any:
    """Hand the conversation over to somebody else."""
    return Command(goto="elsewhere")


FAILURES: list[tuple[str, str]] = [
    ("print('so far')\n1 / 0", "ZeroDivisionError"),
    ("while True: pass", "timed out after 3 s"),
    ("   ", "there is no code to run"),
    ("call_tool('denied')", "Tool 'denied' failed"),
    ("call_tool('broken')", "Tool 'broken' failed"),
    ("call_tool('worded')", "no such thing here"),
    ("call_tool('asks')", "interrupt_on"),
    ("call_tool('leaves')", "another place of the graph"),
    ("call_tool('weather')", "city"),
    ("call_tool('aborts')", "no further"),
]


@pytest.mark.parametrize(("source", "said"), FAILURES, ids=[source[:24] for source, _ in FAILURES])
async def test_a_failure_is_a_message_with_status_error_and_the_agent_goes_on(source: str, said: str) -> None:
    async with Runtime(refusing_registry(), limits=Limits(wall_s=3)) as runtime:
        made = code_execution_tool(runtime, tools=[weather, broken, worded, asks, leaves])
        result = await create_agent(model(source), tools=[made]).ainvoke(ASK)
    (answer,) = answers(result)
    assert answer.status == "error" and said in answer.text, answer
    assert "secret place" not in answer.text
    assert result["messages"][-1].content == "done"


async def test_cancelling_the_agent_ends_the_script_and_leaves_nothing() -> None:
    started = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait until somebody cancels it."""
        started.set()
        await asyncio.Event().wait()
        return ""

    before = {each.pid for each in psutil.Process().children(recursive=True)}
    async with Runtime(asking([])) as runtime:
        agent = create_agent(model("call_tool('wait')"), tools=[code_execution_tool(runtime, tools=[wait])])
        running = asyncio.create_task(agent.ainvoke(ASK))
        await asyncio.wait_for(started.wait(), 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await runtime.execute_code("6 * 7")).value == 42
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


def test_wrong_arguments_are_refused() -> None:
    check_refusals(code_execution_tool, weather, on_approval="never")


def test_the_example_prints_what_it_says() -> None:
    assert run_example("with_langchain.py") == "Oslo is 4 degrees warmer than Bergen.\n"
