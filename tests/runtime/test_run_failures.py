"""A callback or a measurement that raises ends its own run, with that exception; the first reason to stop counts."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import anyio
import pytest

from toolcell import Limits, Outcome, PoolConfig, Runtime, ToolRegistry
from toolcell.run.connection import GuestConnection
from toolcell.run.outcome import Aborted, ProtocolViolation, StopReason
from toolcell.sandbox.backend import LimitExceeded, Sample
from toolcell.testing import FakeBackend, Hang, RawOutput, ScriptedCall
from toolcell.testing.scripted import Die, ScriptedSandbox
from toolcell_bridge.wire.messages import CallTool, Done, Log, Progress, Result, RunScript, ToolFail, ToolReturn

pytestmark = pytest.mark.anyio

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
@pytest.mark.parametrize("source", GUESTS)
async def test_what_raises_ends_its_own_run_and_disturbs_no_other(source: str) -> None:
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

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(calm)
                await entered.wait()
                with pytest.raises(Unexpected, match="this run only"):
                    await runtime.execute_code(source, on_log=fail, on_progress=fail)
                ended.set()
        assert (await runtime.execute_code("calm")).value == "undisturbed"

    assert [(result.outcome, result.value) for result in results] == [(Outcome.OK, "undisturbed")]


class CountingSandbox:
    """As much of a sandbox as is needed to be killed."""

    limits = Limits()
    stream = None

    def __init__(self) -> None:
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1


REASONS: list[StopReason] = [
    LimitExceeded(Outcome.TIMEOUT, "wall_s", 1.0, 1.1),
    ProtocolViolation("garbage"),
    Aborted("enough"),
    Done(True, None),
]


@pytest.mark.parametrize("first", REASONS, ids=lambda reason: type(reason).__name__)
def test_the_first_reason_to_stop_counts_and_all_but_done_kill(first: StopReason) -> None:
    sandbox: Any = CountingSandbox()
    connection = GuestConnection(sandbox)

    connection.stop(first)
    for reason in REASONS:
        connection.stop(reason)

    assert connection.stopped is first
    assert sandbox.kills == (0 if isinstance(first, Done) else 1)
