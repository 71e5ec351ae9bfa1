"""A callback or a measurement that raises ends its own run with that exception. The first reason to stop counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rows import each_row
from toolcell import Limits, Outcome, PoolConfig, Runtime, ToolRegistry
from toolcell.run import options
from toolcell.run.connection import GuestConnection
from toolcell.run.options import Callbacks
from toolcell.run.outcome import Aborted, ProtocolViolation, StopReason
from toolcell.sandbox.backend import LimitExceeded, Sample
from toolcell.support import event_loop
from toolcell.support.event_loop import SLICE_S, TimeSlice
from toolcell.testing import FakeBackend, Hang, RawOutput, ScriptedCall
from toolcell.testing.scripted import Die, ScriptedSandbox
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.messages import CallTool, Done, Log, Progress, Result, RunScript, ToolFail, ToolReturn

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

GUESTS: dict[str, list[Any]] = {
    "a message": [Log(1, "x"), Hang()],
    "its progress": [Progress(1), Hang()],
    "raw output": [RawOutput(stdout=b"x"), Hang()],
    "raw output before it dies": [RawOutput(stdout=b"x"), Die()],
    "a message beside a call": [CallTool(1, "stay", {}, None), Log(1, "x"), Hang()],
    "raw output beside a call": [CallTool(1, "stay", {}, None), RawOutput(stdout=b"x"), Hang()],
    "a measurement": [Hang()],
}


class Unexpected(Exception):
    """Raised by a callback."""


def fail(*_: object) -> None:
    raise Unexpected("this run only")


async def fail_later(*_: object) -> None:
    await anyio.lowlevel.checkpoint()
    fail()


def leave(*_: object) -> None:
    raise SystemExit(3)


class Odd(BaseException):
    """As pytest's own outcomes are."""


def fail_oddly(*_: object) -> None:
    raise Odd


async def fail_oddly_later(*_: object) -> None:
    raise Odd


RAISED = {leave: SystemExit, fail_oddly: Odd, fail_oddly_later: Odd}


def guest(run: RunScript) -> Generator[Any, ToolReturn | ToolFail | None, None]:
    if run.source in GUESTS:
        yield from GUESTS[run.source]
    else:
        answer = yield ScriptedCall("meet")
        assert isinstance(answer, ToolReturn)
        yield Result(answer.value, [])


@pytest.fixture
def broken_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(self: ScriptedSandbox, *, brief: bool = False, last: bool = False) -> Sample:
        if self.runs and self.runs[-1].source == "a measurement":
            fail()
        return Sample()

    monkeypatch.setattr(ScriptedSandbox, "sample", sample)


@pytest.mark.usefixtures("broken_measurement")
@pytest.mark.parametrize(
    ("source", "callback"),
    [
        *((source, callback) for source in GUESTS for callback in (fail, fail_later)),
        ("a message", leave),
        ("raw output", leave),
        ("raw output", fail_oddly),
        ("raw output", fail_oddly_later),
    ],
)
async def test_what_raises_ends_its_own_run_and_disturbs_no_other(source: str, callback: Callable[..., object]) -> None:
    registry, entered, ended = ToolRegistry(), anyio.Event(), anyio.Event()

    @registry.tool
    async def meet() -> str:
        """Wait until the other run has ended."""
        entered.set()
        await ended.wait()
        return "undisturbed"

    @registry.tool
    async def stay() -> None:
        """Never return, however long it is waited for."""
        await anyio.sleep_forever()

    results: list[Any] = []
    async with Runtime(
        registry, backend=FakeBackend(guest), limits=Limits(wall_s=20), pool=PoolConfig(warm=1), allow_unisolated=True
    ) as runtime:

        async def calm() -> None:
            results.append(await runtime.execute_code("calm"))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(calm)
                await entered.wait()
                with pytest.raises(RAISED.get(callback, Unexpected)):
                    await runtime.execute_code(source, on_log=callback, on_progress=callback)
                ended.set()
        assert (await runtime.execute_code("calm")).value == "undisturbed"

    assert [(result.outcome, result.value) for result in results] == [(Outcome.OK, "undisturbed")]


async def test_a_run_whose_processor_time_cannot_be_read_is_ended_by_its_other_limits() -> None:
    limits = Limits(wall_s=0.2, cpu_s=0.001)
    async with Runtime(backend=FakeBackend([Hang()]), limits=limits, allow_unisolated=True) as runtime:
        assert (await runtime.execute_code("")).outcome is Outcome.TIMEOUT


