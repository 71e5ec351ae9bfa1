"""The examples of typed tools: derived schemas, validation, progress, order and interception."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from pydantic import BaseModel, Field

from rows import each_row
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.tools import (
    AgentTool,
    Block,
    Call,
    Image,
    Override,
    Text,
    ToolDefinition,
    ToolRegistry,
    ToolResult,
)
from tools.toolkit import Meeting, kinds, recorded

pytestmark = pytest.mark.anyio


class SearchArgs(BaseModel):
    query: str = Field(description="Search query", min_length=1)
    limit: int | None = Field(None, description="Max results", ge=1, le=50)


def search_docs(execute: Any, **record: Any) -> AgentTool:
    return AgentTool(
        ToolDefinition.from_model("search_docs", "Search the documentation", SearchArgs), execute, **record
    )


@pytest.mark.conforms("EX-18", "C1", "C4", "C5", "C6", "C-b3")
def test_a_schema_derived_from_a_type_is_inline_and_clean() -> None:
    schema = ToolDefinition.from_model("search_docs", "Search the documentation", SearchArgs).parameters

    assert schema["required"] == ["query"]
    assert schema["properties"]["query"]["minLength"] == 1
    limit = schema["properties"]["limit"]
    assert (limit["type"], limit["minimum"], limit["maximum"]) == ("integer", 1, 50)
    assert schema["additionalProperties"] is False
    for word in ("$ref", "$defs", "title", "anyOf"):
        assert word not in json.dumps(schema)


@pytest.mark.conforms("EX-19", "C2", "C7", "C8", "C9", "C15", "C17", "V-3")
async def test_arguments_are_mended_where_they_can_be_and_refused_with_every_reason_where_not() -> None:
    received: list[SearchArgs] = []

    async def execute(args: dict[str, Any]) -> ToolResult:
        received.append(SearchArgs(**args))
        return ToolResult.ok("found")

    registry = ToolRegistry([search_docs(execute)])
    mended = {"query": "x", "limit": "3"}
    bad: list[tuple[dict[str, Any], list[str]]] = [
        ({"query": ""}, ["query"]),
        ({"limit": 5}, ["query"]),
        ({"query": "x", "limit": 99}, ["limit"]),
        ({"query": "x", "zzz": 1}, ["zzz"]),
        ({"query": "", "limit": 99}, ["query", "limit"]),
    ]
    model = ScriptedModel([calls(*[("search_docs", args) for args, _ in bad]), "done"])

    ran = await registry.execute("search_docs", mended)
    run = await Agent(model, tools=registry).run("go")

    assert ran.text == "found"
    assert received == [SearchArgs(query="x", limit=3)]
    assert type(received[0].limit) is int
    assert mended == {"query": "x", "limit": "3"}
    answers = [message["content"] for message in run.messages if message["role"] == "tool"]
    for (_, names), answer in zip(bad, answers, strict=True):
        assert answer.startswith('invalid tool arguments: validation failed for tool "search_docs":\n  - ')
        assert all(name in answer.split("Received arguments:")[0] for name in names)
    assert run.content == "done"


@pytest.mark.conforms("EX-20", "D1", "D2", "D-b1")
async def test_prepared_arguments_reach_the_tool_and_nobody_else() -> None:
    received: list[dict[str, Any]] = []

    def prepare(a: dict[str, Any]) -> dict[str, Any]:
        if "limit" not in a:
            a["limit"] = 10
        return a

    async def execute(args: dict[str, Any]) -> ToolResult:
        received.append(args)
        return ToolResult.ok("found")

    registry = ToolRegistry([search_docs(execute, prepare=prepare)])
    model = ScriptedModel(
        [calls(("search_docs", {"query": "x"})), calls(("search_docs", {"query": "x", "limit": 7})), "done"]
    )
    agent = Agent(model, tools=registry)
    log = recorded(agent.events)

    run = await agent.run("go")

    assert [args["limit"] for args in received] == [10, 7]
    starts = [event.args for event in log if event.type == "tool_execution_start"]
    assert starts == [{"query": "x"}, {"query": "x", "limit": 7}]
    assert run.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"query": "x"}'


@pytest.mark.conforms("EX-21", "B3", "B4", "B5")
@each_row("can_see", [True, False])
async def test_details_stay_with_the_events_and_images_reach_models_that_can_see(can_see: bool) -> None:
    picture = Image(b"\x89PNG\r\n\x1a\n", "image/png")

    async def query() -> ToolResult:
        """Count the rows and draw them."""
        return ToolResult(parts=(Text("drawn"), picture), details={"rows": 3})

    model = ScriptedModel([calls(("query", {})), "done"], supports_images=can_see)
    agent = Agent(model, tools=[query])
    log = recorded(agent.events)

    await agent.run("go")

    [end] = [event for event in log if event.type == "tool_execution_end"]
    assert end.result is not None
    assert end.result.details == {"rows": 3}
    assert "rows" not in json.dumps([request.messages for request in model.requests])
    answer = model.requests[1].messages[-1]
    if can_see:
        assert answer["images"] == [{"media_type": "image/png", "data": "iVBORw0KGgo="}]
    else:
        assert "images" not in answer
        assert "(tool image omitted: model does not support images)" in answer["content"]


@pytest.mark.conforms("EX-22", "F13", "F14", "O13", "V-17")
async def test_a_run_stops_early_only_when_every_call_of_a_batch_wants_it() -> None:
    async def stop() -> ToolResult:
        """Say that this is enough."""
        return ToolResult.ok("enough", terminate=True)

    async def go_on() -> ToolResult:
        """Say that there is more."""
        return ToolResult.ok("more")

    async def samplings(*names: str) -> tuple[int, str]:
        registry = ToolRegistry([stop, go_on])
        registry.add_hook(before=lambda call: Block("no") if call.name == "go_on" and len(names) == 3 else None)
        model = ScriptedModel([calls(*[(name, {}) for name in names]), "done"])
        run = await Agent(model, tools=registry).run("go")
        return model.samplings, run.stop_reason

    assert await samplings("stop", "stop") == (1, "terminated")
    assert await samplings("stop", "go_on") == (2, "final")
    assert await samplings("stop", "go_on", "stop") == (2, "final")


@pytest.mark.conforms("EX-23", "J1", "V-2")
async def test_a_tool_that_raises_fails_alone() -> None:
    async def bad() -> str:
        """Always fail, for the test."""
        raise ValueError("boom")

    async def good() -> str:
        """Always work, for the test."""
        return "fine"

    model = ScriptedModel([calls(("bad", {}), ("good", {})), "done"])
    run = await Agent(model, tools=[bad, good]).run("go")

    first, second = (message for message in run.messages if message["role"] == "tool")
    assert first["is_error"]
    assert "boom" in first["content"]
    assert second["content"] == "fine"
    assert run.content == "done"


@pytest.mark.conforms("EX-24", "J3", "H5", "G6")
async def test_a_call_that_cannot_run_is_a_result_with_a_start_and_an_end() -> None:
    ran: list[str] = []

    async def forbidden() -> str:
        """Never to be run at all."""
        ran.append("forbidden")
        return "oops"

    empty = ToolDefinition("hollow", "A tool with nothing inside", {"type": "object", "properties": {}})
    registry = ToolRegistry([forbidden, AgentTool(empty)])
    after: list[str] = []
    registry.add_hook(
        before=lambda call: Block("not today") if call.name == "forbidden" else None,
        after=lambda call, result: after.append(call.name),
    )
    log = recorded(registry.events)

    names = ["nowhere", "hollow", "forbidden"]
    results = [await registry.execute(name) for name in names]

    assert all(result.is_error for result in results)
    assert 'tool "hollow" has no execute function' in results[1].text
    assert results[2].text == "not today"
    assert ran == []
    assert "forbidden" not in after
    assert [kind for kind in kinds(log) if kind[0] in ("start", "end")] == [
        (kind, name) for name in names for kind in ("start", "end")
    ]


@pytest.mark.conforms("EX-25", "I1", "I2", "H2", "I-b1")
async def test_progress_is_told_between_start_and_end_and_never_later() -> None:
    kept: list[Any] = []

    async def query() -> list[int]:
        return [1, 2, 3]

    async def execute(ctx: Any, args: dict[str, Any], on_update: Any) -> ToolResult:
        kept.append(on_update)
        on_update(details="connecting")
        rows = await query()
        on_update(details=f"{len(rows)} rows")
        return ToolResult.ok(str(rows))

    definition = ToolDefinition("query", "Query the table of rows", {"type": "object", "properties": {}})
    registry = ToolRegistry([AgentTool(definition, execute)])
    log = recorded(registry.events)

    await registry.execute("query")
    kept[0](details="too late")

    told = [event for event in log if event.type != "tool_execution_finished"]
    assert [event.type.removeprefix("tool_execution_") for event in told] == ["start", "update", "update", "end"]
    assert [event.update for event in told[1:3]] == [{"details": "connecting"}, {"details": "3 rows"}]


def ordered_agent(log: list[str], running: list[int], meeting: Meeting | None, **agent: Any) -> Agent:
    def tool(name: str) -> Any:
        async def run() -> str:
            running[0] += 1
            running[1] = max(running)
            if meeting is not None:
                await meeting.join()
            await anyio.lowlevel.checkpoint()
            running[0] -= 1
            return name

        run.__name__, run.__doc__ = name, "A tool that takes a while."
        return run

    in_hook = [0]

    async def hook(what: str, call: Call) -> None:
        in_hook[0] += 1
        assert in_hook[0] == 1, "hooks overlap"
        await anyio.lowlevel.checkpoint()
        log.append(f"{what} {call.name}")
        in_hook[0] -= 1

    async def after(call: Call, result: ToolResult) -> Override | None:
        await hook("after", call)
        return None

    model = ScriptedModel([calls(("A", {}), ("B", {}), ("C", {})), "done"])
    registry = ToolRegistry([tool("A"), tool("B"), tool("C")])
    registry.add_hook(before=lambda call: hook("before", call), after=after)
    made = Agent(model, tools=registry, **agent)

    def note(event: Any) -> None:
        kind = {"tool_execution_start": "start", "tool_execution_end": "end"}.get(event.type)
        if kind:
            log.append(f"{kind} {event.tool}")
        elif event.type == "message_end" and event.call_id:
            log.append(f"msg {event.data['message']['content']}")

    made.subscribe(note)
    return made


@pytest.mark.conforms("EX-26", "F7", "G8", "H1", "H3", "H6")
async def test_around_overlapping_tools_everything_happens_in_source_order() -> None:
    log: list[str] = []

    await ordered_agent(log, [0, 0], Meeting(3)).run("go")

    assert log == [
        *(f"{what} {name}" for name in "ABC" for what in ("start", "before")),
        *(f"{what} {name}" for name in "ABC" for what in ("after", "end", "msg")),
    ]


@pytest.mark.conforms("EX-26", "F6", "F9", "F12")
@each_row("how", ["loop", "tool"])
async def test_in_sequence_each_call_lives_its_whole_life_before_the_next(how: str) -> None:
    log, running = list[str](), [0, 0]
    agent = ordered_agent(log, running, None, parallel_tools=how != "loop")
    if how == "tool":

        async def B() -> str:
            """Take over the place of the other B."""
            return "B"

        agent.registry.add(B, replace=True, mode="sequential")

    await agent.run("go")

    assert log == [f"{what} {name}" for name in "ABC" for what in ("start", "before", "after", "end", "msg")]
    assert running[1] == 1
