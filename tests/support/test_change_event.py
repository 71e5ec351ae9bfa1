"""`ChangeEvent`: everybody who waits goes on at the next report, and only then."""

from __future__ import annotations

import anyio
import pytest

from toolcell.support.event_loop import ChangeEvent

pytestmark = pytest.mark.quick

LONG_S = 60.0


@pytest.mark.anyio
async def test_a_report_wakes_everybody_who_waits_then_and_nobody_after() -> None:
    woken: list[str] = []

    change = ChangeEvent()

    async def waiter(name: str) -> None:
        await change.wait()
        woken.append(name)

    change.notify()  # nobody waits: it is not remembered
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waiter, "first")
        tasks.start_soon(waiter, "second")
        await anyio.wait_all_tasks_blocked()
        assert woken == []
        change.notify()
        tasks.start_soon(waiter, "third")
        await anyio.wait_all_tasks_blocked()
        assert sorted(woken) == ["first", "second"]
        change.notify()
    assert woken[2:] == ["third"]


@pytest.mark.anyio
async def test_one_waiter_that_is_cancelled_leaves_the_others_waiting() -> None:
    change, woken = ChangeEvent(), anyio.Event()

    async def stays() -> None:
        await change.wait()
        woken.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stays)
        await anyio.wait_all_tasks_blocked()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await change.wait()
        await anyio.wait_all_tasks_blocked()
        assert not woken.is_set()
        change.notify()
        await woken.wait()


def test_whoever_was_cancelled_in_one_event_loop_does_not_bind_the_next_loop() -> None:
    change = ChangeEvent()

    async def cancelled() -> None:
        with anyio.move_on_after(0.001):
            await change.wait()

    async def woken() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(change.wait)
            await anyio.wait_all_tasks_blocked()
            change.notify()

    anyio.run(cancelled)
    anyio.run(woken)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_whoever_waits_for_so_long_learns_whether_something_was_reported(backend: str) -> None:
    pytest.importorskip(backend)

    async def main() -> None:
        change = ChangeEvent()

        async def wait_long() -> None:
            assert await change.wait(LONG_S)

        assert not await change.wait(0.001)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_long)
            await anyio.wait_all_tasks_blocked()
            change.notify()

    anyio.run(main, backend=backend)
