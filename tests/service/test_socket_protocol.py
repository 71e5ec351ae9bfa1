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

from rows import each_row
from toolcell.results import ExecutionResult, Outcome
from toolcell.service.socket import messages
from toolcell.service.socket.messages import (
    CALLER_MESSAGES,
    FRAME_BYTES,
    FRAMES,
    PART_BYTES,
    SERVICE_MESSAGES,
    SOCKET_VERSION,
    Ask,
    AskTool,
    Finished,
)
from toolcell.service.socket.streams import PART_COST, WINDOW_BYTES, SaidGoodbye, Stream, Streams
from toolcell.service.socket.values import READERS, plain_record
from toolcell_bridge.wire.errors import LocalProtocolError, RemoteProtocolError
from wire.table_examples import TABLES

pytestmark = pytest.mark.quick

MESSAGE_BYTES = 2_000_000


class Ends:
    """A caller and a service with a connection that delivers what a test says."""

    def __init__(self) -> None:
        self.begun: list[Stream] = []
        self.caller = Streams(CALLER_MESSAGES, SERVICE_MESSAGES, message_bytes=MESSAGE_BYTES, most=64)
        self.service = self.new_service()
        self.got: dict[str, dict[int, list[bytes]]] = {"caller": defaultdict(list), "service": defaultdict(list)}
        self.takes = True
        self._up: list[bytes] = []
        self._down: list[bytes] = []

    def new_service(self) -> Streams:
        return Streams(
            SERVICE_MESSAGES, CALLER_MESSAGES, message_bytes=MESSAGE_BYTES, most=64, on_request=self.begun.append
        )

    def connect(self) -> None:
        """Begin a connection: each end says what it has received."""
        self._up, self._down = [], []
        hello = self.caller.received()
        self.service.resume(hello)
        self.caller.resume(self.service.received())

    def move(self, up: int, down: int) -> bool:
        """Carry so many frames each way; return whether there were any."""
        for end, line in ((self.caller, self._up), (self.service, self._down)):
            while (frame := end.next_frame()) is not None:
                line.append(FRAMES.encode_body(frame))
        moved = bool(self._up or self._down)
        for end, name, frames in (
            (self.service, "service", self._up[:up]),
            (self.caller, "caller", self._down[:down]),
        ):
            for each in frames:
                end.receive(each)
            if self.takes:
                self.take(end, name)
        del self._up[:up], self._down[:down]
        return moved

    def take(self, end: Streams, name: str) -> None:
        for stream in end:
            while stream._inbox:
                self.got[name][stream.number].append(stream.take())

    def settle(self) -> None:
        """Carry everything."""
        while self.move(1000, 1000):
            pass

    def requests(self, count: int) -> list[Stream]:
        """Begin requests; return the caller's end of each."""
        found = [self.caller.open() for _ in range(count)]
        for each in found:
            each.send_body(b"begin")
        self.settle()
        return found


def connected() -> Ends:
    ends = Ends()
    ends.connect()
    return ends


