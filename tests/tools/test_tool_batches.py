"""Group F: several calls in one response."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from rows import each_row
from toolcell.agents import Agent
from toolcell.agents.loop import ends_run
from toolcell.agents.providers.scripted import ScriptedModel
from toolcell.calls.concurrency import abandoned_threads
from toolcell.calls.options import Origin
from toolcell.calls.run_state import RunState
from toolcell.errors import RegistrationError, UsageError
from toolcell.tools import (
    AgentTool,
    Call,
    RunContext,
    Status,
    ToolCall,
    ToolContext,
    ToolDefinition,
    ToolRegistry,
    ToolResult,
)
from tools.toolkit import PATIENCE_S, Crowd, FakeRuntime, Meeting, kinds, recorded

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


ROUNDING_S = 1e-6
"""A deadline is the clock plus a timeout. What is left of it can be a little more than the timeout."""


def visiting(crowd: Crowd, **settings: Any) -> ToolRegistry:
    registry = ToolRegistry(**settings)

    @registry.tool
    async def visit() -> str:
        """Be counted while running."""
        await crowd.visit()
        return "visited"

    registry.enable_plan_execution()
    return registry


@pytest.mark.conforms("F2", "F-b4")
@each_row(("workers", "asked", "most"), [(10, 25, 10), (10, 3, 3), (4, 25, 4), (40, 25, 25)])
async def test_the_number_of_workers_is_the_cap_or_the_number_of_calls(workers: int, asked: int, most: int) -> None:
    crowd = Crowd()

    results = await visiting(crowd, max_workers=workers).execute_batch([("visit", {})] * asked)

    assert len(results) == asked
    assert crowd.most == most


@pytest.mark.conforms("F5", "F8", "EX-4", "F1", "F4", "V-5")
async def test_a_result_is_at_its_calls_place_whatever_ended_first() -> None:
    turns = [anyio.Event() for _ in range(5)]

    async def take_turn(number: int) -> int:
        """Wait until everybody after this one is done."""
        if number < 4:
            await turns[number + 1].wait()
        turns[number].set()
        return number

    registry = ToolRegistry([take_turn])
    log = recorded(registry.events)

    results = await registry.execute_batch([("take_turn", {"number": number}) for number in range(5)])

    assert [result.value for result in results] == [0, 1, 2, 3, 4]
    assert [event.call_id for event in log if event.type.endswith("finished")] == [f"call_{n}" for n in (4, 3, 2, 1, 0)]
    assert [event.call_id for event in log if event.type.endswith("end")] == [f"call_{n}" for n in range(5)]


@pytest.mark.conforms("F6", "F9")
@each_row("how", ["setting", "argument", "option"])
async def test_one_sequential_wish_is_enough_for_the_whole_batch(how: str) -> None:
    crowd = Crowd()
    registry = visiting(crowd, sequential=how == "setting")

    @registry.tool(mode="sequential" if how == "option" else "")
    async def alone() -> str:
        """Be alone while running."""
        await crowd.visit()
        return "alone"

    batch: list[Any] = [("visit", {}), ("alone", {}), ("visit", {})]
    results = await registry.execute_batch(batch, sequential=True if how == "argument" else None)

    assert [result.text for result in results] == ["visited", "alone", "visited"]
    assert crowd.most == 1


@pytest.mark.conforms("F10", "F15", "H5")
async def test_cancelling_a_sequence_answers_the_calls_that_never_ran() -> None:
    run = RunContext()
    ran: list[int] = []

    async def step(number: int) -> str:
        """Take one step, and cancel at the second."""
        ran.append(number)
        if number == 1:
            run.cancel("the user left")
            await anyio.sleep_forever()
        return "stepped"

    registry = ToolRegistry([step])
    log = recorded(run.events)

    results = await registry.execute_batch(
        [("step", {"number": number}) for number in range(4)], context=run, sequential=True
    )

    assert ran == [0, 1]
    assert [result.text for result in results] == [
        "stepped",
        "the user left",
        "tool execution aborted",
        "tool execution aborted",
    ]
    assert [result.status for result in results[1:]] == [Status.CANCELLED] * 3
    started = [kind for kind, _ in kinds(log) if kind in ("start", "end")]
    assert started == ["start", "end"] * 4


@pytest.mark.conforms("F11")
async def test_cancelling_a_concurrent_batch_answers_every_call_at_once() -> None:
    run, meeting = RunContext(), Meeting(2)

    async def wait(number: int) -> str:
        """Wait for ever unless it is the first."""
        if number == 0:
            return "quick"
        await meeting.join()
        await anyio.sleep_forever()
        return "never"

    registry = ToolRegistry([wait])
    results: list[ToolResult] = []

    async def batch() -> None:
        results.extend(await registry.execute_batch([("wait", {"number": n}) for n in range(3)], context=run))

    async with anyio.create_task_group() as group:
        group.start_soon(batch)
        await meeting.all_here.wait()
        run.cancel("stop now")

    assert [result.text for result in results] == ["quick", "stop now", "stop now"]


@pytest.mark.conforms("F-b1")
async def test_plans_inside_a_batch_share_its_workers_and_never_wait_for_each_other() -> None:
    crowd = Crowd()
    registry = visiting(crowd)
    plan = {"steps": [{"tool": "visit", "args": {}}] * 10}

    with anyio.fail_after(PATIENCE_S):
        results = await registry.execute_batch([("execute_plan", plan)] * 12 + [("visit", {})] * 8)

    assert not any(result.is_error for result in results)
    assert crowd.visits == 128
    assert crowd.most == 10


@pytest.mark.conforms("F-b1", "P-b4")
async def test_calls_of_code_count_too_and_code_runs_two_at_a_time_in_a_plan() -> None:
    leaves, scripts = Crowd(), Crowd(rounds=200)

    async def script(call_tool: Any) -> Any:
        async with anyio.create_task_group() as group:
            group.start_soon(scripts.visit)
            for _ in range(20):
                group.start_soon(call_tool, "visit")
        return "done"

    registry = visiting(leaves)
    registry.enable_code_execution(FakeRuntime(script))
    step = {"tool": "execute_code", "args": {"code": "..."}}

    result = await registry.execute("execute_plan", {"steps": [step] * 6})

    assert [row["status"] for row in result.value] == ["ok"] * 6
    assert leaves.visits == 120
    assert leaves.most == 10
    assert scripts.most == 2


@pytest.mark.conforms("F-b1")
async def test_a_tool_that_calls_tools_lends_them_its_place() -> None:
    async def inner() -> str:
        """Do the inner work."""
        await anyio.lowlevel.checkpoint()
        return "inner"

    async def outer(ctx: ToolContext) -> str:
        """Call the inner tool."""
        return (await ctx.call_tool("inner")).text

    registry = ToolRegistry([inner, outer], max_workers=1)

    with anyio.fail_after(PATIENCE_S):
        results = await registry.execute_batch([("outer", {})] * 4)

    assert [result.text for result in results] == ["inner"] * 4


@pytest.mark.conforms("F-b2", "J-b4", "B-b3")
async def test_a_timeout_really_cancels_an_async_tool() -> None:
    cleaned: list[str] = []

    async def hang() -> str:
        """Hang until something stops it."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
        finally:
            cleaned.append("cleaned")
        return "never"

    registry = ToolRegistry()
    registry.add(hang, timeout_s=0.01)

    result = await registry.execute("hang")

    assert result.status is Status.TIMEOUT
    assert result.text == "timed out after 0.01 s"
    assert result.error is not None
    assert (result.error.code, result.error.retryable) == ("timeout", True)
    assert cleaned == ["cleaned"]


