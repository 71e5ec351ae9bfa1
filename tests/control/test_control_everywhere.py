"""The rules of suspended and repaired runs hold in the container profile, with an audit log, and in plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from control.conftest import Effects
from toolcell import Outcome, PoolConfig, Runtime, SyncRuntime
from toolcell.audit.filters import Filter
from toolcell.audit.query import Index
from toolcell.audit.reader import RecordedRun
from toolcell.control.replays import Replay, replay
from toolcell.tools import Approve

pytestmark = pytest.mark.isolation

SCRIPT = "import random\na = call_tool('write', text=str(random.random()))\n[a, call_tool('pay', to='x'), sorted({'a', 'b'})]"


def carry_on(effects: Effects, **options: Any) -> Any:
    with SyncRuntime(effects.registry, pool=PoolConfig(warm=1), **options) as runtime:
        waiting = runtime.execute_code(SCRIPT, on_approval="suspend")
        assert waiting.suspension is not None
        done = runtime.resume(waiting.suspension, {"call_2": Approve()})
        broken = runtime.execute_code("call_tool('write', text='b')\n1/0")
        fixed = runtime.execute_code("call_tool('write', text='b')", repairs=broken)
    assert done.ok, done.error
    assert fixed.ok and fixed.value == 3
    assert len(effects.of("write")) == 2 and effects.of("pay") == [["pay", "x", 1]]
    return done


def test_the_audit_log_tells_answers_of_the_journal_from_calls_and_its_runs_replay(
    tmp_path: Path, effects: Effects
) -> None:
    carry_on(effects, record=tmp_path / "log")
    with Index(tmp_path / "log") as index:
        runs = [index.load(line) for line in index.runs(Filter(limit=None))]
    suspended = next(run for run in runs if run.outcome == str(Outcome.SUSPENDED))
    resumed = next(run for run in runs if run.id.startswith(f"{suspended.id}."))

    assert [call.tool for call in suspended.calls] == ["write"]  # the one that waits was not made
    assert [call.start_extra.get("answered_from") for call in resumed.calls] == [suspended.id, None]
    assert resumed.calls[1].start_extra["decided"] == {"decision": "approve"}
    for run, why in ((suspended, "the run was suspended"), (resumed, "")):
        again = anyio.run(replayed, run)
        assert again.ok and why in again.stopped, again


async def replayed(run: RecordedRun) -> Replay:
    async with Runtime(pool=PoolConfig(warm=1), **run.runtime_options()) as runtime:
        return await replay(runtime, run)


def test_steps_of_a_plan_are_decided_by_hooks_unless_it_may_suspend(opened: SyncRuntime, effects: Effects) -> None:
    registry = effects.registry.merged()
    registry.enable_plan_execution()
    rows = opened.execute_plan([{"tool": "pay", "args": {"to": "x"}}], tools=registry)

    assert rows[0]["status"] == "error" and "needs approval" in rows[0]["error"]
    assert not effects.made
