"""Many calls that do not wait let other tasks have the event loop: batches of every kind, and plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rows import each_row
from toolcell import ToolRegistry
from toolcell.support import event_loop
from toolcell.tools import Call, RunContext, plan

pytestmark = pytest.mark.anyio

MANY = 500


def registry(**settings: Any) -> ToolRegistry:
    made = ToolRegistry(**settings)

    @made.tool
    async def echo(q: int) -> int:
        """Return the number unchanged."""
        return q

    @made.tool(mode="sequential")
    async def in_turn(q: int) -> int:
        """Return the number unchanged, one call at a time."""
        return q

    return made


async def turns_of_others(work: Callable[[], Awaitable[object]]) -> int:
    """How often another task had its turn while `work` was done."""
    turns, is_over = 0, False

    async def other() -> None:
        nonlocal turns
        while not is_over:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        await anyio.lowlevel.checkpoint()
        turns = 0
        await work()
        is_over = True
    return turns


@each_row(
    ("name", "settings"),
    [("echo", {"max_batch": None}), ("in_turn", {"max_batch": None}), ("echo", {"max_batch": 1}), ("none", {})],
    ids=["overlapping", "in turn", "past the limit", "unknown"],
)
async def test_a_batch_of_calls_that_do_not_wait_gives_way(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "SLICE_S", 0.0)
    tools = registry(**settings)
    calls = [(name, {"q": number}) for number in range(MANY)]

    assert await turns_of_others(lambda: tools.execute_batch(calls, context=RunContext(run_id="r"))) >= MANY // 2


async def test_the_results_of_a_batch_that_gives_way_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "SLICE_S", 0.0)
    told: list[Any] = []

    async def note(call: Call, result: Any) -> None:
        told.append(result.value)

    results = await registry(max_batch=None).execute_batch([("echo", {"q": n}) for n in range(MANY)], on_result=note)

    assert [each.value for each in results] == told == list(range(MANY))


@pytest.mark.parametrize("needs", [False, True], ids=["flat", "one after the other"])
async def test_the_steps_of_a_plan_give_way(needs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "SLICE_S", -1.0)
    tools = registry()
    steps = [{"tool": "echo", "args": {"q": number}, "id": f"s{number}"} for number in range(50)]
    if needs:
        steps = [step | {"depends_on": ["s0"]} if step["id"] != "s0" else step for step in steps]

    assert await turns_of_others(lambda: tools.run_plan({"steps": steps}, RunContext(run_id="r"))) >= 40


async def test_the_rows_of_a_plan_are_put_together_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ToolRegistry()

    @made.tool
    async def much() -> list[int]:
        """Return a list that is longer than its share of the rows."""
        return [1] * 2000

    steps = [{"tool": "much", "args": {}} for _ in range(50)]
    results: list[Any] = []

    async def work() -> None:
        results.append(await made.run_plan({"steps": steps}, RunContext(run_id="r")))

    monkeypatch.setattr(event_loop, "SLICE_S", -1.0)
    turns = await turns_of_others(work)

    assert all(row["truncated"] for row in results[0].value)
    assert turns >= 4 * len(steps)  # admitted, performed, concluded, measured and cut


async def test_looking_at_a_plan_before_it_runs_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "SLICE_S", -1.0)
    plan = {"steps": [{"tool": "echo", "args": {"q": 1}}] * 50, "validate_only": True}

    # 49: under trio the order within a turn is random, so the first or the last may not be seen.
    assert await turns_of_others(lambda: registry().run_plan(plan, RunContext(run_id="r"))) >= 49


@pytest.mark.parametrize("is_right", [True, False], ids=["right", "wrong"])
async def test_checking_large_arguments_gives_way(is_right: bool) -> None:
    made = ToolRegistry()

    @made.tool
    async def count(numbers: list[int]) -> int:
        """Count the numbers that were passed."""
        return len(numbers)

    numbers: list[Any] = [1] * 20_000 if is_right else ["x"] * 20_000
    results: list[Any] = []

    async def work() -> None:
        results.append(await made.execute("count", {"numbers": numbers}))

    assert await turns_of_others(work) > 1
    assert results[0].is_error is not is_right


async def test_small_arguments_are_checked_without_a_turn_of_anybody_else() -> None:
    assert await turns_of_others(lambda: registry().execute("echo", {"q": "1"})) <= 1


@each_row("workers", [1, 2, 8])
async def test_those_who_share_a_slice_go_on_in_turn_and_one_in_each_turn_of_the_event_loop(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "SLICE_S", -1.0)  # over at once
    shared, done = event_loop.TimeSlice(), [0] * workers
    furthest_ahead = 0

    async def work(number: int) -> None:
        nonlocal furthest_ahead
        for _ in range(MANY):
            await shared.give_way()
            done[number] += 1
            furthest_ahead = max(furthest_ahead, max(done) - min(done))

    async def work_all() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(workers):
                tasks.start_soon(work, number)

    assert await turns_of_others(work_all) >= MANY * workers
    assert furthest_ahead <= 1


async def test_a_task_that_is_cancelled_while_it_gives_way_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "SLICE_S", -1.0)
    shared = event_loop.TimeSlice()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await shared.give_way()

    with anyio.fail_after(60):
        await shared.give_way()

    assert scope.cancelled_caught


async def test_of_those_who_wait_for_their_turn_a_cancelled_one_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "SLICE_S", -1.0)
    shared, done = event_loop.TimeSlice(), list[int]()

    async def work(number: int, scope: anyio.CancelScope) -> None:
        with scope:
            await shared.give_way()
            done.append(number)

    scopes = [anyio.CancelScope() for _ in range(4)]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for number, scope in enumerate(scopes):
                tasks.start_soon(work, number, scope)
            await anyio.lowlevel.checkpoint()
            scopes[0].cancel()
            scopes[2].cancel()

    assert {1, 3} <= set(done)


async def test_no_time_passes_while_whoever_shares_a_slice_waits_for_the_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "SLICE_S", 60.0)
    shared, now = event_loop.TimeSlice(), 1000.0
    monkeypatch.setattr(event_loop, "time", SimpleNamespace(perf_counter=lambda: now))

    shared.until = now + 1.0
    shared.pause()
    now += 500.0
    shared.pause()  # another task waits, too
    shared.resume()
    assert shared.until == now + 1.0

    shared.resume()  # a second one, which shares what is left
    now += 2.0
    assert shared.until < now
    await shared.give_way()
    assert shared.until == now + 60.0


async def test_calls_of_a_batch_that_do_not_wait_are_made_in_different_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made, turn, seen = ToolRegistry(max_batch=None), 0, list[int]()

    @made.tool
    async def much() -> list[int]:
        """Return many numbers without waiting."""
        seen.append(turn)
        return [1] * 2000

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(event_loop, "SLICE_S", -1.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        await made.execute_batch([("much", {})] * 20, context=RunContext(run_id="r"))
        tasks.cancel_scope.cancel()

    assert max(Counter(seen).values()) <= 2  # one in each turn, and under trio the order within a turn is random


async def test_large_results_of_a_plan_are_not_written_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made, written = ToolRegistry(), list[Any]()

    @made.tool
    async def much() -> list[list[str]]:
        """Return more than all rows of a plan may hold."""
        return [["abc"]] * 60_000

    @made.tool(read_only=True)
    async def text() -> str:
        """Return a text of two megabytes."""
        return "x" * 2_000_000

    to_json = plan.to_json
    monkeypatch.setattr(plan, "to_json", lambda value: written.append(value) or to_json(value))
    steps = (
        [{"tool": "much", "args": {}, "id": "a"}] + [{"tool": "much", "args": {}}] * 48 + [{"tool": "text", "args": {}}]
    )
    rows = (await made.run_plan({"steps": steps}, RunContext(run_id="r"))).value

    assert not written
    assert all(row["truncated"] and len(row["result"]) <= 2000 for row in rows)
    assert rows[0]["result"].startswith('[["abc"], ["abc"], ')
    assert "more than 100,000 characters" in rows[0]["result"]
