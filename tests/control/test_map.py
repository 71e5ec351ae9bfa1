"""`Runtime.map`: one script over many inputs; each item once, in bounded memory."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest

import journals
from control.conftest import Effects
from rows import each_row
from toolcell import (
    Limits,
    MapItem,
    MapStopped,
    Outcome,
    PoolConfig,
    RunContext,
    Runtime,
    SandboxUnavailable,
    SyncRuntime,
    ToolRegistry,
    UsageError,
)
from toolcell.audit.query import Index
from toolcell.control.map_stream import WINDOW
from toolcell.tools import AlreadyMade, Approve

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

SQUARE = "n * n"
FAIL_AT_3 = "if n == 3:\n    raise ValueError('three')\nn"


def numbers(count: int) -> Iterator[dict[str, int]]:
    return ({"n": n} for n in range(count))


def values(items: list[MapItem]) -> list[Any]:
    return [item.value for item in items]


# Order, errors and memory


def test_items_come_in_the_order_of_their_inputs(opened: SyncRuntime) -> None:
    items = list(opened.map("import time\ntime.sleep(0.02 if n % 3 == 0 else 0)\nn", numbers(10), concurrency=4))

    assert values(items) == list(range(10))
    assert [item.index for item in items] == list(range(10))
    assert all(item.ok and item.result is not None and item.inputs == {"n": item.index} for item in items)


@pytest.mark.anyio
async def test_unordered_items_come_as_they_end_and_the_inputs_may_be_an_async_iterator() -> None:
    registry, release = ToolRegistry(), anyio.Event()

    @registry.tool
    async def wait() -> None:
        """Wait until everybody else is through."""
        await release.wait()

    async def given() -> AsyncIterator[dict[str, int]]:
        for n in range(4):
            await anyio.lowlevel.checkpoint()
            yield {"n": n}

    async with Runtime(registry, pool=PoolConfig(warm=2)) as runtime:
        found = []
        async for item in runtime.map("if n == 0: call_tool('wait')\nn", given(), concurrency=2, ordered=False):
            found.append(item.index)
            if len(found) == 3:
                release.set()

    assert sorted(found) == [0, 1, 2, 3]
    assert found[-1] == 0


@pytest.mark.anyio
async def test_no_more_items_run_at_once_than_the_concurrency() -> None:
    registry, running, most, two = ToolRegistry(), 0, 0, anyio.Event()

    @registry.tool
    async def stay() -> None:
        """Stay until two items have run at once, and a little longer."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            two.set()
        await two.wait()
        await anyio.sleep(0.05)
        running -= 1

    async with Runtime(registry, pool=PoolConfig(warm=6)) as runtime:
        assert [item.ok async for item in runtime.map("call_tool('stay')", numbers(6), concurrency=2)] == [True] * 6
    assert most == 2


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("ordered", [True, False])
async def test_inputs_are_pulled_as_their_items_are_read(ordered: bool) -> None:
    pulled = 0

    def endless() -> Iterator[dict[str, int]]:
        nonlocal pulled
        for pulled in itertools.count(1):
            yield {"n": pulled}

    async with (
        Runtime(pool=PoolConfig(warm=2)) as runtime,
        runtime.map("n", endless(), concurrency=2, ordered=ordered) as items,
    ):
        await anext(items)
        with anyio.fail_after(60):
            while pulled < WINDOW * 2 + 1:
                await anyio.sleep(0.01)
        await runtime.execute_code("1")
        assert pulled == WINDOW * 2 + 1


def test_a_failed_item_is_yielded_with_its_error_and_the_others_go_on(opened: SyncRuntime) -> None:
    items = list(opened.map(FAIL_AT_3, numbers(6)))

    assert [str(item.outcome) for item in items] == ["ok", "ok", "ok", "error", "ok", "ok"]
    assert items[3].error is not None and items[3].error.message == "three"


