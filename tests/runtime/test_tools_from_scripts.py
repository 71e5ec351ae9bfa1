"""Tool calls from a script: values, failures, threads, asyncio, budgets."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell import Limits, Outcome, Runtime, SyncRuntime, ToolAbort, ToolRegistry

from .conftest import Run

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


@pytest.mark.conforms("Q12", "EX-43", "T2")
def test_a_call_blocks_and_returns_the_tools_value(run: Run) -> None:
    assert run("set_result(call_tool('add', {'a': 40, 'b': 2}))").value == 42
    assert run("set_result(call_tool('add', a=40, b=2))").value == 42
    assert run("set_result(call_tool('add', {'a': 1}))").value == 2


def test_a_run_keeps_the_tools_that_it_began_with() -> None:
    registry = ToolRegistry()

    @registry.tool
    def early() -> str:
        """Be there from the beginning."""
        return "early"

    @registry.tool
    def change() -> None:
        """Take one tool out and register another."""
        registry.unregister("early")
        registry.add(lambda: "late", name="late", description="Come late and say so.")

    script = """
call_tool("change")
def ask(name):
    try: return call_tool(name)
    except RuntimeError as error: return error.code
set_result([ask("early"), ask("late")])"""
    with SyncRuntime(registry) as runtime:
        first = runtime.execute_code(script)
        second = runtime.execute_code(script.replace('call_tool("change")', ""))
    assert (first.value, second.value) == (["early", "unknown_tool"], ["unknown_tool", "late"])


@pytest.mark.conforms("Q-b13", "T6")
@pytest.mark.parametrize(
    "value", [None, True, -1, 2**63 - 1, 0.5, "ü\u2028", [1, [2]], {"k": {"n": None}}, "x" * 300_000]
)
def test_plain_values_cross_both_ways_unchanged(run: Run, value: Any) -> None:
    result = run("set_result(call_tool('echo', q=value))", inputs={"value": value})

    assert result.value == value
    assert type(result.value) is type(value)


@pytest.mark.conforms("Q11", "Q13", "Q-b12")
def test_a_failing_tool_is_an_exception_the_script_can_catch(run: Run) -> None:
    script = """
try:
    call_tool("fail", text="boom")
