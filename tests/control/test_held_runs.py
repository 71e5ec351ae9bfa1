"""Suspended runs that are held: the very sandbox goes on, and whoever is not held is carried on with the same result."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from control.conftest import Effects
from toolcell import (
    ExecutionResult,
    Limits,
    Outcome,
    Policy,
    PoolConfig,
    Quota,
    Quotas,
    ResumeError,
    RunContext,
    Runtime,
    SyncRuntime,
    UsageError,
)
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel
from toolcell.audit.filters import Filter
from toolcell.audit.keys import HmacKey
from toolcell.audit.log import AuditLog
from toolcell.audit.query import Index
from toolcell.audit.replays import replay, runtime_options
from toolcell.audit.verification import verify
from toolcell.control import Approve, Deny, Edit
from toolcell.run import recording
from toolcell.sandbox.process import cgroup_manager
from toolcell.sandbox.process.namespaced_sandbox import ProcessSandbox

pytestmark = pytest.mark.isolation

LIVE = """
import threading, time
mark = time.monotonic_ns()
file = open('state', 'w+')
file.write('kept')
counter = (n for n in range(10))
next(counter)
call_tool('write', text=str(mark))
paid = call_tool('pay', to='ada')
file.seek(0)
[mark, paid, file.read(), next(counter)]
"""
"""Diverges when it is run again: only the sandbox itself can go on with it."""

SAME = """
import os, random
print('begin', flush=True)
os.write(2, b'raw')
progress('half')
first = call_tool('read', name='price')
def attempt(to):
    try:
        return call_tool('pay', to=to, euros=first[1])
    except ToolError as error:
        return [error.code, str(error)]
first = [first, attempt('ada'), random.random(), attempt('bob')]
print('end')
open('out.txt', 'w').write(str(first))
set_result(first, files=['out.txt'])
"""


def held(runtime: SyncRuntime) -> int:
    return len(runtime.runtime.sandboxes.held_runs)


def suspended(
    runtime: SyncRuntime, effects: Effects, source: str = LIVE, hold_s: float = 600, **options: Any
) -> ExecutionResult:
    result = runtime.execute_code(
        source, tools=effects.registry, on_approval="suspend", hold_s=hold_s, seed=1, clock=1e9, **options
    )
    assert result.outcome is Outcome.SUSPENDED and result.suspension is not None, result
    return result


def resume(
    runtime: SyncRuntime, effects: Effects, result: ExecutionResult, *decisions: Any, **options: Any
) -> ExecutionResult:
    assert result.suspension is not None
    waiting = result.suspension.calls
    given = {call.id: each for call, each in zip(waiting, decisions or [Approve()] * len(waiting), strict=False)}
    return runtime.resume(result.suspension.to_json(), given, tools=effects.registry, **options)


def let_go(runtime: SyncRuntime) -> None:
    """Wait until nothing is held, and nothing is left of what was."""
    until = time.monotonic() + 120
    while held(runtime) or (runtime.runtime.pool is not None and runtime.runtime.pool.busy):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture(params=["memory", "disk"])
def runtime(request: pytest.FixtureRequest) -> SyncRuntime:
    found: SyncRuntime = request.getfixturevalue("opened" if request.param == "memory" else "durable")
    return found


def test_the_sandbox_itself_goes_on_with_everything_in_its_memory(runtime: SyncRuntime, effects: Effects) -> None:
    result = suspended(runtime, effects)
    assert held(runtime) == 1
    done = resume(runtime, effects, result)

    assert done.ok, done
    assert done.value[1:] == ["paid ada 1", "kept", 1]
    assert effects.made == [["write", str(done.value[0])], ["pay", "ada", 1]]
    let_go(runtime)


def told(result: ExecutionResult) -> dict[str, Any]:
    """What a caller reads of a result, without times."""
    calls = [(each.id, each.name, each.args, each.status, each.error_code, each.line) for each in result.calls]
    files = [(each.name, each.data) for each in result.files]
    return {
        "outcome": result.outcome,
        "value": result.value,
        "stdout": result.logs.stdout,
        "stderr": result.logs.stderr,
        "error": result.error,
        "calls": calls,
        "files": files,
        "bytes": (result.usage.sent_bytes, result.usage.received_bytes),
        "work": result.usage.host_work,
    }


def two_suspensions(runtime: SyncRuntime, hold_s: float, *decisions: Any, **options: Any) -> tuple[list[Any], Effects]:
    """Run `SAME`, which waits twice; return what was told of each part, and what the callbacks heard."""
    effects, heard = Effects(), list[Any]()
    on = {"on_progress": heard.append, "on_log": lambda stream, text: heard.append((stream, text))}
    parts = [suspended(runtime, effects, SAME, hold_s, **on)]
    for decision in decisions:
        assert held(runtime) == (1 if hold_s else 0)
        parts.append(resume(runtime, effects, parts[-1], decision, **on))
    return [*map(told, parts), sorted(map(str, heard))], effects


@pytest.mark.parametrize(
    "decisions",
    [(Approve(), Approve()), (Deny("not to ada"), Edit({"to": "eve", "euros": "3"})), (Edit({"to": "x"}), Deny("no"))],
)
def test_a_held_run_tells_the_same_as_one_that_is_run_again(runtime: SyncRuntime, decisions: tuple[Any, ...]) -> None:
    again, made_again = two_suspensions(runtime, 0, *decisions)
    went_on, made = two_suspensions(runtime, 600, *decisions)

    assert went_on == again
    assert made.made == made_again.made and went_on[-2]["outcome"] is Outcome.OK


def test_a_call_without_a_decision_waits_again_and_its_run_is_held_again(
    runtime: SyncRuntime, effects: Effects
) -> None:
    source = f"first = {LIVE.strip().splitlines()[1]!r}\n{LIVE}"
    result = suspended(runtime, effects, source)
    for _ in range(3):
        result = runtime.resume(result.suspension, {}, tools=effects.registry)  # type: ignore[arg-type]
        assert result.outcome is Outcome.SUSPENDED and held(runtime) == 1
    assert resume(runtime, effects, result).ok and effects.of("pay") == [["pay", "ada", 1]]


ASYNC = """
import asyncio
async def hurried():
    try:
        return await asyncio.wait_for(call_tool_async('slow', ms=60_000), 0.05)
    except asyncio.TimeoutError:
        return 'late'
