"""What is kept of a guest's words when they arrive after its death: as much as before it, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from toolcell import Limits
from toolcell.run.connection import GuestConnection
from toolcell.run.ending import Ending
from toolcell.run.output import RunOutput
from toolcell.sandbox.backend import Sandbox
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.messages import FilePart, Log, Result


class Talk:
    """As much of a sandbox and its stream as is looked at here."""

    sent_bytes = 0
    received_bytes = 0

    def kill(self) -> None:
        raise AssertionError("it is dead already")


@pytest.fixture
def heard() -> RunOutput:
    talk: Any = Talk()
    sandbox: Sandbox = talk
    ending = Ending(sandbox)
    traffic = GuestConnection(talk, Connection.host(), ending, None)
    talk.received_bytes = 1_000_000
    seen: list[tuple[str, str]] = []
    made = RunOutput(
        Limits(result_bytes=1000), traffic, ending, lambda call: None, lambda *what: seen.append(what), None
    )
    made.seen = seen  # type: ignore[attr-defined]
    return made


def test_a_late_result_is_held_to_its_limit(heard: RunOutput) -> None:
    heard.take_late(Result("early", []))
    with pytest.raises(RemoteProtocolError, match=r"result too large .* 1000 bytes"):
        heard.take_late(Result("x" * 2000, []))

    assert heard.value == "early"


def test_a_late_result_has_its_own_files_and_not_those_of_the_one_before(heard: RunOutput) -> None:
    heard.take(Result(1, ["old"]))
    heard.take(FilePart("old", "text/plain", b"old", True))
    heard.take_late(Result(2, ["new"]))
    heard.take_late(FilePart("new", "text/plain", b"new", True))

    assert heard.value == 2
    assert [(file.name, file.data) for file in heard.files()] == [("new", b"new")]


def test_late_words_are_told_like_any(heard: RunOutput) -> None:
    heard.take_late(Log(1, "the last of it\n"))

    assert heard.logs().stdout == "the last of it\n"
    assert heard.seen == [("stdout", "the last of it\n")]  # type: ignore[attr-defined]
