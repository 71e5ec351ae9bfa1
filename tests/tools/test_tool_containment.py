"""Group J: a failing tool never ends its run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rows import each_row
from toolcell import Secrets
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.errors import AuditError, ToolAbort, ToolError
from toolcell.tools import (
    Call,
    Feature,
    RunContext,
    Status,
    Text,
    ToolRegistry,
    ToolResult,
)
from tools.toolkit import Meeting, recorded

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


async def a_group() -> None:
    async def fail() -> None:
        raise ValueError("from a child task")

    async with anyio.create_task_group() as group:
        group.start_soon(fail)
        group.start_soon(anyio.sleep_forever)


def raising(exc: BaseException) -> Any:
    async def bad() -> str:
        """Raise what the test wants."""
        await anyio.lowlevel.checkpoint()
        raise exc

    return bad


@pytest.mark.conforms("J1", "J2")
async def test_exceptions_of_a_tools_own_tasks_are_contained_too() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def group() -> None:
        """Fail in a task of its own."""
        await a_group()

    result = await registry.execute("group")

    assert result.is_error
    assert isinstance(result.exc, ExceptionGroup)


@pytest.mark.conforms("J2", "EX-3", "B2")
async def test_a_returned_or_announced_error_is_its_message_and_nothing_else() -> None:
    async def announced() -> str:
        """Fail the announced way."""
        raise ToolError("city not found", code="no_city", retryable=True, details={"near": ["Rome"]})

    async def returned() -> ToolResult:
        """Fail the returned way."""
        return ToolResult.fail("city not found")

    registry = ToolRegistry([announced, returned])
    first, second = await registry.execute("announced"), await registry.execute("returned")

    assert first.message == second.message == "city not found"
    assert first.error is not None
    assert (first.error.code, first.error.retryable, first.error.details) == ("no_city", True, {"near": ["Rome"]})


@pytest.mark.conforms("J-b1", "V-1", "J5")
@each_row("nested", [False, True])
async def test_tool_abort_is_the_one_way_a_tool_ends_the_run(nested: bool) -> None:
    abort = ToolAbort("the database is gone")
    registry = ToolRegistry([raising(ExceptionGroup("wrapped", [abort]) if nested else abort)])
    meeting, left = Meeting(1), list[str]()

    @registry.tool
    async def other() -> str:
        """Wait until something ends the run."""
        await meeting.join()
        try:
            await anyio.sleep_forever()
        finally:
            left.append("left")
        return ""

    model = ScriptedModel([calls(("other", {}), ("bad", {})), "never said"])
    agent = Agent(model, tools=registry)
    log = recorded(agent.events)

    run = await agent.run("go")

    assert (run.stop_reason, run.error, model.samplings) == ("cancelled", "the database is gone", 1)
    assert [message["tool_call_id"] for message in run.messages if message["role"] == "tool"] == [
        "call_0_other",
        "call_1_bad",
    ]
    assert len([event for event in log if event.type == "tool_execution_end"]) == 2
    with pytest.raises(ToolAbort, match="the database is gone"):
        await registry.execute("bad")


@pytest.mark.conforms("J-b1")
async def test_an_interrupt_passes_through_and_is_recorded() -> None:
    ended: list[Call] = []

    class Observer(Feature):
        def call_started(self, call: Call) -> None: ...

        def call_ended(self, call: Call) -> None:
            ended.append(call)

    class Interrupt(KeyboardInterrupt):
        """So that the loop under test is not really interrupted."""

    registry = ToolRegistry()

    @registry.tool
    async def interrupted() -> str:
        """Be interrupted from outside."""
        raise Interrupt

    try:
        await registry.dispatch("interrupted", {}, context=RunContext().having(Observer()))
    except KeyboardInterrupt:
        passed = True

    assert passed
    assert ended[0].is_error


@pytest.mark.conforms("J-b2")
async def test_forgetting_the_result_is_an_error_where_one_is_promised() -> None:
    class Forgetful:
        name = "forgetful"
        description = "Forgets to return anything."
        parameters = EMPTY

        async def execute(self, ctx: Any, args: Any) -> Any:
            return None

    async def fine() -> None:
        """Do something and return nothing."""

    registry = ToolRegistry([Forgetful(), fine])
    forgotten, nothing = await registry.execute("forgetful"), await registry.execute("fine")

    assert forgotten.error is not None
    assert forgotten.error.code == "no_result"
    assert nothing.status is Status.OK
    assert nothing.text == ""


@pytest.mark.conforms("J-b4")
async def test_a_tool_that_lets_out_somebody_elses_cancellation_only_fails() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def confused() -> str:
        """Await something that was cancelled."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # trio knows no such thing
            raise ValueError("nothing to confuse") from None
        future = loop.create_future()
        future.cancel()
        await future
        return ""

    @registry.tool
    async def good() -> str:
        """Always work, for the test."""
        return "fine"

    confused_result, good_result = await registry.execute_batch([("confused", {}), ("good", {})])

    assert confused_result.is_error
    assert good_result.text == "fine"


