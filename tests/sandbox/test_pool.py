"""The pool alone: what it plans, what it keeps, and what happens to used items."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell import Limits, SandboxUnavailable
from toolcell.config import MIB, fits
from toolcell.sandbox import pool as pools
from toolcell.sandbox.pool import Pool, StartClock, plan, quiet_from

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

LONG_S = 600.0


class Works:
    """Starts numbers and notes what became of them."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.ended: list[int] = []
        self.frozen: list[int] = []
        self.fails = 0
        self.freezes = True

    async def start(self) -> int:
        await anyio.lowlevel.checkpoint()
        if self.fails:
            self.fails -= 1
            raise SandboxUnavailable("no more")
        self.started.append(len(self.started))
        return self.started[-1]

    async def end(self, item: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.ended.append(item)

    def freeze(self, item: int) -> bool:
        self.frozen += [item] * self.freezes
        return self.freezes


@asynccontextmanager
async def opened(works: Works, **options: Any) -> AsyncIterator[Pool[int]]:
    settings = {"warm": 4, "cap": 8, "idle_s": LONG_S, "clock": StartClock(LONG_S)} | options
    pool = Pool(works.start, works.end, lambda item: item not in works.ended, works.freeze, **settings)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            await pool.open(tasks)
            try:
                await until(lambda: len(works.started) == min(settings["warm"], settings["cap"]))
                yield pool
            finally:
                await pool.close()
    assert sorted(works.ended) == works.started, "everything that was started was ended once"


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await anyio.sleep(0.001)


@pytest.fixture
def never_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIET_S", "LONG_RUN_S", "FROZEN_S"):
        monkeypatch.setattr(pools, name, LONG_S)


@given(
    ages=st.lists(st.floats(0, 100), max_size=8).map(lambda ages: sorted(ages, reverse=True)),
    busy=st.integers(0, 8),
    starting=st.integers(0, 8),
    warm=st.integers(0, 8),
    cap=st.integers(1, 16),
    waiting=st.integers(0, 8),
    is_quiet=st.booleans(),
)
def test_a_plan_never_passes_the_cap_and_serves_whoever_waits(
    ages: list[float], busy: int, starting: int, warm: int, cap: int, waiting: int, is_quiet: bool
) -> None:
    todo = plan(ages, busy, starting, warm, cap, 50.0, waiting, is_quiet=is_quiet)
    spare = len(ages) - todo.expire + starting

    assert todo.expire == sum(age > 50 for age in ages)
    assert todo.start >= 0
    assert todo.start == 0 or busy + spare + todo.start <= cap
    assert todo.start == 0 or spare + todo.start <= max(warm, waiting)
    assert spare + todo.start >= min(max(warm if is_quiet else (warm + 1) // 2, waiting), cap - busy)


@given(taken_at=st.floats(0, 1), returned_at=st.floats(0, 1), in_use=st.integers(0, 3))
def test_it_is_quiet_soon_after_the_last_return_or_a_while_after_what_is_in_use_was_taken(
    taken_at: float, returned_at: float, in_use: int
) -> None:
    at = quiet_from(taken_at, returned_at, in_use)

    assert at > (taken_at if in_use else returned_at)
    assert quiet_from(taken_at, returned_at, in_use + 1) == quiet_from(taken_at, 0.0, 1)


async def test_every_item_is_handed_out_once() -> None:
    works = Works()
    async with opened(works) as pool:
        seen = []
        for _ in range(30):
            seen.append(await pool.acquire())
            pool.release(seen[-1])

    assert len(set(seen)) == 30


@pytest.mark.usefixtures("never_quiet")
async def test_during_a_burst_what_was_used_is_frozen_and_half_of_the_warm_items_are_enough() -> None:
    works = Works()
    async with opened(works) as pool:
        for number in range(2):
            pool.release(await pool.acquire())
            await until(lambda number=number: works.frozen == list(range(number + 1)))  # type: ignore[misc]
        assert works.ended == []
        assert len(works.started) == 4

        pool.release(await pool.acquire())  # more than half of them are gone
        await until(lambda: len(works.started) == 5)
        assert works.ended == []


@pytest.mark.usefixtures("never_quiet")
async def test_what_waits_for_too_long_is_replaced_also_when_nothing_happens() -> None:
    works = Works()
    async with opened(works, warm=2, idle_s=0.05) as pool:
        await until(lambda: {0, 1, 2, 3} <= set(works.ended) and len(pool.idle) == 2)


async def test_what_cannot_be_frozen_is_ended_at_once() -> None:
    works = Works()
    works.freezes = False
    async with opened(works) as pool:
        pool.release(await pool.acquire())
        await until(lambda: works.ended == [0])


async def test_when_a_burst_is_over_what_was_used_is_ended_and_replaced() -> None:
    works = Works()
    async with opened(works) as pool:
        for _ in range(2):
            pool.release(await pool.acquire())
        await until(lambda: len(works.ended) == 2 and len(works.started) == 6)


async def test_nothing_stays_frozen_for_long_however_long_a_burst_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIET_S", "LONG_RUN_S"):
        monkeypatch.setattr(pools, name, LONG_S)
    works = Works()
    async with opened(works) as pool:
        pool.release(await pool.acquire())
        await until(lambda: works.ended == [0])


@pytest.mark.usefixtures("never_quiet")
async def test_whoever_waits_at_the_cap_gets_the_place_of_what_is_frozen() -> None:
    works = Works()
    async with opened(works, warm=2, cap=2) as pool:
        held = [await pool.acquire(), await pool.acquire()]
        pool.release(held[0])
        await until(lambda: works.frozen == [held[0]])
        assert await pool.acquire() == 2
        assert works.ended == [held[0]]
        for item in (held[1], 2):
            pool.release(item)


async def test_a_spare_is_made_for_an_item_that_stays_busy() -> None:
    works = Works()
    async with opened(works) as pool:
        item = await pool.acquire()

        def has_spare() -> bool:
            pool.tend()  # as with each tick of a run
            return len(works.started) == 5

        await until(has_spare)
        pool.release(item)


async def test_failures_are_told_to_whoever_waits_and_the_pool_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "BACKOFF_S", (0.0,))
    works = Works()
    works.fails = 3
    async with opened(works, warm=0) as pool:
        with pytest.raises(SandboxUnavailable, match="no more"):
            await pool.acquire()
        assert await pool.acquire() == 0
        pool.release(0)


async def test_failures_before_a_start_that_succeeds_are_forgotten_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are in a long life: only those in a row are told."""
    monkeypatch.setattr(pools, "BACKOFF_S", (0.0,))
    works = Works()
    async with opened(works, warm=0) as pool:
        for number in range(2 * pools.TRIES):
            works.fails = pools.TRIES - 1
            assert await pool.acquire() == number
            pool.release(number)
        works.fails = pools.TRIES
        with pytest.raises(SandboxUnavailable, match="no more"):
            await pool.acquire()


async def test_an_item_whose_end_fails_takes_no_other_with_it(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Works):
        async def end(self, item: int) -> None:
            await super().end(item)
            if item == 0:
                raise RuntimeError("can't start new thread")

    works = Failing()
    async with opened(works, warm=1, cap=2) as pool:
        first = await pool.acquire()
        pool.release(first)
        await until(lambda: bool(works.ended))
        pool.release(await pool.acquire())

    assert "0 could not be ended" in caplog.text


async def test_a_pool_that_was_closed_has_nothing_to_give() -> None:
    async with opened(Works()) as pool:
        await pool.close()
        with pytest.raises(SandboxUnavailable, match="closed"):
            await pool.acquire()


async def test_what_is_given_back_is_ended_at_once_also_when_everything_was_cancelled() -> None:
    """A cancellation from further up reaches the pool's own tasks before it reaches `close`."""
    works = Works()
    with anyio.fail_after(60), anyio.CancelScope() as everything:
        async with opened(works) as pool:
            items = {await pool.acquire(), await pool.acquire()}
            everything.cancel()
            try:
                await anyio.sleep(LONG_S)
            finally:
                for item in items:
                    pool.release(item)
                with anyio.fail_after(60, shield=True):
                    await until(lambda: items <= {*works.ended})


async def test_whoever_waits_for_a_start_that_is_stuck_hears_of_it_in_time() -> None:
    works = Works()

    async def stuck() -> int:
        await anyio.sleep(LONG_S)
        return 0

    works.start = stuck  # type: ignore[method-assign]
    async with opened(works, warm=0, clock=StartClock(0.05)) as pool:
        with anyio.fail_after(60), pytest.raises(SandboxUnavailable, match=r"no sandbox came up within 0\.05 s"):
            await pool.acquire()


@pytest.mark.slow
async def test_a_slow_start_is_not_stuck_while_others_succeed() -> None:
    clock = StartClock(2.0)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()

            async def slow() -> int:
                started.set()
                await anyio.sleep_until(begun + 3.0)
                return 1

            async def quick() -> int:
                return 2

            begun = anyio.current_time()
            tasks.start_soon(clock.run, slow)
            await started.wait()
            await anyio.sleep_until(begun + 1.5)
            assert await clock.run(quick) == 2


async def test_who_waits_at_the_cap_gets_the_place_of_what_is_given_back_and_does_not_run_out_of_time() -> None:
    works, got = Works(), []
    async with opened(works, warm=1, cap=1, clock=StartClock(0.5)) as pool, anyio.create_task_group() as tasks:
        held = await pool.acquire()

        async def wait() -> None:
            got.append(await pool.acquire())

        tasks.start_soon(wait)
        await anyio.sleep(1.2)
        pool.release(held)
        await until(lambda: got == [1])
        assert works.ended == [held]
        pool.release(1)


async def test_an_item_wakes_one_of_those_who_wait_and_a_cancelled_one_passes_it_on() -> None:
    works = Works()
    got: list[int] = []
    async with opened(works, warm=0, cap=1) as pool:
        held = await pool.acquire()

        async def take(number: int, scope: anyio.CancelScope) -> None:
            with scope:
                item = await pool.acquire()
                got.append(number)
                pool.release(item)

        scopes = [anyio.CancelScope() for _ in range(5)]
        async with anyio.create_task_group() as tasks:
            for number, scope in enumerate(scopes):
                tasks.start_soon(take, number, scope)
            await anyio.wait_all_tasks_blocked()
            scopes[2].cancel()
            pool.release(held)
            while not (pool.idle or got):
                await anyio.lowlevel.checkpoint()
            scopes[0].cancel()  # it may have been woken, and has not run yet
    assert set(got) >= {1, 3, 4}
    assert 2 not in got


async def test_what_a_task_was_woken_for_goes_to_the_next_one_if_asyncio_cancels_it_first() -> None:
    works = Works()
    async with opened(works, warm=0, cap=1) as pool:
        held = await pool.acquire()
        first, second = (asyncio.create_task(pool.acquire()) for _ in range(2))
        await anyio.wait_all_tasks_blocked()
        pool.release(held)
        while not pool.idle:
            await anyio.lowlevel.checkpoint()
        assert not first.done()  # it is to run next
        first.cancel()
        with anyio.fail_after(60):
            pool.release(await second)
        assert first.cancelled()


async def test_a_pool_that_begins_to_close_hands_out_nothing_more() -> None:
    works = Works()
    async with opened(works) as pool:
        await until(lambda: len(pool.idle) == 4)
        pool.refuse()
        with pytest.raises(SandboxUnavailable, match="closed"):
            await pool.acquire()


@each_row(
    ("changes", "is_held"),
    [
        ({}, True),
        ({"wall_s": 99.0, "cpu_s": 1.0, "cpu_cores": 1.0}, True),
        ({"cpu_s": 99.0}, False),
        ({"memory_bytes": 64 * MIB, "processes": 1, "open_files": 16}, True),
        ({"memory_bytes": 1024 * MIB}, False),
        ({"processes": 41}, False),
        ({"disk_bytes": 4 * MIB}, False),
        ({"inodes": 65}, False),
        ({"frame_bytes": 4096}, False),
    ],
)
def test_a_warm_sandbox_is_for_runs_that_its_limits_fit(changes: dict[str, Any], is_held: bool) -> None:
    limits = Limits(memory_bytes=128 * MIB, processes=40, cpu_s=20)
    assert fits(limits.model_copy(update=changes), limits) is is_held