except RuntimeError as error:
    set_result([type(error).__name__, str(error), error.tool, error.code, error.retryable])"""
    result = run(script)

    assert result.outcome is Outcome.OK
    name, message, tool, code, retryable = result.value
    assert (name, tool, code, retryable) == ("ToolError", "fail", "tool_error", False)
    assert message == "Tool 'fail' failed: boom"
    assert [(call.status, call.error_code) for call in result.calls] == [("error", "tool_error")]


@pytest.mark.conforms("Q11")
def test_a_failing_tool_that_nobody_catches_fails_the_run(run: Run) -> None:
    result = run("x = 1\ncall_tool('fail', text='boom')")

    assert result.outcome is Outcome.ERROR
    assert result.error is not None
    assert (result.error.type, result.error.line) == ("ToolError", 2)


@pytest.mark.conforms("Q14", "EX-43")
def test_parallel_calls_overlap_and_keep_their_order(run: Run) -> None:
    result = run("set_result(call_tools_parallel([('wait', {'seconds': s}) for s in (0.3, 0.1, 0.2)]))")

    assert result.value == [0.3, 0.1, 0.2]
    starts = [call.started_s for call in result.calls]
    ends = [call.started_s + call.duration_s for call in result.calls]
    assert max(starts) < min(ends)


@each_row("calls", ["{'add': {'a': 1}}", "{'tool': 'add', 'args': {'a': 1}}", "'add'", "None", "5"])
def test_what_is_no_list_of_calls_calls_nothing_and_is_told_what_is(run: Run, calls: str) -> None:
    result = run(f"call_tools_parallel({calls})")

    assert (
        result.error is not None
        and "takes a list of calls, such as [('tool', {...}), ...], not" in result.error.message
    )
    assert result.calls == ()


def test_a_call_of_a_list_with_a_key_that_means_nothing_is_not_made(run: Run) -> None:
    result = run("call_tools_parallel([{'tool': 'add', 'args': {'a': 1}, 'retries': 3}])")
    assert result.error is not None and "retries" in result.error.message
    assert result.calls == ()


def test_a_tool_may_have_a_parameter_of_any_name(sync_runtime: SyncRuntime) -> None:
    registry = ToolRegistry()
    names = ("self", "name", "args", "values", "kwargs", "line")
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    registry.register("count", "Count what it is given.", schema, sorted)

    result = sync_runtime.execute_code(f"tools.count(**dict.fromkeys({names}, 1))", tools=registry)

    assert result.value == sorted(names), result.error


def test_a_call_without_a_first_value_is_told_that_the_name_comes_first(run: Run) -> None:
    for call in ("call_tool(name='add', args={'a': 1})", "await call_tool_async(tool='add', a=1)"):
        result = run(call)
        assert result.error is not None and "takes the tool's name first" in result.error.message


@pytest.mark.conforms("Q-b14", "V-11", "Q15")
def test_the_first_failure_of_a_batch_is_raised_after_all_have_finished(run: Run) -> None:
    calls = "[('add', {'a': 1}), ('fail', {'text': 'one'}), {'tool': 'add', 'args': {'a': 2}}, ('nope', {})]"
    raised = run(f"call_tools_parallel({calls})")
    listed = run(f"set_result([str(x) for x in call_tools_parallel({calls}, return_exceptions=True)])")

    assert raised.error is not None
    assert "one" in raised.error.message
    assert len(raised.calls) == 4
    assert listed.value[0] == "2"
    assert "one" in listed.value[1]
    assert listed.value[2] == "3"
    assert "unknown tool: nope" in listed.value[3]


@pytest.mark.quick(every_row=True)
@pytest.mark.conforms("Q-b14")
@pytest.mark.parametrize(
    ("limits", "asked", "most"), [(Limits(), ", max_workers=2", 2), (Limits(concurrent_calls=3), "", 3)]
)
def test_a_batch_and_the_host_bound_how_many_calls_run_at_once(limits: Limits, asked: str, most: int) -> None:
    registry, running, peak = ToolRegistry(), 0, 0

    @registry.tool
    async def work(n: int) -> int:
        """Count how many of these run at once."""
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await anyio.sleep(0.01)
        running -= 1
        return n

    with SyncRuntime(registry, limits=limits) as runtime:
        result = runtime.execute_code(f"call_tools_parallel([('work', {{'n': i}}) for i in range(20)]{asked})")

    assert (result.value, peak) == (list(range(20)), most)


@pytest.mark.conforms("Q-b6")
def test_threads_get_their_own_answers(run: Run) -> None:
    script = """
import threading
got = {}
def work(i):
    for n in range(5):
        got[i, n] = call_tool("echo", q=[i, n])
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
set_result(all(value == list(key) for key, value in got.items()) and len(got))"""

    assert run(script).value == 40


def test_threads_and_asyncio_may_call_at_the_same_time(run: Run) -> None:
    script = """
import asyncio, threading
threaded = []
thread = threading.Thread(target=lambda: threaded.extend(call_tool("echo", q=i) for i in range(20)))
async def one(i): return await call_tool_async("echo", q=i)
thread.start()
gathered = await asyncio.gather(*(one(i) for i in range(20)))
thread.join()
set_result([threaded == list(range(20)), gathered == list(range(20))])"""

    assert run(script).value == [True, True]


def test_cancelling_an_async_call_cancels_the_tool() -> None:
    registry, seen = ToolRegistry(), []

    @registry.tool
    async def slow() -> str:
        """Wait until cancelled, and remember it."""
        try:
            await anyio.sleep(60)
        except BaseException:
            seen.append("cancelled")
            raise
        return "never"

    script = """