def test_on_error_stop_begins_nothing_more(opened: SyncRuntime) -> None:
    items = list(opened.map(FAIL_AT_3, numbers(1000), concurrency=2, on_error="stop"))

    assert [item.index for item in items if not item.ok] == [3]
    assert len(items) <= 3 + 2 * WINDOW


def test_on_error_raise_raises_with_the_item_and_ends_the_rest(opened: SyncRuntime) -> None:
    seen = []
    with pytest.raises(MapStopped, match=r"item 3 ended as error: three") as caught:
        seen.extend(item.index for item in opened.map(FAIL_AT_3, numbers(999), concurrency=2, on_error="raise"))

    assert seen == [0, 1, 2]
    assert caught.value.item.index == 3


def test_a_loop_that_is_left_early_ends_its_runs(opened: SyncRuntime) -> None:
    begun = opened.map("import time\nif n: time.sleep(60)\nn", numbers(8), concurrency=2)
    assert next(begun).value == 0
    begun.close()  # type: ignore[attr-defined]
    assert list(opened.map(SQUARE, numbers(3))) != []


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_map_that_nobody_holds_any_more_ends_its_runs() -> None:
    ended = anyio.Event()

    def given() -> Iterator[dict[str, int]]:
        try:
            yield from numbers(100)
        finally:
            ended.set()

    async with Runtime(pool=PoolConfig(warm=2)) as runtime:
        items = runtime.map("import time\nif n: time.sleep(60)\nn", given(), concurrency=2)
        assert (await anext(items)).value == 0
        del items
        gc.collect()
        with anyio.fail_after(60):
            assert (await runtime.execute_code("1")).value == 1
            await runtime.close()


@pytest.mark.slow
@pytest.mark.anyio
@each_row("ordered", [True, False])
@each_row(
    ("last", "said"),
    [
        (ValueError("the database is away"), "the database is away"),
        (["no dict"], "input 3 of a map must be a dict"),
        ({"n": object()}, r"input 3 of the map: cannot send inputs\['n'\]"),
    ],
    ids=["raises", "no dict", "no data"],
)
async def test_an_error_of_the_inputs_comes_after_the_items_that_were_under_way(
    ordered: bool, last: Any, said: str
) -> None:
    registry, release, made = ToolRegistry(), anyio.Event(), list[int]()

    @registry.tool
    async def pay(n: int) -> int:
        """Pay, when everybody has begun."""
        made.append(n)
        if len(made) == 3:
            release.set()
        await release.wait()
        return n

    async def given() -> AsyncIterator[Any]:
        for n in range(3):
            yield {"n": n}
        if isinstance(last, Exception):
            raise last
        yield last

    async with Runtime(registry, pool=PoolConfig(warm=4)) as runtime:
        found, items = [], runtime.map("call_tool('pay', n=n)", given(), concurrency=4, ordered=ordered)
        with pytest.raises((ValueError, UsageError), match=said):
            async for item in items:
                found.append(item)  # noqa: PERF401

    assert sorted(item.value for item in found) == sorted(made) == [0, 1, 2]


@pytest.mark.anyio
async def test_on_error_stop_waits_for_no_more_inputs_and_runs_none_that_comes_late() -> None:
    registry, entered, asked = ToolRegistry(), list[int](), anyio.Event()

    @registry.tool
    async def enter(n: int) -> int:
        """Note who comes in, once the next input has been asked for."""
        await asked.wait()
        entered.append(n)
        return n

    async def given() -> AsyncIterator[dict[str, int]]:
        yield {"n": 0}
        try:
            asked.set()
            await anyio.sleep_forever()
        finally:
            entered.append(-1)  # it is closed, and not left behind
        yield {"n": 1}

    async with Runtime(registry, pool=PoolConfig(warm=2)) as runtime:
        source = "call_tool('enter', n=n)\nraise ValueError('stop')"
        with anyio.fail_after(60):
            items = [item async for item in runtime.map(source, given(), concurrency=4, on_error="stop")]

    assert [item.outcome for item in items] == [Outcome.ERROR]
    assert asked.is_set() and entered == [0, -1]


