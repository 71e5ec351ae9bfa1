"""A task with a slow reader: what it fails with is the reader's, and it ends when nobody reads any more."""

from __future__ import annotations

import gc

import anyio
import pytest
from anyio.abc import TaskGroup

from toolcell.errors import UsageError
from toolcell.support.background import BackgroundTask, TaskReader

pytestmark = [pytest.mark.quick, pytest.mark.every_loop]


class Numbers(BackgroundTask):
    def __init__(self, count: int, fails: bool = False) -> None:
        super().__init__("closed before the end")
        self.ready: list[int] = []
        self._count, self._fails = count, fails

    async def count(self) -> None:
        for number in range(self._count):
            self.ready.append(number)
            self.changed.notify()
            await anyio.lowlevel.checkpoint()
        if self._fails:
            raise ValueError("no more numbers")
        if not self._count:
            await anyio.sleep_forever()

    def take(self) -> int | None:
        return self.ready.pop(0) if self.ready else None

    def leave(self) -> None:
        self.cancel()
        super().leave()


class Reader(TaskReader[int]):
    def __init__(self, numbers: Numbers, tasks: TaskGroup) -> None:
        super().__init__(numbers)
        self._numbers, self._tasks = numbers, tasks

    def _begin(self) -> None:
        self._tasks.start_soon(self._numbers.run, self._numbers.count)


@pytest.mark.anyio
async def test_a_reader_gets_everything_and_then_what_the_task_failed_with() -> None:
    async with anyio.create_task_group() as tasks:
        assert [number async for number in Reader(Numbers(3), tasks)] == [0, 1, 2]
        reader = Reader(Numbers(2, fails=True), tasks)
        assert [await anext(reader), await anext(reader)] == [0, 1]
        with pytest.raises(ValueError, match="no more numbers"):
            await anext(reader)
        with pytest.raises(StopAsyncIteration):  # it is told once
            await anext(reader)
        left = Reader(Numbers(1, fails=True), tasks)
        assert await anext(left) == 0
        await anyio.wait_all_tasks_blocked()
        await left.aclose()
        with pytest.raises(StopAsyncIteration):  # nor to somebody who has left
            await anext(left)


@pytest.mark.anyio
async def test_a_task_ends_when_its_reader_is_closed_cancelled_or_dropped() -> None:
    async with anyio.create_task_group() as tasks:
        closed = Numbers(0)
        async with Reader(closed, tasks) as reader:
            with anyio.move_on_after(0.001):
                await anext(reader)  # cancelled: the work ends
        assert closed.over.is_set() and closed.is_left

        dropped = Numbers(0)
        held = [Reader(dropped, tasks)]
        tasks.start_soon(dropped.run, dropped.count)
        held[0]._is_begun = True
        await anyio.wait_all_tasks_blocked()
        assert not dropped.over.is_set()
        held.clear()
        gc.collect()
        await dropped.over.wait()

        early = Numbers(0)  # closed between its start and its first step
        tasks.start_soon(early.run, early.count)
        early.leave()
        await early.over.wait()


@pytest.mark.anyio
async def test_a_reader_is_told_that_the_task_was_ended_by_others() -> None:
    numbers = Numbers(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(numbers.run, numbers.count)
        await anyio.wait_all_tasks_blocked()
        numbers.cancel()
        with pytest.raises(UsageError, match="closed before the end"):
            await numbers.next()
    assert numbers.over.is_set()
