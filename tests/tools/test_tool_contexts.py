"""Groups K and L: the context of a call, and work that goes on after the call."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from rows import each_row
from tool_routes import ROUTES, answer_by
from toolcell import Secrets, tool
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.run_state import JobTable, RunState
from toolcell.compat import execute_with_context
from toolcell.errors import UsageError
from toolcell.tools import (
    AgentTool,
    Origin,
    RunContext,
    Status,
    ToolContext,
    ToolDefinition,
    ToolRegistry,
    ToolResult,
    current_context,
)
from tools.toolkit import PATIENCE_S, FakeRuntime, recorded

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


@pytest.mark.conforms("K2", "K3", "O2")
async def test_the_context_of_a_run_reaches_its_tools_without_being_in_their_signature() -> None:
    async def whose() -> list[Any]:
        """Tell whose run this is."""
        ctx = current_context()
        return [ctx.user_id, ctx.thread_id, ctx.chat_id, ctx.custom["plan"]]

    def whose_in_a_thread() -> str:
        """Tell it from a worker thread."""
        return current_context().user_id

    run = RunContext(user_id="ada", thread_id="t1", chat_id="c1", custom={"plan": "pro"})
    registry = ToolRegistry([whose, whose_in_a_thread])

    assert (await registry.dispatch("whose", {}, context=run)).value == ["ada", "t1", "c1", "pro"]
    assert (await registry.dispatch("whose_in_a_thread", {}, context=run)).text == "ada"


@pytest.mark.conforms("K3")
async def test_a_missing_task_context_is_an_error_result() -> None:
    async def needy(ctx: ToolContext) -> str:
        """Need somebody to work for."""
        return ctx.require_task().user_id

    registry = ToolRegistry([needy])

    nobody = await registry.execute("needy")

    assert nobody.text == "no task context"
    assert (await registry.dispatch("needy", {}, context=RunContext(user_id="ada"))).text == "ada"
    with pytest.raises(UsageError, match="no tool call"):
        current_context()


def messaging(sent: list[tuple[str, str, str]]) -> AgentTool:
    async def execute(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        channel, chat = args.get("channel") or ctx.channel, args.get("chat_id") or ctx.chat_id
        if not (channel and chat):
            return ToolResult.fail("No target channel/chat specified")
        sent.append((channel, chat, args["text"]))
        return ToolResult.silenced("Message sent")

    properties = {name: {"type": "string"} for name in ("text", "channel", "chat_id")}
    schema = {"type": "object", "properties": properties, "required": ["text"]}
    return AgentTool(ToolDefinition("message", "Send a message to a chat", schema), execute)


@pytest.mark.conforms("K4")
async def test_a_message_goes_to_the_chat_of_its_arguments_or_else_of_the_context() -> None:
    sent: list[tuple[str, str, str]] = []
    registry = ToolRegistry([messaging(sent)])

    here = await execute_with_context(registry, "message", {"text": "hi"}, "tg", "1")
    there = await execute_with_context(registry, "message", {"text": "yo", "channel": "sl", "chat_id": "9"}, "tg", "1")
    nowhere = await registry.execute("message", {"text": "hm"})

    assert sent == [("tg", "1", "hi"), ("sl", "9", "yo")]
    assert (here.silent, there.silent) == (True, True)
    assert nowhere.text == "No target channel/chat specified"


@pytest.mark.conforms("K-b1")
async def test_a_context_belongs_to_one_call_and_cannot_be_changed() -> None:
    kept: list[ToolContext] = []

    async def keep(ctx: ToolContext) -> str:
        """Keep the context for later."""
        kept.append(ctx)
        return ""

    registry = ToolRegistry([keep])
    await registry.execute_batch([("keep", {}), ("keep", {})])

    assert kept[0] is not kept[1]
    assert {ctx.call_id for ctx in kept} == {"call_0", "call_1"}
    with pytest.raises(AttributeError):
        kept[0].user_id = "mallory"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        kept[0].run.user_id = "mallory"  # type: ignore[misc]


@pytest.mark.conforms("K-b3")
async def test_the_context_carries_everything_and_reaches_plans_code_and_sub_agents() -> None:
    seen: list[dict[str, Any]] = []

    async def look(ctx: ToolContext) -> str:
        """Look at the context of this call."""
        await anyio.lowlevel.checkpoint()
        assert ctx.scope is not None
        assert ctx.deadline - anyio.current_time() < 61
        ctx.logger.debug("looking")
        ctx.emit("custom_event", note="x")
        seen.append({"user": ctx.user_id, "run": ctx.run_id, "origin": str(ctx.origin), "key": ctx.secret("key")})
        return str(ctx.limits)

    async def script(call_tool: Any) -> Any:
        return await call_tool("look", {})

    run = RunContext(user_id="ada", secrets=Secrets({"key": "k-1234"}), limits={"wall_s": 1})
    log = recorded(run.events)
    inner = Agent(ScriptedModel([calls(("look", {})), "inner"]), tools=[look])
    model = ScriptedModel(
        [
            calls(("look", {})),
            calls(("execute_plan", {"steps": [{"tool": "look", "args": {}}]})),
            calls(("execute_code", {"code": "..."})),
            calls(("aide", {"task": "look"})),
            "done",
        ]
    )
    agent = Agent(model, tools=[look], plan_execution=True, code_execution=FakeRuntime(script))
    agent.add_subagent("aide", "Helps with looking at things.", inner)

    result = await agent.run("go", context=run)

    assert result.content == "done"
    assert [each["origin"] for each in seen] == ["model", "plan", "code", "subagent"]
    assert {(each["user"], each["run"], each["key"]) for each in seen} == {("ada", run.run_id, "k-1234")}
    assert len([event for event in log if event.type == "custom_event"]) == 4
    missing = await ToolRegistry([look]).execute("look")
    assert "no secret named 'key' is configured" in missing.text


# Work that goes on


async def in_background(ctx: ToolContext, fail: bool = False) -> ToolResult:
    """Start some work in the background."""

    async def work() -> ToolResult:
        if fail:
            raise ValueError("work broke")
        await anyio.lowlevel.checkpoint()
        return ToolResult.ok("worked")

    return ctx.start_job(work, ack="on it")


@pytest.mark.conforms("L2", "L4", "L-b3")
async def test_a_job_has_an_id_a_result_an_event_and_can_be_found() -> None:
    completed: list[str] = []

    async def on_complete(run: RunContext, result: ToolResult) -> None:
        await anyio.lowlevel.checkpoint()
        completed.append(result.text)

    registry = ToolRegistry([in_background])
    run = RunContext(on_complete=on_complete)
    log = recorded(run.events)

    async with JobTable() as jobs:
        run.state.jobs = jobs
        pending = await registry.dispatch("in_background", {}, call_id="c1", context=run)
        assert pending.job_id is not None
        final = await jobs.await_(pending.job_id)
        found = jobs.get(pending.job_id)
        assert found is not None
        assert [job.id for job in jobs.list()] == [pending.job_id]
        assert (found.tool, found.call_id, found.is_done) == ("in_background", "c1", True)
        with pytest.raises(UsageError, match="no job 'ghost'"):
            await jobs.await_("ghost")
        with anyio.fail_after(PATIENCE_S):
            while not completed:
                await anyio.lowlevel.checkpoint()

    assert (pending.status, pending.text) == (Status.PENDING, "on it")
    assert final.text == "worked"
    assert completed == ["worked"]
    [ended] = [event for event in log if event.type == "job_end"]
    assert (ended.call_id, ended.data["job_id"]) == ("c1", pending.job_id)


@pytest.mark.conforms("L4", "L-b3")
async def test_a_finished_job_is_told_to_the_model_as_a_follow_up() -> None:
    model = ScriptedModel([calls(("in_background", {})), "started, waiting", "it worked"])
    agent = Agent(model, tools=[in_background])

    async with JobTable() as jobs:
        run = RunContext(state=_with_jobs(jobs))
        result = await agent.run("go", context=run)

    assert result.content == "it worked"
    assert model.requests[1].messages[-1]["content"] == "on it"
    assert model.requests[2].messages[-1] == {
        "role": "user",
        "content": "Background job job_1 of in_background finished: worked",
    }


def _with_jobs(jobs: JobTable) -> RunState:
    state = RunState()
    state.jobs = jobs
    return state


@pytest.mark.conforms("L-b2")
@each_row("how", ["raises", "forgets", "takes too long", "is cancelled"])
async def test_work_that_does_not_come_to_an_end_ends_as_an_error_all_the_same(how: str) -> None:
    async def start(ctx: ToolContext) -> ToolResult:
        """Start some work that goes wrong."""

        async def work() -> Any:
            if how == "raises":
                raise ValueError("work broke")
            if how != "forgets":
                await anyio.sleep_forever()

        return ctx.start_job(work, timeout_s=0.01 if how == "takes too long" else None)

    async with JobTable() as jobs:
        run = RunContext(state=_with_jobs(jobs))
        pending = await ToolRegistry([start]).dispatch("start", {}, context=run)
        assert pending.job_id is not None
        if how == "is cancelled":
            assert jobs.cancel(pending.job_id)
            assert not jobs.cancel(pending.job_id)
        result = await jobs.await_(pending.job_id)

    codes = {"raises": "exception", "forgets": "no_result", "takes too long": "timeout", "is cancelled": "cancelled"}
    assert result.error is not None
    assert result.error.code == codes[how]


@pytest.mark.conforms("L-b2", "F-b5")
async def test_closing_the_table_ends_what_still_runs() -> None:
    left: list[str] = []

    async def start(ctx: ToolContext) -> ToolResult:
        """Start some work that never ends."""

        async def work() -> ToolResult:
            try:
                await anyio.sleep_forever()
            finally:
                left.append("left")
            return ToolResult.ok("never")

        return ctx.start_job(work)

    registry = ToolRegistry([start])
    async with JobTable() as jobs:
        run = RunContext(state=_with_jobs(jobs))
        await registry.dispatch("start", {}, context=run)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()

    assert left == ["left"]
    assert jobs.list()[0].is_done
    late = await registry.dispatch("start", {}, context=run)
    assert late.is_error


@pytest.mark.conforms("L1", "L-b1", "L-b2")
@each_row("outcome", ["worked", "failed", "too slow"])
async def test_background_work_has_its_result_on_every_route_of_a_program_also_without_a_run(outcome: str) -> None:
    completed, arrived = list[str](), anyio.Event()

    @tool
    async def start(ctx: ToolContext) -> ToolResult:
        """Start some work in the background."""

        async def work() -> ToolResult:
            await anyio.lowlevel.checkpoint()
            if outcome == "too slow":
                await anyio.sleep_forever()
            return ToolResult.ok("worked") if outcome == "worked" else ToolResult.fail("failed")

        return ctx.start_job(work, timeout_s=0.01 if outcome == "too slow" else None)

    async def complete(run: RunContext, result: ToolResult) -> None:
        completed.append(result.text)
        arrived.set()

    registry = ToolRegistry([start])
    registry.enable_plan_execution()
    said = "job of start timed out after 0.01 s" if outcome == "too slow" else outcome
    results = {
        "execute": await registry.execute("start"),
        "batch": (await registry.execute_batch([("start", {}), ("start", {})]))[1],
        "batch of a model": (await registry.execute_batch([("start", {})], origin=Origin.MODEL))[0],
    }
    assert {route: result.text for route, result in results.items()} == dict.fromkeys(results, said)
    rows = (await registry.execute("execute_plan", {"steps": [{"tool": "start"}]})).value
    assert said in (rows[0].get("result"), rows[0].get("error"))

    answer = await execute_with_context(registry, "start", {}, "chat", "1", complete)
    assert (answer.status, answer.text) == (Status.PENDING, "started")
    with anyio.fail_after(PATIENCE_S):
        await arrived.wait()
    assert completed == [said]


@pytest.mark.conforms("L1", "L-b1", "L-b2")
async def test_a_completion_handle_works_from_any_thread_and_only_once() -> None:
    completed: list[str] = []

    async def start(args: dict[str, Any], callback: Any) -> ToolResult:
        def work() -> None:
            callback(ToolResult.ok("from a thread"))
            callback(ToolResult.ok("again"))

        thread = threading.Thread(target=work)
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        return ToolResult.async_("started")

    registry = ToolRegistry([AgentTool(ToolDefinition("start", "Start work on a thread", EMPTY), start)])

    def on_complete(run: RunContext, result: ToolResult) -> None:
        completed.append(result.text)

    acknowledged = await execute_with_context(registry, "start", {}, callback=on_complete)

    assert acknowledged.text == "started"
    assert completed == ["from a thread"]


@pytest.mark.every_loop
async def test_a_tool_that_calls_its_completion_without_waiting_for_it_has_its_result_delivered() -> None:
    completed: list[str] = []

    async def start(args: dict[str, Any], callback: Any) -> ToolResult:
        callback(ToolResult.ok("done"))
        return ToolResult.async_("started")

    registry = ToolRegistry([AgentTool(ToolDefinition("start", "Start work that is done at once", EMPTY), start)])
    await execute_with_context(registry, "start", {}, callback=lambda run, result: completed.append(result.text))

    assert completed == ["done"]


@pytest.mark.conforms("EX-42", "L3")
async def test_work_elsewhere_of_a_call_without_a_callback_runs_and_its_first_answer_is_the_result() -> None:
    handles: list[Any] = []

    async def start(args: dict[str, Any], callback: Any) -> ToolResult:
        handles.append(callback)
        return ToolResult.async_("started")

    result = await ToolRegistry([AgentTool(ToolDefinition("start", "Start work for later", EMPTY), start)]).execute(
        "start"
    )

    assert (result.status, result.text, handles) == (Status.PENDING, "started", [None])


@pytest.mark.conforms("L-b2", "EX-42")
@pytest.mark.parametrize("with_jobs", [False, True], ids=["callback", "job"])
@pytest.mark.parametrize("late", ["again", "after the run was cancelled"])
async def test_a_completion_that_comes_too_late_changes_nothing_and_is_logged(
    with_jobs: bool, late: str, caplog: pytest.LogCaptureFixture
) -> None:
    handles: list[Any] = []
    completed: list[str] = []

    async def start(args: dict[str, Any], callback: Any) -> ToolResult:
        handles.append(callback)
        return ToolResult.async_("started")

    def on_complete(run: RunContext, result: ToolResult) -> None:
        completed.append(result.text)

    registry = ToolRegistry([AgentTool(ToolDefinition("start", "Start work for later", EMPTY), start)])
    async with JobTable() as jobs:
        state = _with_jobs(jobs) if with_jobs else RunState()
        run = RunContext(state=state, on_complete=on_complete)
        await registry.dispatch("start", {}, context=run)
        await handles[0](ToolResult.ok("first"))
        await anyio.wait_all_tasks_blocked()
        if late != "again":
            run.cancel()
        await handles[0](ToolResult.ok("second"))
        if late != "again":
            await registry.dispatch("start", {}, context=run)
        finished = [job.result.text for job in jobs.take_finished(()) if job.result is not None]

    assert completed == ["first"]
    assert finished == (["first"] if with_jobs else [])
    assert "late completion of start" in caplog.text
    assert "completed again" not in caplog.text


@pytest.mark.conforms("L-b2")
async def test_work_elsewhere_that_never_calls_back_ends_as_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(args: dict[str, Any], callback: Any) -> ToolResult:
        return ToolResult.async_("started")

    monkeypatch.setattr("toolcell.calls.run_state.JOB_TIMEOUT_S", 0.02)
    registry = ToolRegistry([AgentTool(ToolDefinition("start", "Start work for later", EMPTY), start)])
    async with JobTable() as jobs:
        pending = await registry.dispatch("start", {}, context=RunContext(state=_with_jobs(jobs)))
        assert pending.job_id is not None
        result = await jobs.await_(pending.job_id, timeout_s=PATIENCE_S)

    assert result.error is not None
    assert result.error.code == "timeout"


@pytest.mark.conforms("L-b2")
@pytest.mark.parametrize("end", ["timed out", "cancelled"])
async def test_a_job_that_has_ended_keeps_its_end_when_its_handle_is_called_later(
    end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handles: list[Any] = []
    completed: list[str] = []

    async def start(args: dict[str, Any], callback: Any) -> ToolResult:
        handles.append(callback)
        return ToolResult.async_("started")

    def on_complete(run: RunContext, result: ToolResult) -> None:
        completed.append(result.text)

    if end == "timed out":
        monkeypatch.setattr("toolcell.calls.run_state.JOB_TIMEOUT_S", 0.01)
    registry = ToolRegistry([AgentTool(ToolDefinition("start", "Start work for later", EMPTY), start)])
    async with JobTable() as jobs:
        run = RunContext(state=_with_jobs(jobs), on_complete=on_complete)
        pending = await registry.dispatch("start", {}, context=run)
        assert pending.job_id is not None
        if end == "cancelled":
            jobs.cancel(pending.job_id)
        await jobs.await_(pending.job_id, timeout_s=PATIENCE_S)
        assert "completed again" not in caplog.text
        await handles[0](ToolResult.ok("too late"))
        result = await jobs.await_(pending.job_id)
        finished = jobs.take_finished(())

    assert end in result.text
    assert len(finished) == len(completed) == 1
    assert end in completed[0]
    assert "completed again; ignored" in caplog.text


@pytest.mark.conforms("L-b2", "L-b3")
async def test_a_handle_gets_a_job_in_a_run_that_keeps_jobs_and_a_cancelled_run_hears_nothing() -> None:
    handles: list[Any] = []

    async def start(args: dict[str, Any], callback: Any) -> ToolResult:
        handles.append(callback)
        return ToolResult.async_("started")

    registry = ToolRegistry([AgentTool(ToolDefinition("start", "Start work for later", EMPTY), start)])
    async with JobTable() as jobs:
        run = RunContext(state=_with_jobs(jobs))
        first = await registry.dispatch("start", {}, context=run)
        second = await registry.dispatch("start", {}, context=run)
        await handles[0](ToolResult.ok("done"))
        run.cancel()
        await handles[1](ToolResult.ok("too late"))
        assert first.job_id is not None
        assert second.job_id is not None
        assert (await jobs.await_(first.job_id)).text == "done"
        open_job = jobs.get(second.job_id)
        assert open_job is not None
        assert not open_job.is_done


@pytest.mark.conforms("L-b4")
async def test_plans_and_code_wait_for_background_work_a_while_and_then_get_its_id() -> None:
    async def script(call_tool: Any) -> Any:
        return await call_tool("in_background", {})

    async def endless(ctx: ToolContext) -> ToolResult:
        """Start some work that never ends."""

        async def work() -> ToolResult:
            await anyio.sleep_forever()
            return ToolResult.ok("never")

        return ctx.start_job(work, ack="on it")

    registry = ToolRegistry([in_background, endless], pending_wait_s=0.01)
    patient = ToolRegistry([in_background])
    for each in (registry, patient):
        each.enable_plan_execution()
        each.enable_code_execution(FakeRuntime(script))

    async with JobTable() as jobs:
        run = RunContext(state=_with_jobs(jobs))
        steps = [{"tool": "in_background", "args": {}}]
        plan = await patient.dispatch("execute_plan", {"steps": steps}, context=run)
        code = await patient.dispatch("execute_code", {"code": "..."}, context=run)
        never = await registry.dispatch("execute_plan", {"steps": [{"tool": "endless", "args": {}}]}, context=run)

    assert plan.value == [{"step": 0, "tool": "in_background", "status": "ok", "result": "worked"}]
    assert code.value == "worked"
    [row] = never.value
    assert row["status"] == "pending"
    assert row["result"] == {"job_id": "job_3", "status": "pending", "text": "on it"}


class Counter:
    """A contextual tool in the seeds' form, with state of its own."""

    name = "count"
    description = "Count the calls, and say where to."
    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}}

    def __init__(self) -> None:
        self.number = 0
        self.channel = self.chat_id = ""
        self.callback: Any = None

    def set_context(self, channel: str, chat_id: str) -> None:
        self.channel, self.chat_id = channel, chat_id

    def set_callback(self, callback: Any) -> None:
        self.callback = callback

    async def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        self.number += 1
        before = (self.channel, self.chat_id)
        await anyio.lowlevel.checkpoint()
        assert (self.channel, self.chat_id) == before
        return ToolResult.of([self.number, *before])


