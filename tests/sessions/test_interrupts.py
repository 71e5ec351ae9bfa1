"""When a script may be interrupted: never in the middle of a message, and always while it waits."""

from __future__ import annotations

import contextlib
import select
import signal
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from toolcell_bridge.guest import rehearsal
from toolcell_bridge.guest.channel import Channel, is_interruptible
from toolcell_bridge.guest.interrupts import INTERRUPT_SIGNAL, Interrupts
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import PROTOCOL_VERSION, Hello, RunScript

pytestmark = pytest.mark.quick

HELLO = Hello(PROTOCOL_VERSION, "", "", {})
SCRIPT = encode(RunScript(1, "1", {}, "", "", 1, 0, 0, None, None))


class Wire:
    """A socket and a poll object that note whether their caller may be interrupted."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []
        self.on_send: Any = lambda: None
        self.on_receive: Any = lambda: None
        self.has_sent = True

    def fileno(self) -> int:
        return -1

    def register(self, *_: object) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        self.seen.append(("send", is_interruptible(sys._getframe())))
        self.on_send()

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.seen.append(("receive", is_interruptible(sys._getframe())))
        self.on_receive()
        return SCRIPT

    def poll(self, timeout_ms: int | None) -> list[int]:
        self.seen.append(("wait", is_interruptible(sys._getframe())))
        return [1] * self.has_sent


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    made = Wire()
    monkeypatch.setattr(select, "poll", lambda: made)
    return made


@pytest.fixture
def channel(wire: Wire) -> Channel:
    made = Channel(cast(Any, wire), Connection.guest())
    made.wait_interruptibly()
    return made


@pytest.fixture
def interrupts(channel: Channel) -> Iterator[Interrupts]:
    made, before = Interrupts(channel), signal.getsignal(INTERRUPT_SIGNAL)
    made.install()
    yield made
    signal.signal(INTERRUPT_SIGNAL, before)


def interrupt() -> None:
    signal.raise_signal(INTERRUPT_SIGNAL)


def test_a_script_may_be_interrupted_while_it_waits_and_not_while_bytes_move(wire: Wire, channel: Channel) -> None:
    channel.send(HELLO)
    channel.next_request()

    assert wire.seen == [("send", False), ("wait", True), ("receive", False)]
    assert is_interruptible(sys._getframe())


def test_an_interrupt_during_a_message_comes_when_the_message_is_sent(
    wire: Wire, channel: Channel, interrupts: Interrupts
) -> None:
    interrupts.allow()
    wire.on_send = interrupt

    with pytest.raises(KeyboardInterrupt):
        channel.send(HELLO)
    wire.on_send = lambda: None
    channel.next_request()
    channel.send_printed(1, b"the next message")
    assert [what for what, _ in wire.seen] == ["send", "wait", "receive", "send"]


def test_an_interrupt_while_something_is_read_comes_when_it_is_read(
    wire: Wire, channel: Channel, interrupts: Interrupts
) -> None:
    channel.send(HELLO)
    interrupts.allow()
    wire.on_receive = interrupt

    with pytest.raises(KeyboardInterrupt):
        channel.next_request()
    channel.next_request()
    assert [what for what, _ in wire.seen] == ["send", "wait", "receive"]


@pytest.mark.parametrize(
    ("when", "is_kept"),
    [("nothing was sent", False), ("it was sent", True), ("it has come", True), ("the one before is ending", False)],
)
def test_an_interrupt_counts_for_the_script_that_the_host_had_sent(
    when: str, is_kept: bool, wire: Wire, interrupts: Interrupts
) -> None:
    wire.has_sent = when in ("it was sent", "the one before is ending")
    if when == "it has come":
        interrupts.has_come = True
    elif when == "the one before is ending":
        interrupts.allow()
        interrupts.end()
    interrupt()
    interrupts.listen()

    with pytest.raises(KeyboardInterrupt) if is_kept else contextlib.nullcontext():
        interrupts.allow()


def test_a_script_has_time_to_clean_up_before_it_is_interrupted_again(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause_s, again in ((3600.0, contextlib.nullcontext()), (0.0, pytest.raises(KeyboardInterrupt))):
        monkeypatch.setattr("toolcell_bridge.guest.interrupts.AGAIN_S", pause_s)
        interrupts.end()
        interrupts.allow()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        with again:
            interrupt()


@pytest.mark.parametrize(
    ("source", "number"), [("rows", 1), ("set_result(rows)", 1), ("set_result(rows)\nrows = 1", 2)]
)
def test_a_last_value_comes_in_one_write_with_the_end_of_its_script(
    source: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(rehearsal, "SCRIPT", source)
    made, writes = rehearsal.Rehearsal(1 << 20), []
    send = made._host.sendall
    monkeypatch.setattr(made._host, "sendall", lambda data: (writes.append(data), send(data)))
    made.run()

    assert len(writes) == number
