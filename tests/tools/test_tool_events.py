"""Groups H and I: events of calls, and progress while they run."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from rows import each_row
from toolcell import Secrets
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.context import BURST, MAX_UPDATE_CHARS, current_context
from toolcell.calls.events import TOOL_END, TOOL_OUTPUT, TOOL_START, TOOL_UPDATE
from toolcell.compat import as_call_event, as_stream_event
from toolcell.tools import (
    AgentTool,
    Block,
    Event,
    EventBus,
    RunContext,
    Status,
    ToolContext,
    ToolDefinition,
    ToolRegistry,
    ToolResult,
)
from tools.toolkit import PATIENCE_S, FakeRuntime, Meeting, kinds, recorded

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


def working() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def work(ctx: ToolContext, text: str = "") -> ToolResult:
        """Work on a text and tell about it."""
        ctx.update("half way")
        return ToolResult.ok("done", details={"rows": 1})

    return registry


@pytest.mark.conforms("H1", "H2", "H3", "H4", "H5", "V-13", "B4")
async def test_start_update_and_end_carry_what_they_should_under_their_wire_names() -> None:
    registry = working()
    log = recorded(registry.events)

    await registry.dispatch("work", {"text": 5}, call_id="c1")

    start, update, end = (event for event in log if event.type != "tool_execution_finished")
    assert [event.type for event in (start, update, end)] == [
        "tool_execution_start",
        "tool_execution_update",
        "tool_execution_end",
    ]
    assert {(event.call_id, event.tool) for event in (start, update, end)} == {("c1", "work")}
    assert (start.args, update.args, end.args) == ({"text": 5}, {"text": "5"}, {"text": "5"})
    assert update.update == {"text": "half way"}
    assert end.result is not None
    assert (end.result.details, end.is_error) == ({"rows": 1}, False)
    assert end.duration_ms is not None


@pytest.mark.conforms("H5", "EX-24", "J3", "G6")
async def test_every_call_starts_once_and_ends_once_whatever_becomes_of_it() -> None:
    registry = ToolRegistry(timeout_s=0.01)

    @registry.tool
    async def panic() -> str:
        """Raise something bad."""
        raise SystemExit(3)

    @registry.tool
    async def hang() -> str:
        """Never come to an end."""
        await anyio.sleep_forever()
        return ""

    registry.add_hook(before=lambda call: Block("no") if call.args else None)
    registry.register("open", "Takes anything at all", None, lambda args: "x")
    registry.add(AgentTool(ToolDefinition("hollow", "A tool with nothing inside", {"type": "object"})))
    log = recorded(registry.events)
    batch: list[tuple[str, Any]] = [
        ("nowhere", {}),
        ("panic", {"x": 1}),
        ("panic", "{bad"),
        ("open", {"blocked": 1}),
        ("panic", {}),
        ("hang", {}),
        ("hollow", {}),
    ]

    results = await registry.execute_batch(batch)

    assert all(result.is_error for result in results)
    for kind in (TOOL_START, TOOL_END):
        assert [event.call_id for event in log if event.type == kind] == [f"call_{n}" for n in range(7)]
    assert 'tool "hollow" has no execute function' in results[6].text


@pytest.mark.conforms("H6")
async def test_a_run_is_told_from_its_start_to_its_end() -> None:
    model = ScriptedModel([calls(("work", {}), ("work", {})), "done"])
    agent = Agent(model, tools=working())
    log = recorded(agent.events)

    await agent.run("go")

    told = [event.type for event in log if event.type != "tool_execution_finished"]
    tool = ["tool_execution_end", "message_start", "message_end"]
    assert told == [
        "agent_start", "turn_start", "message_start", "message_end",
        "tool_execution_start", "tool_execution_start", "tool_execution_update", "tool_execution_update",
        *tool, *tool, "turn_end",
        "turn_start", "message_start", "message_end", "turn_end", "agent_end",
    ]  # fmt: skip


@pytest.mark.conforms("H7")
async def test_listeners_hear_everything_in_order_after_the_state_has_changed_until_they_leave() -> None:
    agent = Agent(ScriptedModel([calls(("work", {}), ("work", {})), "done", "again"]), tools=working())
    first, second, pending = list[Event](), list[Event](), list[Any]()

    def note(event: Event) -> None:
        first.append(event)
        if event.type in (TOOL_START, TOOL_END):
            pending.append((event.type.rpartition("_")[2], list(agent.pending_tool_calls)))

    leave = agent.subscribe(note)
    agent.subscribe(second.append)

    await agent.run("go")
    heard = len(first)
    leave()
    await agent.run("go on")

    a, b = "call_0_work", "call_1_work"
    assert pending == [("start", [a]), ("start", [a, b]), ("end", [b]), ("end", [])]
    assert second[:heard] == first
    assert len(second) > heard == len(first)
    assert [event.seq for event in first] == sorted({event.seq for event in first})


@pytest.mark.conforms("H8", "H9", "I3")
async def test_events_are_also_told_in_the_words_of_two_other_systems() -> None:
    inner = Agent(ScriptedModel(["inner answer"]), name="aide")
    agent = Agent(ScriptedModel([calls(("work", {"text": "x"})), calls(("ask", {"task": "t"})), "done"]))
    agent.registry.add(working().get("work")[0])
    agent.add_subagent("ask", "Ask the aide for help.", inner)
    log = recorded(agent.events)

    await agent.run("go")

    streamed = [event for event in map(as_stream_event, log) if event is not None]
    called = [event for event in map(as_call_event, log) if event is not None]
    assert [event["type"] for event in streamed] == [
        "tool-call-start",
        "tool-progress",
        "tool-call-result",
        "tool-call-start",
        "agent-start",
        "agent-finish",
        "tool-call-result",
    ]
    assert streamed[0] == {"type": "tool-call-start", "name": "work", "args": {"text": "x"}}
    assert streamed[2]["content"] == "done"
    assert set(streamed[2]) == {"type", "name", "content", "usage", "duration"}
    assert streamed[5] == {"type": "agent-finish", "name": "aide", "content": "inner answer"}
    assert called[:2] == [
        {"ToolCallStarted": {"name": "work", "args": {"text": "x"}}},
        {"ToolCallFinished": {"name": "work", "result": "done", "success": True}},
    ]


@pytest.mark.conforms("H10")
async def test_each_step_leaves_a_short_trace() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def echo(text: str) -> str:
        """Say the same thing twice."""
        return text * 2

    inner = Agent(ScriptedModel([{"content": "ok", "usage": {"input_tokens": 3, "output_tokens": 4}}]))
    agent = Agent(ScriptedModel([calls(("echo", {"text": "x" * 900}), ("ask", {"task": "t"})), "done"]), tools=registry)
    agent.add_subagent("ask", "Ask the aide for help.", inner)

    run = await agent.run("go")

    tool, sub = run.steps
    assert (tool.name, tool.type, len(tool.input), len(tool.output)) == ("echo", "tool", 200, 500)
    assert (sub.name, sub.type, sub.usage.total) == ("ask", "agent", 7)
    assert tool.duration_ms >= 0


@pytest.mark.conforms("H-b1")
async def test_nested_calls_form_a_tree() -> None:
    async def script(call_tool: Any) -> Any:
        await call_tool("work")

    registry = working()
    registry.enable_plan_execution()
    registry.enable_code_execution(FakeRuntime(script))
    log = recorded(registry.events)
    steps = [{"tool": "work", "args": {}}, {"tool": "execute_code", "args": {"code": "..."}}]

    await registry.dispatch("execute_plan", {"steps": steps}, call_id="top")

    starts = [event for event in log if event.type == TOOL_START]
    parents = [(event.call_id, event.parent_call_id) for event in starts]
    assert parents[:3] == [("top", None), ("plan_step_0", "top"), ("plan_step_1", "top")]
    assert [parent for _, parent in parents[3:]] == ["plan_step_1"]
    assert [event.origin for event in starts] == ["model", "plan[0]", "plan[1]", "code"]
    assert [event.seq for event in log] == list(range(1, len(log) + 1))
    assert all(event.at > 0 for event in log)


@pytest.mark.conforms("H-b2")
async def test_a_tool_is_told_to_have_finished_before_its_slower_sibling() -> None:
    finished = anyio.Event()

    async def quick() -> str:
        """Finish at once and say so."""
        return "quick"

    async def slow() -> str:
        """Finish after the other one."""
        with anyio.fail_after(PATIENCE_S):
            await finished.wait()
        return "slow"

    registry = ToolRegistry([slow, quick])
    log = recorded(registry.events)
    registry.events.subscribe(
        lambda event: finished.set() if (event.type, event.tool) == ("tool_execution_finished", "quick") else None
    )

    await registry.execute_batch([("slow", {}), ("quick", {})])

    assert kinds(log) == [
        ("start", "slow"),
        ("start", "quick"),
        ("finished", "quick"),
        ("finished", "slow"),
        ("end", "slow"),
        ("end", "quick"),
    ]


@pytest.mark.conforms("H-b3")
async def test_a_listener_that_raises_or_takes_its_time_holds_nothing_up() -> None:
    registry = working()

    def broken(event: Event) -> None:
        raise RuntimeError("listener broke")

    registry.events.subscribe(broken)
    with registry.events.stream() as unread:
        log = recorded(registry.events)

        result = await registry.execute("work")

    assert result.text == "done"
    assert registry.events.listener_errors == len(log) == 4
    assert [event.type async for event in unread] == [event.type for event in log]


@pytest.mark.conforms("H-b3")
@each_row(("ends", "updates"), [(0, [7, 8, 9]), (5, [])])
async def test_a_full_queue_keeps_the_newest_updates_and_every_start_and_end(ends: int, updates: list[int]) -> None:
    bus = EventBus()
    stream = bus.stream(max_events=4)

    bus.emit(type=TOOL_START, call_id="a")
    for number in range(10):
        bus.emit(type=TOOL_UPDATE, update=number)
    for number in range(ends):
        bus.emit(type=TOOL_END, call_id=str(number))
    stream.close()

    kept = [event async for event in stream]
    assert [event.type for event in kept] == [TOOL_START, *[TOOL_UPDATE] * len(updates), *[TOOL_END] * ends]
    assert [event.update for event in kept if event.type == TOOL_UPDATE] == updates
    assert stream.dropped == 10 - len(updates)


# Progress


@pytest.mark.conforms("I1", "I2", "I-b3", "EX-25")
async def test_updates_come_between_start_and_end_of_their_call_and_may_interleave() -> None:
    meeting = Meeting(2)

    async def work(ctx: ToolContext, name: str) -> str:
        """Work in two halves."""
        ctx.update(f"{name} one")
        await meeting.join()
        ctx.update(f"{name} two")
        return name

    registry = ToolRegistry([work])
    log = recorded(registry.events)

    await registry.execute_batch([("work", {"name": "a"}), ("work", {"name": "b"})])

    for call_id in ("call_0", "call_1"):
        own = [event.type for event in log if event.call_id == call_id]
        assert own == [TOOL_START, TOOL_UPDATE, TOOL_UPDATE, "tool_execution_finished", TOOL_END]


@pytest.mark.conforms("I-b1")
@each_row("before", [["before"], []])
@each_row("hangs", [True, False])
async def test_updates_after_the_end_are_ignored_also_the_first_and_after_a_timeout(
    before: list[str], hangs: bool
) -> None:
    kept: list[ToolContext] = []

    async def work() -> str:
        """Tell something, and perhaps never end."""
        kept.append(current_context())
        for text in before:
            kept[0].update(text)
        if hangs:
            await anyio.sleep_forever()
        return "done"

    registry = ToolRegistry([work], timeout_s=0.01 if hangs else PATIENCE_S)
    log = recorded(registry.events)

    await registry.execute("work")
    kept[0].update("too late")

    assert [event.update for event in log if event.type == TOOL_UPDATE] == [{"text": text} for text in before]
    assert kept[0].update.ignored == 1


@pytest.mark.conforms("I-b2")
async def test_updates_come_from_worker_threads_too_and_from_threads_of_the_tools_own() -> None:
    def work(ctx: ToolContext) -> str:
        """Work on a thread and start another."""
        ctx.update("from the worker")
        other = threading.Thread(target=ctx.update, args=("from its own thread",))
        other.start()
        other.join(PATIENCE_S)
        return "done"

    registry = ToolRegistry([work])
    loop_thread, heard_on = threading.get_ident(), list[int]()
    log = recorded(registry.events)
    registry.events.subscribe(lambda event: heard_on.append(threading.get_ident()))

    await registry.execute("work")

    updates = [event.update["text"] for event in log if event.type == TOOL_UPDATE]
    assert updates == ["from the worker", "from its own thread"]
    assert set(heard_on) == {loop_thread}


@pytest.mark.conforms("I-b2")
async def test_a_flood_of_updates_is_thinned_and_the_last_one_always_told() -> None:
    async def flood(ctx: ToolContext) -> ToolResult:
        """Tell far too much."""
        for number in range(5_000):
            ctx.update(str(number))
        return ToolResult.ok("done")

    registry = ToolRegistry([flood])
    log = recorded(registry.events)

    await registry.execute("flood")

    updates = [event.update["text"] for event in log if event.type == TOOL_UPDATE]
    assert BURST <= len(updates) < 500
    assert updates[-1] == "4999"


@pytest.mark.conforms("I-b2")
async def test_what_a_tool_writes_arrives_whole_and_in_order_and_it_waits_for_slow_readers() -> None:
    written, pieces = 0, [f"{number}," for number in range(200)]

    async def write(ctx: ToolContext) -> None:
        """Write in pieces."""
        nonlocal written
        for piece in pieces:
            await ctx.write(piece)
            written += 1

    def write_in_thread(ctx: ToolContext) -> None:
        """Write in pieces, from a thread."""
        nonlocal written
        for piece in pieces:
            ctx.write(piece)
            written += 1

    async def write_much(ctx: ToolContext) -> None:
        """Write all at once, and do not wait."""
        nonlocal written
        ctx.write("".join(pieces))
        ctx.update(details="x" * 50_000)
        written += len(pieces)

    for tool in (write, write_in_thread, write_much):
        registry, written = ToolRegistry([tool]), 0
        plain = recorded(registry.events)
        read, ahead = "", 0
        with registry.events.stream(max_events=10) as events:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(registry.execute, tool.__name__)
                async for event in events:
                    if event.type == TOOL_OUTPUT:
                        read += event.update["text"]
                        await anyio.lowlevel.checkpoint()
                        ahead = max(ahead, written - read.count(","))
                    if event.type == TOOL_END:
                        break
        assert read == "".join(pieces) == "".join(each.update["text"] for each in plain if each.type == TOOL_OUTPUT)
        assert ahead <= 11
        states = [event.update for event in plain if event.type == TOOL_UPDATE]
        assert states == ([{"details": "x" * 50_000}] if tool is write_much else [])


@pytest.mark.anyio
async def test_a_tool_that_writes_without_end_to_nobody_is_ended_by_its_time_limit() -> None:
    registry, written = ToolRegistry(), 0

    @registry.tool(timeout_s=0.1)
    async def talk(ctx: ToolContext) -> None:
        """Write until the call is ended."""
        nonlocal written
        while written < 10**8:  # minutes
            await ctx.write("more")
            written += 1

    assert (await registry.execute("talk", {})).status is Status.TIMEOUT
    assert written


@pytest.mark.conforms("I-b2")
async def test_an_update_is_bounded_redacted_and_can_neither_end_nor_fail_anything() -> None:
    async def work(ctx: ToolContext) -> str:
        """Tell a few odd things."""
        ctx.update("x" * 2 * MAX_UPDATE_CHARS)
        ctx.update(ToolResult.fail("no", terminate=True, details={"key": "hunter22"}))
        ctx.update(details=list(range(100_000)))
        ctx.update({"rows": 3})
        return "fine"

    run = RunContext(secrets=Secrets({"key": "hunter22"}))
    log = recorded(run.events)

    result = await ToolRegistry([work]).dispatch("work", {}, context=run)

    updates = [event for event in log if event.type == TOOL_UPDATE]
    assert len(updates[0].update["text"]) == MAX_UPDATE_CHARS
    assert updates[2].update == {"details": "(list too large to show)"}
    assert updates[3].update == {"details": {"rows": 3}}
    assert all(event.is_error is None and event.result is None for event in updates)
    assert "hunter22" not in repr(updates)
    assert (result.is_error, result.terminate) == (False, False)


@pytest.mark.conforms("I-b4")
async def test_what_code_prints_is_progress_of_its_call_while_it_runs() -> None:
    async def script(call_tool: Any) -> Any:
        return 1

    registry = ToolRegistry()
    registry.enable_code_execution(FakeRuntime(script, logs="step 1 done\n"))
    log = recorded(registry.events)

    await registry.dispatch("execute_code", {"code": "print('step 1 done')"}, call_id="c1")

    [update] = [event for event in log if event.type == TOOL_UPDATE]
    assert (update.tool, update.call_id) == ("execute_code", "c1")
    assert update.update == {"text": "step 1 done\n"}
