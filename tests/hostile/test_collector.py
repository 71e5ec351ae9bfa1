"""A long message is decoded without a pass of the garbage collector, whose time is that of all it holds."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from toolcell import Outcome, PoolConfig, Runtime, ToolRegistry
from toolcell.run.garbage_pause import COLLECTED_STEPS, DECODING, PAUSED_STEPS, Decoding
from toolcell.support.collector import has_frozen_objects
from toolcell.testing import FakeBackend, Hang
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.messages import Done, Progress, Result

LONG = [[]] * 130_000
"""As many containers as a message may hold."""


@pytest.fixture(autouse=True)
def counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DECODING, "steps", 0)


@contextmanager
def passes() -> Iterator[list[int]]:
    """Generations that the collector looks through meanwhile."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


async def run(*messages: Any) -> Outcome:
    guest = [b"".join(map(encode, [Progress(1), *messages, Done(True, None)])), Hang()]
    backend = FakeBackend(guest)
    async with Runtime(ToolRegistry(), backend=backend, pool=PoolConfig(warm=1), allow_unisolated=True) as runtime:
        with passes() as seen:
            result = await runtime.execute_code("pass", on_progress=lambda update: None)
        assert 2 not in seen, f"{len(seen)} passes, {seen.count(2)} of them through everything"
        return result.outcome


@pytest.mark.parametrize("message", [Progress(LONG), Result(LONG, [])], ids=["progress", "result"])
def test_no_pass_through_everything_while_a_long_message_is_decoded(message: Any) -> None:
    assert anyio.run(run, message) is Outcome.OK
    assert gc.isenabled()
    assert not has_frozen_objects()


def test_a_long_message_after_which_the_guest_sends_nothing_is_decoded_to_its_end() -> None:
    async def read() -> list[Any]:
        guest = [b"".join(map(encode, [Progress(1), Progress(LONG)])), encode(Done(True, None)), Hang()]
        backend, seen = FakeBackend(guest), list[Any]()
        async with Runtime(ToolRegistry(), backend=backend, pool=PoolConfig(warm=1), allow_unisolated=True) as runtime:
            result = await runtime.execute_code("pass", on_progress=seen.append)
        assert result.outcome is Outcome.OK, result.error
        return seen

    assert anyio.run(read) == [1, LONG]


def test_what_is_decoded_without_the_collector_is_freed_without_it() -> None:
    gc.collect()
    gc.unfreeze()  # what Python 3.12 freezes itself when it collects
    before = len(gc.get_objects())
    made = Decoding().do(lambda: [[] for _ in range(1000)])
    assert len(gc.get_objects()) > before + 900  # the collector knows it, as old
    del made
    assert len(gc.get_objects()) < before + 100


FREEZES = """
import gc
from toolcell.run.garbage_pause import Decoding
gc.freeze()
frozen = gc.get_freeze_count()
Decoding().do(lambda: None)
assert gc.get_freeze_count() == frozen > 0
"""


def test_a_host_that_has_frozen_its_objects_or_switched_the_collector_off_keeps_it_so() -> None:
    subprocess.run([sys.executable, "-c", FREEZES], check=True, timeout=60)  # other threads of this one free some
    gc.disable()
    try:
        Decoding().do(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_step_that_raises_leaves_the_collector_on() -> None:
    with pytest.raises(ZeroDivisionError):
        Decoding().do(lambda: 1 / 0)
    assert gc.isenabled()


def test_after_many_long_messages_the_collector_has_one() -> None:
    decoding, was_on = Decoding(), list[bool]()
    for _ in range(2 * (PAUSED_STEPS + COLLECTED_STEPS)):
        decoding.do(lambda: was_on.append(gc.isenabled()))

    assert was_on.count(True) == 2 * COLLECTED_STEPS
    assert was_on[PAUSED_STEPS : PAUSED_STEPS + COLLECTED_STEPS - 1] == [True] * (COLLECTED_STEPS - 1)