@pytest.mark.conforms("J-b5")
async def test_repeating_a_failing_call_is_pointed_out_at_the_third_time() -> None:
    registry = ToolRegistry([raising(ValueError("boom"))])
    model = ScriptedModel([*[calls(("bad", {}))] * 3, calls(("bad", {"x": 1})), "gave up"])

    run = await Agent(model, tools=registry).run("go")

    answers = [message["content"] for message in run.messages if message["role"] == "tool"]
    assert "failed 3 times" not in answers[1]
    assert "this exact call has now failed 3 times; change its arguments or do something else" in answers[2]
    assert "failed" not in answers[3].replace("validation failed", "")


@pytest.mark.conforms("J-b5")
async def test_a_success_starts_the_count_of_failures_anew() -> None:
    works_at = {3}

    async def flaky(n: int = 0) -> str:
        """Fail, except now and then."""
        flaky_calls.append(n)
        if len(flaky_calls) in works_at:
            return "worked"
        raise ValueError("boom")

    flaky_calls: list[int] = []
    model = ScriptedModel([*[calls(("flaky", {}))] * 6, "gave up"])

    run = await Agent(model, tools=[flaky]).run("go")

    answers = [message["content"] for message in run.messages if message["role"] == "tool"]
    assert ["failed 3 times" in answer for answer in answers] == [False, False, False, False, False, True]


async def test_a_call_that_cannot_be_recorded_is_not_made() -> None:
    ran: list[str] = []

    async def act() -> str:
        """Act in some way or other."""
        ran.append("acted")
        return ""

    class Full(Feature):
        def __init__(self, exc: Exception) -> None:
            self.exc = exc

        async def call_started(self, call: Call) -> None:
            raise self.exc

        def call_ended(self, call: Call) -> None: ...

    registry = ToolRegistry([act])
    result = await registry.dispatch("act", {}, context=RunContext().having(Full(OSError("disk full"))))

    assert result.error is not None
    assert result.error.code == "unavailable"
    assert result.message == "the call could not be recorded, so it was not made"
    with pytest.raises(AuditError):
        await registry.dispatch("act", {}, context=RunContext().having(Full(AuditError("chain broken"))))
    assert ran == []