async def main():
    late = await hurried()
    return [late, await asyncio.gather(*[call_tool_async(name, **args) for name, args in CALLS])]
await main()
"""


def test_answers_and_cancellations_come_again_in_their_order(opened: SyncRuntime) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("slow", {"ms": 5 * n % 17}) for n in range(12)]
    calls += [("pay", {"to": "a"}), ("pay", {"to": "b"}), ("unknown", {})]
    source = f"CALLS = {calls[:-1]!r}\n{ASYNC}"
    found = []
    for hold_s in (0, 600):
        effects = Effects()

        @effects.registry.tool
        async def slow(ms: int) -> int:
            """Take so many milliseconds."""
            await anyio.sleep(ms / 1000)
            return ms

        result = suspended(opened, effects, source, hold_s, limits=Limits(concurrent_calls=4))
        while result.suspension is not None:
            assert held(opened) == (1 if hold_s else 0)
            result = resume(opened, effects, result)
        found.append((result.value, [each.status for each in result.calls], sorted(effects.made)))

    assert found[0] == found[1] and found[0][0][0] == "late", found


# Time and other limits


@pytest.mark.slow
def test_no_time_passes_for_a_held_run(opened: SyncRuntime, effects: Effects) -> None:
    result = suspended(opened, effects, limits=Limits(wall_s=6))
    time.sleep(6.2)
    done = resume(opened, effects, result)

    assert done.ok, done


def test_time_before_it_was_held_counts(opened: SyncRuntime, effects: Effects) -> None:
    result = suspended(opened, effects, limits=Limits(wall_s=30))
    (run,) = opened.runtime.sandboxes.held_runs._runs.values()
    assert run.connection is not None and run.connection.spent_s == result.usage.wall_s
    run.connection.spent_s = 30.0
    done = resume(opened, effects, result)

    assert done.outcome is Outcome.TIMEOUT
    let_go(opened)


BURNS = """
import threading, time
def burn():
    until = time.process_time() + 0.4
    while time.process_time() < until: pass
