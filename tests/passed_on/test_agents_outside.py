"""The main claims about agents, on public names only, so that the files behind them can move."""

from __future__ import annotations

import json
from typing import Any

import pytest

from passed_on.office import SECRET, Office
from toolcell import Agent, PoolConfig, ResumeError, RunContext, Runtime, ToolRegistry, UsageError
from toolcell.agents import ProviderError, RetryPolicy
from toolcell.calls.options import Origin
from toolcell.control import Approve, Deny
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import Budget, Secrets

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


def answers(messages: Any) -> list[str]:
    return [str(message["content"]) for message in messages if message["role"] == "tool"]


WRITE = calls(("write", {"text": "a"}))


async def test_a_conversation_goes_on_until_it_is_forgotten(office: Office) -> None:
    model = ScriptedModel([WRITE, "first", "second", "third"])
    agent = Agent(model, tools=office.registry, system_prompt="You are a clerk.")
    first, second = await agent.run("one"), await agent.run("two")
    agent.reset()
    await agent.run("three")

    assert (first.content, first.stop_reason, first.iterations, second.content) == ("first", "final", 2, "second")
    assert [message["role"] for message in second.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert answers(first.messages) == ["wrote a"] and office.made == ["a"]
    assert [message["role"] for message in model.requests[-1].messages] == ["system", "user"]
    json.dumps(second.messages)


async def test_every_call_has_an_answer_also_one_that_cannot_be_made(office: Office) -> None:
    wrong = calls(("writ", {"text": "a"}), ("write", {"txt": "a"}), ("write", "{"), ("write", {"text": "b"}))
    result = await Agent(ScriptedModel([wrong, "done"]), tools=office.registry).run("go")

    unknown, arguments, unreadable, made = answers(result.messages)
    assert "write" in unknown and "text" in arguments and unreadable and made == "wrote b"
    assert result.content == "done" and office.made == ["b"]


async def test_the_number_of_turns_is_bounded(office: Office) -> None:
    result = await Agent(
        ScriptedModel([WRITE], repeat=True), tools=office.registry, max_iterations=3, synthesize=False
    ).run("go")
    assert result.stop_reason == "max_iterations" and result.iterations == 3 and office.made == ["a"] * 3


async def test_a_budget_holds_for_an_agent_and_all_its_sub_agents(office: Office) -> None:
    inner = Agent(ScriptedModel([WRITE, WRITE, WRITE, "done"]), tools=office.registry)
    outer = Agent(
        ScriptedModel([WRITE, calls(("helper", {"task": "go"})), "done"]),
        tools=office.registry,
        budget=Budget(tool_calls=4),
    )
    outer.registry.add(inner.as_tool("helper", "Does the work of the one that asks."))
    await outer.run("go")
    assert len(office.made) <= 3


async def test_a_run_that_is_cancelled_has_a_result_in_which_every_call_has_an_answer(office: Office) -> None:
    agent = Agent(ScriptedModel([calls(("wait", {}), ("write", {"text": "a"})), "done"]), tools=office.registry)
    office.while_waiting = lambda: agent.cancel("enough")
    result = await agent.run("go")

    assert (result.stop_reason, result.error) == ("cancelled", "enough") and office.ended_waiting.is_set()
    assert len(answers(result.messages)) == 2 and result.is_error


async def test_an_agent_runs_one_prompt_at_a_time(office: Office) -> None:
    agent = Agent(ScriptedModel([calls(("again", {})), "done"]), tools=office.registry)
    refused = list[str]()

    async def again() -> str:
        """Run the agent that calls this."""
        with pytest.raises(UsageError, match="already running") as caught:
            await agent.run("again")
        refused.append(str(caught.value))
        return "tried"

    agent.registry.add(again)
    assert (await agent.run("go")).content == "done"
    assert len(refused) == 1


async def test_a_provider_that_fails_is_tried_again_and_then_named() -> None:
    retry = RetryPolicy(attempts=3, base_s=0.0)
    model = ScriptedModel([ProviderError("overloaded", status=529, retryable=True)], repeat=True)
    result = await Agent(model, retry=retry).run("go")
    assert result.stop_reason == "provider_error" and result.error is not None and "overloaded" in result.error
    assert model.samplings == 3


async def test_what_is_forbidden_is_forbidden_for_sub_agents_too(office: Office) -> None:
    inner = Agent(ScriptedModel([WRITE, "done"]), tools=office.registry)
    outer = Agent(ScriptedModel([calls(("helper", {"task": "go"})), "done"]))
    outer.registry.add(inner.as_tool("helper", "Does the work of the one that asks."))
    outer.blacklist("write")
    await outer.run("go")
    assert office.made == []


async def test_a_tool_that_sub_agents_may_not_call_is_not_offered_to_them(office: Office) -> None:
    registry = office.registry.merged()
    registry.blacklist("write", origins=[Origin.SUBAGENT])
    model = ScriptedModel([WRITE, "done"])
    inner = Agent(model, tools=registry)
    outer = Agent(ScriptedModel([calls(("helper", {"task": "go"})), "done"]))
    outer.registry.add(inner.as_tool("helper", "Does the work of the one that asks."))
    await outer.run("go")
    assert "write" not in model.requests[0].tool_names and office.made == []


async def test_agents_do_not_call_themselves_in_a_circle() -> None:
    model = ScriptedModel([calls(("again", {"task": "go"})), "inner done", "outer done"])
    agent = Agent(model)
    agent.registry.add(agent.as_tool("again", "Does the same once more, and again."))
    result = await agent.run("go")
    assert "circle" in answers(result.messages)[0] and model.samplings == 2


@pytest.mark.parametrize("decision", [Approve(), Deny("not today")], ids=["approved", "denied"])
async def test_an_agent_waits_for_a_person_and_goes_on_as_decided(office: Office, decision: Any) -> None:
    both = calls(("agree", {}), ("write", {"text": "a"}))
    agent = Agent(ScriptedModel([both, "done"]), tools=office.registry, on_approval="suspend")
    waiting = await agent.run("go")
    assert waiting.stop_reason == "suspended" and waiting.suspension is not None and office.made == ["a"]
    (call,) = waiting.suspension.calls

    other = Agent(ScriptedModel([both, "done"]), tools=office.registry, on_approval="suspend")
    with pytest.raises(ResumeError):
        await other.resume(waiting.suspension.to_json(), {call.id: decision})
    result = await agent.resume(waiting.suspension.to_json(), {call.id: decision})
    with pytest.raises(ResumeError):
        await agent.resume(waiting.suspension.to_json(), {call.id: decision})

    said = " ".join(answers(result.messages))
    assert result.content == "done" and ("agreed" in said) == isinstance(decision, Approve) and office.made == ["a"]


@pytest.mark.slow
@pytest.mark.isolation
async def test_a_waiting_script_of_an_agent_goes_on_in_another_process(office: Office, tmp_path: Any) -> None:
    code = "call_tool('write', text='a')\nset_result(call_tool('agree'))"
    async with Runtime(office.registry, pool=PoolConfig(warm=0), record=tmp_path / "j" / "runs.db") as runtime:
        agent = Agent(
            ScriptedModel([calls(("execute_code", {"code": code}))]),
            tools=office.registry,
            code_execution=runtime,
            on_approval="suspend",
        )
        waiting = await agent.run("go")
        assert waiting.suspension is not None
        kept, token = json.dumps(agent.messages), waiting.suspension.to_json()
        idents = [call.id for call in waiting.suspension.calls]
    async with Runtime(office.registry, pool=PoolConfig(warm=0), record=tmp_path / "j" / "runs.db") as runtime:
        agent = Agent(ScriptedModel(["done"]), tools=office.registry, code_execution=runtime, on_approval="suspend")
        agent.messages = json.loads(kept)
        result = await agent.resume(token, {ident: Approve() for ident in idents})
    assert result.content == "done" and "agreed" in answers(result.messages)[0] and office.made == ["a"]


@pytest.mark.isolation
async def test_a_script_after_one_that_failed_repairs_it(office: Office) -> None:
    replies: list[Any] = [
        calls(("execute_code", {"code": "call_tool('write', text='a')\n1/0"})),
        calls(("execute_code", {"code": "set_result(call_tool('write', text='a'))"})),
        "done",
    ]
    async with Runtime(office.registry, pool=PoolConfig(warm=0)) as runtime:
        agent = Agent(ScriptedModel(replies), tools=office.registry, code_execution=runtime, repair=True)
        result = await agent.run("go")
    assert "ZeroDivisionError" in answers(result.messages)[0] and "wrote a" in answers(result.messages)[1]
    assert office.made == ["a"]


async def test_events_of_an_agent_tell_its_turns_calls_and_messages(office: Office) -> None:
    agent, seen = Agent(ScriptedModel([WRITE, "done"]), tools=office.registry, name="clerk"), list[str]()
    agent.subscribe(lambda event: seen.append(event.type))
    await agent.run("go", context=RunContext(secrets=Secrets({"key": SECRET})))

    assert seen[0] == "agent_start" and seen[-1] == "agent_end"
    assert seen.count("turn_start") == seen.count("turn_end") == 2
    assert seen.count("tool_execution_start") == seen.count("tool_execution_end") == 1
    assert agent.pending_tool_calls == []


async def test_tools_can_be_given_for_one_run_only(office: Office) -> None:
    model = ScriptedModel(["one", "two"])
    agent = Agent(model, tools=office.registry)
    await agent.run("go", tools=ToolRegistry())
    await agent.run("go")
    assert model.requests[0].tool_names == [] and "write" in model.requests[1].tool_names