@pytest.mark.conforms("F-b2", "J-b4", "F-b5")
async def test_a_synchronous_tool_that_will_not_stop_is_left_behind_and_counted() -> None:
    started, release = anyio.Event(), threading.Event()
    run, results = RunContext(), list[ToolResult]()

    def stubborn() -> str:
        """Ignore everything until released."""
        anyio.from_thread.run_sync(started.set)
        release.wait(PATIENCE_S)
        return "late"

    registry = ToolRegistry([stubborn])
    with anyio.fail_after(PATIENCE_S):
        while abandoned_threads():  # of tests before this one
            await anyio.sleep(0.001)

    async def call() -> None:
        results.append(await registry.dispatch("stubborn", {}, context=run))

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await started.wait()
            run.cancel("enough")
        assert [result.text for result in results] == ["enough"]
        assert [thread.tool for thread in abandoned_threads()] == ["stubborn"]
    finally:
        release.set()
    with anyio.fail_after(PATIENCE_S):
        while abandoned_threads():
            await anyio.lowlevel.checkpoint()


@pytest.mark.conforms("F-b2", "J-b4")
async def test_a_synchronous_tool_that_takes_too_long_is_a_timeout() -> None:
    release = threading.Event()

    def slow() -> str:
        """Ignore everything until released."""
        release.wait(PATIENCE_S)
        return "late"

    registry = ToolRegistry([slow], timeout_s=0.01)

    try:
        assert (await registry.execute("slow")).status is Status.TIMEOUT
    finally:
        release.set()


