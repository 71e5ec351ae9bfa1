"""Where `RayBackend` starts a sandbox, with nodes that are servers of this process: Ray itself has no part in it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell import Limits, SandboxUnavailable, UsageError
from toolcell.sandbox.backend import Sandbox
from toolcell.sandbox.node import stream as stream_module
from toolcell.sandbox.node.connection import MOST_UNPROVED, NONCE_BYTES, NodeConnection, NodeService
from toolcell.sandbox.node.server import NodeAddress
from toolcell.sandbox.process.backend import ProcessBackend
from toolcell.sandbox.ray.backend import RayBackend, RayNode

pytestmark = [pytest.mark.anyio, pytest.mark.isolation]

KEY = b"k" * 32


class SickBackend:
    """Backend of a node that starts nothing: its disk is full."""

    def __init__(self) -> None:
        self.tries = 0

    async def start(self, limits: Limits) -> Sandbox:
        self.tries += 1
        raise SandboxUnavailable("no space left on device")


@asynccontextmanager
async def node_of(backend: Any, name: str) -> AsyncIterator[RayNode]:
    async def always(_: bytes) -> Any:
        return backend

    service = NodeService(always, KEY)
    server = await asyncio.get_running_loop().create_server(lambda: NodeConnection(service), "127.0.0.1", 0)
    address = NodeAddress("127.0.0.1", server.sockets[0].getsockname()[1], KEY, {})
    try:
        yield RayNode(name, name, address, None)
    finally:
        server.close()
        if service.tasks:
            await asyncio.wait(service.tasks, timeout=10.0)


def backend_of(*nodes: RayNode, places: int = 64) -> RayBackend:
    backend = RayBackend(sandboxes_per_node=places)
    backend._nodes = {node.id: node for node in nodes}
    backend._tasks = anyio.create_task_group()  # it is open
    return backend


@each_row(
    "wrong", [{"address": 5}, {"policy": "full"}, {"resources": 5}, {"tls": "yes"}, {"sandboxes_per_node": 0}], ids=str
)
def test_an_argument_of_another_kind_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}="):
        RayBackend(**wrong)


async def test_a_node_that_starts_nothing_fails_no_run_while_there_are_others() -> None:
    sick = SickBackend()
    healthy = ProcessBackend()
    await healthy.open()
    try:
        async with node_of(sick, "sick") as first, node_of(healthy, "healthy") as second:
            backend = backend_of(first, second)
            started = [await backend.start(Limits()) for _ in range(4)]

            assert dict(backend.nodes) == {"sick": 0, "healthy": 4}
            assert sick.tries == 1  # it has the most free places, and is left alone for a while

            for each in started:
                await each.destroy()
            assert dict(backend.nodes) == {"sick": 0, "healthy": 0}
            first.avoided_until = 0.0
            await (await backend.start(Limits())).destroy()
            assert sick.tries == 2
    finally:
        await healthy.close()


async def test_nodes_that_all_start_nothing_are_each_named_and_tried_once() -> None:
    sick = SickBackend()
    async with node_of(sick, "first") as first, node_of(sick, "second") as second:
        backend = backend_of(first, second)
        with pytest.raises(SandboxUnavailable) as refused:
            await backend.start(Limits())

    assert sick.tries == 2
    assert "first: no space left" in str(refused.value)
    assert "second: no space left" in str(refused.value)
    assert set(backend.nodes.values()) == {0}


async def test_a_caller_out_of_descriptors_loses_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = ProcessBackend()
    await healthy.open()
    try:
        async with node_of(healthy, "healthy") as there:
            backend = backend_of(there)
            kept = await backend.start(Limits())
            with monkeypatch.context() as patched, pytest.raises(SandboxUnavailable, match="Too many open files"):

                def none_left(*_: Any) -> socket.socket:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

                patched.setattr(stream_module.socket, "socket", none_left)
                await backend.start(Limits())
            assert not there.is_lost
            assert kept.is_alive()
            await (await backend.start(Limits())).destroy()
            await kept.destroy()
    finally:
        await healthy.close()


async def test_a_node_that_is_gone_is_left_for_another_one_at_once() -> None:
    sick = SickBackend()
    async with node_of(sick, "gone") as gone:
        pass
    healthy = ProcessBackend()
    await healthy.open()
    try:
        async with node_of(healthy, "healthy") as there:
            backend = backend_of(gone, there)
            there.busy = 1
            sandbox = await backend.start(Limits())
            await sandbox.destroy()
            assert gone.is_lost
            gone.is_lost, there.is_lost = False, True
            with pytest.raises(SandboxUnavailable, match="gone: it could not be reached"):
                await backend.start(Limits())
    finally:
        await healthy.close()


async def has_ended(reader: asyncio.StreamReader) -> bool:
    try:
        await reader.readexactly(NONCE_BYTES)
        return await asyncio.wait_for(reader.read(1), 0.01) == b""
    except TimeoutError:
        return False
    except (ConnectionError, asyncio.IncompleteReadError):
        return True


async def test_strangers_who_say_nothing_keep_no_caller_out_and_hold_few_descriptors() -> None:
    healthy = ProcessBackend()
    await healthy.open()
    try:
        async with node_of(healthy, "healthy") as there:
            strangers = [
                await asyncio.open_connection(there.address.host, there.address.port) for _ in range(MOST_UNPROVED + 20)
            ]
            sandbox = await backend_of(there).start(Limits())
            await sandbox.destroy()

            ended = [await has_ended(reader) for reader, _ in strangers]
            for _, writer in strangers:
                writer.close()
            assert 21 <= sum(ended) < MOST_UNPROVED
            assert not any(ended[30:])  # the oldest go first
    finally:
        await healthy.close()
