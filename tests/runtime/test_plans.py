"""Plans through the runtime: tool calls in parallel, without a sandbox."""

from __future__ import annotations

import pytest

from toolcell import PoolConfig, Runtime, UsageError
from toolcell.testing import FakeBackend

from .conftest import make_registry

pytestmark = pytest.mark.quick


def offline() -> Runtime:
    """A runtime to open, without isolation: plans take no sandbox."""
    return Runtime(make_registry(), backend=FakeBackend([]), pool=PoolConfig(warm=0), allow_unisolated=True)


@pytest.mark.anyio
@pytest.mark.conforms("T4", "P5", "P12")
async def test_a_plan_runs_without_a_sandbox_and_reports_each_step() -> None:
    async with offline() as runtime:
        rows = await runtime.execute_plan(
            [
                {"tool": "add", "args": {"a": 40, "b": 2}},
                {"tool": "fail", "args": {"text": "timeout"}},
                {"tool": "echo", "args": {"q": [1]}},
            ]
        )

    assert rows == [
        {"step": 0, "tool": "add", "status": "ok", "result": 42},
        {"step": 1, "tool": "fail", "status": "error", "error": "timeout"},
        {"step": 2, "tool": "echo", "status": "ok", "result": [1]},
    ]


@pytest.mark.anyio
async def test_an_object_that_is_not_data_is_the_callers_error() -> None:
    async with offline() as runtime:
        with pytest.raises(UsageError, match=r"steps\[0\]\.args\.q: object is not data"):
            await runtime.execute_plan([{"tool": "echo", "args": {"q": object()}}])


@pytest.mark.anyio
async def test_a_plan_needs_an_open_runtime_as_a_script_does() -> None:
    steps = [{"tool": "echo", "args": {"q": 1}}]
    runtime = offline()
    with pytest.raises(UsageError, match="this Runtime is not open"):
        await runtime.execute_plan(steps)
    async with runtime:
        assert (await runtime.execute_plan(steps))[0]["status"] == "ok"
    with pytest.raises(UsageError, match="this Runtime is not open"):
        await runtime.execute_plan(steps)