@pytest.mark.anyio
async def test_inputs_that_wait_for_a_task_that_was_cancelled_end_the_map_with_an_error() -> None:
    waits = asyncio.ensure_future(asyncio.sleep(60))
    waits.cancel()

    async def given() -> AsyncIterator[dict[str, int]]:
        yield {"n": 0}
        await waits
        yield {"n": 1}

    async with Runtime(pool=PoolConfig(warm=2)) as runtime:
        await asyncio.wait([waits])
        for inputs in (given(), (each if each["n"] == 0 else waits.result() for each in numbers(2))):
            found = []
            with pytest.raises(UsageError, match="the inputs of a map were cancelled"):
                async for item in runtime.map("n", inputs, concurrency=4):
                    found.append(item.value)  # noqa: PERF401
            assert found == [0]


@pytest.mark.anyio
async def test_a_map_may_be_allowed_far_more_runs_at_once_than_it_has_inputs() -> None:
    async with Runtime(pool=PoolConfig(warm=2)) as runtime:
        with anyio.fail_after(60):
            assert [item.value async for item in runtime.map("n", numbers(5), concurrency=10**9)] == list(range(5))


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_map_that_another_thread_drops_ends_its_runs() -> None:
    entered, registry = list[int](), ToolRegistry()

    @registry.tool
    def enter(n: int) -> int:
        """Note who comes in."""
        entered.append(n)
        return n

    async with Runtime(registry, pool=PoolConfig(warm=2)) as runtime:
        holder = [runtime.map("import time\nif n: time.sleep(60)\nn", numbers(100), concurrency=2)]
        assert (await anext(holder[0])).value == 0
        pump = holder[0]._pump
        dropping = threading.Thread(target=holder.clear)
        dropping.start()
        dropping.join()
        gc.collect()
        with anyio.fail_after(60):
            await pump.over.wait()


@pytest.mark.slow
@pytest.mark.anyio
async def test_attempts_leave_no_journals(effects: Effects, tmp_path: Path) -> None:
    async with Runtime(effects.registry, record=tmp_path / "j" / "runs.db", pool=PoolConfig(warm=1)) as runtime:
        items = [item async for item in runtime.map("raise ValueError(n)", numbers(3), retries=2, retry_on={"error"})]
    assert [item.attempts for item in items] == [3] * 3
    assert journals.names(tmp_path / "j") == []


def test_a_map_whose_runtime_was_closed_says_so() -> None:
    with SyncRuntime(pool=PoolConfig(warm=0)) as runtime:
        items = runtime.map("n", numbers(3))
    with pytest.raises(UsageError, match="that is closed"):
        next(items)


@pytest.mark.anyio
async def test_a_map_and_a_stream_of_a_closed_runtime_say_so() -> None:
    async with Runtime(pool=PoolConfig(warm=0)) as runtime:
        late = [runtime.map("n", numbers(3)), runtime.stream("1")]
    for each in late:
        with pytest.raises(UsageError, match="not open"):
            await anext(aiter(each))


