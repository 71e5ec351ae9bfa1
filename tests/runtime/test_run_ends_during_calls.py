"""Calls whose run ends: cancelled before it began, out of time, or done without waiting for them."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from toolcell import Limits, Outcome, PoolConfig, Runtime, ToolRegistry
from toolcell.results import ExecutionResult
from toolcell.testing import FakeBackend, Hang
from toolcell_bridge.wire.messages import CallTool, Done, Log

pytestmark = [pytest.mark.quick, pytest.mark.every_loop, pytest.mark.anyio]

WALL_S = 1.0
"""Enough for a run to begin its first call on a busy machine."""
PAST_WALL_S = 1.3

STUBBORN = CallTool(1, "stubborn", {}, None)
NOTE = CallTool(2, "note", {}, None)


class Case:
    """A tool that goes on when it is cancelled, and one that acts at once; what they did, and the run's result."""

    def __init__(self) -> None:
        self.registry = ToolRegistry()
        self.did: list[str] = []
        self.takes_s = 0.1
        self.registry.add(self.stubborn)
        self.registry.add(self.note)

    async def stubborn(self) -> str:
        """Go on, also when the run is over."""
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self.takes_s)
        self.did.append("stubborn")
        return "made"

    async def note(self) -> None:
        """Act without waiting."""
        self.did.append("note")

    async def run(self, guest: list[Any], cancel: anyio.Event | None = None, **limits: Any) -> ExecutionResult:
        """Play the guest."""
        async with Runtime(
            self.registry, backend=FakeBackend(guest), pool=PoolConfig(warm=1), allow_unisolated=True
        ) as runtime:
            return await runtime.execute_code("play", cancel=cancel, limits=Limits(**limits))


async def test_a_run_that_is_cancelled_before_it_begins_makes_no_call() -> None:
    case, cancel = Case(), anyio.Event()
    cancel.set()

    result = await case.run([NOTE, Done(True, None)], cancel)

    assert (result.outcome, result.calls, case.did) == (Outcome.CANCELLED, (), [])


async def test_a_call_that_is_finished_after_its_run_is_recorded_as_finished() -> None:
    case = Case()

    result = await case.run([STUBBORN, Log(1, "x"), Done(True, None)])

    assert result.outcome is Outcome.OK
    assert [(call.name, call.status) for call in result.calls] == [("stubborn", "ok")]


async def test_a_queued_call_is_not_made_when_the_time_of_the_run_is_over() -> None:
    case = Case()
    case.takes_s = PAST_WALL_S

    result = await case.run([STUBBORN, NOTE, Hang()], wall_s=WALL_S, concurrent_calls=1)

    assert (result.outcome, case.did) == (Outcome.TIMEOUT, ["stubborn"])
    assert [call.status for call in result.calls] == ["ok", "pending"]


async def test_a_run_whose_time_is_over_is_a_timeout_whatever_its_tools_do() -> None:
    case = Case()
    case.takes_s = PAST_WALL_S

    result = await case.run([STUBBORN, Hang()], wall_s=WALL_S)

    assert (result.outcome, case.did) == (Outcome.TIMEOUT, ["stubborn"])
