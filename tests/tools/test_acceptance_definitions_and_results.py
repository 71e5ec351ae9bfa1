"""The examples of tool definitions, of the custom tool guide and of the result model, as their documents show them."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.compat import all_definitions, async_, error, ok, silent, to_content_error, to_for_llm, user
from toolcell.tools import ToolContext, ToolDefinition, ToolRegistry, ToolResult
from tools.toolkit import Crowd, FakeRuntime, Meeting

pytestmark = pytest.mark.anyio


SEARCH_PARAMETERS = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "Search query"},
        "limit": {"type": "integer", "description": "Max results (default 10)"},
    },
    "required": ["query"],
}


def a_registry_of_two() -> ToolRegistry:
    registry = ToolRegistry()
    found = ToolResult.ok("two pages about go")
    registry.register("web_search", "Search the web for information", SEARCH_PARAMETERS, lambda args: found)
    registry.register("knowledge_search", "Search what is known already", SEARCH_PARAMETERS, lambda args: found)
    return registry


@pytest.mark.conforms("EX-1", "A3", "E6", "E7")
def test_a_definition_reaches_each_provider_in_its_own_shape_and_otherwise_untouched() -> None:
    definition = ToolDefinition(
        name="web_search", description="Search the web for information", parameters=SEARCH_PARAMETERS
    )

    openai = definition.to_openai()["function"]
    anthropic = definition.to_anthropic()

    assert openai["parameters"] == definition.parameters == SEARCH_PARAMETERS
    assert json.dumps(openai["parameters"]) == json.dumps(SEARCH_PARAMETERS)
    assert set(anthropic) == {"name", "description", "input_schema"}


@pytest.mark.conforms("EX-2", "E2", "E8", "C24", "V-4")
async def test_a_registry_dispatches_by_name_and_an_unknown_name_is_a_result() -> None:
    registry = a_registry_of_two()

    by_text = await registry.execute("web_search", '{"query": "go"}')
    by_dict = await registry.execute("web_search", {"query": "go"})
    unknown = await registry.execute("nope", {})

    assert [each.name for each in all_definitions(registry)] == ["web_search", "knowledge_search"]
    assert by_text.text == by_dict.text == "two pages about go"
    assert unknown.is_error
    assert "unknown tool: nope" in unknown.text


@pytest.mark.conforms("EX-3", "B2", "J5", "V-1")
async def test_a_returned_failure_and_a_raised_one_are_both_results_the_model_can_read() -> None:
    async def right(city: str) -> ToolResult:
        """Look up a city the right way."""
        return ToolResult.fail("city not found: " + city, code="no_such_city")

    async def wrong(city: str) -> ToolResult:
        """Look up a city the wrong way."""
        raise RuntimeError("city not found: " + city)

    registry = ToolRegistry([right, wrong])
    model = ScriptedModel([calls(("right", {"city": "Atlantis"})), calls(("wrong", {"city": "Atlantis"})), "sorry"])

    proper = await registry.execute("right", {"city": "Atlantis"})
    improper = await registry.execute("wrong", {"city": "Atlantis"})
    run = await Agent(model, tools=registry).run("weather?")

    for result in (proper, improper):
        assert result.is_error
        assert "city not found: Atlantis" in result.message
    assert proper.error is not None
    assert proper.error.code == "no_such_city"
    assert improper.error is not None
    assert improper.error.code == "exception"
    assert isinstance(improper.exc, RuntimeError)
    assert to_content_error(proper) == {"content": "", "error": "city not found: Atlantis"}
    assert (run.content, model.samplings) == ("sorry", 3)


@pytest.mark.conforms("EX-4", "F1", "F2", "F4", "F5", "F8", "F-b4", "V-5")
async def test_calls_of_one_response_overlap_and_are_answered_in_the_order_of_the_request() -> None:
    together = Meeting(3)
    crowd = Crowd()
    finished: list[str] = []

    def tool(name: str, last: bool) -> Any:
        async def run(ctx: ToolContext) -> str:
            await together.join()
            if last:
                await anyio.lowlevel.checkpoint()
            finished.append(name)
            return f"from {name}"

        run.__name__, run.__doc__ = name, "A tool that waits for the others."
        return run

    async def visit() -> str:
        """Be counted while running."""
        await crowd.visit()
        return "visited"

    registry = ToolRegistry([tool("web_search", True), tool("knowledge_search", True), tool("file_read", False), visit])
    three = calls(("web_search", {}), ("knowledge_search", {}), ("file_read", {}))
    model = ScriptedModel([three, "done", calls(*[("visit", {})] * 25), "done"])
    agent = Agent(model, tools=registry)

    first = await agent.run("go")
    await agent.run("again")

    answers = [message["content"] for message in first.messages if message["role"] == "tool"]
    assert answers == ["from web_search", "from knowledge_search", "from file_read"]
    assert finished[0] == "file_read"
    assert (first.iterations, model.samplings) == (2, 4)
    assert (crowd.visits, crowd.most) == (25, 10)


@pytest.mark.conforms("EX-5", "F3")
async def test_a_single_call_runs_in_the_task_of_its_caller() -> None:
    async def whoami() -> int:
        """Tell the id of the running task."""
        return anyio.get_current_task().id

    registry = ToolRegistry([whoami])

    [result] = await registry.execute_batch([("whoami", {})])

    assert result.value == anyio.get_current_task().id


@pytest.mark.conforms("EX-6", "P1", "P2")
async def test_execute_plan_is_there_only_when_enabled() -> None:
    registry = a_registry_of_two()
    with_plan = Agent(ScriptedModel([calls(("execute_plan", {"steps": []})), "x"]), tools=registry, plan_execution=True)
    without = Agent(ScriptedModel([calls(("execute_plan", {"steps": []})), "x"]), tools=registry)

    names = {agent: [each.name for each in agent.definitions()] for agent in (with_plan, without)}
    answers = {agent: (await agent.run("plan")).messages[2]["content"] for agent in (with_plan, without)}

    assert names[with_plan] == ["web_search", "knowledge_search", "execute_plan"]
    assert names[without] == ["web_search", "knowledge_search"]
    assert answers[with_plan] == "execute_plan requires at least one step"
    assert "unknown tool: execute_plan" in answers[without]
    assert registry.list() == ["web_search", "knowledge_search"]


class Weather:
    def __init__(self, api_key: str, broken: bool = False) -> None:
        self.api_key = api_key
        self.broken = broken
        self.asked: list[Any] = []

    def definitions(self) -> list[ToolDefinition]:
        city = {"type": "string", "description": "City name (e.g. 'Jakarta', 'New York')"}
        schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
        return [ToolDefinition("get_weather", "Get current weather for a city.", schema)]

    async def execute(self, ctx: ToolContext, name: str, args: dict[str, Any]) -> ToolResult:
        self.asked.append(args)
        try:
            if self.broken:
                raise ConnectionError("no route")
        except ConnectionError as exc:
            return ToolResult.fail(f"weather API error: {exc}")
        return ToolResult.ok(f"Weather in {args['city']}: 28°C, sunny")


@pytest.mark.conforms("EX-13", "A1", "C22", "C-b1")
async def test_the_weather_tool_of_the_guide_works_as_written() -> None:
    weather = Weather("k")
    registry = ToolRegistry([weather])

    sunny = await registry.execute("get_weather", {"city": "Jakarta"})
    broken_json = await registry.execute("get_weather", "{bad json")
    nowhere = await registry.execute("get_weather", {})
    failing = await ToolRegistry([Weather("k", broken=True)]).execute("get_weather", {"city": "Jakarta"})

    assert sunny.text == "Weather in Jakarta: 28°C, sunny"
    assert broken_json.text.startswith("invalid args: ")
    assert nowhere.is_error
    assert "city" in nowhere.text
    assert weather.asked == [{"city": "Jakarta"}]
    assert failing.message == "weather API error: no route"


@pytest.mark.conforms("EX-14", "A14")
async def test_a_registered_tool_is_in_the_first_request_without_further_steps() -> None:
    model = ScriptedModel(["hello"])

    await Agent(model, tools=[Weather("k")]).run("hi")

    assert model.requests[0].tool_names == ["get_weather"]


class Widgets:
    def definitions(self) -> list[ToolDefinition]:
        empty: dict[str, Any] = {"type": "object", "properties": {}}
        described = {"create": "Create a widget", "list": "List all widgets", "delete": "Delete a widget"}
        return [ToolDefinition(f"widget_{verb}", text, empty) for verb, text in described.items()]

    async def execute(self, ctx: ToolContext | None, name: str, args: dict[str, Any]) -> ToolResult:
        match name:
            case "widget_create" | "widget_list" | "widget_delete":
                return ToolResult.ok(f"{name} done")
            case _:
                return ToolResult.fail(f"unknown tool: {name}")


@pytest.mark.conforms("EX-15", "A2", "E1")
async def test_one_object_offers_several_functions_and_is_told_which_was_called() -> None:
    registry = ToolRegistry()
    registry.add(Widgets())

    results = [await registry.execute(name) for name in registry]
    stray = await Widgets().execute(None, "widget_x", {})

    assert registry.list() == ["widget_create", "widget_list", "widget_delete"]
    assert [result.text for result in results] == ["widget_create done", "widget_list done", "widget_delete done"]
    assert stray.text == "unknown tool: widget_x"


class Remember:
    def __init__(self, store: list[str], embed: Any) -> None:
        self.store = store
        self.embed = embed

    def definitions(self) -> list[ToolDefinition]:
        text = {"type": "object", "properties": {"content": {"type": "string"}}, "required": ["content"]}
        return [ToolDefinition("remember", "Keep a note for later.", text)]

    async def execute(self, ctx: ToolContext, name: str, args: dict[str, Any]) -> ToolResult:
        self.store.append(self.embed(args["content"]))
        return ToolResult.ok(f"{len(self.store)} notes")


@pytest.mark.conforms("EX-16", "A13")
async def test_what_a_tool_depends_on_is_given_to_it_and_shared_with_nobody() -> None:
    mine, yours = list[str](), list[str]()
    one, other = ToolRegistry([Remember(mine, str.upper)]), ToolRegistry([Remember(yours, str.lower)])

    await one.execute("remember", {"content": "Tea"})
    await other.execute("remember", {"content": "Coffee"})

    assert (mine, yours) == (["TEA"], ["coffee"])


@pytest.mark.conforms("EX-17", "C23", "A16")
async def test_a_value_outside_its_enum_is_refused_with_the_allowed_values() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "Natural language search query. Be specific."},
            "limit": {"type": "integer", "description": "Maximum number of results to return. Default: 10, max: 50."},
            "format": {
                "type": "string",
                "enum": ["brief", "detailed"],
                "description": "Output format. 'brief' for summaries, 'detailed' for full content.",
            },
        },
        "required": ["query"],
    }
    registry = ToolRegistry()
    registry.register("search", "Search everything there is.", parameters, lambda args: "found")

    refused = await registry.execute("search", {"query": "q", "format": "xml"})
    accepted = await registry.execute("search", {"query": "q"})

    assert refused.is_error
    for word in ("format", "brief", "detailed"):
        assert word in refused.text
    assert accepted.text == "found"
    assert json.dumps(registry.to_provider_defs()[0]["function"]["parameters"]) == json.dumps(parameters)


@pytest.mark.conforms("EX-37", "B6", "B8")
def test_the_result_aides_set_exactly_the_documented_flags() -> None:
    quiet = {"silent": False, "is_error": False, "async": False}
    failure = ValueError("disk full")
    failed = error("failed").with_error(failure)

    assert to_for_llm(ok("File saved")) == {"for_llm": "File saved", **quiet}
    assert to_for_llm(silent("noted")) == {"for_llm": "noted", **quiet, "silent": True}
    assert to_for_llm(async_("started")) == {"for_llm": "started", **quiet, "async": True}
    assert to_for_llm(error("failed")) == {"for_llm": "failed", **quiet, "is_error": True}
    assert to_for_llm(user("hello")) == {"for_llm": "hello", "for_user": "hello", **quiet}
    assert failed.exc is failure
    assert "err" not in to_for_llm(failed)
    assert "disk full" not in json.dumps(failed.to_dict())


@pytest.mark.conforms("EX-10", "P16")
async def test_code_filters_what_a_tool_returned_as_data() -> None:
    async def web_search(query: str) -> list[dict[str, Any]]:
        """Search the web for information."""
        return [{"title": "a", "score": 0.9}, {"title": "b", "score": 0.2}, {"title": "c"}]

    async def script(call_tool: Any) -> Any:
        results = await call_tool("web_search", {"query": "Go frameworks"})
        return {"top_results": [r for r in results if r.get("score", 0) > 0.8]}

    registry = ToolRegistry([web_search])
    registry.enable_code_execution(FakeRuntime(script))

    out = await registry.execute("execute_code", {"code": "results = call_tool(...)"})

    assert json.loads(out.text) == out.value == {"top_results": [{"title": "a", "score": 0.9}]}
