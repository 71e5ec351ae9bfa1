"""The pool on its own: what it plans, what it keeps, and what becomes of what was used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcell import SandboxUnavailable
from toolcell.sandbox import pool as pools
from toolcell.sandbox.pool import Pool, plan

pytestmark = pytest.mark.anyio

LONG_S = 60.0


class Works:
    """Starts numbers and notes what became of them."""

    def __init__(self, *, freezes: bool = True) -> None:
        self.started: list[int] = []
        self.frozen: list[int] = []
        self.ended: list[int] = []
        self.fails = 0
        self.freezes = freezes

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
        if self.freezes:
            self.frozen.append(item)
        return self.freezes


@asynccontextmanager
async def opened(works: Works, **options: Any) -> AsyncIterator[Pool[int]]:
    settings = {"warm": 4, "cap": 8, "idle_s": LONG_S} | options
    pool = Pool(works.start, works.end, lambda item: item not in works.ended, works.freeze, **settings)
    with anyio.fail_after(20):
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
    monkeypatch.setattr(pools, "QUIET_S", LONG_S)
    monkeypatch.setattr(pools, "FROZEN_S", LONG_S)


@given(
    ages=st.lists(st.floats(0, 100), max_size=8).map(lambda ages: sorted(ages, reverse=True)),
    busy=st.integers(0, 8),
    starting=st.integers(0, 8),
    warm=st.integers(0, 8),
    cap=st.integers(1, 16),
    waiting=st.integers(0, 8),
)
def test_a_plan_never_passes_the_cap_and_serves_whoever_waits(
    ages: list[float], busy: int, starting: int, warm: int, cap: int, waiting: int
) -> None:
    todo = plan(ages, busy, starting, warm, cap, 50.0, waiting)
    spare = len(ages) - todo.expire + starting

    assert todo.expire == sum(age > 50 for age in ages)
    assert todo.start >= 0
    assert todo.start == 0 or busy + spare + todo.start <= cap
    assert todo.start == 0 or spare + todo.start <= max(warm, waiting)
    assert spare + todo.start >= min(max(warm, waiting), cap - busy)


async def test_every_item_is_handed_out_once() -> None:
    works = Works()
    async with opened(works) as pool:
        seen = []
        for _ in range(30):
            seen.append(await pool.acquire())
            pool.release(seen[-1])

    assert len(set(seen)) == 30


@pytest.mark.usefixtures("never_quiet")
async def test_during_a_burst_what_was_used_is_frozen_and_nothing_is_started() -> None:
    works = Works()
    async with opened(works) as pool:
        for _ in range(2):
            pool.release(await pool.acquire())
        await until(lambda: len(works.frozen) == 2)
        assert (len(works.started), works.ended) == (4, [])

        pool.release(await pool.acquire())  # more than half of them are gone
        await until(lambda: len(works.started) == 7)
        assert works.ended == []


async def test_when_a_burst_is_over_it_is_ended_and_replaced() -> None:
    works = Works()
    async with opened(works) as pool:
        for _ in range(2):
            pool.release(await pool.acquire())
        await until(lambda: len(works.ended) == 2 and len(works.started) == 6)


async def test_nothing_stays_frozen_for_as_long_as_a_burst_may_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "QUIET_S", LONG_S)
    works = Works()
    async with opened(works) as pool:
        pool.release(await pool.acquire())
        await until(lambda: works.ended == [0])


async def test_a_spare_is_made_for_an_item_that_stays_busy() -> None:
    works = Works()
    async with opened(works) as pool:
        item = await pool.acquire()
        await until(lambda: len(works.started) == 5)
        pool.release(item)


@pytest.mark.usefixtures("never_quiet")
async def test_what_cannot_be_frozen_is_ended_at_once() -> None:
    works = Works(freezes=False)
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


@pytest.mark.usefixtures("never_quiet")
async def test_while_somebody_waits_nothing_is_frozen() -> None:
    works = Works()
    got = []
    async with opened(works, warm=1, cap=1) as pool, anyio.create_task_group() as tasks:
        held = await pool.acquire()

        async def wait() -> None:
            got.append(await pool.acquire())

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        pool.release(held)
        await until(lambda: got == [1])
        assert works.frozen == []
        pool.release(1)


async def test_failures_are_told_to_whoever_waits_and_the_pool_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "BACKOFF_S", (0.0,))
    works = Works()
    works.fails = 3
    async with opened(works, warm=0) as pool:
        with pytest.raises(SandboxUnavailable, match="no more"):
            await pool.acquire()
        assert await pool.acquire() == 0
        pool.release(0)


async def test_a_pool_that_was_closed_has_nothing_to_give() -> None:
    async with opened(Works()) as pool:
        await pool.close()
        with pytest.raises(SandboxUnavailable, match="closed"):
            await pool.acquire()


@pytest.mark.parametrize("freezes", [True, False])
async def test_what_is_given_back_is_ended_at_once_also_when_everything_was_cancelled(freezes: bool) -> None:
    """A cancellation from further up reaches the pool's own tasks before it reaches `close`."""
    works = Works(freezes=freezes)
    with anyio.fail_after(20), anyio.CancelScope() as everything:
        async with opened(works) as pool:
            items = {await pool.acquire(), await pool.acquire()}
            everything.cancel()
            try:
                await anyio.sleep(LONG_S)
            finally:
                for item in items:
                    pool.release(item)
                with anyio.fail_after(5, shield=True):
                    await until(lambda: items <= {*works.ended})
