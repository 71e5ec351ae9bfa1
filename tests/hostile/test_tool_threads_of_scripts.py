"""`concurrent_calls` bounds the functions of synchronous tools that run at once, also of calls that a script gives up."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from toolcell import Limits, PoolConfig, Runtime, SyncRuntime, ToolRegistry
from toolcell.calls.call import RunContext
from toolcell.calls.run_state import RunState
from toolcell.results import Outcome
from toolcell.sandbox.backend import Backend
from toolcell.testing import FakeBackend
from toolcell.tools import abandoned_threads

pytestmark = [pytest.mark.quick, pytest.mark.every_loop]

PATIENCE_S = 60.0
LIMIT = 3

GIVES_UP = """
import asyncio

async def give_up(seconds):
    try:
        await asyncio.wait_for(call_tool_async("stubborn"), seconds)
    except asyncio.TimeoutError:
        pass

for seconds in (1.0, 0.05, 0.05, 0.05):  # the first calls have time to begin
    await asyncio.gather(*[give_up(seconds) for _ in range(5)])
set_result("went on")
"""


class Bodies:
    """Counts functions that run at the same time; none returns before it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.changed = threading.Condition()
        self.now = self.most = self.begun = 0

    def enter(self) -> str:
        with self.changed:
            self.now += 1
            self.begun += 1
            self.most = max(self.most, self.now)
        self.released.wait(PATIENCE_S)
        with self.changed:
            self.now -= 1
            self.changed.notify_all()
        return "done"


@contextmanager
def bodies_of(registry: ToolRegistry) -> Iterator[Bodies]:
    """A tool `stubborn`, whose functions have all returned when the block is left."""
    bodies = Bodies()

    @registry.tool
    def stubborn() -> str:
        """Wait to be released, whatever happens."""
        return bodies.enter()

    try:
        yield bodies
    finally:
        bodies.released.set()
        with bodies.changed:
            assert bodies.changed.wait_for(lambda: not bodies.now, PATIENCE_S)


@pytest.mark.parametrize("backend", ["process", FakeBackend], ids=["process", "fake"])
def test_calls_that_a_script_gives_up_keep_their_places(backend: str | Callable[[], Backend]) -> None:
    registry = ToolRegistry()
    chosen = backend if isinstance(backend, str) else backend()
    limits = Limits(wall_s=20, concurrent_calls=LIMIT)
    with bodies_of(registry) as bodies:
        with SyncRuntime(
            registry, backend=chosen, limits=limits, pool=PoolConfig(warm=1), allow_unisolated=True
        ) as runtime:
            result = runtime.execute_code(GIVES_UP)

            assert (result.outcome, result.value) == (Outcome.OK, "went on")
            assert bodies.most == LIMIT
            assert [thread.tool for thread in result.abandoned] == ["stubborn"] * LIMIT
            assert result.to_dict()["abandoned"][0]["run_id"] == result.run_id
            assert runtime.abandoned_threads() == result.abandoned
            bodies.released.set()
            again = runtime.execute_code("call_tool('stubborn')")
            assert (again.value, again.abandoned) == ("done", ())
        assert runtime.abandoned_threads() == ()


def test_a_run_that_is_over_leaves_its_threads_in_the_list_of_its_runtime() -> None:
    registry = ToolRegistry()
    with bodies_of(registry) as bodies:
        with SyncRuntime(registry, limits=Limits(wall_s=1.0), pool=PoolConfig(warm=1)) as runtime:
            result = runtime.execute_code("call_tool('stubborn')")

            assert result.outcome is Outcome.TIMEOUT
            assert bodies.begun == 1
            assert [(thread.tool, thread.run_id) for thread in result.abandoned] == [("stubborn", result.run_id)]
        assert runtime.abandoned_threads() == result.abandoned  # also when the runtime is closed
        assert set(runtime.abandoned_threads()) <= set(abandoned_threads())


@pytest.mark.slow
def test_threads_that_pile_up_over_runs_turn_their_tool_away() -> None:
    registry = ToolRegistry(max_abandoned_threads=2)
    registry.tool(quick)
    limits = Limits(concurrent_calls=1)
    with bodies_of(registry) as bodies, SyncRuntime(registry, limits=limits, pool=PoolConfig(warm=1)) as runtime:
        for _ in range(2):
            runtime.execute_code(GIVES_UP)
        refused = runtime.execute_code("call_tool('stubborn')")
        other = runtime.execute_code("call_tool('quick')")

        assert len(runtime.abandoned_threads()) == 2
        assert refused.error is not None
        assert "max_abandoned_threads = 2" in refused.error.message
        assert (bodies.begun, other.value) == (2, "quick")


def quick() -> str:
    """Answer at once."""
    return "quick"


@pytest.mark.anyio
async def test_the_threads_of_a_plan_are_in_the_list_of_its_runtime() -> None:
    registry = ToolRegistry(timeout_s=0.05)
    with bodies_of(registry):
        async with Runtime(registry, backend=FakeBackend(), allow_unisolated=True) as runtime:
            context = RunContext(state=RunState())
            while not runtime.abandoned_threads():  # on a busy machine the thread may begin too late
                [row] = await runtime.execute_plan([{"tool": "stubborn", "args": {}}], context=context)

            assert row["error"].startswith("timed out after 0.05 s")  # and what is said of a call that fails often
            assert [thread.run_id for thread in runtime.abandoned_threads()] == [context.run_id]


NEVER_RETURNS = """
import sys, threading
import anyio, anyio.from_thread
from toolcell import ToolRegistry
from toolcell.tools import RunContext, abandoned_threads

registry = ToolRegistry()

@registry.tool
def stuck() -> str:
    \"\"\"Never return, whatever happens.\"\"\"
    threading.Thread(target=threading.Event().wait).start()
    anyio.from_thread.run_sync(begun.set)
    threading.Event().wait()
    return ""

async def main():
    global begun
    begun = anyio.Event()
    steps = [{"tool": "stuck", "args": {}, "id": "a"}]
    async with anyio.create_task_group() as tasks:
        if sys.argv[2] == "plan":
            tasks.start_soon(registry.run_plan, {"steps": steps}, RunContext(run_id="r"))
        else:
            tasks.start_soon(registry.execute, "stuck", {})
        await begun.wait()
        tasks.cancel_scope.cancel()

anyio.run(main, backend=sys.argv[1])
print([each.tool for each in abandoned_threads()])
"""


@pytest.mark.parametrize("route", ["call", "plan"])
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_function_that_never_returns_is_listed_and_does_not_keep_the_process_from_ending(
    loop: str, route: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NEVER_RETURNS, loop, route],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert done.stdout == "['stuck']\n"
