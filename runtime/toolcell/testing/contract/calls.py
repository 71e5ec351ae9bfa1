"""Tool calls: one, many, failing, abandoned."""

from __future__ import annotations

from toolcell.results import Outcome
from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import LIMITS, BackendHarness, expect, expect_equal, expect_outcome

promises = Promises("calls")


@promises
async def single(stand: BackendHarness) -> None:
    """A call reaches the tool with its arguments, comes back with its value, and is recorded with its line."""
    result = await stand.run("x = {'a': [1, None, 'b']}\n\nset_result(call_tool('echo', {'q': x}))")
    expect_outcome(result, Outcome.OK)
    expect_equal(result.value, {"a": [1, None, "b"]}, "the answer")
    (call,) = result.calls
    expect_equal((call.name, call.status, call.line), ("echo", "ok", 3), "the record")


@promises
async def every_way(stand: BackendHarness) -> None:
    """call_tool, tools.name, call_tool_async and list_tools all reach the host."""
    source = """
rows = [call_tool("echo", q=1), tools.echo(q=2), await call_tool_async("echo", q=3)]
set_result([rows, sorted(tool["name"] for tool in list_tools())])
"""
    rows, names = await stand.value(source)
    expect_equal(rows, [1, 2, 3], "the answers")
    expect_equal(names, sorted(stand.registry.names()), "the tools on offer")


@promises
async def in_sequence(stand: BackendHarness) -> None:
    """Hundreds of calls, one after the other, each get their own answer."""
    limits = LIMITS.model_copy(update={"tool_calls": 300, "wall_s": 60.0})
    value = await stand.value("set_result([call_tool('echo', q=i) for i in range(300)])", limits=limits)
    expect_equal(value, list(range(300)), "the answers")


@promises
async def in_parallel(stand: BackendHarness) -> None:
    """Parallel calls are in the tools at the same time, and their answers come in the order of the calls."""
    source = (
        "set_result(call_tools_parallel([('meet', {'name': 'parallel', 'size': 5})] * 5 + [('echo', {'q': 'last'})]))"
    )
    expect_equal(await stand.value(source), [5] * 5 + ["last"], "the answers")


@promises
async def from_tasks_and_threads(stand: BackendHarness) -> None:
    """Calls from tasks and from threads of the script are in the tools at the same time."""
    tasks = """
import asyncio
set_result(await asyncio.gather(*(call_tool_async("meet", name="tasks", size=4) for _ in range(4))))
"""
    expect_equal(await stand.value(tasks), [4] * 4, "the answers of tasks")
    threads = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    set_result(list(pool.map(lambda _: call_tool("meet", name="threads", size=4), range(4))))
"""
    expect_equal(await stand.value(threads), [4] * 4, "the answers of threads")


@promises
async def failing(stand: BackendHarness) -> None:
    """A tool that fails raises ToolError with its words; one that crashes tells the script nothing of the host."""
    source = """
def problem(name, **args):
    try: call_tool(name, args)
    except ToolError as error: return [error.code, error.retryable, error.details, str(error)]
set_result([problem("fail", text="no luck"), problem("crash", text="secret"), problem("nothing_like_it")])
"""
    failed, crashed, unknown = await stand.value(source)
    expect_equal(failed[:3], ["wanted", True, {"text": "no luck"}], "the wanted failure")
    expect("no luck" in failed[3], f"the tool's words are missing: {failed[3]!r}")
    expect("secret" not in crashed[3] and "LookupError" in crashed[3], f"the crash is told as {crashed[3]!r}")
    expect("nothing_like_it" in unknown[3], f"the unknown tool is told as {unknown[3]!r}")


@promises
async def failing_ends_the_script(stand: BackendHarness) -> None:
    """A failure that the script does not catch is its error."""
    result = await stand.run("print('before')\ncall_tool('fail', text='no luck')")
    expect_outcome(result, Outcome.ERROR)
    assert result.error is not None
    expect_equal((result.error.type, result.error.line), ("ToolError", 2), "type and line")


@promises
async def aborting(stand: BackendHarness) -> None:
    """A tool that aborts ends the run, whatever the script would catch."""
    result = await stand.run("try: call_tool('abort', text='enough')\nexcept BaseException: set_result('went on')")
    expect_outcome(result, Outcome.CANCELLED)
    expect_equal(result.has_value, False, "has_value")


@promises
async def abandoned(stand: BackendHarness) -> None:
    """A script may stop waiting for a call and go on."""
    source = """
import asyncio
task = asyncio.ensure_future(call_tool_async("stay"))
await call_tool_async("echo", q=0)
task.cancel()
await asyncio.gather(task, return_exceptions=True)
set_result(call_tool("echo", q=1))
"""
    expect_equal(await stand.value(source), 1, "the later answer")


@promises
async def left_open(stand: BackendHarness) -> None:
    """A script that ends with calls still under way ends all the same."""
    source = """
import threading
threading.Thread(target=call_tool, args=("stay",), daemon=True).start()
call_tool("echo", q=1)
"""
    expect_equal(await stand.value(source), 1, "the value")


@promises
async def large(stand: BackendHarness) -> None:
    """Megabytes of arguments and answers cross whole, also many at once."""
    source = """
data = "x" * 2_000_000
answers = call_tools_parallel([("echo", {"q": data + str(i)}) for i in range(6)])
set_result([answer == data + str(i) for i, answer in enumerate(answers)])
"""
    expect_equal(await stand.value(source), [True] * 6, "the comparison")
