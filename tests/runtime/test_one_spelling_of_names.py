"""A tool of a namespace has one name everywhere, `github.pay`, however a script or a plan writes it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell import PoolConfig, Runtime, SyncRuntime, ToolRegistry
from toolcell.tools import Approve

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

WRITTEN = "github__"


def make_registry() -> ToolRegistry:
    registry = ToolRegistry()
    for name in ("github.search", "github.pay", "github.fail", "github.write"):
        options: dict[str, Any] = {"requires_approval": True} if name == "github.pay" else {}

        def act(args: dict[str, Any], name: str = name) -> Any:
            if name == "github.fail":
                raise ValueError("boo")
            return args["a"]

        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        registry.register(name, f"Do what {name} is for", schema, act, **options)
    return registry


@pytest.fixture(scope="module")
async def runtime(anyio_backend: str) -> AsyncIterator[Runtime]:
    async with Runtime(make_registry(), pool=PoolConfig(warm=1)) as opened:
        yield opened


SCRIPTS = [
    "call_tool('github__search', a=1)",
    "call_tool('github__search', 1)",
    "call_tool('github__search', a='x')",
    "call_tool('github__fail', a=1)",
    "await call_tool_async('github__fail', a=1)",
    "call_tools_parallel([('github__fail', {'a': 1}), {'tool': 'github__search', 'args': {'a': 1}}, 'github__pay'])",
    "try: call_tool('github__fail', a=1)\nexcept ToolError as exc: set_result([exc.tool, str(exc)])",
    # What a guest sends that does not find the names itself.
    "call_tool.__self__._channel.wait(call_tool.__self__._channel.call([('github__search', {'a': 1}, 1)])[0][1])",
]


@each_row("script", SCRIPTS)
async def test_results_errors_and_events_of_a_script_have_the_registered_name(runtime: Runtime, script: str) -> None:
    events = [event async for event in runtime.stream(script, on_approval="deny")]
    async with runtime.session() as session:
        again = await session.execute_code(script, on_approval="deny")

    result = events[-1].result  # type: ignore[union-attr]
    assert {call.name for call in result.calls} <= {"github.search", "github.fail", "github.pay"}
    assert result.calls and [call.name for call in again.calls] == [call.name for call in result.calls]
    said = [each.error.message for each in (result, again) if each.error is not None]  # the rest quotes the script
    assert WRITTEN not in repr([events[:-1], result.calls, again.calls, said, result.value, again.value])


async def test_what_waits_is_resumed_collected_repaired_and_foreseen_has_it_too(runtime: Runtime) -> None:
    waiting = await runtime.execute_code("call_tool('github__pay', a=1)", on_approval="suspend")
    assert waiting.suspension is not None
    (call,) = waiting.suspension.calls
    resumed = await runtime.resume(waiting.suspension, {call.id: Approve()})
    draft = await runtime.execute_code("call_tool('github__write', a=1)", dry_run=True)
    committed = await runtime.commit(draft)
    failed = await runtime.execute_code("call_tool('github__search', a=1); call_tool('github__fail', a=1)")
    mended = await runtime.execute_code("call_tool('github.search', a=1)", repairs=failed)
    foreseen = await runtime.preflight("call_tool('github__search', a=1)")

    assert (call.tool, resumed.value, mended.value) == ("github.pay", 1, 1)
    assert [each.tool for each in mended.repair.reused] == ["github.search"]  # type: ignore[union-attr]
    assert [each.tool for each in draft.effects] == ["github.write"]
    assert WRITTEN not in repr([waiting, resumed, draft, committed, failed, mended, foreseen])


async def test_rows_of_a_plan_have_it(runtime: Runtime) -> None:
    steps = [{"tool": f"github__{name}", "args": {"a": 1}} for name in ("search", "fail", "pay")]
    rows = await runtime.execute_plan(steps, on_approval="suspend")
    assert rows.suspension is not None
    resumed = await runtime.resume(rows.suspension, {rows.suspension.calls[0].id: Approve()})

    assert [row["tool"] for row in rows] == ["github.search", "github.fail", "github.pay"]
    assert WRITTEN not in repr([rows, rows.suspension, resumed])


async def test_the_audit_log_has_it(tmp_path: Path) -> None:
    async with Runtime(make_registry(), pool=PoolConfig(warm=1), record=tmp_path / "runs.db") as opened:
        result = await opened.execute_code("name = 'github' + '__search'; call_tool(name, a=1)")

    assert result.value == 1
    records = b"".join(path.read_bytes() for path in tmp_path.glob("runs.db*"))
    assert b"github.search" in records and b"github__" not in records


async def test_calls_of_a_model_have_it() -> None:
    registry, heard = make_registry(), list[Any]()
    run = registry.new_run()
    run.events.subscribe(heard.append)
    (result,) = await registry.execute_batch([("github__search", {"a": 1})], context=run)
    await registry.dispatch("github__fail", {"a": 1}, context=run)

    assert result.meta.tool == "github.search"
    assert heard and WRITTEN not in repr([each.__dict__ if hasattr(each, "__dict__") else each for each in heard])


def test_the_blocking_runtime_has_it() -> None:
    with SyncRuntime(make_registry()) as runtime:
        result = runtime.execute_code("call_tool('github__search', a=1)")
        rows = runtime.execute_plan([{"tool": "github__search", "args": {"a": 1}}])

    assert [call.name for call in result.calls] == [row["tool"] for row in rows] == ["github.search"]


def test_a_name_that_no_tool_has_is_told_as_it_was_written() -> None:
    with SyncRuntime(make_registry()) as runtime:
        result = runtime.execute_code("call_tool('github__serch', a=1)")

    assert result.error is not None and "'github__serch'" in result.error.message
    assert [call.name for call in result.calls] == ["github__serch"]
