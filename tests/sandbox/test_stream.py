"""The host's end of a bridge receives everything that arrives."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator

import anyio
import anyio.lowlevel
import pytest

from toolcell.sandbox import stream as streams
from toolcell.sandbox.stream import SocketStream

pytestmark = [pytest.mark.quick, pytest.mark.every_loop, pytest.mark.anyio]


@pytest.fixture
def ends() -> Iterator[tuple[SocketStream, socket.socket]]:
    ours, theirs = socket.socketpair()
    stream = SocketStream(ours)
    with theirs:
        yield stream, theirs
    ours.close()


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


async def test_a_closed_stream_says_so_to_whoever_waits(ends: tuple[SocketStream, socket.socket]) -> None:
    stream, _ = ends
    ended: list[bytes] = []

    async def receive() -> None:
        ended.append(await stream.receive())

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            stream.close()

    assert ended == [b""]


def test_a_socket_is_not_watched_where_the_table_of_watches_is_full(
    ends: tuple[SocketStream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def add_reader(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(asyncio, "get_running_loop", Full)
    assert streams.call_when_readable(ends[1], list) is None


async def test_only_a_peer_that_has_answered_is_looked_at_before_sleeping(
    ends: tuple[SocketStream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, peer = ends
    looks: list[int] = []
    monkeypatch.setattr(streams, "sched_yield", lambda: looks.append(1))
    await stream.send(b"script")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.receive)
        await anyio.wait_all_tasks_blocked()
        assert not looks
        peer.sendall(b"call")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.receive)
        await anyio.wait_all_tasks_blocked()
        assert looks
        peer.sendall(b"done")
    stream.close()
