"""When a script may be interrupted: never in the middle of a message, and always while it waits."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, cast

import pytest

from toolcell_bridge.guest import rehearsal
from toolcell_bridge.guest.channel import Channel, is_interruptible
from toolcell_bridge.guest.interrupts import Interrupts
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import PROTOCOL_VERSION, Hello

pytestmark = pytest.mark.quick

HELLO = Hello(PROTOCOL_VERSION, "", "", {})


class Wire:
    """A socket and a poll object that note whether their caller may be interrupted."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []
        self.on_send: Any = lambda: None
        self.on_receive: Any = lambda: None
        self.has_sent = True

    def sendall(self, data: bytes) -> None:
        self.seen.append(("send", is_interruptible(sys._getframe())))
        self.on_send()

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.seen.append(("receive", is_interruptible(sys._getframe())))
        self.on_receive()
        return b"\0"

    def poll(self, timeout_ms: int | None) -> list[int]:
        self.seen.append(("wait", is_interruptible(sys._getframe())))
        return [1] * self.has_sent


def channel_over(wire: Wire) -> Channel:
    return Channel(cast(Any, wire), Connection.guest())


def test_a_script_may_be_interrupted_while_it_waits_and_not_while_bytes_move() -> None:
    wire = Wire()
    channel = channel_over(wire)
    channel._readable = wire
    channel.send(HELLO)
    channel._read()

    assert wire.seen == [("send", False), ("wait", True), ("receive", False)]
    assert is_interruptible(sys._getframe())


def test_an_interrupt_during_a_message_comes_when_the_message_is_sent() -> None:
    wire = Wire()
    channel = channel_over(wire)
    interrupts = Interrupts(channel)
    interrupts.is_allowed = True
    wire.on_send = lambda: interrupts._handle(51, sys._getframe())

    with pytest.raises(KeyboardInterrupt):
        channel.send(HELLO)
    assert channel._sending is False and channel._lock.acquire(blocking=False)
    assert len(wire.seen) == 1


def test_an_interrupt_while_something_is_read_comes_when_it_is_read() -> None:
    wire = Wire()
    channel = channel_over(wire)
    channel._readable = wire
    interrupts = Interrupts(channel)
    interrupts.allow()
    wire.on_receive = lambda: interrupts._handle(51, sys._getframe())

    with pytest.raises(KeyboardInterrupt):
        channel._read()
    assert channel._connection.frames.buffer == b"\0"


@pytest.mark.parametrize(
    ("when", "is_kept"),
    [("nothing was sent", False), ("it was sent", True), ("it has come", True), ("the one before is ending", False)],
)
def test_an_interrupt_counts_for_the_script_that_the_host_had_sent(when: str, is_kept: bool) -> None:
    wire = Wire()
    channel = channel_over(wire)
    channel._poll_of_its_own = lambda: cast(Any, wire)  # type: ignore[method-assign]
    wire.has_sent = when in ("it was sent", "the one before is ending")
    interrupts = Interrupts(channel)
    if when == "it has come":
        interrupts.has_come = True
    elif when == "the one before is ending":
        interrupts.allow()
        interrupts.end()
    interrupts._handle(51, sys._getframe())
    interrupts.listen()

    with pytest.raises(KeyboardInterrupt) if is_kept else contextlib.nullcontext():
        interrupts.allow()


def test_a_script_has_time_to_clean_up_before_it_is_interrupted_again_and_afterwards_it_is_left_alone() -> None:
    interrupts = Interrupts(channel_over(Wire()))
    interrupts.allow()
    with pytest.raises(KeyboardInterrupt):
        interrupts._handle(51, sys._getframe())
    assert interrupts._next > 0
    interrupts._next = float("inf")
    interrupts._handle(51, sys._getframe())  # too early
    interrupts._next = 0.0
    with pytest.raises(KeyboardInterrupt):
        interrupts._handle(51, sys._getframe())


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