def body_of(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


Step = tuple[str, int, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3), st.integers(1, 200_000)),
        st.tuples(st.just("tell"), st.integers(0, 3), st.integers(1, 200_000)),
        st.tuples(st.just("move"), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("cut"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.slow
@given(STEPS)
@settings(max_examples=150)
def test_each_message_arrives_once_and_in_order_whatever_is_cut(steps: list[Step]) -> None:
    ends = connected()
    asked = ends.requests(4)
    sent: dict[str, dict[int, list[bytes]]] = {"caller": defaultdict(list), "service": defaultdict(list)}
    for stream in asked:
        sent["service"][stream.number].append(b"begin")
    for number, (what, first, second) in enumerate(steps):
        match what:
            case "ask" | "tell":
                streams, reader = (asked, "service") if what == "ask" else (ends.begun, "caller")
                body = body_of(second, number)
                streams[first].send_body(body)
                sent[reader][streams[first].number].append(body)
            case "move":
                ends.move(first, second)
            case "cut":
                ends.connect()
    ends.settle()

    assert ends.got == sent


@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_frames_that_come_twice_on_one_connection_are_acted_on_once(seed: int) -> None:
    ends = connected()
    stream = ends.caller.open()
    bodies = [body_of(size, seed) for size in (1, 70_000, 5)]
    for body in bodies:
        stream.send_body(body)
    seen: list[bytes] = []
    while (frame := ends.caller.next_frame()) is not None:
        seen.append(FRAMES.encode_body(frame))
        for again in (seen[-1], random.Random(seed).choice(seen)):
            ends.service.receive(again)
            ends.take(ends.service, "service")

    assert ends.got["service"][stream.number] == bodies
    assert len(ends.begun) == 1


def test_a_reader_that_takes_nothing_is_sent_a_window_and_no_more() -> None:
    ends = connected()
    ends.requests(2)
    slow, quick = ends.begun
    ends.takes = False
    for _ in range(100):
        slow.send_body(b"x" * 10_000)
    ends.settle()

    reader = next(each for each in ends.caller if each.number == slow.number)
    held = sum(len(body) + PART_COST for body in reader._inbox)
    assert WINDOW_BYTES - 10_000 - PART_COST < held <= WINDOW_BYTES
    quick.send_body(b"y" * 100_000)  # another request goes on
    ends.settle()
    assert [len(each) for each in next(each for each in ends.caller if each.number == quick.number)._inbox] == [100_000]
    ends.takes = True
    ends.take(ends.caller, "caller")
    ends.settle()
    assert len(ends.got["caller"][slow.number]) == 100


def test_a_reader_that_takes_nothing_holds_the_window_over_a_lost_connection_too() -> None:
    ends = connected()
    ends.requests(1)
    ends.takes = False
    ends.begun[0].send_body(b"x" * 4 * WINDOW_BYTES)
    for _ in range(3):
        ends.move(1000, 2)
        ends.connect()
    ends.settle()
    ends.take(ends.caller, "caller")

    assert ends.got["caller"][1] == [b"x" * 4 * WINDOW_BYTES]  # of one that is not whole, more comes


def test_what_was_taken_is_said_again_when_the_connection_was_lost() -> None:
    ends = connected()
    ends.requests(1)
    ends.begun[0].send_body(b"x" * 4 * WINDOW_BYTES)
    for _ in range(3):
        ends.move(0, 1000)  # a window full, which is taken
        ends.move(0, 0)  # this is said, and lost
        ends.connect()
    ends.settle()

    assert ends.got["caller"][1] == [b"x" * 4 * WINDOW_BYTES]


def test_a_long_message_lets_a_short_one_of_another_request_pass() -> None:
    ends = connected()
    long, short = ends.caller.open(), ends.caller.open()
    long.send_body(b"x" * 1_000_000)
    short.send_body(b"y")
    order = list(iter(ends.caller.next_frame, None))

    assert [each.request for each in order if isinstance(each, messages.MessagePart)][1] == short.number


def test_what_is_kept_to_be_sent_again_is_a_window_of_each_request() -> None:
    ends = connected()
    stream = ends.caller.open()
    for _ in range(10_000):
        stream.send_body(b"x" * 100)
    sent = list(iter(ends.caller.next_frame, None))

    assert len(sent) == len(stream._sent) == WINDOW_BYTES // (100 + PART_COST)


def test_of_a_request_that_is_over_nothing_is_kept_and_what_still_comes_is_dropped() -> None:
    ends = connected()
    (stream,) = ends.requests(1)
    late = FRAMES.encode_body(messages.MessagePart(1, 2, True, b"late"))
    ends.caller.forget(stream)
    ends.settle()
    ends.service.receive(late)

    assert len(ends.caller) == len(ends.service) == 0 and ends.got["service"][1] == [b"begin"]


def test_a_request_that_its_caller_gave_up_while_it_was_away_is_over() -> None:
    ends = connected()
    given_up, other = ends.requests(2)
    ends.caller.forget(given_up)
    ends.connect()  # the frame that said so was lost

    assert [each.number for each in ends.service] == [other.number]


def test_a_request_of_which_nothing_was_sent_is_distinguished_from_one_that_may_have_begun() -> None:
    ends = connected()
    (begun,) = ends.requests(1)
    unsent = ends.caller.open()
    unsent.send_body(b"y")
    assert (begun.is_begun, unsent.is_begun) == (True, False)


# What is illegal.


def opened(*, is_caller: bool = False) -> Streams:
    ends = connected()
    return ends.caller if is_caller else ends.service


ILLEGAL: dict[str, Any] = {
    "no msgpack": b"\xc1",
    "nothing": b"",
    "no array": msgpack.packb(7),
    "empty array": msgpack.packb([]),
    "unknown tag": msgpack.packb([99, 1]),
    "a bool as tag": msgpack.packb([True, 1]),
    "too few fields": msgpack.packb([3, 1]),
    "too many fields": msgpack.packb([4, 1, 1, 1]),
    "text as number": msgpack.packb([4, "1", 1]),
    "an extension": msgpack.packb([4, msgpack.ExtType(1, b""), 1]),
    "a huge claim": b"\xdd\xff\xff\xff\xff",
    "deep": b"\x91" * 5000 + b"\x00",
    "too long": b"x" * (FRAME_BYTES + 1),
    "text": "text",
    "a second hello": messages.CallerHello(SOCKET_VERSION, "me", {}),
    "a hello of the service": messages.ServiceHello(SOCKET_VERSION, "home", {}, 1.0, 1, 1),
    "a gap": messages.MessagePart(1, 2, True, b"x"),
    "request 0": messages.MessagePart(0, 1, True, b"x"),
    "a negative request": messages.MessagePart(-1, 1, True, b"x"),
    "an empty part": messages.MessagePart(1, 1, False, b""),
    "a part too long": messages.MessagePart(1, 1, True, b"x" * (PART_BYTES + 1)),
    "taken of what was never begun": messages.Taken(1, 1),
}


@each_row("name", ILLEGAL)
def test_an_illegal_frame_is_refused(name: str) -> None:
    data = ILLEGAL[name] if isinstance(ILLEGAL[name], bytes | str) else FRAMES.encode_body(ILLEGAL[name])
    with pytest.raises(RemoteProtocolError):
        opened().receive(data)


def test_more_taken_than_was_sent_is_refused() -> None:
    ends = connected()
    ends.requests(1)
    for number in (-1, 1):
        with pytest.raises(RemoteProtocolError, match="was taken"):
            ends.service.receive(FRAMES.encode_body(messages.Taken(1, number)))


@each_row("received", [2, -1, "1", True, [1]])
def test_more_received_than_was_sent_is_refused(received: Any) -> None:
    ends = connected()
    ends.requests(1)
    with pytest.raises(RemoteProtocolError, match="arrived"):
        ends.caller.resume({"1": received})


def test_a_service_begins_no_request_at_its_caller_and_ends_none() -> None:
    for frame in (messages.MessagePart(1, 1, True, b"x"), messages.RequestOver(1)):
        with pytest.raises(RemoteProtocolError):
            opened(is_caller=True).receive(FRAMES.encode_body(frame))


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_no_bytes_raise_anything_but_a_protocol_error(data: bytes) -> None:
    for end in (opened(), opened(is_caller=True)):
        try:
            end.receive(data)
        except RemoteProtocolError:
            pass


@each_row("size", [1, PART_BYTES])
def test_more_than_the_window_is_refused(size: int) -> None:
    end = opened()
    with pytest.raises(RemoteProtocolError, match="window"):
        for number in range(1, 10_000):  # messages that arrive, and that nobody takes
            end.receive(FRAMES.encode_body(messages.MessagePart(1, number, True, b"x" * size)))


def test_a_message_longer_than_message_bytes_is_refused() -> None:
    end = opened()
    with pytest.raises(RemoteProtocolError, match="message_bytes"):
        for number in range(1, 100):
            end.receive(FRAMES.encode_body(messages.MessagePart(1, number, False, b"x" * PART_BYTES)))
            while end.next_frame() is not None:
                pass


def test_more_requests_than_the_service_allows_are_refused() -> None:
    end = opened()
    with pytest.raises(RemoteProtocolError, match="64 requests"):
        for number in range(1, 100):
            end.receive(FRAMES.encode_body(messages.MessagePart(number, 1, True, b"x")))


def test_goodbye_goes_before_everything_that_waits() -> None:
    ends = connected()
    (stream,) = ends.requests(1)
    stream.send_body(b"more")
    ends.caller.say_goodbye("closed", "bye")
    with pytest.raises(SaidGoodbye, match="bye"):
        ends.settle()
    assert ends.got["service"][1] == [b"begin"]


@each_row("codec", [FRAMES, CALLER_MESSAGES, SERVICE_MESSAGES])
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
    for kind in codec.kinds:
        message = kind(*(samples[str(each.type)] for each in dataclasses.fields(kind)))
        assert codec.decode(codec.encode_body(message)) == message


def test_a_result_may_have_tables() -> None:
    values = plain_record(ExecutionResult("r1", Outcome.OK, {"value": list(TABLES)}))
    found = SERVICE_MESSAGES.decode(SERVICE_MESSAGES.encode_body(Finished(values)))
    assert isinstance(found, Finished) and READERS["result"](found.value).value == {"value": list(TABLES)}


def test_a_value_as_deep_as_the_bridge_allows_fits_into_a_result() -> None:
    deep: Any = 1
    for _ in range(64):
        deep = [deep]
    message = Finished({"value": deep, "calls": [{"args": {"x": 1}}]})
    assert SERVICE_MESSAGES.decode(SERVICE_MESSAGES.encode_body(message)) == message
    for _ in range(20):
        deep = [deep]
    with pytest.raises(RemoteProtocolError, match="levels deep"):
        CALLER_MESSAGES.decode(msgpack.packb([1, "m", {"x": deep}]))
    assert isinstance(CALLER_MESSAGES.decode(CALLER_MESSAGES.encode_body(Ask("m", {"x": 1}))), Ask)
    wrong: Any = AskTool(1, "call", "x", {}, "code", False, "", "", None)
    with pytest.raises(LocalProtocolError):
        CALLER_MESSAGES.encode_body(wrong)