def test_what_the_inputs_raise_comes_out_of_the_loop(opened: SyncRuntime) -> None:
    def broken() -> Iterator[dict[str, int]]:
        yield {"n": 1}
        raise KeyError("the file ended")

    with pytest.raises(KeyError, match="the file ended"):
        list(opened.map(SQUARE, broken()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"concurrency": 0}, "concurrency= must be a whole number of at least 1"),
        ({"retries": -1}, "retries= must be a whole number of at least 0"),
        ({"retry_on": {"ok"}}, "retry_on= takes outcomes of failures"),
        ({"retry_on": "lost"}, "retry_on= takes outcomes of failures"),
        ({"retry_on": 5}, "retry_on= takes outcomes of failures"),
        ({"on_error": "ignore"}, "on_error= must be one of"),
        ({"map_id": "m"}, r"Runtime\(record=FILE\)"),
        ({"map_id": "../m"}, "map_id= must be 1 to 48"),
        ({"resume": True}, "pass its map_id= too"),
        ({"options": {"dry_run": True}}, "options= has dry_run"),
        ({"retry": 3}, "did you mean retry_on"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_runs(opened: SyncRuntime, options: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        list(opened.map(SQUARE, numbers(1), **options))


@pytest.mark.parametrize("given", [5, "text", {"n": 1}, [7]])
def test_inputs_that_are_no_dicts_are_refused(opened: SyncRuntime, given: Any) -> None:
    with pytest.raises(UsageError, match=r"map takes an iterable|input 0 of a map must be a dict"):
        list(opened.map(SQUARE, given))


# Trying again


class Unsteady:
    """A stand-in for what runs the items of a map, whose first answers are prescribed."""

    def __init__(self, runtime: Runtime, *first: Any) -> None:
        self._execute, self._first = runtime.scripts.execute, list(first)
        self.attempts = 0

    async def __call__(self, source: str, options: Any) -> Any:
        self.attempts += 1
        result = await self._execute(source, options)
        if not self._first:
            return result
        prescribed = self._first.pop(0)
        if isinstance(prescribed, Exception):
            raise prescribed
        import dataclasses

        return dataclasses.replace(result, outcome=prescribed)


async def one(effects: Effects, source: str, *first: Any, **options: Any) -> tuple[MapItem, int]:
    async with Runtime(effects.registry, pool=PoolConfig(warm=1)) as runtime:
        unsteady = Unsteady(runtime, *first)
        runtime.scripts.execute = unsteady  # type: ignore[method-assign]
        found = [item async for item in runtime.map(source, [{"n": 1}], **options)]
    return found[0], unsteady.attempts


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("source", "first", "options", "attempts"),
    [
        pytest.param("n", [Outcome.LOST], {"retries": 2}, 2, id="no call: again"),
        pytest.param("n", [SandboxUnavailable("full")], {"retries": 2}, 2, id="no sandbox: again"),
        pytest.param("call_tool('read', name='a')", [Outcome.LOST], {"retries": 2}, 2, id="only reads: again"),
        pytest.param("call_tool('write', text='a')", [Outcome.LOST], {"retries": 2}, 1, id="a write: never again"),
        pytest.param("n", [Outcome.ERROR], {"retries": 2}, 1, id="the script's own failure"),
        pytest.param("n", [Outcome.ERROR], {"retries": 2, "retry_on": ["error"]}, 2, id="unless that is asked for"),
        pytest.param(
            "call_tool('write', text='a')",
            [Outcome.ERROR],
            {"retries": 2, "retry_on": ["error"]},
            1,
            id="and had no effect",
        ),
        pytest.param("n", [Outcome.LOST] * 5, {"retries": 2}, 3, id="as often as said"),
        pytest.param("n", [Outcome.LOST], {}, 1, id="by default never"),
    ],
)
async def test_only_what_provably_had_no_effect_is_tried_again(
    effects: Effects, source: str, first: list[Any], options: Any, attempts: int
) -> None:
    item, made = await one(effects, source, *first, **options)

    assert (made, item.attempts) == (attempts, attempts)
    assert item.ok == (len(first) < attempts)
    assert len(effects.of("write")) <= 1


@pytest.mark.anyio
async def test_an_item_that_made_calls_does_not_end_as_one_that_got_no_sandbox(
    effects: Effects, tmp_path: Path
) -> None:
    async with Runtime(effects.registry, record=tmp_path / "j" / "runs.db", pool=PoolConfig(warm=0)) as runtime:
        execute = Unsteady(runtime, Outcome.LOST)
        runtime.scripts.execute = execute  # type: ignore[method-assign]
        start = runtime.environment.backend.start

        async def one_sandbox(limits: Limits) -> Any:
            if execute.attempts and effects.of("write"):
                raise SandboxUnavailable("no node is left")
            return await start(limits)

        runtime.environment.backend.start = one_sandbox  # type: ignore[method-assign]
        (item,) = [item async for item in runtime.map("call_tool('write', text='a')", [{}], map_id="m", retries=2)]

        assert (item.outcome, item.attempts) == (Outcome.LOST, 3)
        assert item.result is not None
        assert [call.name for call in item.result.calls] == ["write"]


# Carrying on


def carry_on(folder: Path, effects: Effects, source: str, count: int, **options: Any) -> list[MapItem]:
    with SyncRuntime(effects.registry, record=folder / "runs.db", pool=PoolConfig(warm=1)) as runtime:
        return list(runtime.map(source, numbers(count), map_id="m", resume=True, **options))


def test_what_has_ended_is_answered_from_the_record_and_not_run_again(effects: Effects, tmp_path: Path) -> None:
    source = "if n == 2: raise ValueError('two')\ncall_tool('write', text=str(n))\n{'n': n}"
    first = carry_on(tmp_path / "j", effects, source, 4)
    made = list(effects.made)
    again = carry_on(tmp_path / "j", effects, source, 6)

    assert values(first) == values(again)[:4] == [{"n": 0}, {"n": 1}, None, {"n": 3}]
    assert [item.is_recorded for item in again] == [True] * 4 + [False] * 2
    assert again[2].error is not None and again[2].error.message == "two" and again[2].error.line == 1
    assert effects.made[: len(made)] == made
    assert sorted(text for _, text in effects.of("write")) == ["0", "1", "3", "4", "5"]  # items run side by side
    assert (journals.names(tmp_path / "j"), journals.names(tmp_path / "j", "map")) == ([], ["m"])


@pytest.mark.slow
def test_a_value_too_large_for_the_record_is_said_to_be_missing(effects: Effects, tmp_path: Path) -> None:
    source = "'x' * 1_100_000"
    assert len(carry_on(tmp_path / "j", effects, source, 1)[0].value) == 1_100_000
    (item,) = carry_on(tmp_path / "j", effects, source, 1)

    assert item.ok and item.has_value and item.value is None
    assert "1048576 are kept" in item.unkept


@pytest.mark.slow
def test_a_map_of_that_name_is_not_begun_a_second_time_by_mistake(effects: Effects, tmp_path: Path) -> None:
    carry_on(tmp_path / "j", effects, SQUARE, 1)
    with (
        SyncRuntime(record=tmp_path / "j" / "runs.db") as runtime,
        pytest.raises(UsageError, match="there is a map 'm' in"),
    ):
        list(runtime.map(SQUARE, numbers(1), map_id="m"))


def test_a_map_is_carried_on_with_its_own_script_and_inputs(effects: Effects, tmp_path: Path) -> None:
    carry_on(tmp_path / "j", effects, SQUARE, 2)
    with pytest.raises(UsageError, match="began with another script"):
        carry_on(tmp_path / "j", effects, "n + 1", 2)
    with (
        SyncRuntime(record=tmp_path / "j" / "runs.db") as runtime,
        pytest.raises(UsageError, match="input 1 of map 'm' is anoth"),
    ):
        list(runtime.map(SQUARE, [{"n": 0}, {"n": 7}], map_id="m", resume=True))


@pytest.mark.slow
def test_inputs_that_end_before_items_that_had_ended_are_an_error_after_their_items(
    effects: Effects, tmp_path: Path
) -> None:
    carry_on(tmp_path / "j", effects, SQUARE, 4)
    with SyncRuntime(record=tmp_path / "j" / "runs.db", pool=PoolConfig(warm=1)) as runtime:
        fewer = runtime.map(SQUARE, numbers(2), map_id="m", resume=True)
        assert [next(fewer).value, next(fewer).value] == [0, 1]
        with pytest.raises(UsageError, match="ended after 2, and item 3 had ended before"):
            next(fewer)

    assert values(carry_on(tmp_path / "j", effects, SQUARE, 4)) == [0, 1, 4, 9]


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["raise", "stop"])
def test_a_map_that_stopped_at_a_failure_goes_on_behind_it(effects: Effects, tmp_path: Path, on_error: str) -> None:
    source = "if n == 1: raise ValueError('one')\nn"
    with pytest.raises(MapStopped) if on_error == "raise" else nullcontext():
        carry_on(tmp_path / "j", effects, source, 40, concurrency=1, on_error=on_error)

    again = carry_on(tmp_path / "j", effects, source, 40, concurrency=1, on_error=on_error)

    assert [item.value for item in again] == [0, None, *range(2, 40)]
    assert again[1].is_recorded and again[1].error is not None and again[1].error.message == "one"


