"""Messages of one guest that arrive together leave turns of the event loop to everybody else."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from rows import each_row
from toolcell import Limits, Outcome, PoolConfig, Runtime, ToolRegistry
from toolcell.support import event_loop
from toolcell.testing import FakeBackend, Hang
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.messages import CallTool, Done, GuestMessage, Log, Progress, Result

MANY = 200

LONG = [[0.5] * 250] * 1000
"""Takes more than a hundred steps to decode."""

FLOODS: dict[str, list[GuestMessage]] = {
    "one long progress": [Progress(LONG)],
    "one long result": [Result(LONG, [])],
    "one long call": [CallTool(1, "echo", {"q": LONG}, None)],
    "one long error": [Done(False, {"findings": LONG})],
    "progress": [Progress(1)] * MANY,
    "printed lines": [Log(1, "x\n")] * MANY,
    "calls that are made": [CallTool(number + 1, "echo", {"q": number}, None) for number in range(MANY)],
    "calls that are refused": [CallTool(number + 1, "n" * 300, {}, None) for number in range(MANY)],
}


async def turns_of_others(flood: str) -> int:
    """Turns that another task has while a host reads many messages that came at once."""
    turns = 0
    registry = ToolRegistry()

    @registry.tool
    async def echo(q: int) -> int:
        """Return the argument unchanged."""
        return q

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    guest = [b"".join(map(encode, [*FLOODS[flood], Done(True, None)])), Hang()]
    backend = FakeBackend(guest)
    limits = Limits(tool_calls=2 * MANY)
    async with (
        Runtime(registry, backend=backend, limits=limits, pool=PoolConfig(warm=1), allow_unisolated=True) as runtime,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(count)
        await anyio.lowlevel.checkpoint()
        before = turns
        result = await runtime.execute_code("pass")
        tasks.cancel_scope.cancel()
    assert result.outcome is (Outcome.ERROR if "error" in flood else Outcome.OK)
    return turns - before


@each_row("flood", FLOODS)
def test_messages_that_come_at_once_leave_turns_to_other_tasks(flood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "SLICE_S", -1.0)  # every message takes longer than its slice

    assert anyio.run(turns_of_others, flood) >= (100 if "long" in flood else MANY)