async def test_the_record_of_a_call_begins_before_its_effect_and_ends_after() -> None:
    log: list[str] = []

    class Observer(Feature):
        async def call_started(self, call: Call) -> None:
            log.append(f"started {call.name} {call.args} {call.refusal is None}")

        def call_ended(self, call: Call) -> None:
            assert call.result is not None
            log.append(f"ended {call.name} {call.result.status}")

    async def act(n: int) -> str:
        """Act in some way or other."""
        log.append("effect")
        return ""

    registry = ToolRegistry([act])
    run = RunContext().having(Observer())

    await registry.dispatch("act", {"n": "1"}, context=run)
    await registry.dispatch("nowhere", {}, context=run)

    assert log == [
        "started act {'n': 1} True",
        "effect",
        "ended act ok",
        "started nowhere {} False",
        "ended nowhere error",
    ]


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("route", ["call", "batch", "plan"])
async def test_the_end_of_each_call_that_began_is_noted_also_when_its_run_is_cancelled(
    route: str, is_asynchronous: bool
) -> None:
    told, began = list[str](), anyio.Event()

    class Observer(Feature):
        def call_started(self, call: Call) -> None:
            told.append(f"started {call.name}")

        def call_ended(self, call: Call) -> Any:
            assert call.result is not None
            told.append(f"ended {call.name} {call.result.status}")
            return anyio.lowlevel.checkpoint() if is_asynchronous else None

    registry = ToolRegistry()

    @registry.tool
    async def hang() -> None:
        """Wait for ever and never return."""
        began.set()
        await anyio.sleep_forever()

    async def run() -> None:
        context = RunContext().having(Observer())
        match route:
            case "call":
                await registry.dispatch("hang", {}, context=context)
            case "batch":
                await registry.execute_batch([("hang", {})] * 2, context=context)
            case _:
                await registry.run_plan({"steps": [{"tool": "hang", "args": {}}]}, context)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await began.wait()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()

    count = 2 if route == "batch" else 1
    assert sorted(told) == ["ended hang cancelled"] * count + ["started hang"] * count


class Refusing(dict[str, Any]):
    def __iter__(self) -> Any:
        raise ValueError("even reading me fails")

    items = keys = __iter__


class Promising:
    def to_tool_result(self) -> ToolResult:
        raise ValueError("no result after all")


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


MALFORMED: dict[str, Callable[[], Any]] = {
    "parts missing": lambda: ToolResult(parts=None),  # type: ignore[arg-type]
    "parts not parts": lambda: ToolResult(parts=(1,)),  # type: ignore[arg-type]
    "text not text": lambda: ToolResult(parts=(Text(5),)),  # type: ignore[arg-type]
    "error not a failure": lambda: ToolResult(error="boom", status=Status.ERROR),  # type: ignore[arg-type]
    "files not files": lambda: ToolResult(files=("x",)),  # type: ignore[arg-type]
    "no usage": lambda: ToolResult(usage=None),  # type: ignore[arg-type]
    "no meta": lambda: ToolResult(meta=None),  # type: ignore[arg-type]
    "for_user a number": lambda: ToolResult(for_user=5),  # type: ignore[arg-type]
    "data that contains itself": lambda: endless(),
    "a result that contains itself": lambda: ToolResult.of(endless()),
    "keys that are not text": lambda: ToolResult.of({(1, 2): 3}),
    "half a character": lambda: "\ud800",
    "a mapping that cannot be read": lambda: Refusing(a=1),
    "a promise that is not kept": lambda: Promising(),
    "a class": lambda: ToolResult,
    "an exception": lambda: ValueError("returned, not raised"),
    "a generator": lambda: (number for number in range(3)),
}


@pytest.mark.conforms("J1", "J-b3")
@each_row("secrets", [False, True], ids=["", "secrets"])
@each_row("what", MALFORMED)
async def test_whatever_a_tool_returns_every_call_of_its_batch_has_an_answer(what: str, secrets: bool) -> None:
    async def odd() -> Any:
        """Return something that is not a proper result."""
        return MALFORMED[what]()

    async def good() -> str:
        """Always work, for the test."""
        return "fine"

    registry = ToolRegistry([good])
    registry.add(odd, max_result_bytes=1000)
    registry.enable_plan_execution()
    run = RunContext(secrets=Secrets({"key": "hunter2"})) if secrets else RunContext()
    log = recorded(run.events)

    results = await registry.execute_batch([("good", {}), ("odd", {}), ("good", {})], context=run)
    steps = [{"tool": "odd", "args": {}}, {"tool": "good", "args": {}}]
    plan = await registry.execute("execute_plan", {"steps": steps})
    model = ScriptedModel([calls(("odd", {}), ("good", {})), "done"])
    answered = await Agent(model, tools=registry).run("go")

    assert [result.meta.call_id for result in results] == ["call_0", "call_1", "call_2"]
    assert [results[0].text, results[2].text] == ["fine", "fine"]
    assert [json.loads(event.to_json())["type"] for event in log] == [event.type for event in log]
    assert plan.value[1]["result"] == "fine"
    assert (answered.content, answered.messages[3]["content"]) == ("done", "fine")
