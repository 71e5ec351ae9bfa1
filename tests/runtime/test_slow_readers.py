"""A guest that does not read its answers gets no advantage."""

from __future__ import annotations

import anyio
import pytest

from toolcell import Limits, Outcome, PoolConfig, Runtime, ToolRegistry
from toolcell.testing import FakeBackend, Hang
from toolcell.testing.scripted import ScriptedStream
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.messages import CallTool

pytestmark = pytest.mark.anyio


async def test_a_call_keeps_its_place_until_its_answer_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, begun, enough = ToolRegistry(), [], anyio.Event()
    running = most = 0

    @registry.tool
    async def work(number: int) -> None:
        """Work for a while."""
        nonlocal running, most
        begun.append(number)
        running += 1
        most = max(most, running)
        await anyio.sleep(0.01)
        running -= 1
        if len(begun) == 3 and not running:
            enough.set()

    late = [encode(CallTool(3, "work", {"number": 3}, None))]
    send = ScriptedStream.send

    async def send_slowly(self: ScriptedStream, data: bytes) -> None:
        if begun and late:  # the first answer: the guest calls once more before it reads
            self.put(late.pop())
            await anyio.wait_all_tasks_blocked()
        await send(self, data)

    monkeypatch.setattr(ScriptedStream, "send", send_slowly)
    guest = [*(CallTool(number, "work", {"number": number}, None) for number in (1, 2)), Hang()]
    async with Runtime(registry, backend=FakeBackend(guest), pool=PoolConfig(warm=1), allow_unisolated=True) as runtime:
        result = await runtime.execute_code("work", limits=Limits(concurrent_calls=1), cancel=enough)

    assert (most, begun) == (1, [1, 2, 3])
    assert result.outcome is Outcome.CANCELLED
