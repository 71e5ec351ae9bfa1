"""The host's end of a bridge: what arrives reaches whoever reads, whatever happened to the one before."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import anyio
import anyio.lowlevel
import pytest

from toolcell.sandbox.stream import SocketStream

pytestmark = pytest.mark.anyio


@pytest.fixture
def ends() -> Iterator[tuple[SocketStream, socket.socket]]:
    ours, theirs = socket.socketpair()
    stream = SocketStream(ours)
    with theirs:
        yield stream, theirs
    ours.close()


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": each}) for each in (False, True)], ids=str)
async def test_what_came_while_its_reader_was_cancelled_is_the_next_readers(
    ends: tuple[SocketStream, socket.socket],
) -> None:
    stream, peer = ends
    reader = asyncio.create_task(stream.receive())
    await anyio.wait_all_tasks_blocked()
    peer.sendall(b"for nobody")
    stream._readable._notice()  # as the event loop would, before the task has its turn
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader

    with anyio.fail_after(10):
        assert await stream.receive() == b"for nobody"
    assert stream.received_bytes == len(b"for nobody")
    stream.close()


async def test_messages_arrive_whole_and_in_order_whether_or_not_somebody_waits(
    ends: tuple[SocketStream, socket.socket],
) -> None:
    stream, peer = ends
    arrived = bytearray()

    async def read() -> None:
        while data := await stream.receive():
            arrived.extend(data)
            if len(arrived) % 3 == 0:
                await anyio.lowlevel.checkpoint()  # meanwhile more may come for nobody

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        for number in range(200):
            peer.sendall(bytes([number]))
            if number % 50 == 0:
                await anyio.wait_all_tasks_blocked()
        peer.shutdown(socket.SHUT_WR)

    assert bytes(arrived) == bytes(range(200))
    stream.close()


async def test_a_reader_waits_again_without_asking_the_event_loop_again(
    ends: tuple[SocketStream, socket.socket],
) -> None:
    stream, peer = ends

    async def receive_later() -> bytes:
        async with anyio.create_task_group() as tasks:
            received: list[bytes] = []

            async def receive() -> None:
                received.append(await stream.receive())

            tasks.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            was_registered.append(stream._readable._is_registered)
            peer.sendall(b"x")
        await anyio.lowlevel.checkpoint()
        was_registered.append(stream._readable._is_registered)
        return received[0]

    was_registered: list[bool] = []
    assert [await receive_later() for _ in range(3)] == [b"x"] * 3
    assert len(set(was_registered)) == 1
    stream.close()
    assert not stream._readable._is_registered


async def test_a_closed_stream_says_so_to_whoever_waits(ends: tuple[SocketStream, socket.socket]) -> None:
    stream, _ = ends
    ended: list[bytes] = []

    async def receive() -> None:
        ended.append(await stream.receive())

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            stream.close()

    assert ended == [b""]