@pytest.mark.slow
def test_a_map_that_is_under_way_is_not_carried_on_by_somebody_else(effects: Effects, tmp_path: Path) -> None:
    with SyncRuntime(record=tmp_path / "j" / "runs.db", pool=PoolConfig(warm=1)) as runtime:
        begun = runtime.map(SQUARE, numbers(100), concurrency=2, map_id="m")  # more than are pulled before one is read
        next(begun)
        with pytest.raises(UsageError, match="it is open already"):
            carry_on(tmp_path / "j", effects, SQUARE, 100)
        assert len(list(begun)) == 99


@pytest.mark.slow
def test_a_record_that_was_changed_is_refused(effects: Effects, tmp_path: Path) -> None:
    carry_on(tmp_path / "j", effects, SQUARE, 5)
    journals.replace(tmp_path / "j", "map", b"\xa2ok", b"\xa3ok")
    with pytest.raises(UsageError, match="is damaged"):
        carry_on(tmp_path / "j", effects, SQUARE, 5)


@pytest.mark.slow
@pytest.mark.anyio
async def test_items_that_were_cut_short_are_carried_on_and_their_calls_are_not_made_again(
    effects: Effects, tmp_path: Path
) -> None:
    source = "a = call_tool('write', text=str(n))\nb = call_tool('wait', n=n)\n[a, b]"
    begun, is_open = anyio.Event(), anyio.Event()

    @effects.registry.tool(read_only=True)
    async def wait(n: int) -> int:
        """Wait until the gate is open."""
        if n == 1:
            begun.set()
            await is_open.wait()
        return n

    async def run(is_left: bool) -> list[MapItem]:
        async with (
            Runtime(effects.registry, record=tmp_path / "j" / "runs.db", pool=PoolConfig(warm=2)) as runtime,
            runtime.map(source, numbers(2), map_id="m", resume=True, concurrency=2) as items,
        ):
            if not is_left:
                return [item async for item in items]
            found = [await anext(items)]
            with anyio.fail_after(60):
                await begun.wait()
            return found

    assert [item.index for item in await run(True)] == [0]
    is_open.set()
    done = await run(False)

    assert [item.value[1] for item in done] == [0, 1]
    assert sorted(text for _, text in effects.of("write")) == ["0", "1"]