@pytest.mark.conforms("F-b2")
async def test_timeouts_default_to_a_minute_and_waiting_for_a_place_does_not_count() -> None:
    async def deadline(ctx: ToolContext) -> float:
        """Tell how much time is left."""
        await anyio.lowlevel.checkpoint()
        return ctx.deadline - anyio.current_time()

    registry = ToolRegistry([deadline])
    registry.add(deadline, replace=True)

    assert 50 < (await registry.execute("deadline")).value <= 60 + ROUNDING_S
    assert ToolRegistry().settings.timeout_s == 60


@pytest.mark.conforms("F-b2")
@each_row(
    ("settings", "options"),
    [({"max_workers": 1}, {}), ({}, {"max_concurrency": 1}), ({}, {"exclusive_group": "one"})],
    ids=["workers", "own limit", "group"],
)
async def test_the_time_a_call_waits_for_its_place_is_not_taken_off_its_timeout(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    registry = ToolRegistry(timeout_s=60, **settings)

    @registry.tool(**options)
    async def hold(ctx: ToolContext) -> float:
        """Tell how much time is left, and keep the place for a while."""
        await anyio.lowlevel.checkpoint()
        left_s = ctx.deadline - anyio.current_time()
        await anyio.sleep(0.3)
        return left_s

    results = await registry.execute_batch([("hold", {})] * 2)

    assert all(59.8 < result.value <= 60 + ROUNDING_S for result in results)


@pytest.mark.conforms("F-b2")
async def test_a_tool_may_limit_how_often_it_runs_at_once() -> None:
    limited, free = Crowd(), Crowd()
    registry = visiting(free)

    @registry.tool(max_concurrency=2)
    async def narrow() -> str:
        """Let two in at a time."""
        await limited.visit()
        return "in"

    await registry.execute_batch([("narrow", {})] * 6 + [("visit", {})] * 6)

    assert limited.most == 2
    assert free.most > 2


@pytest.mark.conforms("F-b3")
async def test_an_exclusive_group_serialises_its_own_members_only() -> None:
    writers, readers, both = Crowd(), Crowd(), Crowd()
    registry = ToolRegistry()

    def writer(name: str) -> Any:
        async def run(ctx: ToolContext, again: bool = False) -> str:
            if again:
                return (await ctx.call_tool(name, {})).text
            async with anyio.create_task_group() as group:
                group.start_soon(both.visit)
                await writers.visit()
            return "written"

        run.__name__, run.__doc__ = name, "Write into the workspace."
        return run

    async def read() -> str:
        """Read from the workspace."""
        async with anyio.create_task_group() as group:
            group.start_soon(both.visit)
            await readers.visit()
        return "read"

    registry.add(writer("write"), exclusive_group="workspace")
    registry.add(writer("append"), exclusive_group="workspace")
    registry.add(read)

    with anyio.fail_after(PATIENCE_S):
        await registry.execute_batch([("write", {}), ("read", {}), ("append", {"again": True}), ("read", {})])

    assert writers.most == 1
    assert readers.most == 2
    assert both.most > 1
    with pytest.raises(RegistrationError, match="cannot hold an exclusive group"):
        registry.add(writer("plan"), exclusive_group="workspace", orchestrates=True)


@pytest.mark.conforms("F-b5", "H5")
async def test_when_the_caller_is_cancelled_no_tool_outlives_it_and_every_call_has_its_end() -> None:
    meeting, left = Meeting(3), list[int]()
    run = RunContext()

    async def wait(number: int) -> str:
        """Wait for ever with the others."""
        try:
            await meeting.join()
            await anyio.sleep_forever()
        finally:
            left.append(number)
        return "never"

    registry = ToolRegistry([wait])
    log = recorded(run.events)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(_batch, registry, [("wait", {"number": n}) for n in range(3)], run)
            await meeting.all_here.wait()
            scope.cancel()

    assert sorted(left) == [0, 1, 2]
    ends = [event for event in log if event.type.endswith("_end")]
    assert [event.result.status for event in ends if event.result] == [Status.CANCELLED] * 3
    assert run.state.scopes == {}


async def _batch(registry: ToolRegistry, batch: Any, run: RunContext) -> None:
    await registry.execute_batch(batch, context=run)


@pytest.mark.conforms("F-b6")
async def test_ids_used_twice_or_not_at_all_are_made_unique_in_calls_and_transcript() -> None:
    async def whoami(ctx: ToolContext) -> str:
        """Tell the id of this call."""
        return ctx.call_id

    def call(call_id: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "whoami", "arguments": "{}"}}

    asked = {"content": "", "tool_calls": [call("x"), call("x"), call(""), call("x_2")]}
    model = ScriptedModel([asked, "done"])

    run = await Agent(model, tools=[whoami]).run("go")

    ids = [call["id"] for call in run.messages[1]["tool_calls"]]
    answers = [(message["tool_call_id"], message["content"]) for message in run.messages[2:6]]
    assert len(set(ids)) == 4
    assert ids[0] == "x"
    assert answers == [(call_id, call_id) for call_id in ids]