import asyncio
try:
    await asyncio.wait_for(call_tool_async("slow"), 0.05)
except asyncio.TimeoutError:
    set_result([await call_tool_async("slow2") for _ in range(2)])"""

    @registry.tool
    async def slow2() -> str:
        """Answer at once."""
        return "fine"

    with SyncRuntime(registry) as runtime:
        result = runtime.execute_code(script)

    assert result.value == ["fine", "fine"]
    assert seen == ["cancelled"]
    assert [call.status for call in result.calls] == ["error", "ok", "ok"]


def test_a_cancelled_call_whose_tool_ends_after_the_run_is_no_pending_call() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def slow_to_end() -> str:
        """Take its time to be cancelled."""
        try:
            await anyio.sleep(60)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.3)
        return "never"

    script = """
import asyncio
try:
    await asyncio.wait_for(call_tool_async("slow_to_end"), 0.05)
except asyncio.TimeoutError:
    set_result(1)"""
    with SyncRuntime(registry) as runtime:
        (call,) = runtime.execute_code(script).calls

    assert (call.status, call.error_code) == ("error", "cancelled")


@pytest.mark.conforms("Q-b15")
def test_tools_have_methods_lists_and_a_search(run: Run) -> None:
    script = """
listed = {tool["name"]: tool for tool in list_tools()}
set_result({
    "proxy": tools.add(a=1, b=2),
    "names": sorted(listed),
    "required": listed["web_search"]["parameters"]["required"],
    "found": [tool["name"] for tool in search_tools("web information")],
    "dir": "add" in dir(tools),
})"""
    value = run(script).value

    assert value["proxy"] == 3
    assert value["names"] == ["add", "crash", "echo", "fail", "text", "wait", "web_search"]
    assert value["required"] == ["query"]
    assert value["found"] == ["web_search"]
    assert value["dir"] is True
    assert "did you mean 'web_search'" in run("tools.web_serch()").error.message  # type: ignore[union-attr]


@pytest.mark.conforms("Q-b15")
def test_log_and_progress_reach_the_host(sync_runtime: SyncRuntime) -> None:
    seen: list[object] = []
    result = sync_runtime.execute_code(
        "log('warning', 'careful', 1)\nprogress(0.5)\nprogress(step='two', of=3)\n"
        "progress('x', total=3)\nprogress({'at': 1}, total=3)",
        on_progress=seen.append,
    )

    assert result.logs.stderr == "[warning] careful 1\n"
    assert seen == [0.5, {"step": "two", "of": 3}, {"value": "x", "total": 3}, {"at": 1, "total": 3}]


def test_output_can_be_followed_as_it_appears(sync_runtime: SyncRuntime) -> None:
    seen: list[tuple[str, str]] = []
    sync_runtime.execute_code("print('a')\nprint('b')", on_log=lambda stream, text: seen.append((stream, text)))

    assert {stream for stream, _ in seen} == {"stdout"}
    assert "".join(text for _, text in seen) == "a\nb\n"


@pytest.mark.conforms("Q-b21", "Q30")
def test_calls_past_the_budget_are_refused_and_named(run: Run) -> None:
    script = "for i in range(10): call_tool('echo', q=i)"
    result = run(script, limits=Limits(tool_calls=3))

    assert result.outcome is Outcome.CALL_LIMIT
    assert result.error is not None
    assert (result.error.limit, result.error.limit_value, result.error.line) == ("tool_calls", 3, 1)
    assert "3 tool calls" in result.error.message
    assert len(result.calls) == 3


@pytest.mark.conforms("Q-b21")
def test_a_script_that_copes_with_the_budget_ends_well(run: Run) -> None:
    script = """
done = 0
try:
    while True: call_tool('echo', q=done); done += 1
