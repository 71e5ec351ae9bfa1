"""Group G: hooks before and after calls."""

from __future__ import annotations

import json
import time
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rows import each_row
from tool_routes import ROUTES, answer_by
from toolcell.agents import Agent, Halt, ModelResponse, Processor
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.run_state import JobTable, RunState
from toolcell.errors import ToolAbort
from toolcell.tools import (
    Approve,
    Block,
    Call,
    Deny,
    Edit,
    Hook,
    Override,
    Rewrite,
    RunContext,
    Substitute,
    ToolContext,
    ToolRegistry,
    ToolResult,
    approval_hook,
)
from tools.toolkit import FakeRuntime, recorded

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


def adding(**options: Any) -> tuple[ToolRegistry, list[Any]]:
    ran: list[Any] = []
    registry = ToolRegistry()

    @registry.tool(**options)
    async def add(a: int, b: int = 0) -> int:
        """Add two numbers together."""
        ran.append((a, b))
        return a + b

    return registry, ran


@pytest.mark.conforms("G1", "G2", "G3")
@each_row(
    ("verdict", "text"),
    [
        (Block("not in this session"), "not in this session"),
        (Block(), "tool call blocked"),
    ],
)
async def test_a_before_hook_can_block_and_its_reason_is_what_the_model_reads(verdict: Any, text: str) -> None:
    registry, ran = adding()
    registry.add_hook(before=lambda call: verdict)
    model = ScriptedModel([calls(("add", {"a": 1})), "went on"])

    run = await Agent(model, tools=registry).run("go")

    assert run.messages[2]["content"] == text
    assert run.content == "went on"
    assert ran == []


@pytest.mark.conforms("G1", "D4")
async def test_before_hooks_see_validated_arguments_and_never_invalid_ones() -> None:
    registry, _ = adding()
    seen: list[Any] = []
    registry.add_hook(before=lambda call: seen.append(dict(call.args)))

    await registry.execute("add", {"a": "1"})
    await registry.execute("add", {"a": "one"})
    await registry.execute("nowhere", {})

    assert seen == [{"a": 1, "b": 0}]


@pytest.mark.conforms("G4", "G5")
async def test_an_after_hook_replaces_what_it_sets_and_keeps_the_rest() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def work() -> ToolResult:
        """Work and leave notes."""
        return ToolResult.ok("text", details={"rows": 1}, terminate=False)

    async def after(change: Any) -> ToolResult:
        with_hook = registry.merged()
        with_hook.add_hook(after=lambda call, result: change)
        return await with_hook.execute("work")

    kept = await after(None)
    reworded = await after(Override(content="other"))
    noted = await after(Override(details={"rows": 2}))
    stopped = await after(Override(terminate=True))
    failed = await after(Override(is_error=True))
    replaced = await after(ToolResult.ok("all new"))

    assert (kept.text, kept.details, kept.terminate, kept.is_error) == ("text", {"rows": 1}, False, False)
    assert (reworded.text, reworded.details) == ("other", {"rows": 1})
    assert (noted.text, noted.details) == ("text", {"rows": 2})
    assert (stopped.text, stopped.terminate) == ("text", True)
    assert (failed.text, failed.is_error) == ("text", True)
    assert (replaced.text, replaced.meta.tool) == ("all new", "work")


@pytest.mark.conforms("G5", "V-17")
async def test_an_after_hook_can_end_the_run_even_with_an_error_and_turn_errors_round() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def fail() -> ToolResult:
        """Fail with a message."""
        return ToolResult.fail("broken")

    registry.add_hook(after=lambda call, result: Override(terminate=True))
    model = ScriptedModel([calls(("fail", {})), "never said"])
    run = await Agent(model, tools=registry).run("go")
    mended = registry.merged()
    mended.add_hook(after=lambda call, result: Override(content="all is well", is_error=False))

    assert (run.stop_reason, model.samplings) == ("terminated", 1)
    assert (await mended.execute("fail")).status == "ok"
    assert (await mended.execute("fail")).text == "all is well"


