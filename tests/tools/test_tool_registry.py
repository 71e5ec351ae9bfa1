"""Group E: registering tools, listing them, and snapshots and subsets of a registry."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell import Secrets
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.call import Call
from toolcell.compat import execute_with_context, get_definitions
from toolcell.errors import RegistrationError, ToolError, UsageError
from toolcell.tools import RunContext, ToolContext, ToolDefinition, ToolRegistry, ToolResult
from toolcell.tools.spec import Proceed

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


QUERY: dict[str, Any] = {"type": "object", "required": ["q"], "properties": {"q": {"type": "string"}, "n": {}}}


def with_tools(*names: str, **settings: Any) -> ToolRegistry:
    registry = ToolRegistry(**settings)
    for name in names:
        registry.register(name, f"The tool that is called {name}", EMPTY, lambda args, name=name: name, blocking=False)
    return registry


@each_row("nothing", [None, "", "null", {}, "{}"])
async def test_no_arguments_are_no_arguments_however_they_are_written(nothing: Any) -> None:
    registry = with_tools("a")

    assert (await registry.dispatch("a", nothing)).text == "a"
    assert (await registry.execute("a", nothing)).text == "a"
    results = await registry.execute_batch([("a", nothing), {"name": "a", "arguments": nothing}, {"name": "a"}])
    assert [result.text for result in results] == ["a", "a", "a"]


@pytest.mark.conforms("E6", "E7", "EX-29", "A6", "EX-35", "EX-36", "EX-1", "A3")
def test_one_registry_speaks_every_format() -> None:
    registry, text = ToolRegistry(), "The tool that is called a"
    registry.register("a", text, QUERY, lambda args: "a", blocking=False)

    assert (
        get_definitions(registry)
        == registry.to_provider_defs()
        == [{"type": "function", "function": {"name": "a", "description": text, "parameters": QUERY}}]
    )
    assert json.dumps(registry.schemas()) == json.dumps([{"name": "a", "description": text, "input_schema": QUERY}])
    assert registry.to_mcp() == [
        {
            "name": "a",
            "description": text,
            "inputSchema": QUERY,
            "annotations": {"readOnlyHint": False, "idempotentHint": False, "destructiveHint": False},
        }
    ]


@pytest.mark.conforms("E8", "E-b5", "J4", "EX-2", "E2", "V-4")
async def test_an_unknown_tool_is_a_result_that_lists_what_there_is_within_bounds() -> None:
    few, many = with_tools("alpha", "beta"), with_tools(*(f"tool_{number}" for number in range(50)))

    full = with_tools(*(f"tool_{number}" for number in range(20)))

    listed = await few.execute("gamma")
    all_listed = await full.execute("gamma")
    bounded = await many.execute("gamma")

    assert (await ToolRegistry().execute("gamma")).text == "unknown tool: gamma; no tools are available"
    assert listed.text == "unknown tool: gamma; available tools: alpha, beta"
    assert all_listed.text.endswith(", tool_19")
    assert "tool_19 and 30 more" in bounded.text
    assert "tool_20" not in bounded.text
    assert listed.error is not None
    assert listed.error.details["available"] == ["alpha", "beta"]


@pytest.mark.conforms("E9")
def test_while_one_thread_registers_another_may_look_and_execute_and_a_third_loses_nothing() -> None:
    registry = with_tools("base")
    logger = logging.getLogger("toolcell.tools")
    inside, looked, third_done = threading.Event(), threading.Event(), threading.Event()
    looked_meanwhile: list[bool] = []

    def pause(record: logging.LogRecord) -> bool:
        """Stop the first thread in the middle of its change: a replaced tool is logged there."""
        if not inside.is_set():
            inside.set()
            looked_meanwhile.append(looked.wait(60))
            third_done.wait(0.3)  # the third thread has to wait for the first, so this passes in full
        return True

    def look_and_execute() -> tuple[list[str], str]:
        assert inside.wait(60)
        seen = registry.names(), anyio.run(registry.execute, "base").text
        looked.set()
        return seen

    def register() -> None:
        assert inside.wait(60)
        registry.register("late", "A tool registered by a thread", EMPTY, lambda args: "late", blocking=False)
        third_done.set()

    level = logger.level
    logger.addFilter(pause)
    logger.setLevel(logging.INFO)
    try:
        with ThreadPoolExecutor(2) as pool:
            second, third = pool.submit(look_and_execute), pool.submit(register)
            registry.register("base", "A better base tool", EMPTY, lambda args: "new", blocking=False, replace=True)
            seen = second.result(30)
            third.result(30)
    finally:
        logger.removeFilter(pause)
        logger.setLevel(level)

    assert (seen, looked_meanwhile) == ((["base"], "base"), [True])
    assert registry.names() == ["base", "late"]
    assert anyio.run(registry.execute, "base").text == "new"


@pytest.mark.conforms("E10")
async def test_executing_without_a_context_is_executing_with_an_empty_one() -> None:
    async def whose(ctx: ToolContext) -> list[Any]:
        """Tell whose call this is."""
        return [ctx.channel, ctx.chat_id, ctx.user_id, ctx.callback is None]

    registry = ToolRegistry([whose])

    assert (await registry.execute("whose")).value == (await execute_with_context(registry, "whose", {})).value
    assert (await registry.execute("whose")).value == ["", "", "", True]


@pytest.mark.conforms("E11", "L5", "E-b4")
async def test_calls_are_logged_with_timing_and_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    async def work(text: str) -> str:
        """Work on a text."""
        return "four"

    async def later(text: str) -> ToolResult:
        """Start working on a text."""
        return ToolResult.async_("started")

    async def fail(text: str) -> str:
        """Fail to work on a text."""
        raise ToolError(f"cannot use {text}")

    registry = ToolRegistry([work, later, fail])
    run = RunContext(secrets=Secrets({"key": "hunter22"}))

    with caplog.at_level(logging.INFO, "toolcell.tools"):
        for name in registry:
            await registry.dispatch(name, {"text": "hunter22 " + "x" * 2000}, context=run)

    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(":")[0].split(" in ")[0].split(" after ")[0] for message in messages] == [
        "tool work started",
        "tool work completed",
        "tool later started",
        "tool later started (async)",
        "tool fail started",
        "tool fail failed",
    ]
    assert messages[1].endswith("ms, 4 characters")
    assert "hunter22" not in caplog.text
    assert "[redacted]" in messages[0]
    assert all(len(message) < 700 for message in messages)


@pytest.mark.conforms("E-b1")
@given(names=st.lists(st.sampled_from("abcdefgh"), unique=True), replaced=st.sets(st.sampled_from("abcdefgh")))
def test_definitions_come_in_order_of_registration_and_replacing_keeps_the_place(
    names: list[str], replaced: set[str]
) -> None:
    registry = with_tools(*names)
    for name in replaced & set(names):
        registry.register(name, "The tool that took its place", EMPTY, lambda args: "", replace=True)

    assert [definition.name for definition in registry.definitions()] == names
    assert [entry["function"]["name"] for entry in registry.to_provider_defs()] == names
    assert [entry["name"] for entry in registry.schemas()] == names


@pytest.mark.conforms("E-b2", "V-6")
def test_a_name_taken_twice_is_refused_and_a_tool_with_one_bad_name_registers_nothing() -> None:
    class Both:
        def definitions(self) -> list[ToolDefinition]:
            return [ToolDefinition(name, "One of two functions", EMPTY) for name in ("fresh", "a")]

        async def execute(self, ctx: ToolContext, name: str, args: dict[str, Any]) -> ToolResult:
            return ToolResult.ok(name)

    registry = with_tools("a", "b")

    with pytest.raises(RegistrationError, match="'a' is already registered"):
        registry.add(Both())
    assert registry.list() == ["a", "b"]
    registry.add(Both(), replace=True)
    assert registry.list() == ["a", "b", "fresh"]
    assert len(registry.definitions()) == 3


@pytest.mark.conforms("E-b3")
async def test_views_share_the_tools_and_leave_the_registry_alone() -> None:
    registry = with_tools("read", "write", "list")

    some = registry.subset(["read", "list"])
    matching = registry.subset(lambda definition: definition.name.startswith("w"))
    spaced = registry.namespaced("fs")
    frozen = registry.snapshot()

    assert some.list() == ["read", "list"]
    assert matching.list() == ["write"]
    assert spaced.list() == ["fs_read", "fs_write", "fs_list"]
    assert (await spaced.execute("fs_read")).text == "read"
    assert registry.unregister("write") is True
    assert registry.unregister("write") is False
    assert frozen.list() == ["read", "write", "list"]
    with pytest.raises(UsageError, match="frozen"):
        frozen.register("late", "A tool that comes too late", EMPTY, lambda args: "")
    with pytest.raises(UsageError, match="no such tools: ghost"):
        registry.subset(["ghost"])


@pytest.mark.conforms("E-b3")
async def test_a_tool_registered_during_a_run_joins_the_next_one() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def grow() -> str:
        """Register another tool while running."""
        registry.register("late", "A tool that comes late", EMPTY, lambda args: "late", replace=True, blocking=False)
        return "grown"

    model = ScriptedModel([calls(("grow", {})), calls(("late", {})), "done", "again"])
    agent = Agent(model, tools=registry)

    run = await agent.run("go")
    await agent.run("once more")

    assert "unknown tool: late" in run.messages[4]["content"]
    assert [request.tool_names for request in model.requests] == [["grow"]] * 3 + [["grow", "late"]]


@pytest.mark.conforms("E-b3")
def test_registries_can_be_merged_unless_they_disagree_about_a_name() -> None:
    one, other, rival = with_tools("a"), with_tools("b"), with_tools("a")
    other.policy.blacklist("a")

    merged = one.merged(other)

    assert merged.list() == ["a", "b"]
    assert merged.names() == ["b"]
    with pytest.raises(RegistrationError, match="two registries offer a tool 'a'"):
        one.merged(rival)


@pytest.mark.conforms("E-b6")
async def test_middleware_can_make_a_call_again_and_knows_what_may_be_repeated() -> None:
    tried: dict[str, int] = {}
    registry = ToolRegistry()

    def flaky(name: str) -> Any:
        async def run() -> str:
            tried[name] = tried.get(name, 0) + 1
            if tried[name] < 3:
                raise ConnectionError("try again")
            return "at last"

        run.__name__, run.__doc__ = name, "A tool that fails at first."
        return run

    registry.add(flaky("safe"), idempotent=True)
    registry.add(flaky("unsafe"))

    async def retry(call: Call, proceed: Proceed) -> ToolResult:
        result = await proceed()
        for _ in range(2 if call.options.idempotent else 0):
            result = await proceed() if result.is_error else result
        return result

    registry.add_middleware(retry)

    assert (await registry.execute("safe")).text == "at last"
    assert (await registry.execute("unsafe")).is_error
    assert tried == {"safe": 3, "unsafe": 1}


@pytest.mark.conforms("E-b6")
async def test_the_first_middleware_is_the_outermost_and_can_answer_in_place_of_the_tool() -> None:
    asked, seen = list[str](), list[str]()
    registry, remembered = ToolRegistry(), dict[tuple[str, str], ToolResult]()

    @registry.tool(read_only=True)
    async def price(item: str) -> str:
        """Look up the price of an item."""
        asked.append(item)
        return f"price {len(asked)}"

    async def cache(call: Call, proceed: Proceed) -> ToolResult:
        key = (str(call.args), call.run.user_id)
        if key not in remembered:
            remembered[key] = await proceed()
        return remembered[key]

    async def rate_limit(call: Call, proceed: Proceed) -> ToolResult:
        seen.append(call.name)
        return await proceed() if len(seen) < 3 else ToolResult.fail("try again later", retryable=True)

    registry.add_middleware(cache)
    registry.add_middleware(rate_limit)

    first = await registry.execute("price", {"item": "tea"})
    again = await registry.execute("price", {"item": "tea"})
    other = await registry.dispatch("price", {"item": "tea"}, context=RunContext(user_id="ada"))
    refused = await registry.execute("price", {"item": "rice"})

    assert (first.text, again.text, other.text) == ("price 1", "price 1", "price 2")
    assert (refused.text, asked) == ("try again later", ["tea", "tea"])


@pytest.mark.conforms("E-b6")
async def test_middleware_that_fails_fails_the_call() -> None:
    registry = with_tools("a")

    async def broken(call: Any, proceed: Any) -> ToolResult:
        raise ValueError("middleware broke")

    registry.add_middleware(broken)

    assert "middleware broke" in (await registry.execute("a")).text


async def test_what_a_stranger_calls_a_tool_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "toolcell.tools"):
        result = await with_tools("a").execute("x\nINFO tool a completed\x1b[2J" + "y" * 10_000, {"k\n": "v\n"})

    assert len(caplog.records) == 2
    assert all("\n" not in record.getMessage() and "\x1b" not in record.getMessage() for record in caplog.records)
    assert len(result.text) < 200


async def test_a_plain_function_that_returns_something_to_await_is_awaited() -> None:
    async def later(args: dict[str, Any]) -> str:
        return "later"

    registry = ToolRegistry()
    registry.register("wrapped", "A lambda around an async function", EMPTY, lambda args: later(args))
    registry.register("inline", "The same on the event loop itself", EMPTY, lambda args: later(args), blocking=False)

    assert [(await registry.execute(name)).text for name in registry] == ["later", "later"]
