"""Bytes in flight: what a tenant sends and never ends, or what waits for a place, is bounded, and keeps no other out."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.client_serving import serving, until
from service_host import registry
from toolcell.config import KIB, MIB
from toolcell.service import Client, TenantConfig
from toolcell.service.principal import Scope
from toolcell.service.receiving import FLOOR_BYTES, Receiving
from toolcell.service.socket.connection import PART_BYTES, Connection
from toolcell.service.socket.messages import MESSAGES, Notification
from toolcell.service.tokens import TokenDatabase
from toolcell.support import daemon_threads
from toolcell_bridge.wire.errors import RemoteProtocolError

HEAD = "POST /v1/execute HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\n"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 40) | st.none())))
def test_no_tenant_and_all_together_never_hold_more_than_they_may(steps: list[tuple[str, int, int | None]]) -> None:
    receiving = Receiving(60 * MIB, lambda tenant: 30 * MIB)
    held = {(tenant, number): receiving.reservation(tenant) for tenant in "abc" for number in range(6)}
    for tenant, number, size in steps:
        if size is None:
            held[tenant, number].give_back()
        else:
            held[tenant, number].take(size * MIB)
        for each in "abc":
            assert sum(one.held_bytes for (whose, _), one in held.items() if whose == each) <= 30 * MIB
        assert receiving.held_bytes == sum(one.held_bytes for one in held.values()) <= 60 * MIB + 3 * FLOOR_BYTES
    for each in held.values():
        each.give_back()
    assert receiving.held_bytes == 0


class Line:
    """A transport that has these frames, and then none."""

    def __init__(self, *frames: bytes) -> None:
        self._frames = [*frames]

    async def send(self, message: bytes, /) -> None:
        raise AssertionError("nothing is sent")

    async def recv(self) -> bytes:
        if not self._frames:
            await asyncio.Event().wait()
        return self._frames.pop(0)


@pytest.mark.anyio
async def test_unfinished_messages_of_a_client_are_bounded_together() -> None:
    receiving = Receiving(10 * MIB, lambda tenant: 3 * MIB)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(5):  # connections of one tenant, with a message each that never ends
            line = Line(*[bytes(PART_BYTES)] * 10)
            connection = await stack.enter_async_context(Connection(line, 64 * MIB, receiving.reservation("a")))
            reading = asyncio.create_task(connection.receive())
            stack.callback(reading.cancel)
            await until(lambda line=line, reading=reading: not line._frames or reading.done())
        with pytest.raises(RemoteProtocolError, match="may send 3145728 bytes at once"):
            await reading
        assert 2 * MIB < receiving.held_bytes <= 3 * MIB
    assert receiving.held_bytes == 0


@pytest.mark.anyio
async def test_of_large_messages_that_come_together_those_after_the_debt_are_not_free() -> None:
    debt_s, body = list[float](), MESSAGES.encode_body(Notification("log", {"data": bytes(2 * PART_BYTES)}))
    frames = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
    daemon_threads.account.set(daemon_threads.Account(debt_s.append, anyio.Lock()))
    async with contextlib.AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(Connection(Line(*frames), MIB, is_free=lambda: not debt_s))
            for _ in range(3)
        ]
        received = await asyncio.gather(*(each.receive() for each in connections))
    assert sorted(each.was_free for each in received) == [False, False, True]


@pytest.mark.isolation
@pytest.mark.anyio
async def test_a_message_counts_until_its_request_has_its_place(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"concurrent_runs": 1, "grace_s": 0.0}
    async with serving(tmp_path, registry(), **settings) as (url, service), Client(url) as first, Client(url) as second:
        running = asyncio.create_task(first.execute_code("while True: pass"))
        await until(lambda: len(service.runs) == 1 and service.receiving.held_bytes == 0)
        waiting = asyncio.create_task(second.execute_code("len(x)", inputs={"x": "x" * 100_000}))
        await until(lambda: service.receiving.held_bytes > 100_000)
        held = service.receiving.held_bytes
        assert await second.kept_sessions() == []  # gives back its own bytes, once
        await until(lambda: service.receiving.held_bytes == held)
        running.cancel()
        assert (await waiting).value == 100_000
        assert service.receiving.held_bytes == 0
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.mark.isolation
@pytest.mark.anyio
async def test_bodies_that_never_end_are_bounded_and_keep_no_other_tenant_out(tmp_path: Path) -> None:
    with contextlib.closing(TokenDatabase(tmp_path / "tokens.db")) as store:
        hostile, polite = (store.create(name, tuple(Scope)).text for name in ("hostile", "polite"))
    settings: dict[str, Any] = {
        "tokens": tmp_path / "tokens.db",
        "body_bytes": MIB,
        "receiving_bytes": 8 * MIB,
        "defaults": TenantConfig(receiving_bytes=4 * MIB),
    }
    async with serving(tmp_path / "state", registry(), **settings) as (url, service):
        host = url.removeprefix("http://")
        writers = []
        for _ in range(12):
            _, writer = await asyncio.open_connection("127.0.0.1", int(host.rpartition(":")[2]))
            writer.write((HEAD.format(host, hostile) + f"Content-Length: {MIB}\r\n\r\n").encode() + bytes(MIB - 1024))
            writers.append(writer)
        await until(lambda: service.receiving.held_bytes > 3 * MIB)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            def ask(token: str) -> Any:
                body = {"code": "1 + 1", "inputs": {"x": "x" * 500 * KIB}}
                return client.post("/v1/execute", json=body, headers={"authorization": f"Bearer {token}"})

            refused = await ask(hostile)
            assert (refused.status_code, refused.json()["code"]) == (503, "busy_receiving")
            assert "Retry-After" in refused.headers
            assert (await ask(polite)).json()["value"] == 2
            assert service.receiving.held_bytes <= 4 * MIB
            for writer in writers:
                writer.close()
            await until(lambda: service.receiving.held_bytes == 0)
            assert (await ask(hostile)).json()["value"] == 2
        async with Client(url, token=hostile) as remote:
            assert (await remote.execute_code("len(x)", inputs={"x": "x" * 500 * KIB})).value == 500 * KIB
        await until(lambda: service.receiving.held_bytes == 0)
