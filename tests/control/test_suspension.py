"""Runs that wait for decisions: what is asked, what a token allows, and that nothing is made twice."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from control.conftest import Effects
from toolcell import (
    AuditLog,
    ExecutionResult,
    Limits,
    Outcome,
    PoolConfig,
    RecordConfig,
    ResumeError,
    RunContext,
    Runtime,
    SyncRuntime,
    ToolRegistry,
    UsageError,
)
from toolcell.control.suspension import check_ids
from toolcell.tools import AlreadyMade, Approve, Call, Deny, Edit, Feature, Rewrite, approval_hook

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

SCRIPT = """
import random, time
first = call_tool('read', name='price')
paid = call_tool('pay', to='ada', euros=first[1])
set_result([first, paid, random.random(), time.time()])
"""


def suspended(runtime: SyncRuntime, effects: Effects, source: str = SCRIPT, **options: Any) -> ExecutionResult:
    result = runtime.execute_code(source, tools=effects.registry, on_approval="suspend", **options)
    assert result.outcome is Outcome.SUSPENDED and result.suspension is not None
    return result


def resume(
    runtime: SyncRuntime, effects: Effects, result: ExecutionResult, *decisions: Any, **options: Any
) -> ExecutionResult:
    assert result.suspension is not None
    given = {call.id: each for call, each in zip(result.suspension.calls, decisions, strict=True)}
    return runtime.resume(result.suspension.to_json(), given, tools=effects.registry, **options)


@pytest.fixture(params=["memory", "disk"])
def runtime(request: pytest.FixtureRequest) -> SyncRuntime:
    found: SyncRuntime = request.getfixturevalue("opened" if request.param == "memory" else "durable")
    return found


def test_a_call_that_needs_approval_suspends_the_run_and_is_made_once_it_is_approved(
    runtime: SyncRuntime, effects: Effects
) -> None:
    result = suspended(runtime, effects)

    assert effects.made == [["read", "price"]]
    assert result.suspension is not None
    (call,) = result.suspension.calls
    assert (call.tool, call.args, call.line, call.reason) == ("pay", {"to": "ada", "euros": 1}, 4, "needs approval")
    assert "pay (line 4)" in str(result.error)

    done = resume(runtime, effects, result, Approve())

    assert done.ok, done.error
    assert done.value[:2] == [["price", 1], "paid ada 1"]
    assert effects.made == [["read", "price"], ["pay", "ada", 1]]


def test_decisions_deny_and_edit(runtime: SyncRuntime, effects: Effects) -> None:
    source = """
def attempt(to):
    try:
        return call_tool('pay', to=to)
    except ToolError as error:
        return [error.code, str(error)]
[attempt('ada'), attempt('bob')]
"""
    second = resume(runtime, effects, suspended(runtime, effects, source), Deny("not to ada"))
    done = resume(runtime, effects, second, Edit({"to": "eve", "euros": "3"}))

    assert done.value[0][0] == "blocked" and "not to ada" in done.value[0][1]
    assert done.value[1] == "paid eve 3"
    assert effects.made == [["pay", "eve", 3]]


@pytest.mark.parametrize("on_approval", ["suspend", "ask", "deny"])
def test_an_observer_is_told_the_start_and_the_end_of_each_call(
    on_approval: Any, runtime: SyncRuntime, effects: Effects
) -> None:
    """However calls that need approval are decided, before and after the run waited for that."""
    told = list[tuple[str, str]]()

    class Observer(Feature):
        def call_started(self, call: Call, /) -> None:
            told.append(("started", call.name))

        def call_ended(self, call: Call, /) -> None:
            told.append(("ended", call.name))

    script = "call_tool('write', text='a')\ntry: call_tool('pay', to='b')\nexcept ToolError: pass\ncall_tool('read', name='c')"
    tools, context = effects.registry.merged(), RunContext().having(Observer())
    if on_approval == "ask":
        tools.add_hook(approval_hook(lambda call: Approve()))
    result = runtime.execute_code(script, tools=tools, on_approval=on_approval, context=context)
    if result.suspension is not None:
        assert told == [("started", "write"), ("ended", "write")]
        told.clear()
        again = RunContext().having(Observer())
        result = runtime.resume(result.suspension, {"call_2": Approve()}, tools=tools, context=again)

    assert result.ok, result.error
    assert told == [(what, name) for name in ("write", "pay", "read") for what in ("started", "ended")]


def test_calls_of_one_parallel_batch_suspend_together(runtime: SyncRuntime, effects: Effects) -> None:
    source = """
