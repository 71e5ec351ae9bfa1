"""Scripts inside scripts never wait for each other's sandboxes until their time is over."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from rows import each_row
from toolcell import Limits, Runtime, ToolRegistry
from toolcell.config import PoolConfig
from toolcell.results import Outcome
from toolcell.run import sandboxes

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]


def opened(registry: ToolRegistry, cap: int) -> Runtime:
    return Runtime(registry, limits=Limits(wall_s=120), pool=PoolConfig(warm=0, cap=cap))


def deep() -> ToolRegistry:
    registry = ToolRegistry()
    registry.save_script("third", "3")
    registry.save_script("second", "tools.third() + call_tool('third')")
    registry.save_script("first", "sum(call_tools_parallel([('second', {})] * 3))")
    return registry


@each_row("cap", [1, 2, 3])
async def test_scripts_that_hold_every_place_of_the_pool_get_their_nested_scripts_run(cap: int) -> None:
    async with opened(deep(), cap) as runtime:
        results = list[object]()

        async def run() -> None:
            result = await runtime.execute_code("tools.first()")
            results.append(result.value if result.ok else result.error)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(run)
        assert results == [18] * 6
        assert runtime.sandboxes.nested._extra == 0 and runtime.sandboxes.nested._waiting == []


async def test_a_session_that_holds_the_only_place_gets_its_nested_scripts_run() -> None:
    async with opened(deep(), 1) as runtime, runtime.session() as session:
        with anyio.fail_after(60):
            result = await session.execute_code("x = tools.first(); x")
        assert result.value == 18


async def test_a_chain_of_runs_that_tools_start_in_tasks_of_their_own_has_no_end() -> None:
    registry, results, tasks = ToolRegistry(), list[object](), set[asyncio.Task[None]]()

    @registry.tool
    async def start_next(left: int) -> int:
        """Start another script, which goes on when this one is over."""
        if left:
            tasks.add(asyncio.create_task(run(left - 1)))
        return left

    async def run(left: int) -> None:
        result = await runtime.execute_code(f"call_tool('start_next', left={left})")
        results.append(result.value if result.ok else result.error)

    async with opened(registry, 1) as runtime:
        await run(sandboxes.MAX_EXTRA + 3)
        while tasks:
            await tasks.pop()
    assert sorted(results, reverse=True) == [*range(sandboxes.MAX_EXTRA + 3, -1, -1)]


async def test_more_nested_scripts_than_there_can_be_sandboxes_fail_and_say_why() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def deeper(depth: int) -> int:
        """Run a script in a script."""
        if not depth:
            return 0
        result = await runtime.execute_code(f"call_tool('deeper', depth={depth - 1}) + 1")
        if not result.ok:
            raise ValueError(result.outcome)
        return int(result.value)

    async with opened(registry, 1) as runtime:
        with anyio.fail_after(60):
            enough = await runtime.execute_code(f"call_tool('deeper', depth={sandboxes.MAX_EXTRA})")
            too_many = await runtime.execute_code(f"call_tool('deeper', depth={sandboxes.MAX_EXTRA + 1})")

        assert enough.value == sandboxes.MAX_EXTRA
        assert not too_many.ok and runtime.sandboxes.nested._extra == 0
        assert (await runtime.execute_code("1")).value == 1


async def test_a_caller_that_gives_up_while_its_nested_script_waits_leaves_nothing_behind() -> None:
    async with opened(deep(), 1) as runtime:
        for wall_s in (0.01, 0.05, 0.1, 0.2, 0.3):
            result = await runtime.execute_code("tools.first()", limits=Limits(wall_s=wall_s))
            assert result.ok or result.outcome is Outcome.TIMEOUT
        with anyio.fail_after(60):
            assert (await runtime.execute_code("tools.first()")).value == 18
            while runtime.sandboxes.nested._extra or runtime.pool is None or runtime.pool.busy:
                await anyio.sleep(0.01)
