"""Tool calls: one, many, failing, cancelled by the script."""

from __future__ import annotations

from toolcell.results import Outcome
from toolcell.testing.contract.case import CaseGroup
from toolcell.testing.harness import (
    LIMITS,
    BackendHarness,
    expect,
    expect_equal,
)

calls_cases = CaseGroup("calls")


@calls_cases
async def single(harness: BackendHarness) -> None:
    """A call reaches the tool with its arguments, comes back with its value, and is recorded with its line."""
    result = await harness.run("x = {'a': [1, None, 'b']}\n\nset_result(call_tool('echo', {'q': x}))", Outcome.OK)
    expect_equal(result.value, {"a": [1, None, "b"]}, "the answer")
    (call,) = result.calls
    expect_equal((call.name, call.status, call.line), ("echo", "ok", 3), "the record")


@calls_cases
async def every_way(harness: BackendHarness) -> None:
    """call_tool, tools.name, call_tool_async and list_tools all reach the host."""
    source = """
rows = [call_tool("echo", q=1), tools.echo(q=2), await call_tool_async("echo", q=3)]
set_result([rows, sorted(tool["name"] for tool in list_tools())])
"""
    rows, names = await harness.value(source)
    expect_equal(rows, [1, 2, 3], "the answers")
    expect_equal(names, sorted(harness.registry.names()), "the tools on offer")


calls_cases.value(
    "in_sequence",
    "Hundreds of calls in a row each get their own answer.",
    "set_result([call_tool('echo', q=i) for i in range(300)])",
    list(range(300)),
    limits=LIMITS.model_copy(update={"tool_calls": 300, "wall_s": 60.0}),
)


calls_cases.value(
    "in_parallel",
    "Parallel calls run at the same time, and the answers are in the order of the calls.",
    "set_result(call_tools_parallel([('meet', {'name': 'parallel', 'size': 5})] * 5 + [('echo', {'q': 'last'})]))",
    [5] * 5 + ["last"],
)


calls_cases.value(
    "from_tasks",
    "Calls from tasks of the script run at the same time.",
    """
import asyncio
set_result(await asyncio.gather(*(call_tool_async("meet", name="tasks", size=4) for _ in range(4))))
""",
    [4] * 4,
)


calls_cases.value(
    "from_threads",
    "Calls from threads of the script run at the same time.",
    """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    set_result(list(pool.map(lambda _: call_tool("meet", name="threads", size=4), range(4))))
""",
    [4] * 4,
)


@calls_cases
async def failing(harness: BackendHarness) -> None:
    """A failing tool raises ToolError with its message; a crashing tool reveals nothing of the host to the script."""
    source = """
def problem(name, **args):
    try: call_tool(name, args)
    except ToolError as error: return [error.code, error.retryable, error.details, str(error)]
set_result([problem("fail", text="no luck"), problem("crash", text="secret"), problem("nothing_like_it")])
"""
    failed, crashed, unknown = await harness.value(source)
    expect_equal(failed[:3], ["wanted", True, {"text": "no luck"}], "the wanted failure")
    expect("no luck" in failed[3], f"the tool's message is missing: {failed[3]!r}")
    expect("secret" not in crashed[3] and "LookupError" in crashed[3], f"the crash is reported as {crashed[3]!r}")
    expect("nothing_like_it" in unknown[3], f"the unknown tool is reported as {unknown[3]!r}")


@calls_cases
async def failing_ends_the_script(harness: BackendHarness) -> None:
    """A ToolError that the script does not catch becomes the error of the run."""
    result = await harness.run("print('before')\ncall_tool('fail', text='no luck')", Outcome.ERROR)
    assert result.error is not None
    expect_equal((result.error.type, result.error.line), ("ToolError", 2), "type and line")


@calls_cases
async def aborting(harness: BackendHarness) -> None:
    """A tool that raises ToolAbort ends the run, even if the script catches every exception."""
    result = await harness.run(
        "try: call_tool('abort', text='enough')\nexcept BaseException: set_result('went on')", Outcome.CANCELLED
    )
    expect_equal(result.has_value, False, "has_value")


calls_cases.value(
    "cancelled_by_the_script",
    "A script may cancel its wait for a call and go on.",
    """
import asyncio
task = asyncio.ensure_future(call_tool_async("stay"))
await call_tool_async("echo", q=0)
task.cancel()
await asyncio.gather(task, return_exceptions=True)
set_result(call_tool("echo", q=1))
""",
    1,
)


calls_cases.value(
    "left_open",
    "A run ends although calls of its script are still in progress.",
    """
import threading
threading.Thread(target=call_tool, args=("stay",), daemon=True).start()
call_tool("echo", q=1)
""",
    1,
)


calls_cases.value(
    "large",
    "Megabytes of arguments and answers arrive intact, also many at once.",
    """
data = "x" * 2_000_000
answers = call_tools_parallel([("echo", {"q": data + str(i)}) for i in range(6)])
set_result([answer == data + str(i) for i, answer in enumerate(answers)])
""",
    [True] * 6,
)