calls = [('pay', {'to': 'a'}), ('read', {'name': 'x'}), ('pay', {'to': 'b'}), ('write', {'text': 't'}), ('pay', {'to': 'c'})]
[str(each) for each in call_tools_parallel(calls, return_exceptions=True)]
"""
    result = suspended(runtime, effects, source)
    assert result.suspension is not None
    assert [call.args["to"] for call in result.suspension.calls] == ["a", "b", "c"]
    assert sorted(effects.made) == [["read", "x"], ["write", "t"]]

    done = resume(runtime, effects, result, Approve(), Deny("no"), Approve())

    assert [done.value[0], done.value[2], done.value[4]] == ["paid a 1", "Tool 'pay' failed: no", "paid c 1"]
    assert len(effects.made) == 4 and sorted(effects.of("pay")) == [["pay", "a", 1], ["pay", "c", 1]]


def test_more_calls_than_run_at_once_are_decided_in_turns(opened: SyncRuntime, effects: Effects) -> None:
    source = "call_tools_parallel([('pay', {'to': str(n)}) for n in range(5)])"
    result = suspended(opened, effects, source, limits=Limits(concurrent_calls=2))
    asked = []
    while result.suspension is not None:
        asked.append(len(result.suspension.calls))
        result = resume(opened, effects, result, *[Approve()] * asked[-1])

    assert asked == [2, 2, 1]
    assert result.value == [f"paid {n} 1" for n in range(5)]
    assert len(effects.made) == 5


def test_tasks_of_a_script_that_go_on_meanwhile_are_repeated_and_not_made_again(
    opened: SyncRuntime, effects: Effects
) -> None:
    source = """
import asyncio
async def chain(name):
    seen = []
    for step in range(3):
        seen.append(await call_tool_async('write', text=f'{name}{step}'))
    seen.append(await call_tool_async('pay', to=name))
    return seen
