"""Plans through the runtime: tool calls in parallel, with no sandbox at all."""

from __future__ import annotations

import pytest

from toolcell import Runtime, UsageError

from .conftest import make_registry


@pytest.mark.anyio
@pytest.mark.conforms("T4", "P5", "P12")
async def test_a_plan_runs_without_a_sandbox_and_reports_each_step() -> None:
    runtime = Runtime(make_registry())

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
@pytest.mark.conforms("P9", "P11")
async def test_a_plan_that_cannot_run_is_the_callers_error() -> None:
    runtime = Runtime(make_registry())

    with pytest.raises(UsageError, match="at least one step"):
        await runtime.execute_plan([])
    with pytest.raises(UsageError, match="cannot call execute_plan"):
        await runtime.execute_plan([{"tool": "execute_plan", "args": {}}])
