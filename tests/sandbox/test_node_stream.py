"""`NodeStream`: what it keeps of a guest's bytes, over a pair of sockets."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgpack
import pytest

from toolcell.sandbox.node import connection
from toolcell.sandbox.node.connection import frame
from toolcell.sandbox.node.stream import HELD_BYTES, NodeStream
from toolcell.sandbox.stream import SocketStream

pytestmark = [pytest.mark.quick, pytest.mark.every_loop, pytest.mark.anyio]

PIECE = bytes(1 << 18)
END = frame(connection.END, msgpack.packb([9, None, 0.1, 1, ""]))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[NodeStream, SocketStream]]:
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    stream, node = NodeStream(ours, "the node"), SocketStream(theirs)
    try:
        yield stream, node
    finally:
        stream.close()
        node.close()


async def flood(node: SocketStream, count: int, sent: list[int]) -> None:
    for _ in range(count):
        await node.send(frame(connection.BRIDGE, PIECE))
        sent[0] += 1


async def take_all(node: SocketStream) -> None:
    """Be a node whose guest reads nothing: it keeps what comes, and acknowledges none of it."""
    while await node.receive():
        pass


async def test_while_nobody_receives_a_sender_that_waits_keeps_little_and_goes_on_when_somebody_does() -> None:
    sent, count = [0], 64
    async with connected() as (stream, node), anyio.create_task_group() as tasks:
        tasks.start_soon(take_all, node)
        tasks.start_soon(stream.send, bytes(2 * connection.WINDOW_BYTES))
        tasks.start_soon(flood, node, count, sent)
        for _ in range(20):
            await anyio.sleep(0.01)
        assert HELD_BYTES <= len(stream._bridge) <= HELD_BYTES + 2 * len(PIECE)
        assert sent[0] < count  # the guest waits

        got = 0
        with anyio.fail_after(60):
            while got < count * len(PIECE):
                got += len(await stream.receive())
                assert len(stream._bridge) <= HELD_BYTES + 2 * len(PIECE)
        tasks.cancel_scope.cancel()


async def test_an_end_that_was_asked_for_is_read_behind_any_flood() -> None:
    sent, count = [0], 64
    async with connected() as (stream, node), anyio.create_task_group() as tasks:

        async def flood_and_end() -> None:
            await flood(node, count, sent)
            await node.send(END)

        tasks.start_soon(take_all, node)
        tasks.start_soon(stream.send, bytes(2 * connection.WINDOW_BYTES))
        tasks.start_soon(flood_and_end)
        for _ in range(20):
            await anyio.sleep(0.01)
        await anyio.to_thread.run_sync(stream.end)  # as a deadline does
        with anyio.fail_after(60):
            await stream.wait(lambda: stream.exit is not None)
        assert stream.exit is not None and stream.exit.signal == 9
        assert len(stream._bridge) <= HELD_BYTES + 2 * len(PIECE)


async def test_a_last_measurement_is_not_waited_for_behind_more_than_is_kept() -> None:
    sent = [0]
    async with connected() as (stream, node), anyio.create_task_group() as tasks:
        tasks.start_soon(flood, node, 64, sent)
        await anyio.sleep(0.05)
        stream.look()
        stream.ask()
        assert len(stream._bridge) <= HELD_BYTES + 2 * len(PIECE)
        tasks.cancel_scope.cancel()


async def test_a_connection_whose_node_proves_nothing_is_closed_with_whoever_waits_for_it() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        for each in (ours, theirs):
            each.setblocking(False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(NodeStream.over, ours, "the node", b"key")
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert ours.fileno() == -1
        assert theirs.recv(1) == b""