async def test_asynchronous_callbacks_are_awaited_in_order_before_the_run_has_its_result() -> None:
    seen: list[object] = []

    async def take(*what: object) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(what[-1])

    def play(run: RunScript) -> Generator[Any, Any, None]:
        yield Log(1, "first")
        yield Progress("second")
        yield RawOutput(stdout=b"raw")
        yield Result(None, [])

    async with Runtime(backend=FakeBackend(play), pool=PoolConfig(warm=1), allow_unisolated=True) as runtime:
        result = await runtime.execute_code("", on_log=take, on_progress=take)

    assert result.ok
    assert [what for what in seen if what != "raw"] == ["first", "second"]
    assert "raw" in seen  # the monitor may read it before the messages


async def test_a_run_that_is_cancelled_while_it_gives_way_makes_no_further_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry, cancel, seen = ToolRegistry(), anyio.Event(), list[int]()

    @registry.tool
    async def act(n: int) -> None:
        """Do something that counts."""
        seen.append(n)

    give_way = TimeSlice.give_way

    async def give_way_for_long(self: TimeSlice) -> None:
        await anyio.wait_all_tasks_blocked()
        await give_way(self)

    monkeypatch.setattr(TimeSlice, "give_way", give_way_for_long)

    def take(_: str, text: str) -> None:
        if text == "last":
            cancel.set()
        time.sleep(2 * SLICE_S)  # its slice is over when the next message is due

    together = encode(Log(1, "last")) + encode(CallTool(1, "act", {"n": 1}, None))
    script = [Log(1, "first"), Log(1, "second"), together, Hang()]
    async with Runtime(registry, backend=FakeBackend(script), allow_unisolated=True) as runtime:
        result = await runtime.execute_code("", cancel=cancel, on_log=take)

    assert (result.outcome, result.calls, seen) == (Outcome.CANCELLED, (), [])


async def test_a_run_after_a_quiet_time_gives_no_turn_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "SLICE_S", 60.0)
    given = list[TimeSlice]()

    async def give_way(self: TimeSlice) -> None:
        given.append(self)

    async with Runtime(backend=FakeBackend([Done(True, None)]), allow_unisolated=True) as runtime:
        await runtime.execute_code("")
        event_loop.shared_slice().until = 0.0  # long ago
        monkeypatch.setattr(TimeSlice, "give_way", give_way)
        result = await runtime.execute_code("")

    assert (result.outcome, given) == (Outcome.OK, [])


async def test_a_callback_that_does_not_return_is_awaited_by_one_task_and_cancelled_after_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hearing: list[int] = []
    cancelled = anyio.Event()
    hear = Callbacks.hear

    async def counted(self: Callbacks, stop: Callable[[BaseException], None]) -> None:
        hearing.append(1)
        await hear(self, stop)

    async def stay(*_: object) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    monkeypatch.setattr(Callbacks, "hear", counted)
    monkeypatch.setattr(options, "HEAR_S", 0.05)
    monkeypatch.setattr(ScriptedSandbox, "read_output", lambda sandbox: (b"x" * sandbox.is_alive(), b""))
    backend, limits = FakeBackend([Hang()]), Limits(wall_s=0.5)
    async with Runtime(backend=backend, limits=limits, allow_unisolated=True) as runtime:
        result = await runtime.execute_code("", on_log=stay)
        with anyio.fail_after(60):
            await cancelled.wait()

    assert result.outcome is Outcome.TIMEOUT
    assert len(hearing) <= 3


class CountingSandbox:
    """As much of a sandbox as is needed to be killed."""

    limits = Limits()
    stream = None
    interrupted_s = 0.0

    def __init__(self) -> None:
        self.kills = 0

    def ask_line(self) -> bool:
        return False

    def is_alive(self) -> bool:
        return True

    def kill(self) -> None:
        self.kills += 1


REASONS: list[StopReason] = [
    LimitExceeded(Outcome.TIMEOUT, "wall_s", 1.0, 1.1),
    ProtocolViolation("garbage"),
    Aborted("enough"),
    Done(True, None),
]


@each_row("first", REASONS, ids=lambda reason: type(reason).__name__)
async def test_the_first_reason_to_stop_counts_and_all_but_done_kill(first: StopReason) -> None:
    sandbox: Any = CountingSandbox()
    connection = GuestConnection(sandbox)

    connection.stop(first)
    for reason in REASONS:
        connection.stop(reason)

    assert connection.stopped is first
    assert sandbox.kills == (0 if isinstance(first, Done) else 1)