@pytest.mark.conforms("F-b7", "J-b3")
async def test_calls_past_the_cap_are_refused_and_none_is_dropped() -> None:
    crowd = Crowd(rounds=0)
    registry = visiting(crowd)
    log = recorded(registry.events)

    results = await registry.execute_batch([("visit", {})] * 70, origin=Origin.MODEL)

    assert len(results) == 70
    assert crowd.visits == 64
    assert [result.is_error for result in results] == [False] * 64 + [True] * 6
    assert "at most 64 tool calls" in results[64].text
    assert len([event for event in log if event.type.endswith("_end")]) == 70
    assert visiting(crowd, max_batch=2).settings.max_batch == 2


@pytest.mark.conforms("F14")
async def test_an_empty_batch_is_empty_and_ends_nothing() -> None:
    assert await ToolRegistry().execute_batch([]) == []
    assert not ends_run([])
    assert not ends_run([ToolResult.ok("x", terminate=True), ToolResult.fail("no")])


@pytest.mark.conforms("F15")
async def test_one_tool_may_run_with_itself_and_sees_its_own_cancellation() -> None:
    seen: list[bool] = []
    run, meeting = RunContext(), Meeting(2)

    async def watch(ctx: ToolContext, cancel: bool = False) -> str:
        """Watch for cancellation."""
        try:
            await meeting.join()
            if cancel:
                run.cancel()
            await anyio.sleep_forever()
        finally:
            assert ctx.scope is not None
            seen.append(ctx.scope.cancel_called)
        return "never"

    await ToolRegistry([watch]).execute_batch([("watch", {}), ("watch", {"cancel": True})], context=run)

    assert seen == [True, True]


def test_no_workers_at_all_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        RunState(max_workers=0)


async def test_calls_can_be_written_in_every_providers_way() -> None:
    async def echo(text: str) -> str:
        """Say the same thing again."""
        return text

    registry = ToolRegistry([echo])
    batch: list[Any] = [
        ("echo", {"text": "pair"}),
        ToolCall("1", "echo", '{"text": "ours"}'),
        {"id": "2", "name": "echo", "arguments": {"text": "internal"}},
        {"id": "3", "type": "function", "function": {"name": "echo", "arguments": '{"text": "openai"}'}},
        {"id": "4", "type": "tool_use", "name": "echo", "input": {"text": "anthropic"}},
        {"tool": "echo", "args": {"text": "plan"}},
    ]

    results = await registry.execute_batch(batch)

    assert [result.text for result in results] == ["pair", "ours", "internal", "openai", "anthropic", "plan"]
    with pytest.raises(UsageError, match="not a tool call"):
        await registry.execute_batch(["echo"])