@pytest.mark.conforms("G7")
async def test_a_hook_gets_the_message_the_call_the_arguments_and_the_run() -> None:
    registry, _ = adding()
    seen: list[Any] = []

    def before(call: Call) -> None:
        seen.append((call.message["role"], call.call_id, call.name, call.args, call.run.user_id))

    def after(call: Call, result: ToolResult) -> None:
        seen.append((result.value, result.is_error, call.run.user_id))

    registry.add_hook(before=before, after=after)
    model = ScriptedModel([calls(("add", {"a": 1, "b": 2})), "done"])

    await Agent(model, tools=registry).run("go", context=RunContext(user_id="ada"))

    assert seen == [("assistant", "call_0_add", "add", {"a": 1, "b": 2}, "ada"), (3, False, "ada")]


@pytest.mark.conforms("G8")
async def test_hooks_never_overlap_not_even_for_steps_of_a_plan_or_calls_of_code() -> None:
    registry, _ = adding()
    inside, most = 0, 0

    async def look(call: Call, result: ToolResult | None = None) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        inside -= 1

    async def script(call_tool: Any) -> Any:
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(call_tool, "add", {"a": number})

    registry.enable_plan_execution()
    registry.enable_code_execution(FakeRuntime(script))
    registry.add_hook(before=look, after=look)
    steps: list[dict[str, Any]] = [{"tool": "add", "args": {"a": number}} for number in range(5)]
    linked = [{**step, "id": f"s{number}"} for number, step in enumerate(steps)]
    linked[4]["args"] = {"a": {"$ref": "s0"}}
    batch = [("execute_plan", {"steps": steps}), ("execute_plan", {"steps": linked}), ("execute_code", {"code": "x"})]

    results = await registry.execute_batch(batch)

    assert not any(result.is_error for result in results)
    assert most == 1


@pytest.mark.conforms("G8")
async def test_a_hook_may_call_tools_itself() -> None:
    registry, ran = adding()

    async def before(call: Call) -> None:
        if call.args["a"] == 1:
            await registry.dispatch("add", {"a": 2}, context=call.run)

    registry.add_hook(before=before)

    with anyio.fail_after(60):
        await registry.execute_batch([("add", {"a": 1}), ("add", {"a": 3})])

    assert ran[0] == (2, 0)
    assert sorted(ran) == [(1, 0), (2, 0), (3, 0)]


@pytest.mark.conforms("G9", "G-b3")
async def test_a_hook_may_be_made_to_end_the_run_and_then_says_so_in_an_event() -> None:
    registry, ran = adding()

    def broken(call: Call) -> None:
        raise ValueError("hook broke")

    registry.add_hook(before=broken, on_error="abort", name="guard")
    model = ScriptedModel([calls(("add", {"a": 1})), "never said"])
    agent = Agent(model, tools=registry)
    log = recorded(agent.events)

    run = await agent.run("go")

    assert run.stop_reason == "cancelled"
    assert "hook 'guard' failed: ValueError, on add" in (run.error or "")
    assert [event.data["error"] for event in log if event.type == "error"] == [run.error]
    assert log[-1].type == "agent_end"
    assert ran == []
    assert run.messages[-1]["role"] == "tool"
    with pytest.raises(ToolAbort):
        await registry.execute("add", {"a": 1})


@pytest.mark.conforms("G-b3", "G9")
@each_row("kind", ["raises", "returns nonsense", "takes too long"])
async def test_a_before_hook_that_fails_blocks_its_call(kind: str) -> None:
    registry, ran = adding()

    async def before(call: Call) -> Any:
        if kind == "raises":
            raise RuntimeError("hook broke")
        if kind == "takes too long":
            await anyio.sleep_forever()
        return "nonsense"

    registry.add_hook(before=before, timeout_s=0.01)

    result = await registry.execute("add", {"a": 1})

    assert result.status == "blocked"
    assert result.error is not None
    assert result.error.code == "hook_error"
    assert ran == []


@pytest.mark.conforms("G2", "G-b3")
@each_row("verdict", [(False, "not allowed"), (True, "not allowed"), (True, ""), "no", False, True])
async def test_what_a_before_hook_may_not_return_refuses_the_call(verdict: Any) -> None:
    registry, ran = adding()
    registry.add_hook(before=lambda call: verdict)

    result = await registry.execute("add", {"a": 1})

    assert ran == []
    assert result.error is not None
    assert result.error.code == "hook_error"
    assert "Block(reason)" in result.text


