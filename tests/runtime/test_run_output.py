"""Messages that are read after a guest's death have the same limits as those read before."""

from __future__ import annotations

from typing import Any

import pytest

from rows import each_row
from toolcell import Limits, RunContext, ToolRegistry
from toolcell.run.connection import GuestConnection
from toolcell.run.options import RunOptions
from toolcell.run.output import RunOutput
from toolcell.run.run import Run, Script
from toolcell.support.host_work import HostWork
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.messages import FilePart, Log, Result

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

LIMITS = Limits(result_bytes=1000, files=2, files_bytes=10)


class DeadSandbox:
    """As much of a sandbox and its stream as is looked at here."""

    limits = LIMITS

    @property
    def stream(self) -> DeadSandbox:
        return self


@pytest.fixture
def printed() -> list[tuple[str, str]]:
    return []


@pytest.fixture
async def output(printed: list[tuple[str, str]]) -> RunOutput:
    return output_for(printed)


def output_for(printed: list[tuple[str, str]]) -> RunOutput:
    sandbox: Any = DeadSandbox()
    connection = GuestConnection(sandbox)
    connection.wire.message_bytes = 1_000_000
    script, options = Script(source="", limits=LIMITS), RunOptions(on_log=lambda *what: printed.append(what))
    run = Run(script, ToolRegistry(), RunContext(), script.message(1), work=HostWork(2**20), options=options)
    return RunOutput(run, connection, lambda call: None)


async def test_a_late_result_is_held_to_its_limit(output: RunOutput) -> None:
    output.drain_message(Result("early", []))
    with pytest.raises(RemoteProtocolError, match=r"result too large .* 1000 bytes"):
        output.drain_message(Result("x" * 2000, []))

    assert output.value == "early"


async def test_a_late_result_has_its_own_files_and_not_those_of_the_one_before(output: RunOutput) -> None:
    output.take(Result(1, ["old"]))
    output.take(FilePart("old", "text/plain", b"old", True))
    output.drain_message(Result(2, ["new"]))
    output.drain_message(FilePart("new", "text/plain", b"new", True))

    assert output.value == 2
    assert [(file.name, file.data) for file in output.returned.finished()] == [("new", b"new")]


@each_row("sizes", [[1, 1, 1], [5, 6], [11]])
async def test_a_guest_that_does_not_count_its_files_returns_no_more_than_it_may(sizes: list[int]) -> None:
    """Our own guest counts them first; code in its process may do without."""
    output = output_for([])
    output.take(Result(1, ["f"]))
    *some, last = (FilePart(f"{number}", "text/plain", b"x" * size, True) for number, size in enumerate(sizes))
    for part in some:
        output.take(part)
    with pytest.raises(RemoteProtocolError, match="more files than the run may return"):
        output.take(last)


async def test_late_text_reaches_the_callback_as_any(output: RunOutput, printed: list[tuple[str, str]]) -> None:
    output.drain_message(Log(1, "the last of it\n"))

    assert output.capture.logs().stdout == "the last of it\n"
    assert printed == [("stdout", "the last of it\n")]