async def test_a_record_that_is_async_and_one_that_is_not_overlap_alike() -> None:
    meeting, barrier = Meeting(2), threading.Barrier(2)
    empty = {"type": "object", "properties": {}}

    async def waiting(args: dict[str, Any]) -> ToolResult:
        await meeting.join()
        return ToolResult.ok("async")

    def blocking(args: dict[str, Any]) -> ToolResult:
        barrier.wait(PATIENCE_S)
        return ToolResult.ok("thread")

    registry = ToolRegistry(
        [
            AgentTool(ToolDefinition("waiting", "Wait for the other one", empty), waiting),
            AgentTool(ToolDefinition("blocking", "Block until the other one", empty), blocking),
        ]
    )

    results = await registry.execute_batch([("waiting", {}), ("blocking", {})] * 2)

    assert [result.text for result in results] == ["async", "thread"] * 2


async def test_calls_without_a_run_of_their_own_cannot_be_cancelled_together() -> None:
    async def cancel(ctx: ToolContext) -> str:
        """Try to cancel the run of this call."""
        ctx.run.cancel()
        return "cancelled"

    registry = ToolRegistry([cancel])

    assert "without a run of their own" in (await registry.execute("cancel")).text
    assert "without a run of their own" in (await registry.execute("cancel")).text


@pytest.mark.conforms("F-b1", "G8")
async def test_tools_hooks_and_code_that_call_each_other_never_wait_for_each_other() -> None:
    async def leaf() -> str:
        """Do the actual work."""
        await anyio.lowlevel.checkpoint()
        return "done"

    async def relay(ctx: ToolContext, name: str, code: bool = False) -> str:
        """Call another tool while holding a worker."""
        await anyio.lowlevel.checkpoint()
        return (await ctx.call_tool(name, {"code": "x"} if code else {})).text

    async def script(call_tool: Any) -> Any:
        return await call_tool("leaf")

    async def look(call: Call) -> None:
        if call.name == "relay":
            await call.registry.dispatch("leaf", {}, context=call.run)

    registry = ToolRegistry([leaf], max_workers=2)
    registry.add(relay, exclusive_group="g")
    registry.alias("relay2", "relay")
    registry.enable_code_execution(FakeRuntime(script))
    registry.add_hook(before=look)
    batch: list[Any] = [("relay", {"name": "leaf"}), ("relay", {"name": "execute_code", "code": True})] * 4

    with anyio.fail_after(PATIENCE_S):
        results = await registry.execute_batch(batch)

    assert [result.text for result in results] == ["done", '"done"'] * 4


@pytest.mark.conforms("F-b1")
async def test_a_tool_that_fans_out_by_itself_does_so_with_its_own_worker() -> None:
    crowd = Crowd()

    async def spread(ctx: ToolContext) -> str:
        """Call many tools at once without saying so."""
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(ctx.call_tool, "visit")
        return "spread"

    registry = visiting(crowd, max_workers=3)
    registry.add(spread)

    with anyio.fail_after(PATIENCE_S):
        await registry.execute_batch([("spread", {}), ("spread", {}), ("visit", {}), ("visit", {})])

    assert crowd.visits == 22
    assert crowd.most <= 3


@each_row("waits", [False, True])
async def test_a_context_variable_that_a_tool_sets_is_not_set_in_the_calls_beside_it(waits: bool) -> None:
    registry, user = ToolRegistry(), contextvars.ContextVar("user", default="nobody")

    @registry.tool
    async def sign_in(name: str) -> str:
        """Return who was signed in before."""
        before = user.get()
        user.set(name)
        if waits:
            await anyio.lowlevel.checkpoint()
        assert user.get() == name
        return before

    calls = [("sign_in", {"name": name}) for name in ("ann", "bob", "cid")]
    results = await registry.execute_batch(calls)

    assert [result.text for result in results] == ["nobody"] * 3
    assert user.get() == "nobody"


async def test_calls_that_wait_are_all_begun_before_one_goes_on() -> None:
    registry, begun, all_begun = ToolRegistry(), 0, anyio.Event()

    @registry.tool
    async def wait() -> None:
        """Wait for the others to begin."""
        nonlocal begun
        begun += 1
        if begun == 8:
            all_begun.set()
        await all_begun.wait()

    with anyio.fail_after(PATIENCE_S):
        results = await registry.execute_batch([("wait", {})] * 8)

    assert [result.status for result in results] == ["ok"] * 8