def raises_with_the_result(call: Call, result: ToolResult) -> None:
    raise RuntimeError(f"hook broke at {result.text}")


async def waits(call: Call, result: ToolResult) -> None:
    await anyio.sleep_forever()


def is_slow(call: Call, result: ToolResult) -> None:
    time.sleep(0.1)


AFTER_HOOKS_THAT_FAIL: dict[str, Any] = {
    "raises": raises_with_the_result,
    "waits": waits,
    "is slow": is_slow,
    "a string": lambda call, result: "[redacted]",
    "a refusal": lambda call, result: Block("no"),
    "a pair": lambda call, result: (True, "no"),
    "false": lambda call, result: False,
}


@pytest.mark.conforms("G-b3", "G4")
@pytest.mark.parametrize("kind", AFTER_HOOKS_THAT_FAIL)
async def test_nobody_gets_a_result_that_an_after_hook_failed_at(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    registry, ran = ToolRegistry(), list[int]()

    @registry.tool
    async def read_letter() -> dict[str, str]:
        """Read the letter that nobody may see."""
        ran.append(1)
        return {"letter": "confidential"}

    calls_seen: list[Call] = []
    registry.add_hook(after=lambda call, result: calls_seen.append(call))
    registry.add_hook(after=AFTER_HOOKS_THAT_FAIL[kind], timeout_s=0.05)

    result = await registry.execute("read_letter")

    assert (ran, result.status, result.has_value) == ([1], "error", False)
    assert result.error is not None
    assert result.error.code == "hook_error"
    assert "confidential" not in str(result.to_dict()) and "the tool itself has run" in result.text
    assert calls_seen[0].warnings[0].startswith("after hook")
    assert "failed on read_letter" in caplog.text


@pytest.mark.slow
@pytest.mark.conforms("G-b3", "G-b2")
@each_row("route", ROUTES)
async def test_an_after_hook_that_fails_withholds_the_result_on_every_route(route: str) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def read_letter() -> dict[str, str]:
        """Read the letter that nobody may see."""
        return {"letter": "confidential"}

    registry.add_hook(after=lambda call, result: "[redacted]")  # type: ignore[arg-type, return-value]
    seen = str(await answer_by(route, registry, "read_letter"))

    assert "confidential" not in seen
    assert "withheld" in seen


@pytest.mark.conforms("G-b3", "G-b2")
async def test_an_after_hook_that_fails_withholds_the_result_of_a_job() -> None:
    registry, jobs = ToolRegistry(), JobTable()

    @registry.tool
    async def read_later(ctx: ToolContext) -> ToolResult:
        """Read the letter in the background."""

        async def read() -> ToolResult:
            return ToolResult.of({"letter": "confidential"})

        return ctx.start_job(read)

    registry.add_hook(after=lambda call, result: None if result.status == "pending" else "[redacted]")  # type: ignore[arg-type, return-value]
    async with jobs:
        started = await registry.execute("read_later", context=RunContext(state=RunState(jobs=jobs)))
        assert started.job_id is not None
        result = await jobs.await_(started.job_id)

    assert result.is_error
    assert "confidential" not in str(result.to_dict())


@pytest.mark.conforms("G-b3")
async def test_whoever_adds_an_after_hook_may_choose_that_its_failure_changes_nothing_or_ends_the_run() -> None:
    registry, _ = adding()
    seen: list[Call] = []

    def broken(call: Call, result: ToolResult) -> None:
        seen.append(call)
        raise RuntimeError("hook broke")

    registry.add_hook(after=broken, on_error="keep")

    assert (await registry.execute("add", {"a": 1})).value == 1
    assert seen[0].warnings == ("after hook failed: RuntimeError",)
    registry.add_hook(after=broken, on_error="abort")
    with pytest.raises(ToolAbort):
        await registry.execute("add", {"a": 1})


@pytest.mark.conforms("G-b3")
async def test_a_before_hook_that_keeps_results_blocks_all_the_same() -> None:
    registry, ran = adding()
    registry.add_hook(before=lambda call: 1 / 0, on_error="keep")  # type: ignore[arg-type, return-value]

    assert (await registry.execute("add", {"a": 1})).status == "blocked"
    assert ran == []


@pytest.mark.conforms("G10", "G-b3")
@each_row("kind", ["raises with the result", "a string", "none"])
async def test_a_result_that_a_processor_fails_at_is_withheld_and_the_run_goes_on(kind: str) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def read_letter() -> str:
        """Read the letter that nobody may see."""
        return "confidential"

    answers: dict[str, Any] = {
        "raises with the result": raises_with_the_result,
        "a string": lambda call, result: "[redacted]",
        "none": lambda call, result: None,
    }
    told: list[str] = []
    model = ScriptedModel([calls(("read_letter", {})), "went on"])
    agent = Agent(
        model,
        tools=registry,
        processors=(Processor(post_tool=answers[kind]),),
        on_user=lambda text, result: told.append(text),
    )
    run = await agent.run("go")

    assert run.content == "went on"
    assert "confidential" not in str((run.messages, run.steps, told))
    assert "withheld: a processor failed" in run.messages[2]["content"]


@pytest.mark.conforms("G10")
async def test_processors_edit_requests_answers_and_results_in_order() -> None:
    registry, _ = adding()

    def note(name: str) -> Processor:
        return Processor(
            pre_llm=lambda messages: [*messages, {"role": "system", "content": f"pre {name}"}],
            post_llm=lambda response: ModelResponse(response.content + f" +{name}", response.tool_calls),
            post_tool=lambda call, result: ToolResult.ok(f"{result.text} {name}"),
        )

    model = ScriptedModel([calls(("add", {"a": 1})), "done"])
    run = await Agent(model, tools=registry, processors=(note("one"), note("two"))).run("go")

    assert [message["content"] for message in model.requests[0].messages] == ["go", "pre one", "pre two"]
    assert run.content == "done +one +two"
    assert run.messages[2]["content"] == "1 one two"
    assert "pre one" not in json.dumps(run.messages)


@pytest.mark.conforms("G10")
@each_row("where", ["pre_llm", "post_llm", "post_tool"])
async def test_a_processor_can_halt_the_run_with_an_answer_and_an_error_of_one_stops_it(where: str) -> None:
    registry, _ = adding()

    def halt(*_: Any) -> Any:
        raise Halt("that is enough")

    def fail(*_: Any) -> Any:
        raise RuntimeError("processor broke")

    def model() -> ScriptedModel:
        return ScriptedModel([calls(("add", {"a": 1})), "never said"])

    run = await Agent(model(), tools=registry, processors=(Processor(**{where: halt}),)).run("go")

    assert (run.content, run.stop_reason) == ("that is enough", "final")
    if where == "post_tool":  # costs the result, see above
        return
    with pytest.raises(RuntimeError, match="processor broke"):
        await Agent(model(), tools=registry, processors=(Processor(**{where: fail}),)).run("go")


@pytest.mark.conforms("G11", "A-b4")
async def test_a_person_approves_rejects_or_changes_a_call_before_it_runs() -> None:
    decisions: dict[int, Any] = {1: Approve(), 2: Deny("too risky"), 3: Edit({"a": 30}), 4: Deny(), 5: "what?"}
    registry, ran = adding(requires_approval=True)

    @registry.tool
    async def harmless() -> str:
        """Needs nobody's approval."""
        return "fine"

    async def ask(call: Call) -> Any:
        return decisions[call.args["a"]]

    registry.add_hook(approval_hook(ask))
    results = [await registry.execute("add", {"a": number}) for number in decisions]

    assert ran == [(1, 0), (30, 0)]
    assert [result.is_error for result in results] == [False, True, False, True, True]
    assert results[1].text == "too risky"
    assert (await registry.execute("harmless")).text == "fine"


@pytest.mark.conforms("G11")
async def test_without_anybody_to_ask_a_tool_that_needs_approval_does_not_run() -> None:
    registry, ran = adding(requires_approval=True)

    async def nobody(call: Call) -> Any:
        await anyio.sleep_forever()

    unasked = await registry.execute("add", {"a": 1})
    registry.add_hook(approval_hook(nobody, timeout_s=0.01))
    unanswered = await registry.execute("add", {"a": 1})

    assert "needs approval" in unasked.text
    assert unanswered.status == "blocked"
    assert ran == []


@pytest.mark.conforms("G-b1")
async def test_a_before_hook_can_rewrite_arguments_which_are_validated_again() -> None:
    registry, ran = adding()
    registry.add_hook(before=lambda call: Rewrite({"a": "5"} if call.args["a"] == 1 else {"a": "five"}))

    good = await registry.execute("add", {"a": 1})
    bad = await registry.execute("add", {"a": 2})

    assert good.value == 5
    assert bad.error is not None
    assert bad.error.code == "invalid_arguments"
    assert ran == [(5, 0)]


@pytest.mark.conforms("G-b1", "G1")
async def test_hooks_after_one_that_rewrites_see_the_new_arguments_and_may_still_refuse() -> None:
    registry, ran = adding()
    seen: list[Any] = []

    def guard(call: Call) -> Block | None:
        seen.append(dict(call.args))
        return Block("five is forbidden") if call.args["a"] == 5 else None

    registry.add_hook(before=lambda call: Rewrite({"a": call.args["a"] + 1}))
    registry.add_hook(before=guard)

    allowed = await registry.execute("add", {"a": 1})
    refused = await registry.execute("add", {"a": 4})

    assert (allowed.value, refused.text) == (2, "five is forbidden")
    assert seen == [{"a": 2, "b": 0}, {"a": 5, "b": 0}]
    assert ran == [(2, 0)]


@pytest.mark.conforms("G-b1")
async def test_a_before_hook_can_answer_in_the_tools_place() -> None:
    registry, ran = adding()
    registry.add_hook(before=lambda call: Substitute(ToolResult.of(42)))

    assert (await registry.execute("add", {"a": 1})).value == 42
    assert ran == []


@pytest.mark.conforms("G-b2", "H-b1")
async def test_hooks_see_calls_from_everywhere_and_know_where_from() -> None:
    registry, _ = adding()
    seen: list[tuple[str, str]] = []

    async def script(call_tool: Any) -> Any:
        return await call_tool("add", {"a": 1})

    inner = Agent(ScriptedModel([calls(("add", {"a": 1})), "inner"]), tools=registry.subset(["add"]))
    top = ToolRegistry([*(registry.get(name)[0] for name in registry)])
    top.add_hook(before=lambda call: seen.append((call.name, call.origin_label)))
    steps = [{"tool": "add", "args": {"a": 1}}] * 2
    model = ScriptedModel(
        [
            calls(("add", {"a": 1})),
            calls(("execute_plan", {"steps": steps})),
            calls(("execute_code", {"code": "..."})),
            calls(("aide", {"task": "add"})),
            "done",
        ]
    )
    agent = Agent(model, tools=top, plan_execution=True, code_execution=FakeRuntime(script))
    agent.add_subagent("aide", "Helps with adding numbers.", inner)

    await agent.run("go")

    assert [where for name, where in seen if name == "add"] == ["model", "plan[0]", "plan[1]", "code", "subagent"]


@pytest.mark.conforms("G-b4")
async def test_stacked_hooks_run_outside_in_before_and_inside_out_after() -> None:
    registry, _ = adding()
    log: list[str] = []

    def hook(name: str) -> Hook:
        async def before(call: Call) -> None:
            log.append(f"before {name}")

        def after(call: Call, result: ToolResult) -> None:
            log.append(f"after {name}")

        return Hook(before=before, after=after)

    registry.add_hook(hook("outer"))
    registry.add_hook(hook("inner"))

    await registry.execute("add", {"a": 1})

    assert log == ["before outer", "before inner", "after inner", "after outer"]


async def test_a_decorated_function_sees_every_call() -> None:
    registry, seen = ToolRegistry(), list[str]()

    @registry.tool
    def twice(n: int) -> int:
        """Return twice a number."""
        return 2 * n

    @registry.before_call
    async def before(call: Call) -> None:
        seen.append(f"before {call.name}")

    assert (await registry.execute("twice", {"n": 2})).value == 4
    assert seen == ["before twice"]


async def test_the_log_names_the_function_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def looks(call: Call) -> None:
        """Let it pass."""

    async def breaks(call: Call, result: ToolResult) -> None:
        raise RuntimeError("broken")

    registry = ToolRegistry()

    @registry.tool
    def ping() -> str:
        """Answer the test."""
        return "pong"

    registry.add_hook(before=looks, after=breaks)
    await registry.execute("ping")

    assert "breaks failed on ping" in caplog.text and "looks" not in caplog.text