burn()
call_tool('pay', to='ada')
burn()
"""


def test_cpu_time_counts_in_all_and_nothing_is_used_while_it_is_held(opened: SyncRuntime, effects: Effects) -> None:
    spins = "import threading\nthreading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()\n"
    result = suspended(opened, effects, f"{spins}call_tool('pay', to='ada')", limits=Limits(cpu_s=20, wall_s=300))
    (run,) = opened.runtime.sandboxes.held_runs._runs.values()
    assert run.connection is not None
    sandbox = run.connection.sandbox
    time.sleep(0.1)  # a signal to stop takes a moment
    before = sandbox.cpu_now()
    time.sleep(0.2)
    assert sandbox.cpu_now() == before
    assert resume(opened, effects, result).ok

    quotas = Quotas(Quota(cpu_s=60))
    context = RunContext(user_id="ada", quotas=(quotas,))
    first = suspended(opened, effects, BURNS, context=context, limits=Limits(cpu_s=20, wall_s=300))
    done = resume(opened, effects, first, context=context)
    assert done.ok and done.usage.cpu_s > first.usage.cpu_s + 0.3 > 0.6
    assert quotas.used("ada")["cpu_s"] == pytest.approx(done.usage.cpu_s)

    limited = suspended(opened, effects, BURNS, limits=Limits(cpu_s=0.6, wall_s=300))
    assert resume(opened, effects, limited).outcome is Outcome.CPU_LIMIT
    let_go(opened)


# What lets a run go


def carried_on(runtime: SyncRuntime, effects: Effects, result: ExecutionResult) -> None:
    """Check that a run which is not held any more is carried on by its journal."""
    first = resume(runtime, effects, result)
    done = resume(runtime, effects, first)
    assert done.ok and done.value[1::2] == ["paid ada 1", "paid bob 1"], done
    assert effects.made == [["read", "price"], ["pay", "ada", 1], ["pay", "bob", 1]]


def test_after_its_time_a_run_is_carried_on_by_its_journal(runtime: SyncRuntime, effects: Effects) -> None:
    result = suspended(runtime, effects, SAME, hold_s=0.01)
    let_go(runtime)
    carried_on(runtime, effects, result)


def test_a_sandbox_that_died_is_replaced(runtime: SyncRuntime, effects: Effects) -> None:
    result = suspended(runtime, effects, SAME)
    (run,) = runtime.runtime.sandboxes.held_runs._runs.values()
    assert run.connection is not None
    run.connection.sandbox.kill()
    while run.connection.sandbox.is_alive():
        time.sleep(0.01)
    carried_on(runtime, effects, result)
    let_go(runtime)


def test_a_run_that_waits_for_a_place_gets_that_of_the_oldest(effects: Effects) -> None:
    with SyncRuntime(pool=PoolConfig(warm=0, cap=2)) as runtime:
        first, second = suspended(runtime, effects, SAME), suspended(runtime, Effects())
        assert held(runtime) == 2
        assert runtime.execute_code("1 + 1").value == 2
        assert held(runtime) == 1
        assert resume(runtime, effects, second).ok
        effects.made.clear()
        effects.made.append(["read", "price"])
        carried_on(runtime, effects, first)


async def test_nothing_is_held_while_somebody_waits_for_its_place(anyio_backend: str, effects: Effects) -> None:
    began, gate = anyio.Event(), anyio.Event()

    @effects.registry.tool
    async def wait() -> None:
        """Wait until the test goes on."""
        began.set()
        await gate.wait()

    results: dict[str, ExecutionResult] = {}
    async with Runtime(effects.registry, pool=PoolConfig(warm=0, cap=1)) as runtime:

        async def run(name: str, source: str) -> None:
            results[name] = await runtime.execute_code(source, on_approval="suspend", hold_s=600)

        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, "first", "call_tool('wait')\ncall_tool('pay', to='a')")
                await began.wait()
                tasks.start_soon(run, "second", "1 + 1")
                assert runtime.pool is not None
                while not runtime.pool.is_short:
                    await anyio.sleep(0.01)
                gate.set()
        assert results["first"].outcome is Outcome.SUSPENDED and results["second"].value == 2
        assert not len(runtime.sandboxes.held_runs)


def test_the_pool_says_how_many_are_held(effects: Effects) -> None:
    with SyncRuntime(pool=PoolConfig(warm=0, held=1)) as runtime:
        first, second = suspended(runtime, effects, SAME), suspended(runtime, Effects())
        assert held(runtime) == 1
        assert resume(runtime, effects, second).ok
        effects.made[:] = [["read", "price"]]
        carried_on(runtime, effects, first)
    with SyncRuntime(pool=PoolConfig(warm=0, held=0)) as runtime:
        effects = Effects()
        result = suspended(runtime, effects, SAME)
        assert held(runtime) == 0
        carried_on(runtime, effects, result)
    for wrong in (-1, 1025, 1.5, "many"):
        with pytest.raises(UsageError, match="held"):
            PoolConfig(held=wrong)  # type: ignore[arg-type]


def test_what_cannot_be_paused_or_kept_is_not_held(
    opened: SyncRuntime, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def goes_on(_sandbox: ProcessSandbox) -> bool:
        return False

    monkeypatch.setattr(ProcessSandbox, "pause", goes_on)
    result = suspended(opened, effects, SAME)
    let_go(opened)
    monkeypatch.undo()
    carried_on(opened, effects, result)

    monkeypatch.setattr(recording, "RECORDED_BYTES", 1000)
    second = Effects()
    noisy = suspended(opened, second, f"progress('x' * 2000)\n{SAME}")
    let_go(opened)
    carried_on(opened, second, noisy)


def test_sandboxes_with_limits_of_their_own_are_held_too(opened: SyncRuntime, effects: Effects) -> None:
    more = opened.runtime.limits.memory_bytes * 2
    result = suspended(opened, effects, limits=Limits(memory_bytes=more))
    assert held(opened) == 1
    assert resume(opened, effects, result).ok

    suspended(opened, effects, limits=Limits(memory_bytes=more), hold_s=0.01)
    let_go(opened)


def test_a_run_that_went_on_elsewhere_meanwhile_gets_the_answers_of_that_time(tmp_path: Path, effects: Effects) -> None:
    """The sandbox here stands before the second suspension, and the token is that of the second."""
    with SyncRuntime(journal=tmp_path) as here, SyncRuntime(journal=tmp_path) as there:
        result = suspended(here, effects, SAME)
        second = resume(there, effects, result)
        with pytest.raises(ResumeError, match="used already"):
            resume(here, effects, result)
        assert (held(here), held(there)) == (1, 1)
        done = resume(here, effects, second)
        assert done.ok, done
        assert effects.of("pay") == [["pay", "ada", 1], ["pay", "bob", 1]]
        let_go(here)


# Tokens and decisions


async def test_a_token_resumes_once_also_at_the_same_moment(anyio_backend: str, effects: Effects) -> None:
    outcomes = []
    async with Runtime(effects.registry, pool=PoolConfig(warm=0)) as runtime:
        result = await runtime.execute_code(LIVE, on_approval="suspend", hold_s=600)
        token = result.suspension
        assert token is not None

        async def go_on() -> None:
            try:
                outcomes.append(str((await runtime.resume(token, {token.calls[0].id: Approve()})).outcome))
            except ResumeError:
                outcomes.append("refused")

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(go_on)
        with pytest.raises(ResumeError, match="used already"):
            await runtime.resume(token, {})

    assert sorted(outcomes) == ["ok", "refused", "refused", "refused"]
    assert effects.of("pay") == [["pay", "ada", 1]]


def test_a_resume_that_is_refused_leaves_the_run_held(runtime: SyncRuntime, effects: Effects) -> None:
    result = suspended(runtime, effects)
    assert result.suspension is not None
    for decisions, problem in (
        ({"call_9": Approve()}, "no call call_9 waits"),
        ({result.suspension.calls[0].id: "yes"}, "the decision about"),
        ([], "must be a dict"),
    ):
        if decisions:
            with pytest.raises(UsageError, match=problem):
                runtime.resume(result.suspension, decisions, tools=effects.registry)
    with pytest.raises(ResumeError, match="other tools"):
        runtime.resume(result.suspension, {}, tools=[])

    assert held(runtime) == 1 and resume(runtime, effects, result).ok


def test_a_quota_that_refuses_a_resume_lets_its_run_go(opened: SyncRuntime, effects: Effects) -> None:
    result = suspended(opened, effects, SAME)
    quotas = Quotas(Quota(runs=1))
    context = RunContext(quotas=(quotas,))
    assert opened.execute_code("1", context=context).ok
    with pytest.raises(Exception, match="quota"):
        resume(opened, effects, result, context=context)
    let_go(opened)

    assert result.suspension is not None
    first = opened.resume(result.suspension.run_id, tools=effects.registry)
    assert resume(opened, effects, first).ok


@pytest.mark.parametrize("how", ["event", "scope"])
async def test_a_resume_that_is_cancelled_leaves_nothing_and_is_carried_on(
    anyio_backend: str, how: str, effects: Effects
) -> None:
    began = anyio.Event()

    @effects.registry.tool
    async def stick(n: int) -> None:
        """Give no answer to the first call."""
        if began.is_set():
            return
        began.set()
        await anyio.sleep_forever()

    async with Runtime(effects.registry, pool=PoolConfig(warm=0)) as runtime:
        result = await runtime.execute_code(
            "call_tool('pay', to='a')\ncall_tool('stick', n=1)\n'end'", on_approval="suspend", hold_s=600
        )
        token = result.suspension
        assert token is not None and len(runtime.sandboxes.held_runs) == 1
        cancel, ended = anyio.Event(), list[Outcome]()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def go_on() -> None:
                    done = await runtime.resume(token, {token.calls[0].id: Approve()}, cancel=cancel)
                    ended.append(done.outcome)

                tasks.start_soon(go_on)
                await began.wait()
                scope.cancel() if how == "scope" else cancel.set()
        assert ended == ([Outcome.CANCELLED] if how == "event" else [])
        assert runtime.pool is not None and not len(runtime.sandboxes.held_runs)
        with anyio.fail_after(120):
            while runtime.pool.busy:
                await anyio.sleep(0.01)

        again = await runtime.resume(token.run_id)  # `stick` had started: it is in doubt
        assert again.suspension is not None and again.suspension.calls[0].tool == "stick"
        done = await runtime.resume(again.suspension, {again.suspension.calls[0].id: Approve()})
        assert done.value == "end" and effects.of("pay") == [["pay", "a", 1]]


def test_a_callback_that_raises_ends_a_run_that_would_be_held(opened: SyncRuntime, effects: Effects) -> None:
    def raises(value: Any) -> None:
        raise ValueError(value)

    with pytest.raises(ValueError, match="half"):
        suspended(opened, effects, SAME, on_progress=raises)
    let_go(opened)


# Routes


def test_runs_of_a_stream_are_held(opened: SyncRuntime, effects: Effects) -> None:
    options: dict[str, Any] = {"tools": effects.registry, "on_approval": "suspend", "hold_s": 600}
    *_, last = opened.stream(LIVE, **options)
    result = getattr(last, "result", None)

    assert isinstance(result, ExecutionResult) and held(opened) == 1
    assert resume(opened, effects, result).ok


@pytest.mark.parametrize("route", ["container profile", "no cgroup"])
def test_runs_are_held_in_every_kind_of_process(route: str, effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    if route == "no cgroup":
        monkeypatch.setattr(cgroup_manager, "discover", lambda: cgroup_manager.NoLocation("none here", "get one"))
    policy = Policy(profile="container") if route == "container profile" else Policy()
    with SyncRuntime(pool=PoolConfig(warm=0), policy=policy) as runtime:
        result = suspended(runtime, effects)
        assert held(runtime) == 1
        assert resume(runtime, effects, result).ok


def test_where_nothing_is_held_the_argument_is_refused(opened: SyncRuntime, effects: Effects) -> None:
    for wrong in (-1, -0.5, math.nan, math.inf, 3601, True, "60", None, [60]):
        with pytest.raises(UsageError, match=r"hold_s= must be a number of seconds from 0 to 3600"):
            opened.execute_code("1", on_approval="suspend", hold_s=wrong)
    for options in ({}, {"on_approval": "ask"}, {"on_approval": "deny"}, {"dry_run": True}):
        with pytest.raises(UsageError, match='needs on_approval="suspend"'):
            opened.execute_code("1", hold_s=60, **options)
    with pytest.raises(UsageError, match="dry run cannot be suspended"):
        opened.execute_code("1", hold_s=60, on_approval="suspend", dry_run=True)
    assert opened.execute_code("1", hold_s=0).value == 1

    steps = [{"tool": "pay", "args": {"to": "a"}}]
    refused: list[Callable[[], Any]] = [
        lambda: opened.execute_plan(steps, tools=effects.registry, on_approval="suspend", hold_s=60),
        lambda: opened.resume(suspended(opened, effects).suspension, {}, tools=effects.registry, hold_s=60),  # type: ignore[arg-type]
        lambda: Agent(ScriptedModel([]), on_approval="suspend", hold_s=60),
    ]
    for call in refused:
        with pytest.raises(UsageError, match=r"belongs to Runtime\.execute_code"):
            call()
    with opened.session() as session:
        with pytest.raises(UsageError, match=r"belongs to Runtime\.execute_code"):
            session.execute_code("1", on_approval="suspend", hold_s=60)
        assert session.execute_code("1").value == 1


def test_the_audit_log_of_a_held_run_is_that_of_one_that_is_run_again(tmp_path: Path) -> None:
    recorded, key = [], HmacKey.generate()
    for name, hold_s in (("again", 0.0), ("held", 600.0)):
        with SyncRuntime(audit=AuditLog(tmp_path / name, key=key), pool=PoolConfig(warm=0)) as runtime:
            two_suspensions(runtime, hold_s, Approve(), Deny("no"))
        check = verify(tmp_path / name, [key])
        assert check.ok, check
        with Index(tmp_path / name) as index:
            index.refresh()
            runs = [index.load(line) for line in index.runs(Filter(limit=None))]
        runs.sort(key=lambda run: run.started_ns)
        recorded.append(
            [
                (run.outcome, [(each.tool, each.start_extra.get("warnings"), each.value) for each in run.calls])
                for run in runs
            ]
        )
        for run in runs:
            again = anyio.run(replayed, run)
            assert again.ok, again

    assert recorded[0] == recorded[1] and len(recorded[0]) == 3


async def replayed(run: Any) -> Any:
    async with Runtime(pool=PoolConfig(warm=1), **runtime_options(run)) as runtime:
        return await replay(runtime, run)


# The end


def test_closing_the_runtime_ends_what_is_held(effects: Effects) -> None:
    before = set(psutil.Process().children(recursive=True))
    runtime = SyncRuntime(pool=PoolConfig(warm=0))
    for _ in range(2):  # a Runtime that is opened again holds again
        with runtime:
            result = suspended(runtime, effects)
            assert held(runtime) == 1
        assert held(runtime) == 0
        after = [each for each in psutil.Process().children(recursive=True) if each not in before]
        assert not psutil.wait_procs(after, timeout=60)[1]
    with pytest.raises(UsageError, match="not open"):
        resume(runtime, effects, result)


def test_a_held_run_ends_with_a_host_that_is_killed() -> None:
    source = """
import sys, psutil
from toolcell import PoolConfig, SyncRuntime, ToolRegistry
registry = ToolRegistry()
@registry.tool(requires_approval=True)
async def pay() -> None:
    "Send money to somebody."
with SyncRuntime(registry, pool=PoolConfig(warm=0)) as runtime:
    runtime.execute_code("call_tool('pay')", on_approval="suspend", hold_s=600)
    assert len(runtime.runtime.sandboxes.held_runs) == 1
    print(*[each.pid for each in psutil.Process().children(recursive=True)], flush=True)
    sys.stdin.read()
"""
    host = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with host:
        assert host.stdout is not None
        below = [psutil.Process(int(pid)) for pid in host.stdout.readline().split()]
        assert len(below) >= 2
        host.kill()
        assert not psutil.wait_procs(below, timeout=60)[1]
