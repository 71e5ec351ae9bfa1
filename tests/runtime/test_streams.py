"""`Runtime.stream`: what happens in a run as events, for readers that are quick, slow, or leave."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rows import each_row
from toolcell import (
    Limits,
    Outcome,
    PoolConfig,
    RunContext,
    Runtime,
    SyncRuntime,
    ToolContext,
    ToolRegistry,
    UsageError,
)
from toolcell.calls.run_state import Secrets
from toolcell.run.streaming import (
    QUEUE_EVENTS,
    CallEnded,
    CallOutput,
    CallStarted,
    CallUpdated,
    FileReturned,
    LogPrinted,
    ProgressReported,
    RunEvent,
    RunFinished,
)
from toolcell.testing import FakeBackend, Hang
from toolcell.tools import Event
from toolcell_bridge.wire.messages import Done, Progress

pytestmark = pytest.mark.quick

SMALL = PoolConfig(warm=1)

SCRIPT = """
print("one")
progress({"done": 1})
total = call_tool("add", a=1, b=2)
open("out.txt", "w").write("text")
set_result(total, files=["out.txt"])
"""


def adding() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return registry


def without_ids(events: list[RunEvent]) -> list[object]:
    """What each event says that does not differ from run to run."""
    said: list[object] = []
    for event in events:
        match event:
            case LogPrinted(stream, text):
                said.append((stream, text))
            case ProgressReported(value):
                said.append(value)
            case CallStarted(tool=tool, args=args):
                said.append((tool, dict(args)))
            case CallEnded(tool=tool, status=status):
                said.append((tool, status))
            case FileReturned(file):
                said.append((file.name, file.data))
            case RunFinished(result):
                said.append((result.outcome, result.value))
    return said


HAPPENED = [
    ("stdout", "one\n"),
    {"done": 1},
    ("add", {"a": 1, "b": 2}),
    ("add", "ok"),
    ("out.txt", b"text"),
    (Outcome.OK, 3),
]


@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_stream_tells_what_happens_in_order_and_ends_with_the_result() -> None:
    async with Runtime(adding(), pool=SMALL) as runtime:
        events = [event async for event in runtime.stream(SCRIPT)]
        async with runtime.session() as session:
            in_session = [event async for event in session.stream(SCRIPT)]

    assert without_ids(events) == without_ids(in_session) == HAPPENED
    started, ended = (next(each for each in events if isinstance(each, kind)) for kind in (CallStarted, CallEnded))
    assert started.call_id == ended.call_id


@pytest.mark.anyio
@pytest.mark.isolation
@pytest.mark.conforms("I1", "I3")
async def test_a_stream_has_what_its_tools_report_and_nothing_of_other_runs() -> None:
    registry, context, written = ToolRegistry(), RunContext(), dict[str, int]()

    @registry.tool
    async def count(ctx: ToolContext, name: str) -> None:
        """Count, and report it."""
        ctx.update(f"{name} begins", details={"of": name})
        for number in range(600):
            written[name] = number
            if (name, number) == ("one", QUEUE_EVENTS - 1):  # the last that there is room for
                sum(range(3_000_000))  # its slice of the event loop is used up
            await ctx.write(f"{number},")

    async with Runtime(registry, pool=SMALL) as runtime:
        seen, output = [], ""
        async for event in runtime.stream("call_tool('count', name='one')", context=context):
            if isinstance(event, CallStarted):
                while written.get("one", 0) < QUEUE_EVENTS - 1:  # it waits for us now, and our own call must not
                    await anyio.lowlevel.checkpoint()
                await registry.execute("count", {"name": "other"}, context=context)
            elif isinstance(event, CallUpdated):
                seen.append((event.tool, event.text, event.details))
            elif isinstance(event, CallOutput):
                output += event.text
        assert not context.events.active

    assert seen == [("count", "one begins", {"of": "one"})]
    assert output == "".join(f"{number}," for number in range(600))


@pytest.mark.anyio
@pytest.mark.isolation
async def test_two_streams_with_one_context_each_have_what_their_own_tools_report() -> None:
    registry, context, both = ToolRegistry(), RunContext(run_id="one"), anyio.Event()
    updates: dict[str, list[str]] = {"a": [], "b": []}
    heard: list[Any] = []

    async def hear(event: Event) -> None:
        heard.append(event.update)

    @registry.tool
    async def count(ctx: ToolContext, name: str) -> None:
        """Count, and report it, when both of them do."""
        begun.append(name)
        if len(begun) == 2:
            both.set()
        await both.wait()
        ctx.update(f"{name} counts")

    async def read(name: str) -> None:
        async for event in runtime.stream(f"call_tool('count', name={name!r})", context=context):
            if isinstance(event, CallUpdated):
                updates[name].append(event.text)

    begun: list[str] = []
    context.events.subscribe(hear)
    async with Runtime(registry, pool=SMALL) as runtime, anyio.create_task_group() as tasks:
        tasks.start_soon(read, "a")
        tasks.start_soon(read, "b")

    assert updates == {"a": ["a counts"], "b": ["b counts"]}
    assert sorted(each["text"] for each in heard if each is not None) == ["a counts", "b counts"]


@pytest.mark.isolation
def test_a_blocking_stream_tells_the_same() -> None:
    with SyncRuntime(adding(), pool=SMALL) as runtime:
        events = list(runtime.stream(SCRIPT))
        with runtime.session() as session:
            in_session = list(session.stream(SCRIPT))

    assert without_ids(events) == without_ids(in_session) == HAPPENED


@pytest.mark.anyio
@pytest.mark.isolation
@pytest.mark.parametrize("is_session", [False, True], ids=["run", "session"])
async def test_leaving_the_loop_ends_the_run_and_its_calls(is_session: bool) -> None:
    registry, ended = ToolRegistry(), anyio.Event()

    @registry.tool
    async def wait() -> None:
        """Wait until the call is given up."""
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with Runtime(registry, pool=SMALL, limits=Limits(wall_s=600)) as runtime, runtime.session() as session:
        streaming = session if is_session else runtime
        async for event in streaming.stream("kept = 1; print('begun'); call_tool('wait')"):
            if isinstance(event, CallStarted):  # it comes while the call goes on
                break
        with anyio.fail_after(60):
            await ended.wait()
        if is_session:
            assert (await session.execute_code("kept")).value == 1


@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_closed_stream_has_ended_its_run_and_a_cancelled_reader_too() -> None:
    outcomes: list[Outcome] = []

    async with Runtime(pool=SMALL, limits=Limits(wall_s=600)) as runtime:
        runtime.on_end = lambda result: outcomes.append(result.outcome)  # type: ignore[union-attr]
        async with runtime.stream("print(1)\nwhile True: pass") as events:
            await anext(events)
        assert outcomes == [Outcome.CANCELLED]
        assert [event async for event in events] == []

        async with anyio.create_task_group() as tasks, runtime.stream("print(1)\nwhile True: pass") as events:
            await anext(events)
            tasks.start_soon(anext, events)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert outcomes == [Outcome.CANCELLED] * 2


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_stream_that_another_thread_drops_ends_its_run() -> None:
    async with Runtime(pool=SMALL, limits=Limits(wall_s=600)) as runtime:
        holder = [runtime.stream("print(1)\nwhile True: pass")]
        await anext(holder[0])
        over = holder[0]._feed.over
        dropping = threading.Thread(target=holder.clear)
        dropping.start()
        dropping.join()
        gc.collect()
        with anyio.fail_after(60):
            await over.wait()


@pytest.mark.anyio
@each_row("end", [Done(True, None), Hang()], ids=["ended", "past its limit"])
async def test_a_slow_reader_loses_nothing_and_holds_the_script_up(end: object) -> None:
    guest = [*(Progress(number) for number in range(1000)), end]
    cancel, read = anyio.Event(), list[RunEvent]()
    runtime = Runtime(backend=FakeBackend(guest), pool=SMALL, allow_unisolated=True)
    async with runtime, runtime.stream("progress", cancel=cancel) as stream:
        read.append(await anext(stream))
        await anyio.wait_all_tasks_blocked()
        feed = stream._feed
        assert feed is not None and len(feed._events) < 1000 and not feed.over.is_set()
        async for event in stream:
            read.append(event)
            if event == ProgressReported(999) and isinstance(end, Hang):
                cancel.set()

    assert [event.value for event in read if isinstance(event, ProgressReported)] == list(range(1000))
    assert isinstance(read[-1], RunFinished)
    assert read[-1].result.outcome is (Outcome.OK if isinstance(end, Done) else Outcome.CANCELLED)


@pytest.mark.anyio
async def test_a_call_that_is_refused_is_told_with_the_reason_and_without_secrets() -> None:
    registry = adding()
    async with Runtime(registry, backend=FakeBackend(), pool=SMALL, allow_unisolated=True) as runtime:
        context = RunContext(secrets=Secrets({"key": "hunter2-hunter2"}))
        script = "try: call_tool('add', a='hunter2-hunter2', b=1)\nexcept ToolError: pass"
        events = [event async for event in runtime.stream(script, context=context)]

    assert isinstance(events[0], CallStarted) and events[0].args == {"a": "[redacted]", "b": 1}
    assert isinstance(events[1], CallEnded) and events[1].error_code == "invalid_arguments"


@pytest.mark.anyio
async def test_what_is_wrong_with_a_stream_is_said() -> None:
    with pytest.raises(UsageError, match="not open"):
        Runtime().stream("1")
    async with Runtime(backend=FakeBackend(), pool=SMALL, allow_unisolated=True) as runtime:
        with pytest.raises(UsageError, match="leave out on_log="):
            runtime.stream("1", on_log=print)
        with pytest.raises(UsageError, match=r"cancel= takes an anyio.Event"):
            runtime.stream("1", cancel=True)
        with pytest.raises(UsageError, match="wal_s"):
            runtime.stream("1", wal_s=3)
        with pytest.raises(UsageError, match="source must be a str"):
            await anext(runtime.stream(3))  # type: ignore[arg-type]
        unused = runtime.stream("1")
        await unused.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(unused)


@pytest.mark.anyio
async def test_closing_the_runtime_ends_a_stream_with_a_cancelled_run() -> None:
    runtime = Runtime(backend=FakeBackend([Progress(1), Hang()]), pool=SMALL, allow_unisolated=True)
    await runtime.open()
    stream = runtime.stream("hang")
    await anext(stream)
    await runtime.close()

    last: RunEvent | None = None
    with suppress(StopAsyncIteration):
        while True:
            last = await anext(stream)
    assert isinstance(last, RunFinished) and last.result.outcome is Outcome.CANCELLED