@pytest.mark.slow
def test_a_call_in_doubt_is_told_and_not_made_until_somebody_decides(tmp_path: Path) -> None:
    """The caller is killed in the tool, before and after its effect."""
    for n, (when, decision) in enumerate((("before", Approve()), ("after", AlreadyMade(9)))):
        folder = tmp_path / str(n)
        folder.mkdir()
        assert in_child(folder, when) == -signal.SIGKILL
        with SyncRuntime(ledger(folder, ""), record=folder / "j" / "runs.db", pool=PoolConfig(warm=1)) as runtime:
            for _ in range(2):  # nothing changes while nobody decides
                (item,) = runtime.map("call_tool('enter', n=n)", [{"n": 5}], map_id="m", resume=True)
                assert item.outcome is Outcome.SUSPENDED
                assert [(call.tool, call.args) for call in item.in_doubt] == [("enter", {"n": 5})]
            assert item.suspension is not None
            settled = runtime.resume(item.suspension, {item.in_doubt[0].id: decision})
            assert settled.ok
            (item,) = runtime.map("call_tool('enter', n=n)", [{"n": 5}], map_id="m", resume=True)
            assert item.ok and item.value == settled.value and not item.in_doubt
        assert (folder / "ledger").read_text() == "5\n"


def ledger(folder: Path, when: str) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def enter(n: int) -> int:
        """Append a number to the ledger."""
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        with (folder / "ledger").open("a") as file:
            file.write(f"{n}\n")
        if when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    return registry