await asyncio.gather(*map(chain, 'abc'))
"""
    result = suspended(opened, effects, source)
    assert result.suspension is not None
    assert len(result.suspension.calls) == 3 and len(effects.made) == 9
    done = resume(opened, effects, result, Approve(), Approve(), Approve())
    direct = Effects()
    straight = opened.execute_code(source, tools=approving(direct))

    assert done.ok, done.error
    assert sorted(map(str, effects.made)) == sorted(map(str, direct.made))
    assert [row[-1] for row in done.value] == [row[-1] for row in straight.value]


def approving(effects: Effects) -> ToolRegistry:
    """The same tools, with a hook that approves everything."""
    registry = effects.registry.merged()
    registry.add_hook(approval_hook(lambda call: Approve()))
    return registry


def test_a_call_without_a_decision_suspends_again(opened: SyncRuntime, effects: Effects) -> None:
    source = "call_tools_parallel([('pay', {'to': 'a'}), ('pay', {'to': 'b'})])"
    result = suspended(opened, effects, source)
    assert result.suspension is not None
    _, second = result.suspension.calls
    again = opened.resume(result.suspension, {second.id: Approve()}, tools=effects.registry)

    assert again.suspension is not None
    assert [call.args["to"] for call in again.suspension.calls] == ["a"]
    assert effects.made == [["pay", "b", 1]]
    assert resume(opened, effects, again, Approve()).value == ["paid a 1", "paid b 1"]


def test_deny_refuses_without_asking_and_ask_asks_the_hook(opened: SyncRuntime, effects: Effects) -> None:
    asked: list[str] = []

    def ask(call: Call) -> Approve | Deny:
        asked.append(call.name)
        return Approve()

    registry = effects.registry.merged()
    registry.add_hook(approval_hook(ask))
    source = "try:\n    r = call_tool('pay', to='a')\nexcept ToolError as error:\n    r = [error.code, str(error)]\nr"
    denied = opened.execute_code(source, tools=registry, on_approval="deny")
    assert denied.value[0] == "blocked" and "on_approval='deny'" in denied.value[1]
    assert not asked and not effects.made

    waiting = opened.execute_code(source, tools=registry, on_approval="suspend")
    assert waiting.outcome is Outcome.SUSPENDED and not asked

    assert opened.execute_code(source, tools=registry).value == "paid a 1"
    assert asked == ["pay"]


def test_calls_below_a_call_of_the_script_cannot_suspend_it(opened: SyncRuntime, effects: Effects) -> None:
    registry = effects.registry.merged()

    @registry.tool
    async def outer() -> Any:
        """Call a tool that needs approval, as a tool that wraps others does."""
        from toolcell.tools import current_context

        return (await current_context().call_tool("pay", {"to": "x"})).text

    @registry.tool(orchestrates=True)
    async def script(source: str) -> Any:
        """Run a script inside the call."""
        from toolcell.tools import current_context

        context = current_context()
        inner = await opened.runtime.execute_code(source, tools=registry, context=context.run)
        return [str(inner.outcome), inner.value]

    inner = "try:\n    r = call_tool('pay', to='x')\nexcept ToolError as error:\n    r = str(error)\nr"
    for source in ("call_tool('outer')", f"call_tool('script', source={inner!r})"):
        result = opened.execute_code(source, tools=registry, on_approval="suspend")
        assert "cannot wait for it" in str(result.value), result.error
    registry.enable_plan_execution()
    assert not effects.made


def test_hooks_that_refuse_still_refuse_and_a_rewrite_is_what_is_asked_about(
    opened: SyncRuntime, effects: Effects
) -> None:
    registry = effects.registry.merged()
    wanted = [5]

    @registry.before_call
    def cap(call: Call) -> Rewrite | None:
        return Rewrite({**call.args, "euros": wanted[0]}) if call.name == "pay" else None

    result = opened.execute_code("call_tool('pay', to='a', euros=900)", tools=registry, on_approval="suspend")
    assert result.suspension is not None
    assert result.suspension.calls[0].args == {"to": "a", "euros": 5}

    wanted[0] = 7
    done = opened.resume(result.suspension, {"call_1": Approve()}, tools=registry)
    assert done.outcome is Outcome.DIVERGED and done.divergence is not None
    assert "other arguments than those that were decided about" in done.divergence.message
    assert not effects.made


# Tokens


def test_a_token_is_refused_for_each_reason_with_its_own_words(tmp_path: Path, effects: Effects) -> None:
    with (
        SyncRuntime(effects.registry, record=tmp_path / "a", pool=PoolConfig(warm=1)) as runtime,
        SyncRuntime(effects.registry, record=tmp_path / "b", pool=PoolConfig(warm=1)) as foreign,
    ):
        result = suspended(runtime, effects)
        assert result.suspension is not None
        token = result.suspension.to_json()
        other = ToolRegistry()
        other.tool(read_only=True)(effects_of_another)
        cases: list[tuple[str, dict[str, Any], str]] = [
            ("{}", {}, "not a token of a suspended run"),
            ('{"toolcell_suspension": 1}', {}, "not a token of a suspended run"),
            (f'{{"toolcell_turn": {token}, "scripts": {{}}}}', {}, "token of a suspended agent, not of a run"),
            (token.replace('"signature":"', '"signature":"0'), {}, "was changed, or was signed elsewhere"),
            (token.replace('"ada"', '"eve"'), {}, "was changed, or was signed elsewhere"),
            ("../x", {}, "takes result.suspension, its to_json"),
            (result, {}, "takes result.suspension, its to_json"),  # type: ignore[list-item]
            (token, {"decisions": [Approve()]}, "must be a dict from ids of calls"),
            ("nobody", {}, "no run nobody"),
            (result.suspension.run_id, {}, "with the token of its suspension, not with its id"),
            (
                token,
                {"tools": other},
                "began with other tools .missing: crash, fail, pay, read, write; new: effects_of_another",
            ),
            (token, {"decisions": {"call_9": Approve()}}, "no call call_9 waits for a decision; these do: call_2"),
            (
                token,
                {"decisions": {f"call_x{number}": Approve() for number in range(9_000)}},
                "call_x19 and 8980 more waits for a decision; these do: call_2",
            ),
            (token, {"decisions": {"call_2": "yes"}}, r"is Approve\(\), Deny.*not"),
            (token, {"decisions": {"call_2": AlreadyMade(1)}}, "was not made"),
        ]
        for given, options, message in cases:
            with pytest.raises(UsageError, match=message):
                runtime.resume(given, **options)
        with pytest.raises(ResumeError, match="was changed"):
            foreign.resume(token)
        assert len(effects.made) == 1

        assert runtime.resume(token, {"call_2": Approve()}).ok  # none of them used it up
        for given in (token, result.suspension.run_id):
            with pytest.raises(ResumeError, match=r"used already|has ended"):
                runtime.resume(given, {"call_2": Approve()})
    assert effects.of("pay") == [["pay", "ada", 1]]


async def effects_of_another(q: str) -> str:
    """Look something up somewhere else."""
    return q


def test_a_run_is_not_resumed_with_a_tool_that_takes_something_else_now(runtime: SyncRuntime, effects: Effects) -> None:
    waiting = runtime.execute_code("call_tool('pay', to='b')", tools=effects.registry, on_approval="suspend")
    assert waiting.suspension is not None
    tools = effects.registry.merged()
    tools.register("pay", "Pay as much as one is told.", {"type": "object"}, len, replace=True, requires_approval=True)

    with pytest.raises(ResumeError, match=r"began with other tools \(changed: pay\)"):
        runtime.resume(waiting.suspension, {"call_1": Approve()}, tools=tools)


def test_an_expired_token_is_refused(tmp_path: Path, effects: Effects) -> None:
    log = AuditLog(tmp_path / "runs.db", config=RecordConfig(token_s=1e-6))
    with SyncRuntime(effects.registry, record=log, pool=PoolConfig(warm=1)) as runtime:
        result = suspended(runtime, effects)
        assert result.suspension is not None and result.suspension.expires < time.time() + 1
        with pytest.raises(ResumeError, match=r"expired at 20.*RecordConfig.token_s"):
            runtime.resume(result.suspension, {"call_2": Approve()})


def test_a_token_says_what_a_person_needs_and_nothing_else_of_the_run(opened: SyncRuntime, effects: Effects) -> None:
    result = suspended(opened, effects, SCRIPT, inputs={"hidden": "sesame"})
    assert result.suspension is not None
    plain = json.loads(result.suspension.to_json())["toolcell_suspension"]

    assert [(call["tool"], call["args"], call["line"]) for call in plain["calls"]] == [
        ("pay", {"to": "ada", "euros": 1}, 4)
    ]
    assert "sesame" not in result.suspension.to_json() and "random" not in result.suspension.to_json()
    json.dumps(dataclasses.asdict(result.suspension))
    assert json.loads(result.to_json())["suspension"]["calls"][0]["tool"] == "pay"


def test_two_resumes_at_once_make_the_call_once(tmp_path: Path, effects: Effects) -> None:
    async def main() -> list[Any]:
        results: list[Any] = []
        async with Runtime(effects.registry, record=tmp_path / "runs.db", pool=PoolConfig(warm=2)) as runtime:
            first = await runtime.execute_code(SCRIPT, on_approval="suspend")
            assert first.suspension is not None
            token = first.suspension

            async def attempt() -> None:
                try:
                    results.append(str((await runtime.resume(token, {"call_2": Approve()})).outcome))
                except ResumeError as error:
                    results.append(str(error))

            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(attempt)
        return results

    results = anyio.run(main)
    assert results.count("ok") == 1
    assert all("under way" in each or "used already" in each or "has ended" in each for each in results if each != "ok")
    assert effects.of("pay") == [["pay", "ada", 1]]


# Divergence


def test_a_script_that_does_something_else_is_stopped_before_it_makes_a_call(
    opened: SyncRuntime, effects: Effects
) -> None:
    source = "import time\ncall_tool('write', text=str(time.monotonic_ns()))\ncall_tool('pay', to='a')"
    result = suspended(opened, effects, source)
    done = resume(opened, effects, result, Approve())

    assert done.outcome is Outcome.DIVERGED and done.divergence is not None
    assert (done.divergence.kind, done.divergence.index, done.divergence.line) == ("call", 1, 2)
    assert done.divergence.expected["args"] != done.divergence.got["args"]
    assert len(effects.made) == 1


def test_a_script_that_ends_early_has_diverged(opened: SyncRuntime, effects: Effects) -> None:
    source = "import time\nif time.monotonic_ns() % 2:\n    call_tool('pay', to='a')\ncall_tool('pay', to='b')"
    for _ in range(40):
        result = suspended(opened, effects, source)
        assert result.suspension is not None
        if result.suspension.calls[0].args["to"] == "a":
            done = resume(opened, effects, result, Approve())
            if done.outcome is Outcome.DIVERGED:
                assert done.divergence is not None and done.divergence.index == 1
                return
    pytest.fail("the clock was odd forty times")


def test_arguments_of_the_wrong_kind_are_named(opened: SyncRuntime) -> None:
    for options, message in (
        ({"on_approval": "maybe"}, "on_approval"),
        ({"repairs": "no-such-run"}, "no journal of that run"),
        ({"refresh": "all"}, "refresh"),
    ):
        with pytest.raises(UsageError, match=message):
            opened.execute_code("1", **options)
    for name in ("cancel", "context", "on_log"):
        with pytest.raises(UsageError, match=f"{name}="):
            opened.resume("a-run", **{name: 5})
    for wrong in (7, ""):
        with pytest.raises(UsageError, match="record"):
            SyncRuntime(record=wrong)  # type: ignore[arg-type]


def test_the_context_of_a_suspended_run_is_not_aborted(opened: SyncRuntime, effects: Effects) -> None:
    context = RunContext(run_id="an-agent")
    result = suspended(opened, effects, context=context)

    assert context.state.abort is None
    assert result.run_id == "an-agent"


@pytest.mark.slow
@pytest.mark.parametrize("is_durable", [False, True])
def test_a_call_in_doubt_shows_the_arguments_that_it_started_with(tmp_path: Path, is_durable: bool) -> None:
    made: list[int] = []

    async def main() -> ExecutionResult:
        registry, cancel = ToolRegistry(), anyio.Event()

        @registry.tool(requires_approval=True)
        async def pay(euros: int) -> None:
            """Send money, and take long over it."""
            made.append(euros)
            cancel.set()
            await anyio.sleep_forever()

        record = tmp_path / "runs.db" if is_durable else None
        async with Runtime(registry, record=record, pool=PoolConfig(warm=1)) as runtime:
            first = await runtime.execute_code("call_tool('pay', euros=100)", on_approval="suspend")
            assert first.suspension is not None
            cut = await runtime.resume(first.suspension, {"call_1": Edit({"euros": 10})}, cancel=cancel)
            return await runtime.resume(cut.journal_id)

    result = anyio.run(main)
    assert result.suspension is not None and made == [10]
    assert result.suspension.calls[0].args == {"euros": 10} and "in doubt" in result.suspension.calls[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("in_session", [False, True])
def test_a_call_has_one_id_in_the_result_in_hooks_and_where_it_waits(in_session: bool, opened: SyncRuntime) -> None:
    registry, seen = ToolRegistry(), list[str]()

    @registry.tool(requires_approval=True)
    def pay(to: str, euros: int) -> str:
        """Send money to somebody."""
        return f"paid {to} {euros}"

    @registry.tool
    def look(name: str) -> str:
        """Look something up."""
        return name

    registry.before_call(lambda call: seen.append(call.call_id))
    script = "look = tools.look('x')\nset_result(tools.pay('ada', 3))"  # values in order: their names are asked for
    if in_session:
        with opened.session(tools=registry) as session:
            session.execute_code("tools.look('y')")
            result = session.execute_code(script, on_approval="suspend")
    else:
        result = opened.execute_code(script, tools=registry, on_approval="suspend")

    assert result.suspension is not None
    [waiting] = result.suspension.calls
    assert [call.name for call in result.calls if call.id == waiting.id] == ["pay"]
    assert {call.id for call in result.calls} <= set(seen)


def test_an_error_about_decisions_names_a_few_of_many_ids() -> None:
    waiting = {f"call_{number}": None for number in range(10_000)}
    given = {"x" * 1000 + str(number): Approve() for number in range(9_000)}
    with pytest.raises(
        UsageError, match=r"no call xxx.* and 8980 more waits .*: call_0, .*, call_19 and 9980 more$"
    ) as said:
        check_ids(given, waiting)
    assert len(str(said.value)) < 3_000
