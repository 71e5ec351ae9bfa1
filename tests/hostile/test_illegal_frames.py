"""Every kind of illegal bytes ends the run as a protocol error: PROMISES.md, "bridge".

Which bytes are illegal does not depend on the sandbox they come from, so a scripted guest sends them.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from hostile.illegal_frames import FORGED, HONEST, ILLEGAL, ONE_OF_EACH
from rows import each_row
from toolcell import Limits, Outcome, PoolConfig, Runtime, ToolRegistry
from toolcell.config import MIB
from toolcell.testing import FakeBackend
from toolcell_bridge.wire.connection import State
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.messages import CallTool, FilePart, Message, Progress
from wire.wire_strategies import running_pair

pytestmark = [pytest.mark.quick, pytest.mark.conforms("Q-b5", "Q-b21", "T7")]

SHORT_BYTES = 200_000
HELD_BYTES = 16 * MIB
"""Most memory that may be used to refuse a short frame, whatever lengths it announces."""


def delivered_before_death(data: bytes) -> list[Message]:
    """Return what a host delivers of `data`, on which its connection must die."""
    host, _ = running_pair(max_frame_bytes=Limits().frame_bytes)
    delivered: list[Message] = []
    host.receive_data(data)
    with pytest.raises(RemoteProtocolError):
        while (message := host.next_message()) is not None:
            delivered.append(message)
    assert host.state is State.DEAD
    return delivered


@each_row("kind", ILLEGAL)
def test_illegal_bytes_kill_the_connection_and_nothing_after_them_is_delivered(kind: str) -> None:
    honest, *others = delivered_before_death(HONEST + ILLEGAL[kind] + FORGED)

    assert honest == Progress("honest")
    assert all(isinstance(each, CallTool | FilePart) for each in others)
    assert "forged" not in repr(others)


@each_row("kind", [kind for kind, data in ILLEGAL.items() if len(data) < SHORT_BYTES])
def test_a_short_illegal_frame_takes_little_memory(kind: str) -> None:
    tracemalloc.start()
    try:
        delivered_before_death(HONEST + ILLEGAL[kind] + FORGED)
        assert tracemalloc.get_traced_memory()[1] < HELD_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.anyio
@each_row("kind", ILLEGAL)
async def test_illegal_bytes_end_the_run_as_a_protocol_error_and_no_tool_is_called(kind: str) -> None:
    registry, touched, seen = ToolRegistry(), list[str](), list[Any]()

    @registry.tool
    async def touch(tag: str) -> None:
        """Have an effect."""
        touched.append(tag)

    @registry.tool
    async def echo(text: str) -> str:
        """Return the argument unchanged."""
        return text

    backend = FakeBackend([HONEST, ILLEGAL[kind], FORGED])
    async with Runtime(registry, backend=backend, pool=PoolConfig(warm=0), allow_unisolated=True) as runtime:
        result = await runtime.execute_code("any text", on_progress=seen.append)

    assert result.outcome is Outcome.PROTOCOL_ERROR
    assert (result.has_value, result.files, result.logs.text) == (False, (), "")
    assert (seen, touched) == (["honest"], [])
    assert {call.name for call in result.calls} <= {"echo"}


def test_the_representatives_are_of_the_table() -> None:
    assert set(ONE_OF_EACH) <= set(ILLEGAL)
