"""The protocol of the WebSocket over a transport in memory: whole messages in order, and bounds for both ends."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import socket
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rows import each_row
from toolcell.results import ExecutionResult, Outcome
from toolcell.service.socket.connection import PART_BYTES, QUEUE_BYTES, Connection
from toolcell.service.socket.messages import MESSAGES, Message, Notification, Request, Response
from toolcell.service.socket.values import plain_record, read_as
from toolcell.support.asgi import listening
from toolcell_bridge.wire.errors import LocalProtocolError, RemoteProtocolError
from wire.table_examples import TABLES

pytestmark = pytest.mark.quick

MESSAGE_BYTES = 2_000_000


class Line:
    """A transport whose frames a test gives and takes."""

    def __init__(self, *frames: Any) -> None:
        self.frames = asyncio.Queue[Any]()
        for each in frames:
            self.frames.put_nowait(each)
        self.sent: list[bytes] = []
        self.may_send = asyncio.Event()
        self.may_send.set()

    async def send(self, message: bytes, /) -> None:
        await self.may_send.wait()
        self.sent.append(message)

    async def recv(self) -> Any:
        return await self.frames.get()


def frames_of(message: Message) -> list[bytes]:
    """Return the frames that a connection sends of a message."""

    async def main() -> list[bytes]:
        line = Line()
        async with Connection(line, MESSAGE_BYTES) as connection:
            connection.post(message)
            while connection.waiting_bytes:
                await asyncio.sleep(0)
        return line.sent

    return asyncio.run(main())


def received(*frames: Any, count: int = 1) -> list[Message]:
    """Return the messages that a connection makes of frames."""

    async def main() -> list[Message]:
        async with Connection(Line(*frames), MESSAGE_BYTES) as connection:
            return [(await connection.receive()).message for _ in range(count)]

    return asyncio.run(main())


SIZES = st.one_of(st.integers(0, 200_000), st.integers(PART_BYTES - 40, PART_BYTES), st.just(3 * PART_BYTES))


@given(st.lists(SIZES, min_size=1, max_size=5))
@settings(max_examples=60)
def test_each_message_arrives_whole_and_in_order_whatever_its_size(sizes: list[int]) -> None:
    sent = [Notification("log", {"data": random.Random(size).randbytes(size)}) for size in sizes]
    frames = [frame for each in sent for frame in frames_of(each)]

    assert received(*frames, count=len(sent)) == sent
    assert max(map(len, frames)) <= PART_BYTES


def test_a_message_of_exactly_some_frames_ends_with_an_empty_one() -> None:
    data = b"x" * (2 * PART_BYTES - len(MESSAGES.encode_body(Response(1, None, b"x" * PART_BYTES))) + PART_BYTES)
    message = Response(1, None, data)
    assert [len(each) for each in frames_of(message)] == [PART_BYTES, PART_BYTES, 0]
    assert received(*frames_of(message)) == [message]


@pytest.mark.anyio
async def test_who_sends_faster_than_the_connection_carries_is_made_to_wait() -> None:
    line = Line()
    line.may_send.clear()
    async with Connection(line, MESSAGE_BYTES) as connection:

        async def send() -> None:
            for _ in range(100):
                await connection.send(Response(1, None, b"x" * 100_000))

        sending = asyncio.create_task(send())
        for _ in range(1000):
            await asyncio.sleep(0)
        assert QUEUE_BYTES < connection.waiting_bytes < QUEUE_BYTES + 110_000
        line.may_send.set()
        await asyncio.wait_for(sending, 60)
        while connection.waiting_bytes:
            await asyncio.sleep(0)
    assert sum(map(len, line.sent)) > 10_000_000


@pytest.mark.anyio
async def test_nobody_waits_for_a_connection_that_is_over() -> None:
    line = Line()
    line.may_send.clear()
    async with Connection(line, MESSAGE_BYTES) as connection:
        connection.post(Response(1, None, b"x" * 2 * QUEUE_BYTES))
        sending = asyncio.create_task(connection.send(Response(1, None, 1)))
        await asyncio.sleep(0)
    await asyncio.wait_for(sending, 60)
    connection.post(Response(1, None, 1))


def test_a_short_message_does_not_wait_for_the_acknowledgement_of_the_one_before() -> None:
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# What is illegal.

ILLEGAL: dict[str, Any] = {
    "no msgpack": b"\xc1",
    "nothing": b"",
    "no array": msgpack.packb(7),
    "empty array": msgpack.packb([]),
    "unknown kind": msgpack.packb([99, 1]),
    "a bool as kind": msgpack.packb([True, 1]),
    "too few members": msgpack.packb([0, 1]),
    "too many members": msgpack.packb([2, "log", {}, 1]),
    "text as id": msgpack.packb([0, "1", "hello", {}]),
    "a list as parameters": msgpack.packb([0, 1, "hello", []]),
    "a text as error": msgpack.packb([1, 1, "wrong", None]),
    "an extension": msgpack.packb([1, 1, None, msgpack.ExtType(1, b"")]),
    "a number as name": msgpack.packb([2, "log", {1: 1}]),
    "a huge claim": b"\xdd\xff\xff\xff\xff",
    "deep": b"\x91" * 5000 + b"\x00",
    "too long": b"x" * (PART_BYTES + 1),
    "text": "text",
}


@each_row("name", ILLEGAL)
def test_an_illegal_frame_is_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError):
        received(ILLEGAL[name])


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_no_bytes_raise_anything_but_a_protocol_error(data: bytes) -> None:
    try:
        received(data)
    except RemoteProtocolError:
        pass


def test_a_message_longer_than_message_bytes_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="message_bytes"):
        received(*[b"x" * PART_BYTES] * 100)


def test_every_message_is_read_as_it_was_written() -> None:
    samples = {
        "int": 3,
        "str": "ü",
        "dict[str, Plain]": {"a": [1, None, {"b": b"\xff"}]},
        "dict[str, Plain] | None": None,
        "Plain": [1.5, "x"],
    }
    for kind in MESSAGES.kinds:
        message = kind(*(samples[str(each.type)] for each in dataclasses.fields(kind)))
        assert MESSAGES.decode(MESSAGES.encode_body(message)) == message


def test_a_result_may_have_tables() -> None:
    values = plain_record(ExecutionResult("r1", Outcome.OK, {"value": list(TABLES)}))
    found = MESSAGES.decode(MESSAGES.encode_body(Response(1, None, values)))
    assert isinstance(found, Response) and read_as(ExecutionResult, found.result).value == {"value": list(TABLES)}


def test_a_value_as_deep_as_the_bridge_allows_fits_into_a_result() -> None:
    deep: Any = 1
    for _ in range(64):
        deep = [deep]
    message = Response(1, None, {"value": deep, "calls": [{"args": {"x": 1}}]})
    assert MESSAGES.decode(MESSAGES.encode_body(message)) == message
    for _ in range(20):
        deep = [deep]
    with pytest.raises(RemoteProtocolError, match="levels deep"):
        MESSAGES.decode(msgpack.packb([0, 1, "m", {"x": deep}]))
    assert isinstance(MESSAGES.decode(MESSAGES.encode_body(Request(1, "m", {"x": 1}))), Request)
    wrong: Any = "no message"
    with pytest.raises(LocalProtocolError):
        MESSAGES.encode_body(wrong)
