"""The protocol of the WebSocket without I/O: whatever is cut, doubled or split, every message arrives once, in order."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolcell.service.socket import frames
from toolcell.service.socket.channels import PIECE_COST
from toolcell.service.socket.frames import FRAME_BYTES, FRAMES, PIECE_BYTES, SOCKET_VERSION, WINDOW_BYTES
from toolcell.service.socket.messages import CALLER_MESSAGES, SERVICE_MESSAGES, Ask, AskTool, Finished
from toolcell.service.socket.protocol import (
    CALLER_RECEIVES,
    SERVICE_RECEIVES,
    UNACKNOWLEDGED,
    Arrived,
    Greeted,
    LinkState,
    SessionOver,
    SocketProtocol,
)
from toolcell_bridge.wire.errors import LocalProtocolError, RemoteProtocolError

MESSAGE_BYTES = 2_000_000


class Ends:
    """A caller and a service with a connection that delivers what a test says."""

    def __init__(self) -> None:
        self.caller = SocketProtocol(is_caller=True, message_bytes=MESSAGE_BYTES)
        self.service = SocketProtocol(
            is_caller=False, message_bytes=MESSAGE_BYTES, channels=64, session="s" * 64, grace_s=60.0
        )
        self.got: dict[str, dict[int, list[bytes]]] = {"caller": defaultdict(list), "service": defaultdict(list)}
        self.untaken: list[tuple[SocketProtocol, int]] = []
        self.takes = True
        self.greeted: list[Greeted] = []
        self._up: list[bytes] = []
        self._down: list[bytes] = []

    def connect(self) -> None:
        self._up, self._down = [], []
        self.caller.connected()
        hello = FRAMES.decode(self.caller.next_frame() or b"")
        self.service.connected(hello)
        self._deliver(self.caller, "caller", [self.service.next_frame() or b""])

    def move(self, up: int, down: int) -> bool:
        """Carry so many frames each way; return whether there were any."""
        for end, line in ((self.caller, self._up), (self.service, self._down)):
            while (frame := end.next_frame()) is not None:
                line.append(frame)
        moved = bool(self._up or self._down)
        self._deliver(self.service, "service", self._up[:up])
        self._deliver(self.caller, "caller", self._down[:down])
        del self._up[:up], self._down[:down]
        return moved

    def cut(self) -> None:
        """Lose the connection, and all that is on its way."""
        self.caller.lost()
        self.service.lost()
        self.connect()

    def _deliver(self, end: SocketProtocol, name: str, frames: list[bytes]) -> None:
        for frame in frames:
            for event in end.receive(frame):
                match event:
                    case Arrived(channel, body):
                        self.got[name][channel].append(body)
                        if self.takes:
                            end.channels.take(channel)
                        else:
                            self.untaken.append((end, channel))
                    case Greeted():
                        self.greeted.append(event)
                    case SessionOver():
                        raise AssertionError(event)

    def settle(self) -> None:
        """Carry everything."""
        while self.move(1000, 1000):
            self.caller.acknowledge()
            self.service.acknowledge()


def body_of(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


Step = tuple[str, int, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3), st.integers(1, 200_000)),
        st.tuples(st.just("tell"), st.integers(0, 3), st.integers(1, 200_000)),
        st.tuples(st.just("move"), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("cut"), st.just(0), st.just(0)),
        st.tuples(st.just("acknowledge"), st.just(0), st.just(0)),
        st.tuples(st.just("ping"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=150)
def test_each_message_arrives_once_and_in_order_whatever_is_cut(steps: list[Step]) -> None:
    ends = Ends()
    ends.connect()
    channels = [ends.caller.channels.open() for _ in range(4)]
    sent: dict[str, dict[int, list[bytes]]] = {"caller": defaultdict(list), "service": defaultdict(list)}
    for channel in channels:
        ends.caller.channels.send(channel, b"begin")
        sent["service"][channel].append(b"begin")
    ends.settle()
    for number, (what, first, second) in enumerate(steps):
        match what:
            case "ask" | "tell":
                end, reader = (ends.caller, "service") if what == "ask" else (ends.service, "caller")
                body = body_of(second, number)
                end.channels.send(channels[first], body)
                sent[reader][channels[first]].append(body)
            case "move":
                ends.move(first, second)
            case "cut":
                ends.cut()
            case "acknowledge":
                ends.caller.acknowledge()
                ends.service.acknowledge()
            case "ping":
                ends.caller.ping(number)
                ends.service.ping(number)
    ends.settle()

    assert ends.got == sent
    assert all(each.is_resumed for each in ends.greeted[1:])


@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_frames_that_come_twice_on_one_connection_are_acted_on_once(seed: int) -> None:
    ends = Ends()
    ends.connect()
    channel = ends.caller.channels.open()
    bodies = [body_of(size, seed) for size in (1, 70_000, 5)]
    for body in bodies:
        ends.caller.channels.send(channel, body)
    got = []
    seen: list[bytes] = []
    while (frame := ends.caller.next_frame()) is not None:
        seen.append(frame)
        for again in (frame, random.Random(seed).choice(seen)):
            got += [event.body for event in ends.service.receive(again) if isinstance(event, Arrived)]

    assert got == bodies


def test_a_reader_that_takes_nothing_is_sent_a_window_and_no_more() -> None:
    ends = Ends()
    ends.connect()
    slow, quick = ends.caller.channels.open(), ends.caller.channels.open()
    for channel in (slow, quick):
        ends.caller.channels.send(channel, b"begin")
    ends.settle()
    ends.takes = False
    for _ in range(100):
        ends.service.channels.send(slow, b"x" * 10_000)
    ends.settle()

    held = sum(len(body) + PIECE_COST for body in ends.got["caller"][slow])
    assert WINDOW_BYTES - 10_000 - PIECE_COST < held <= WINDOW_BYTES
    ends.service.channels.send(quick, b"y" * 100_000)  # another channel goes on
    ends.settle()
    assert ends.got["caller"][quick] == [b"y" * 100_000]
    ends.takes = True
    while ends.untaken:
        end, channel = ends.untaken.pop()
        end.channels.take(channel)
        ends.settle()
    assert len(ends.got["caller"][slow]) == 100


def test_a_long_message_lets_a_short_one_of_another_channel_pass() -> None:
    ends = Ends()
    ends.connect()
    long, short = ends.caller.channels.open(), ends.caller.channels.open()
    ends.caller.channels.send(long, b"x" * 1_000_000)
    ends.caller.channels.send(short, b"y")
    order = [FRAMES.decode(frame) for frame in iter(ends.caller.next_frame, None)]

    pieces = [each.channel for each in order if isinstance(each, frames.Piece)]
    assert pieces[1] == short


def test_what_is_kept_to_be_sent_again_is_bounded() -> None:
    ends = Ends()
    ends.connect()
    for _ in range(600):
        channel = ends.caller.channels.open()
        ends.caller.channels.send(channel, b"x")
    assert len(list(iter(ends.caller.next_frame, None))) == UNACKNOWLEDGED


def test_a_service_that_does_not_know_the_session_tells_what_was_lost_and_what_was_never_sent() -> None:
    ends = Ends()
    ends.connect()
    begun = ends.caller.channels.open()
    ends.caller.channels.send(begun, b"x")
    ends.settle()
    ends.caller.lost()
    unsent = ends.caller.channels.open()
    ends.caller.channels.send(unsent, b"y")
    ends.service = SocketProtocol(is_caller=False, message_bytes=10, channels=8, session="t" * 64)
    ends.caller.connected()
    FRAMES.decode(ends.caller.next_frame() or b"")
    ends.service.connected(frames.CallerHello(SOCKET_VERSION, "", 0))
    (greeted,) = ends.caller.receive(ends.service.next_frame() or b"")

    assert greeted == Greeted(False, (begun,), (unsent,))
    assert ends.caller.session == "t" * 64 and ends.caller.sent_bytes == 10


# What is illegal.


def opened(*, is_caller: bool = False) -> SocketProtocol:
    ends = Ends()
    ends.connect()
    return ends.caller if is_caller else ends.service


ILLEGAL: dict[str, Any] = {
    "no msgpack": b"\xc1",
    "nothing": b"",
    "no array": msgpack.packb(7),
    "empty array": msgpack.packb([]),
    "unknown tag": msgpack.packb([99, 1]),
    "a bool as tag": msgpack.packb([True, 1]),
    "too few fields": msgpack.packb([3, 1]),
    "too many fields": msgpack.packb([5, 1, 1]),
    "text as number": msgpack.packb([5, "1"]),
    "a negative number": msgpack.packb([5, -1]),
    "an extension": msgpack.packb([6, msgpack.ExtType(1, b"")]),
    "a huge claim": b"\xdd\xff\xff\xff\xff",
    "deep": b"\x91" * 5000 + b"\x00",
    "too long": b"x" * (FRAME_BYTES + 1),
    "a second hello": frames.CallerHello(SOCKET_VERSION, "", 0),
    "a hello of the service": frames.ServiceHello(SOCKET_VERSION, "", True, 0, 1.0, 1, 1),
    "a gap": frames.Piece(2, 1, True, b"x"),
    "a channel before its time": frames.Piece(1, 2, True, b"x"),
    "channel 0": frames.Piece(1, 0, True, b"x"),
    "an empty piece": frames.Piece(1, 1, False, b""),
    "a piece too long": frames.Piece(1, 1, True, b"x" * (PIECE_BYTES + 1)),
    "credit for nothing": frames.WindowCredit(1, 1, 10),
    "an acknowledgement of what was not sent": frames.Acknowledged(10),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_frame_is_refused(name: str) -> None:
    data = ILLEGAL[name] if isinstance(ILLEGAL[name], bytes) else FRAMES.encode(ILLEGAL[name])
    with pytest.raises(RemoteProtocolError):
        opened().receive(data)


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_no_bytes_raise_anything_but_a_protocol_error(data: bytes) -> None:
    for end in (opened(), opened(is_caller=True)):
        try:
            end.receive(data)
        except RemoteProtocolError:
            pass


def test_more_than_the_window_is_refused() -> None:
    end = opened()
    end.receive(FRAMES.encode(frames.Piece(1, 1, True, b"x")))  # arrived, and not taken
    with pytest.raises(RemoteProtocolError, match="window"):
        for number in range(2, 10):
            end.receive(FRAMES.encode(frames.Piece(number, 1, True, b"x" * PIECE_BYTES)))


def test_many_empty_messages_fill_the_window_too() -> None:
    end = opened()
    with pytest.raises(RemoteProtocolError, match="window"):
        for number in range(1, 10_000):
            end.receive(FRAMES.encode(frames.Piece(number, 1, True, b"x")))


def test_a_message_longer_than_message_bytes_is_refused() -> None:
    end = opened()
    with pytest.raises(RemoteProtocolError, match="message_bytes"):
        for number in range(1, 100):
            end.receive(FRAMES.encode(frames.Piece(number, 1, False, b"x" * PIECE_BYTES)))
            while end.next_frame() is not None:
                pass


def test_more_channels_than_the_service_allows_are_refused() -> None:
    end = opened()
    with pytest.raises(RemoteProtocolError, match="64 channels"):
        for number in range(1, 100):
            end.receive(FRAMES.encode(frames.Piece(number, number, True, b"x")))


def test_a_flood_of_pings_is_answered_once() -> None:
    end = opened()
    for token in range(1000):
        end.receive(FRAMES.encode(frames.Ping(token)))
    answers = [FRAMES.decode(each) for each in iter(end.next_frame, None)]

    assert answers == [frames.Pong(999)]


def test_nothing_is_sent_after_goodbye() -> None:
    end = opened()
    end.close("closed", "bye")
    assert isinstance(FRAMES.decode(end.next_frame() or b""), frames.Goodbye)
    assert end.state is LinkState.OVER and end.next_frame() is None
    with pytest.raises(LocalProtocolError):
        end.connected(frames.CallerHello(SOCKET_VERSION, "", 0))


@pytest.mark.parametrize(("moves", "is_caller"), [(CALLER_RECEIVES, True), (SERVICE_RECEIVES, False)])
def test_every_frame_that_is_no_row_of_the_table_is_refused(moves: Any, is_caller: bool) -> None:
    kinds = [
        frames.CallerHello(SOCKET_VERSION, "", 0),
        frames.ServiceHello(SOCKET_VERSION, "", True, 0, 1.0, 1, 1),
        frames.Piece(1, 1, True, b"x"),
        frames.WindowCredit(1, 1, 1),
        frames.Acknowledged(0),
        frames.Ping(1),
        frames.Pong(1),
        frames.Goodbye("closed", ""),
    ]
    for state in LinkState:
        for frame in kinds:
            if (state, type(frame)) not in moves:
                end = opened(is_caller=is_caller)
                end.state = state
                with pytest.raises(RemoteProtocolError, match="not legal"):
                    end.receive(FRAMES.encode(frame))


@pytest.mark.parametrize("codec", [FRAMES, CALLER_MESSAGES, SERVICE_MESSAGES])
def test_every_message_is_read_as_it_was_written(codec: Any) -> None:
    samples = {
        "bool": True,
        "int": 3,
        "int | None": None,
        "float": 0.5,
        "str": "ü",
        "bytes": b"\x00",
        "dict[str, Plain]": {"a": [1, None, {"b": b"\xff"}]},
        "Plain": [1.5, "x"],
    }
    for layout in codec._layouts.values():
        message = layout.kind(*(samples[str(each.type)] for each in dataclasses.fields(layout.kind)))
        assert codec.decode(codec.encode(message)) == message


def test_a_value_as_deep_as_the_bridge_allows_fits_into_a_result() -> None:
    deep: Any = 1
    for _ in range(64):
        deep = [deep]
    message = Finished({"value": deep, "calls": [{"args": {"x": 1}}]})
    assert SERVICE_MESSAGES.decode(SERVICE_MESSAGES.encode(message)) == message
    for _ in range(20):
        deep = [deep]
    with pytest.raises(RemoteProtocolError, match="levels deep"):
        CALLER_MESSAGES.decode(msgpack.packb([1, "m", {"x": deep}]))
    assert isinstance(CALLER_MESSAGES.decode(CALLER_MESSAGES.encode(Ask("m", {"x": 1}))), Ask)
    with pytest.raises(LocalProtocolError):
        CALLER_MESSAGES.encode(AskTool(1, "call", "x", {}, "code", False, "", "", None))


@pytest.mark.parametrize("name", ["caller", "service"])
def test_what_was_lost_on_its_way_is_sent_again(name: str) -> None:
    ends = Ends()
    ends.connect()
    channel = ends.caller.channels.open()
    ends.caller.channels.send(channel, b"begin")
    ends.settle()
    end, reader = (ends.caller, "service") if name == "caller" else (ends.service, "caller")
    end.channels.send(channel, b"lost")
    ends.move(0, 0)  # it was handed to the connection, and does not arrive
    ends.cut()
    end.channels.send(channel, b"next")
    ends.settle()

    assert ends.got[reader][channel][-2:] == [b"lost", b"next"]
