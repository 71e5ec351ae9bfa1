"""What an agent's model is shown of 1, 30, 500 and 2,000 tools, and how it comes to call those that are not shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rows import each_row
from toolcell.agents import Agent, ToolLoopConfig, run_tool_loop
from toolcell.agents.providers.provider import user
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.config import SHOWN_CHARS
from toolcell.errors import UsageError
from toolcell.tools import ToolRegistry
from tools.catalogues import catalogue
from tools.toolkit import FakeRuntime

pytestmark = pytest.mark.anyio


async def nothing(call_tool: Any) -> Any:
    return await call_tool("crm.find_report", {"title": "x"})


def shown(model: ScriptedModel, turn: int) -> list[str]:
    return [each.name for each in model.requests[turn].tools]


@each_row(("count", "listed"), [(1, 1), (30, 30), (500, 1), (2_000, 1)])
async def test_a_model_is_shown_all_tools_or_the_search(count: int, listed: int) -> None:
    agent = Agent(ScriptedModel(["done"]), tools=catalogue(count))

    definitions = agent.definitions()

    assert len(definitions) == listed
    assert ("search_tools" in [each.name for each in definitions]) is (count > 30)
    assert sum(len(json.dumps(each.to_openai())) for each in definitions) < SHOWN_CHARS * 1.5


async def test_a_tool_that_was_found_is_listed_from_the_next_turn_on_and_can_be_called() -> None:
    search = {"query": "find a report in the crm", "limit": 2}
    call = calls(("crm__find_report", {"title": "May"}))
    model = ScriptedModel([calls(("search_tools", search)), call, "found", "again"])
    agent = Agent(model, tools=catalogue(500))

    await agent.run("Which report is it?")
    await agent.run("And again?")

    assert shown(model, 0) == ["search_tools"]
    assert "crm.find_report" in shown(model, 1) and len(shown(model, 1)) == 3
    assert model.requests[1].messages[-1]["content"].startswith("crm.find_report(title: str")
    assert json.loads(model.requests[2].messages[-1]["content"])["title"] == "May"
    assert shown(model, 3) == ["crm.find_report", "search_tools"]  # what the conversation has called


async def test_a_tool_that_is_not_shown_is_called_by_name_by_a_plan_and_by_code() -> None:
    steps = [{"tool": "crm.find_report", "args": {"title": "x"}}]
    model = ScriptedModel(
        [
            calls(
                ("crm.find_report", {"title": "x"}),
                ("execute_plan", {"steps": steps}),
                ("execute_code", {"code": "..."}),
            ),
            "done",
        ]
    )
    agent = Agent(model, tools=catalogue(500), plan_execution=True, code_execution=FakeRuntime(nothing))

    result = await agent.run("Go on")

    assert shown(model, 0) == ["execute_plan", "execute_code", "search_tools"]
    assert all("crm.find_report" in step.output for step in result.steps) and len(result.steps) == 3
    told = {each.name: each.description for each in model.requests[0].tools}
    assert "500 tools" in told["execute_code"] and "so does search_tools" in told["execute_code"]
    assert "a script of execute_code at once" in told["search_tools"]


@each_row(("shown_chars", "all_shown"), [(0, False), (1_000, False), (10**9, True)])
async def test_the_budget_is_a_parameter_of_agents_and_loops(shown_chars: int, all_shown: bool) -> None:
    registry = catalogue(20)
    registry.enable_tool_search()
    model, looping = ScriptedModel(["done"]), ScriptedModel(["done"])

    agent = Agent(model, tools=registry, code_execution=FakeRuntime(nothing), shown_chars=shown_chars)
    await agent.run("Hello")
    await run_tool_loop(ToolLoopConfig(provider=looping, tools=registry, shown_chars=shown_chars), [user("Hello")])

    assert (len(shown(model, 0)) == 22) is all_shown
    assert (len(shown(looping, 0)) == 21) is all_shown
    [code] = [each.description for each in model.requests[0].tools if each.name == "execute_code"]
    assert ("def create_invoice" in code) is all_shown
    with pytest.raises(UsageError, match="shown_chars must be a whole number"):
        Agent(model, shown_chars=-1)


async def test_a_loop_without_a_search_is_shown_everything() -> None:
    model = ScriptedModel(["done"])
    await run_tool_loop(ToolLoopConfig(provider=model, tools=catalogue(500)), [user("Hello")])
    assert len(shown(model, 0)) == 500


async def test_an_agent_s_own_tool_of_that_name_stays_and_everything_is_shown() -> None:
    registry = catalogue(500)

    @registry.tool
    def search_tools(query: str) -> str:
        """Search for drills and hammers in the shop."""
        return "a hammer"

    model = ScriptedModel([calls(("search_tools", {"query": "hammer"})), "done"])
    await Agent(model, tools=registry).run("A hammer, please")

    assert len(shown(model, 0)) == 501
    assert model.requests[1].messages[-1]["content"] == "a hammer"


async def test_a_sub_agent_searches_its_own_tools_under_the_rules_above_it() -> None:
    found = calls(("search_tools", {"query": "create invoice", "limit": 100, "detail": "names"}))
    inner = ScriptedModel([found, "done"])
    tools = ToolRegistry()
    outer = Agent(ScriptedModel([calls(("clerk", {"task": "x"})), "done"]), tools=tools)
    outer.add_subagent(Agent(inner, tools=catalogue(500)).as_tool("clerk", "Does the work of an office"))
    outer.blacklist("mail.*")

    await outer.run("Go on")

    assert shown(inner, 0) == ["search_tools"]
    names = inner.requests[1].messages[-1]["content"].split(", ")
    assert len(names) == 100 and not any(name.startswith("mail.") for name in names)
    assert shown(inner, 1)[-1] == "search_tools" and len(shown(inner, 1)) > 10