def in_child(folder: Path, when: str) -> int:
    import subprocess
    import sys

    code = (
        "from control.test_map import ledger\nfrom pathlib import Path\nfrom toolcell import SyncRuntime\n"
        f"folder = Path({str(folder)!r})\n"
        f"with SyncRuntime(ledger(folder, {when!r}), record=folder / 'j' / 'runs.db') as runtime:\n"
        "    list(runtime.map(\"call_tool('enter', n=n)\", [{'n': 5}], map_id='m'))\n"
    )
    tests = Path(__file__).parent.parent
    paths = f"{tests}{os.pathsep}{tests.parent}"
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, timeout=60).returncode


@pytest.mark.slow
def test_a_result_that_got_lost_between_run_and_record_is_found_again(effects: Effects, tmp_path: Path) -> None:
    source = "call_tool('write', text=str(n))\nn"
    with SyncRuntime(effects.registry, record=tmp_path / "j" / "runs.db", pool=PoolConfig(warm=1)) as runtime:
        context = RunContext(run_id="m-0").within(item="m-0")  # as a map does it
        result = runtime.execute_code(source, inputs={"n": 0}, context=context)
        assert result.journal_id == "m-0"
    (item,) = carry_on(tmp_path / "j", effects, source, 1)

    assert item.ok and item.value == 0
    assert [text for _, text in effects.of("write")] == ["0"]


@pytest.mark.slow
def test_an_answer_of_an_item_that_is_found_again_names_the_run_that_made_the_call(
    effects: Effects, tmp_path: Path
) -> None:
    source = "call_tool('pay', to=str(n))"
    with SyncRuntime(effects.registry, record=tmp_path / "j" / "runs.db", pool=PoolConfig(warm=1)) as runtime:
        context = RunContext(run_id="m-0").within(item="m-0")  # as a map does it
        waits = runtime.execute_code(source, inputs={"n": 0}, context=context, on_approval="suspend")
        assert waits.suspension is not None
        again = context.child(run_id="m-0.again")
        assert runtime.resume(waits.suspension, {waits.suspension.calls[0].id: Approve()}, context=again).ok
    (item,) = carry_on(tmp_path / "j", effects, source, 1)

    assert item.ok and len(effects.of("pay")) == 1
    with Index(tmp_path / "j" / "runs.db") as index:
        (call,) = index.load(index.find("last")).calls
    assert call.facts["answered_from"] == "m-0.again"


@pytest.mark.slow
def test_the_audit_record_of_a_run_names_its_item(effects: Effects, tmp_path: Path) -> None:
    with SyncRuntime(effects.registry, record=tmp_path / "a", pool=PoolConfig(warm=1)) as runtime:
        items = list(runtime.map("call_tool('write', text='a')", numbers(2)))
    with Index(tmp_path / "a") as index:
        recorded = {index.load(each).who["item"]: each.id for each in index.runs()}
    assert recorded == {item.run_id: item.run_id for item in items}
