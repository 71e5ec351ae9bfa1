"""The interpreter middleware, in the loops of LangChain and deepagents, with LangChain's scripted model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import psutil
import pytest

from integrations.conftest import needs, run_example
from toolcell import Runtime, SyncRuntime, ToolRegistry
from toolcell.errors import UsageError

needs("deepagents")

from deepagents import create_deep_agent  # noqa: E402
from langchain.agents import AgentState, create_agent  # noqa: E402
from langchain.tools import InjectedToolCallId, tool  # noqa: E402
from langchain_core.messages import SystemMessage, ToolMessage  # noqa: E402
from langgraph.checkpoint.memory import InMemorySaver  # noqa: E402
from langgraph.types import Command  # noqa: E402

from integrations.langchain_agents import SENT, answers, broken, model, send, weather  # noqa: E402
from toolcell.integrations import base, deepagents  # noqa: E402
from toolcell.integrations.deepagents import CodeInterpreterMiddleware  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.anyio]

ASK: Any = {"messages": [("user", "Do it.")]}
TWO_TOOLS = "w = tools.weather(city='Oslo')\n[w['temp'], tools.send(to='ann', text='warm')]"


def thread(ident: str) -> Any:
    return {"configurable": {"thread_id": ident}}


def live(middleware: CodeInterpreterMiddleware) -> int:
    return len(middleware._sessions)


@pytest.fixture(autouse=True)
def _nothing_sent() -> None:
    SENT.clear()


@pytest.mark.parametrize("create", [create_agent, create_deep_agent])
async def test_scripts_call_two_of_the_agents_own_tools(create: Callable[..., Any]) -> None:
    registry, seen = ToolRegistry(), list[str]()
    registry.before_call(lambda call: seen.append(call.name))
    async with Runtime(registry) as runtime:
        scripted = model(TWO_TOOLS)
        middleware = CodeInterpreterMiddleware(runtime, ptc=["weather", "send"])
        agent = create(model=scripted, tools=[weather, send, broken], middleware=[middleware])
        result = await agent.ainvoke(ASK)
        assert live(middleware) == 0
    assert answers(result)[0].content == '[20, "sent"]' and SENT == [("ann", "warm")]
    assert seen == ["weather", "send"]
    told = next(each.text for each in scripted.seen[0] if isinstance(each, SystemMessage))
    assert "def weather(" in told and "def send(" in told and "broken" not in told


async def test_a_tool_that_scripts_may_not_call_is_not_described_and_many_are_shown_in_less_detail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = ToolRegistry()
    registry.policy.blacklist("send")
    monkeypatch.setattr(deepagents, "STUBS_CHARS", 60)
    async with Runtime(registry) as runtime:
        scripted = model("1")
        middleware = CodeInterpreterMiddleware(runtime, ptc=["weather", "send"])
        await create_agent(scripted, tools=[weather, send], middleware=[middleware]).ainvoke(ASK)
    told = next(each.text for each in scripted.seen[0] if isinstance(each, SystemMessage))
    assert "weather" in told and "def weather" not in told and "send" not in told


async def test_the_model_is_told_to_search_when_not_even_the_names_of_the_tools_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepagents, "STUBS_CHARS", 5)
    async with Runtime() as runtime:
        scripted = model("search_tools('weather')[0]['name']")
        middleware = CodeInterpreterMiddleware(runtime, ptc=["weather", "send"])
        agent = create_agent(scripted, tools=[weather, send], middleware=[middleware])
        (answer,) = answers(await agent.ainvoke(ASK))
    told = next(each.text for each in scripted.seen[0] if isinstance(each, SystemMessage))
    assert "2 tools: too many to list" in told and "search_tools(" in told
    assert "weather" in answer.text


async def test_a_tool_that_is_not_in_ptc_is_unknown_to_scripts() -> None:
    async with Runtime() as runtime:
        middleware = CodeInterpreterMiddleware(runtime, ptc=["weather"])
        agent = create_agent(model("tools.send(to='a', text='')"), tools=[weather, send], middleware=[middleware])
        (answer,) = answers(await agent.ainvoke(ASK))
    assert answer.status == "error" and "send" in answer.text and SENT == []


async def test_a_tool_itself_may_be_in_ptc_and_is_then_for_scripts_only() -> None:
    async with Runtime() as runtime:
        middleware = CodeInterpreterMiddleware(runtime, ptc=[weather], tool_name="python")
        scripted = model("tools.weather(city='Oslo')['temp']", name="python")
        agent = create_agent(scripted, tools=[], middleware=[middleware])
        assert answers(await agent.ainvoke(ASK))[0].content == "20"


@pytest.mark.parametrize(
    ("mode", "in_turn", "in_thread"), [("thread", "41", "42"), ("turn", "41", "gone"), ("call", "gone", "gone")]
)
async def test_names_stay_for_the_thread_the_turn_or_the_call(mode: Any, in_turn: str, in_thread: str) -> None:
    read = "try:\n    x += 1\nexcept NameError:\n    x = 'gone'\nset_result(x)"
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    async with Runtime() as runtime:
        middleware = CodeInterpreterMiddleware(runtime, mode=mode)
        agent = create_agent(model("x = 40", read), middleware=[middleware], checkpointer=InMemorySaver())
        first = await agent.ainvoke(ASK, thread("a"))
        assert answers(first)[1].content.strip('"') == in_turn
        again = create_agent(model(read), middleware=[middleware], checkpointer=agent.checkpointer)
        assert answers(await again.ainvoke(ASK, thread("a")))[-1].content.strip('"') == in_thread
        other = create_agent(model(read), middleware=[middleware], checkpointer=agent.checkpointer)
        assert answers(await other.ainvoke(ASK, thread("b")))[-1].content.strip('"') == "gone"
        assert live(middleware) == {"thread": 2}.get(mode, 0)
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


async def test_names_of_a_thread_are_there_in_another_process_with_a_journal_on_disk(tmp_path: Path) -> None:
    saver = InMemorySaver()
    for source, expected in (("x = 40", None), ("x + 2", "42")):
        async with Runtime(record=tmp_path / "runs.db") as runtime:
            middleware = CodeInterpreterMiddleware(runtime)
            agent = create_agent(model(source), middleware=[middleware], checkpointer=saver)
            answer = answers(await agent.ainvoke(ASK, thread("a")))[-1]
            assert expected is None or answer.content == expected


async def test_the_session_that_was_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_SESSIONS", 2)
    async with Runtime() as runtime:
        middleware = CodeInterpreterMiddleware(runtime)
        for ident in "abc":
            agent = create_agent(model("x = 1"), middleware=[middleware], checkpointer=InMemorySaver())
            await agent.ainvoke(ASK, thread(ident))
        assert live(middleware) == 2


REVIEW = {"allowed_decisions": ["approve", "reject"], "description": "Look at it."}


async def test_calls_out_of_scripts_wait_for_a_person_and_the_session_goes_on() -> None:
    async with Runtime() as runtime:
        middleware = CodeInterpreterMiddleware(runtime, ptc=["weather", "send"], interrupt_on={"send": REVIEW})
        agent = create_deep_agent(
            model=model("x = 1\n" + TWO_TOOLS, "x + 1"),
            tools=[weather, send],
            middleware=[middleware],
            checkpointer=InMemorySaver(),
        )
        result = await agent.ainvoke(ASK, thread("a"))
        assert result["__interrupt__"][0].value == {
            "action_requests": [{"name": "send", "args": {"to": "ann", "text": "warm"}, "description": "Look at it."}],
            "review_configs": [{"action_name": "send", "allowed_decisions": ["approve", "reject"]}],
        }
        assert SENT == []
        result = await agent.ainvoke(Command(resume={"decisions": [{"type": "approve"}]}), thread("a"))
    assert [each.content for each in answers(result)] == ['[20, "sent"]', "2"]
    assert SENT == [("ann", "warm")]


def test_a_blocking_agent_keeps_names_and_waits_too() -> None:
    with SyncRuntime() as runtime:
        middleware = CodeInterpreterMiddleware(
            runtime, ptc=["weather", "send"], interrupt_on={"send": True}, mode="turn"
        )
        agent = create_agent(
            model("x = 1\n" + TWO_TOOLS, "x + 1"),
            tools=[weather, send],
            middleware=[middleware],
            checkpointer=InMemorySaver(),
        )
        agent.invoke(ASK, thread("a"))
        result = agent.invoke(Command(resume={"decisions": [{"type": "approve"}]}), thread("a"))
        assert [each.content for each in answers(result)] == ['[20, "sent"]', "2"]
        assert live(middleware) == 0


async def test_the_end_of_an_agent_without_a_session_needs_no_config_of_langgraph() -> None:
    async with Runtime() as runtime:
        middleware = CodeInterpreterMiddleware(runtime)
        assert await middleware.aafter_agent({"messages": []}, None) is None


class Notes(AgentState[Any]):
    """A state with notes."""

    notes: Annotated[list[str], lambda old, new: [*(old or []), *new]]


@tool
def note(text: str, ident: Annotated[str, InjectedToolCallId]) -> Any:
    """Keep a note in the state of the graph."""
    return Command(update={"notes": [text], "messages": [ToolMessage(f"noted {text}", tool_call_id=ident)]})


async def test_what_tools_change_in_the_graphs_state_is_changed() -> None:
    source = "print([tools.note(text='a'), tools.note(text='b')])\n1 / 0"
    async with Runtime() as runtime:
        middleware = CodeInterpreterMiddleware(runtime, ptc=["note"])
        agent = create_agent(model(source), tools=[note], middleware=[middleware], state_schema=Notes)
        result = await agent.ainvoke(ASK)
    (answer,) = answers(result)
    assert result["notes"] == ["a", "b"]
    assert answer.status == "error" and "ZeroDivisionError" in answer.text and "noted a" in answer.text


async def test_scripts_use_the_files_of_a_deep_agent() -> None:
    source = "tools.write_file(file_path='/a.txt', content='one')\ntools.read_file(file_path='/a.txt')"
    async with Runtime() as runtime:
        middleware = CodeInterpreterMiddleware(runtime, ptc=["write_file", "read_file"])
        result = await create_deep_agent(model=model(source), middleware=[middleware]).ainvoke(ASK)
    assert "one" in answers(result)[0].text and "/a.txt" in result["files"]


def test_wrong_arguments_are_refused() -> None:
    runtime = Runtime()
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: CodeInterpreterMiddleware("process"), "runtime"),  # type: ignore[arg-type]
        (lambda: CodeInterpreterMiddleware(runtime, ptc="weather"), "ptc="),
        (lambda: CodeInterpreterMiddleware(runtime, ptc=[3]), "ptc="),  # type: ignore[list-item]
        (lambda: CodeInterpreterMiddleware(runtime, mode="day"), "mode"),  # type: ignore[arg-type]
        (lambda: CodeInterpreterMiddleware(runtime, on_approval="never"), "never"),  # type: ignore[arg-type]
        (lambda: CodeInterpreterMiddleware(runtime, interrupt_on={"send": {"when": print}}), "allowed_decisions"),
    ]
    for make, said in wrong:
        with pytest.raises(UsageError, match=said):
            make()


def test_the_example_prints_what_it_says() -> None:
    assert run_example("with_deepagents.py") == EXAMPLE


EXAMPLE = """\
approved: send {'to': 'ann', 'text': 'tides: summer'}
files: /titles.txt
Ann has the first title.
"""
