"""The parts of a `Runtime` work without it: an environment, sandboxes, and runs whose journal is the caller's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

from toolcell import Limits, Misconfigured, Outcome, Policy, PoolConfig, RunContext, ToolRegistry, UsageError
from toolcell.results import ExecutionResult
from toolcell.run.run import Run, RunPart, Script
from toolcell.run.runs import Runs
from toolcell.run.sandboxes import Sandboxes
from toolcell.sandbox.environment import Environment
from toolcell.support.lifetime import Lifetime
from toolcell.testing import FakeBackend
from toolcell_bridge.wire.messages import CallTool, Done, Result

LIMITS = Limits(wall_s=20)

ONCE = """
import sys, anyio
from toolcell import Runtime, ToolRegistry

made = ToolRegistry()

@made.tool(read_only=True)
async def add(a: int, b: int) -> int:
    "Add two whole numbers and return their sum."
    return a + b

async def main():
    async with Runtime(made) as runtime:
        result = await runtime.execute_code("set_result(call_tool('add', a=1, b=2))")
    assert result.value == 3, result

anyio.run(main)
print(*(name for name in sys.modules if name.startswith("toolcell.")))
"""

UNUSED = (
    "toolcell.journal",
    "toolcell.audit",
    "toolcell.sessions",
    "toolcell.agents",
    "toolcell.mcp",
    "toolcell.service",
    "toolcell.cli",
    "toolcell.testing",
    "toolcell.integrations",
    "toolcell.sync",
    "toolcell.quotas",
    "toolcell.control.journaled_calls",
    "toolcell.control.suspension",
    "toolcell.control.script_header",
    "toolcell.control.draft",
    "toolcell.control.dry_runs",
    "toolcell.control.commit",
    "toolcell.control.plans",
    "toolcell.control.resumption",
    "toolcell.control.map_stream",
    "toolcell.control.map_runs",
    "toolcell.control.repair",
    "toolcell.control.revert",
    "toolcell.control.preflight",
    "toolcell.control.type_check",
    "toolcell.control.agent_turns",
    "toolcell.run.streaming",
    "toolcell.tools.plan",
    "toolcell.tools.saved_script",
)
"""What a script with one tool call has no use for."""


class Kept(RunPart):
    """A journal that keeps what it is told, and answers nothing."""

    def __init__(self, run: Run) -> None:
        self.answers: list[int] = []
        self.is_abandoned = False
        run.journal_id, run.parts = "own", (self,)

    def answered(self, call_number: int, frame: bytes) -> None:
        self.answers.append(call_number)

    async def failed(self, error: BaseException) -> None:
        self.is_abandoned = True


@asynccontextmanager
async def opened(registry: ToolRegistry, guest: list[Any], policy: Policy | None = None) -> AsyncIterator[Runs]:
    environment = Environment(FakeBackend(guest), allow_unisolated=True)

    async def enter(stack: AsyncExitStack) -> None:
        await environment.open(runs.policy, LIMITS, 30.0, stack)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        runs.open(tasks)
        sandboxes.make_pool()
        stack.push_async_callback(sandboxes.close)
        stack.push_async_callback(sandboxes.end_runs, "the test is over")
        await sandboxes.open(tasks)

    lifetime = Lifetime("Parts", enter)
    sandboxes = Sandboxes(environment, PoolConfig(warm=1), LIMITS, lambda: lifetime.is_open)
    runs = Runs(
        registry=registry,
        limits=LIMITS,
        policy=policy or Policy(),
        environment=environment,
        sandboxes=sandboxes,
        lifetime=lifetime,
        runtime=None,
    )
    await lifetime.open()
    try:
        yield runs
    finally:
        await lifetime.close()


def registry() -> ToolRegistry:
    made = ToolRegistry()

    @made.tool
    async def add(a: int, b: int) -> int:
        """Add two whole numbers and return their sum."""
        return a + b

    return made


@pytest.mark.anyio
async def test_runs_need_no_runtime_and_their_journal_is_whatever_keeps_one() -> None:
    guest = [CallTool(1, "add", {"a": 1, "b": 2}, 1), Result(3, []), Done(True, None)]
    async with opened(registry(), guest) as runs:
        ended: list[ExecutionResult] = []
        runs.on_end = ended.append
        run = await runs.prepare(Script(source="...", limits=LIMITS), runs.tools(None), RunContext(run_id="r"))
        journal = Kept(run)
        result = await runs.execute(run)

    assert (result.outcome, result.run_id, result.journal_id) == (Outcome.OK, "r", "own")
    assert journal.answers == [1] and not journal.is_abandoned
    assert ended == [result]


@pytest.mark.anyio
async def test_a_message_that_cannot_be_sent_is_refused_before_a_journal_begins() -> None:
    async with opened(registry(), [Done(True, None)]) as runs:
        with pytest.raises(UsageError, match="inputs"):
            await runs.prepare(Script(source="1", limits=LIMITS, inputs={"x": object()}), runs.tools(None), None)


@pytest.mark.anyio
async def test_parts_that_are_closed_start_nothing() -> None:
    async with opened(registry(), [Done(True, None)]) as runs:
        assert runs.sandboxes.pool is not None
    for use in (runs.check_open, runs.task_group, lambda: runs.tools(None)):
        with pytest.raises(Misconfigured, match="this Parts is not open"):
            use()


def test_an_environment_that_isolates_nothing_is_refused() -> None:
    async def work() -> None:
        async with AsyncExitStack() as stack:
            await Environment(FakeBackend()).open(Policy(), LIMITS, 30.0, stack)

    with pytest.raises(UsageError, match="isolates nothing"):
        anyio.run(work)


@pytest.mark.isolation
def test_a_script_with_one_tool_call_loads_only_what_it_uses() -> None:
    done = subprocess.run([sys.executable, "-c", ONCE], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()

    assert "toolcell.run.runs" in loaded
    assert not [name for name in loaded if name in UNUSED or name.startswith(tuple(f"{each}." for each in UNUSED))]
