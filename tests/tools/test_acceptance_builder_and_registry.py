"""The examples of the tool builder, the registry, the provider formats, contexts and background work."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.compat import execute_with_context, get_summaries, observed, register_or_replace, to_for_llm
from toolcell.errors import RegistrationError
from toolcell.tools import RunContext, Tool, ToolContext, ToolRegistry, ToolResult
from tools.toolkit import Meeting

pytestmark = pytest.mark.anyio


def search_tool() -> Tool:
    return (
        Tool("search", "Search the web for current information.")
        .param("query", "string", "The search query")
        .param_opt("limit", "integer", "Max results (default 5)")
        .call(lambda args: f"Results for '{args['query']}': ...")
    )


EMPTY: dict[str, Any] = {"type": "object", "properties": {}}

SEARCH_SCHEMA = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "The search query"},
        "limit": {"type": "integer", "description": "Max results (default 5)"},
    },
    "required": ["query"],
}


@pytest.mark.conforms("EX-28", "A7", "A8", "A9", "A-b1")
async def test_the_builder_makes_a_schema_with_only_required_parameters_required() -> None:
    registry = ToolRegistry([search_tool()])

    result = await registry.execute("search", {"query": "rust"})

    assert registry.definitions()[0].parameters == SEARCH_SCHEMA
    assert result.text == "Results for 'rust': ..."
    with pytest.raises(RegistrationError, match=r"'search'.*'strng'"):
        Tool("search", "Search the web.").param("x", "strng", "")


@pytest.mark.conforms("EX-29", "A6", "E3")
def test_raw_registration_takes_four_things_and_amounts_to_the_same() -> None:
    built, raw = ToolRegistry([search_tool()]), ToolRegistry()

    raw.register("search", "Search the web for current information.", SEARCH_SCHEMA, lambda args: "found")

    assert raw.definitions() == built.definitions()


@pytest.mark.conforms("EX-30", "C21")
async def test_a_missing_required_argument_is_named_and_an_optional_one_has_its_default() -> None:
    def search(args: dict[str, Any]) -> str:
        return f"{args['query']} (limit {args.get('limit', 10)})"

    registry = ToolRegistry()
    registry.register("search", "Search the web for current information.", SEARCH_SCHEMA, search)

    missing = await registry.execute("search", {"limit": 3})
    absent = await registry.execute("search", {"query": "q"})

    assert missing.is_error
    assert '"query"' in missing.text
    assert absent.text == "q (limit 10)"


@pytest.mark.conforms("EX-31", "B10", "B11", "J6")
async def test_a_refusal_of_the_tool_itself_is_data_for_the_next_turn() -> None:
    def fetch(args: dict[str, Any]) -> ToolResult | str:
        if args["url"].startswith("file://"):
            return ToolResult.fail(f"Cannot fetch local file URLs for security reasons: {args['url']}")
        return "Page content here"

    registry = ToolRegistry([Tool("fetch", "Fetch a page of the web.").param("url", "string", "Where").call(fetch)])
    model = ScriptedModel([calls(("fetch", {"url": "file:///etc/passwd"})), "I may not read that"])

    result = await registry.execute("fetch", {"url": "file:///etc/passwd"})
    run = await Agent(model, tools=registry).run("read it")

    assert result.is_error
    assert "Cannot fetch local file URLs" in result.text
    assert observed(result).startswith("ERROR: ")
    assert "Cannot fetch local file URLs" in model.requests[1].messages[-1]["content"]
    assert run.content == "I may not read that"


@pytest.mark.conforms("EX-32", "F12")
@each_row("parallel", [True, False])
async def test_parallel_tools_overlap_when_allowed_and_one_failing_does_not_stop_the_other(parallel: bool) -> None:
    meeting = Meeting(2 if parallel else 1)

    async def search() -> str:
        """Search the web for things."""
        await meeting.join()
        raise RuntimeError("no network")

    async def calculator() -> str:
        """Calculate something quickly."""
        await meeting.join()
        return "42"

    model = ScriptedModel([calls(("search", {}), ("calculator", {})), "done"])
    run = await Agent(model, tools=[search, calculator], parallel_tools=parallel).run("go")

    answers = [message["content"] for message in run.messages if message["role"] == "tool"]
    assert meeting.most == (2 if parallel else 1)
    assert "no network" in answers[0]
    assert answers[1] == "42"


@pytest.mark.conforms("EX-35", "E4", "E12", "A11")
async def test_a_registry_works_without_any_agent() -> None:
    registry = ToolRegistry()
    assert registry.is_empty()

    host = {"type": "object", "properties": {"host": {"type": "string"}}, "required": ["host"]}
    registry.register("ping", "Check if a host is reachable", host, lambda a: f"{a['host']} is reachable")

    assert len(registry) == 1
    assert registry.has("ping")
    assert (await registry.execute("ping", {"host": "8.8.8.8"})).text == "8.8.8.8 is reachable"
    assert set(registry.schemas()[0]) == {"name", "description", "input_schema"}


class ReadFile:
    def name(self) -> str:
        return "read_file"

    def description(self) -> str:
        return "Read the contents of a file at the given path."

    def parameters(self) -> dict[str, Any]:
        path = {"type": "string", "description": "Path to the file to read"}
        return {"type": "object", "properties": {"path": path}, "required": ["path"]}

    async def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        return ToolResult.ok(f"Hello from {args['path']}\n")


@pytest.mark.conforms("EX-36", "E6", "A4", "A5")
def test_provider_definitions_are_exactly_what_the_api_is_sent() -> None:
    assert ToolRegistry([ReadFile()]).to_provider_defs() == [
        {
            "type": "function",
            "function": {
                "name": "read_file",
                "description": "Read the contents of a file at the given path.",
                "parameters": {
                    "type": "object",
                    "properties": {"path": {"type": "string", "description": "Path to the file to read"}},
                    "required": ["path"],
                },
            },
        }
    ]


@pytest.mark.conforms("EX-40", "E3", "E4", "E5", "V-6")
async def test_replacing_keeps_one_tool_of_a_name() -> None:
    class Newer(ReadFile):
        async def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
            return ToolResult.ok("newer")

    registry, newer = ToolRegistry([ReadFile()]), Newer()

    register_or_replace(registry, newer)

    assert registry.count() == 1
    assert (await registry.execute("read_file", {"path": "/tmp/foo"})).text == "newer"
    assert registry.get("read_file") == (newer, True)
    assert registry.get("x") == (None, False)
    assert get_summaries(registry) == ["- `read_file` - Read the contents of a file at the given path."]


class Echo:
    """Keeps its chat in itself, as tools used to."""

    name = "where"
    description = "Tell which chat this is."
    parameters = EMPTY
    channel = ""
    chat_id = ""

    def set_context(self, channel: str, chat_id: str) -> None:
        self.channel, self.chat_id = channel, chat_id

    async def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        before = (self.channel, self.chat_id)
        await anyio.lowlevel.checkpoint()
        assert (self.channel, self.chat_id) == before
        return ToolResult.ok(f"{self.channel}:{self.chat_id}")


@pytest.mark.conforms("EX-41", "K1", "K2", "K-b1", "K-b2")
async def test_two_chats_calling_one_tool_at_once_never_see_each_other() -> None:
    shared = Echo()
    registry = ToolRegistry([shared])
    answers: dict[str, set[str]] = {"1": set(), "2": set()}

    async def chat(chat_id: str) -> None:
        for _ in range(100):
            result = await execute_with_context(registry, "where", {}, "tg", chat_id)
            answers[chat_id].add(result.text)

    async with anyio.create_task_group() as group:
        group.start_soon(chat, "1")
        group.start_soon(chat, "2")
    nobody = await execute_with_context(registry, "where", {}, "tg", "")

    assert answers == {"1": {"tg:1"}, "2": {"tg:2"}}
    assert nobody.text == ":"
    assert (shared.channel, shared.chat_id) == ("", "")


class Background:
    """Answers at once and finishes later, when the test lets it."""

    name = "background"
    description = "Work in the background for a while."
    parameters = EMPTY
    callback: Any = None
    handles: list[Any]

    def __init__(self) -> None:
        self.handles = []

    def set_callback(self, callback: Any) -> None:
        self.callback = callback

    async def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        self.handles.append(self.callback)
        return ToolResult.async_("Task started, will report back")


@pytest.mark.conforms("EX-42", "L1", "L2", "L3", "L-b1", "L-b2")
async def test_background_work_is_acknowledged_at_once_and_completed_exactly_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tool, completed = Background(), list[str]()
    registry = ToolRegistry([tool])

    def on_complete(run: RunContext, result: ToolResult) -> None:
        completed.append(result.text)

    acknowledged = await execute_with_context(registry, "background", {}, "tg", "1", on_complete)
    with caplog.at_level(logging.WARNING):
        await tool.handles[0](ToolResult.ok("finished"))
        await tool.handles[0](ToolResult.ok("finished again"))
    unheard = await registry.execute("background")

    assert to_for_llm(acknowledged)["async"] is True
    assert to_for_llm(acknowledged)["for_llm"] == "Task started, will report back"
    assert completed == ["finished"]
    assert "late completion of background" in caplog.text
    assert unheard.text == "Task started, will report back"
    assert tool.handles[1] is None
    assert tool.callback is None