class SlottedCounter(Counter):
    __slots__ = ()


class PropertyCounter(Counter):
    """Keeps its chat behind a property, and its number in a slot of the class below."""

    @property
    def chat_id(self) -> str:
        return self._chat.upper()

    @chat_id.setter
    def chat_id(self, chat: str) -> None:
        self._chat = chat


@pytest.mark.conforms("K2", "K-b1", "K-b2", "EX-41", "K1")
@each_row("kind", [Counter, SlottedCounter, PropertyCounter])
async def test_a_contextual_tool_keeps_its_own_state_and_each_call_has_its_own_chat(kind: type[Counter]) -> None:
    tool = kind()
    registry = ToolRegistry([tool])
    answers: list[Any] = []

    async def call(chat: str) -> None:
        answers.append((await execute_with_context(registry, "count", {}, "tg", chat)).value)

    async with anyio.create_task_group() as group:
        for number in range(200):
            group.start_soon(call, str(number))

    assert tool.number == 200
    assert sorted(int(chat) for _, _, chat in answers) == list(range(200))
    assert {channel for _, channel, _ in answers} == {"tg"}
    assert (tool.channel, tool.chat_id, tool.callback) == ("", "", None)
    assert (await registry.execute("count")).value == [201, "", ""]


@pytest.mark.slow
@pytest.mark.conforms("K2", "K-b2")
@each_row("route", ROUTES)
async def test_the_state_of_a_contextual_tool_is_kept_on_every_route(route: str) -> None:
    tool = Counter()
    registry = ToolRegistry([tool])

    seen = [str(await answer_by(route, registry, "count")) for _ in range(2)]

    assert tool.number == 2
    assert "1" in seen[0] and "2" in seen[1]


@each_row("has_hook", [False, True])
async def test_a_result_that_comes_after_the_call_is_delivered_whether_or_not_it_is_awaited(has_hook: bool) -> None:
    told: list[str] = []
    arrived, may_end = anyio.Event(), anyio.Event()

    class Reporter:
        name, description = "report", "Report in the background, after the answer."
        parameters: ClassVar[dict[str, Any]] = {"type": "object"}
        callback: Any = None

        def set_callback(self, callback: Any) -> None:
            self.callback = callback

        async def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
            callback = self.callback

            async def later() -> None:
                await may_end.wait()
                callback(ToolResult.ok("ready", for_user="ready"))

            workers.start_soon(later)
            return ToolResult.ok("under way")

    async def tell(run: RunContext, result: ToolResult) -> None:
        told.append(result.text)
        arrived.set()

    registry = ToolRegistry([Reporter()])
    if has_hook:
        registry.add_hook(after=lambda call, result: None)
    async with anyio.create_task_group() as workers:
        with anyio.fail_after(60):
            await execute_with_context(registry, "report", {}, "tg", "1", callback=tell)
            may_end.set()
            await arrived.wait()

    assert told == ["ready"]