except ToolError as error:
    set_result([done, error.code])"""
    result = run(script, limits=Limits(tool_calls=5))

    assert result.outcome is Outcome.OK
    assert result.value == [5, "call_limit"]


def test_a_result_too_large_for_the_wire_is_that_calls_error(run: Run) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def huge() -> str:
        """Return more than a frame holds."""
        return "x" * 200_000

    result = run("call_tool('huge')", tools=registry, limits=Limits(frame_bytes=100_000, result_bytes=50_000))

    assert result.outcome is Outcome.ERROR
    assert result.error is not None
    assert "too large" in result.error.message


def test_a_tool_may_end_the_whole_run(run: Run) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def abort() -> None:
        """End everything."""
        raise ToolAbort("the database is gone")

    result = run("print('x')\ntry: call_tool('abort')\nexcept BaseException: print('never')", tools=registry)

    assert result.outcome is Outcome.CANCELLED
    assert result.error is not None
    assert "the database is gone" in result.error.message
    assert result.logs.text == "x\n"


@pytest.mark.anyio
@pytest.mark.every_loop
async def test_sync_and_async_tools_work_on_every_event_loop(registry: ToolRegistry) -> None:
    async with Runtime(registry) as runtime:
        result = await runtime.execute_code(
            "set_result([call_tool('add', a=1), *call_tools_parallel([('echo', {'q': i}) for i in range(5)])])"
        )

    assert result.outcome is Outcome.OK
    assert result.value == [2, 0, 1, 2, 3, 4]


@pytest.mark.conforms("Q-b21")
@pytest.mark.parametrize("argument", ["'x' * 400_000", "[[]] * 20_000"])
def test_what_calls_hold_together_is_bounded(run: Run, argument: str) -> None:
    script = f"""
refused = []
for _ in range(20):
    try: call_tool("echo", q={argument})
    except ToolError as error: refused.append(error.code)
set_result(refused)"""
    result = run(script, limits=Limits(call_args_bytes=2_000_000))

    assert result.outcome is Outcome.OK
    assert result.value and set(result.value) == {"too_large"}
    assert sum(len(str(call.args)) for call in result.calls) < 4_000_000


def test_one_call_that_is_too_large_is_no_reason_to_refuse_the_next(run: Run) -> None:
    script = """
call_tool("echo", q="x" * 60_000)
try: call_tool("echo", q="x" * 400_000)
except ToolError as error: set_result([error.code, call_tool("echo", q="small")])"""
    result = run(script, limits=Limits(call_args_bytes=100_000))

    assert result.value == ["too_large", "small"]
    assert [(call.name, call.status) for call in result.calls] == [("echo", "ok"), ("echo", "error"), ("echo", "ok")]


def test_a_name_that_is_no_name_is_a_failed_call_and_passes_no_limit(run: Run) -> None:
    script = """
try: call_tool("x" * 100_000)
except ToolError as error: print(error.code)
1 / 0"""
    result = run(script)

    assert (result.outcome, result.logs.stdout) == (Outcome.ERROR, "unknown_tool\n")
    assert [(len(call.name), call.error_code) for call in result.calls] == [(256, "unknown_tool")]


def test_a_call_that_is_cancelled_while_it_waits_for_its_turn_is_not_made(run: Run) -> None:
    script = """
import asyncio
first = asyncio.create_task(call_tool_async("wait", seconds=1.5))
second = asyncio.create_task(call_tool_async("add", a=1))
third = asyncio.create_task(call_tool_async("add", a=2))
await asyncio.sleep(0.05)
second.cancel()
set_result([await first, await third])"""
    result = run(script, limits=Limits(concurrent_calls=1))

    assert result.value == [1.5, 3]
    assert [(call.args, call.status, call.error_code) for call in result.calls] == [
        ({"seconds": 1.5}, "ok", None),
        ({"a": 1}, "error", "cancelled"),
        ({"a": 2}, "ok", None),
    ]
