"""Showing what a guest sent, as progress or as a dict, does not cost the host a look at each value in it.

Work is counted in function calls and bytes, which do not depend on the machine's speed.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio.lowlevel
import pytest

from hostile.counting import calls
from hostile.loop_silence import watched
from rows import each_row
from toolcell import ToolRegistry
from toolcell.agents.processors import Processor, after_tool
from toolcell.calls.call import Hook, Substitute
from toolcell.calls.context import MAX_UPDATE_CHARS, ProgressReporter
from toolcell.errors import ToolError
from toolcell.results import ExecutionResult, Outcome, ToolCallRecord
from toolcell.tools import RunContext, ToolResult

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

SILENCE_S = 0.05


def result(size: int) -> ExecutionResult:
    record = ToolCallRecord("call_1", "echo", {"q": [[]] * size}, "ok")
    return ExecutionResult("r", Outcome.OK, value=[{"a": []}] * size, has_value=True, calls=(record,))


def test_a_result_as_a_dict_costs_the_same_whatever_is_in_it() -> None:
    result(1).to_dict()  # imports what it needs
    assert calls(result(10_000).to_dict) == calls(result(1).to_dict)


@pytest.mark.slow
@each_row(
    "value",
    [
        [[]] * 100_000,
        {str(number): number for number in range(100_000)},
        [["x" * 1000] * 1000] * 100,
        {"a": [{"b": [0] * 100_000}]},
        ["x" * 10_000_000],
        (bytes(10_000_000),),
    ],
    ids=["lists", "names", "texts", "inside", "one text", "bytes"],
)
async def test_progress_too_large_to_show_is_not_looked_through(value: Any) -> None:
    shown: list[Any] = []
    report = ProgressReporter(lambda kind, update: shown.append(update), anyio.lowlevel.checkpoint)

    tracemalloc.start()
    try:
        made = calls(lambda: report(details=value))
        held_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made <= 10 * MAX_UPDATE_CHARS
    assert held_bytes <= 100 * MAX_UPDATE_CHARS  # the text of the whole value takes megabytes
    assert shown == [{"details": f"({type(value).__name__} too large to show)"}]


@pytest.mark.parametrize("value", [[1, {"a": (2, None)}], {"a": {"b": []}}, 1.5, True, {1, 2}, "x" * 7000])
async def test_progress_that_is_short_is_shown_as_it_is(value: Any) -> None:
    shown: list[Any] = []

    ProgressReporter(lambda kind, update: shown.append(update), anyio.lowlevel.checkpoint)(details=value)

    assert shown == [{"details": value}]


async def test_progress_that_contains_itself_is_too_large() -> None:
    shown: list[Any] = []
    endless: list[Any] = []
    endless.append(endless)

    ProgressReporter(lambda kind, update: shown.append(update), anyio.lowlevel.checkpoint)(details=endless)

    assert shown == [{"details": "(list too large to show)"}]


@pytest.mark.slow
@pytest.mark.parametrize("args", [{"q": [0] * 150_000}, {"q": bytes(8_000_000)}], ids=["list", "bytes"])
async def test_large_arguments_are_not_written_out_for_the_log(args: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(q: Any) -> str:
        """Refuse whatever is passed to it."""
        raise ToolError("no")

    registry = ToolRegistry([refuse])

    async def peak_bytes(level: str) -> int:
        caplog.set_level(level, "toolcell.tools")
        tracemalloc.start()
        try:
            await registry.dispatch("refuse", args)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    await peak_bytes("CRITICAL")  # validators are compiled at their first use
    assert await peak_bytes("INFO") <= await peak_bytes("CRITICAL") + 500_000
    assert max(len(record.getMessage()) for record in caplog.records) < 1000


async def test_a_failure_with_large_arguments_is_remembered_by_their_beginning() -> None:
    async def refuse(q: Any) -> str:
        """Refuse whatever is passed to it."""
        raise ToolError("no")

    run = RunContext(run_id="r")
    registry = ToolRegistry([refuse])
    for _ in range(3):
        result = await registry.dispatch("refuse", {"q": [0] * 100_000}, context=run)

    assert "this exact call has now failed 3 times" in result.text
    assert sum(map(len, run.state.failures)) < 1000


@dataclasses.dataclass
class Row:
    """What a tool returns."""

    name: str
    number: int


@dataclasses.dataclass
class Table:
    rows: list[Row]


ROWS = [Row("a", number) for number in range(30_000)]
LARGE_RESULTS: dict[str, Any] = {
    "records": ROWS,
    "a counter": Counter({str(number): number for number in range(100_000)}),
    "a deque of records": deque(ROWS),
    "an object that has records": Table(ROWS),
    "a result whose value are records": ToolResult(value=ROWS, has_value=True),
}


@pytest.mark.slow
@each_row("kind", LARGE_RESULTS)
async def test_a_large_result_becomes_plain_while_others_go_on(kind: str) -> None:
    async def give() -> Any:
        """Return what is no plain data."""
        return LARGE_RESULTS[kind]

    registry = ToolRegistry([give])
    seen = [await watched(registry.dispatch("give", {})) for _ in range(3)]  # a neighbour may have taken our caches

    assert not seen[0].outcome.is_error
    assert min(each.silent_s for each in seen) < SILENCE_S


async def small() -> str:
    """Return a small text."""
    return "small"


async def of_middleware() -> ToolResult:
    registry = ToolRegistry([small])

    async def instead(call: Any, proceed: Any) -> ToolResult:
        return ToolResult(value=ROWS, has_value=True)

    registry.add_middleware(instead)
    return await registry.dispatch("small", {})


async def of_a_hook(hook: Hook) -> ToolResult:
    registry = ToolRegistry([small])
    registry.add_hook(hook)
    return await registry.dispatch("small", {})


async def of_a_processor() -> ToolResult:
    call: Any = None
    processor = Processor(post_tool=lambda _call, result: ToolResult(value=ROWS, has_value=True))
    return await after_tool([processor], call, ToolResult.ok("small"))


ROUTES: dict[str, Callable[[], Awaitable[ToolResult]]] = {
    "middleware": of_middleware,
    "before hook": lambda: of_a_hook(Hook(before=lambda call: Substitute(ToolResult(value=ROWS, has_value=True)))),
    "after hook": lambda: of_a_hook(Hook(after=lambda call, result: ToolResult(value=ROWS, has_value=True))),
    "processor": of_a_processor,
}


@pytest.mark.slow
@each_row("route", ROUTES)
async def test_so_does_what_others_put_in_the_place_of_a_result(route: str) -> None:
    seen = [await watched(ROUTES[route]()) for _ in range(3)]

    assert len(seen[0].outcome.value) == len(ROWS) and type(seen[0].outcome.value[0]) is dict
    assert min(each.silent_s for each in seen) < SILENCE_S
