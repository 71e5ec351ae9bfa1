"""Bytes in flight: what a tenant sends and never ends, or what waits for a place, is bounded, and keeps no other out."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

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
from toolcell.service.socket.channels import Channels
from toolcell.service.socket.frames import PIECE_BYTES
from toolcell.service.tokens import TokenDatabase
from toolcell_bridge.wire.errors import RemoteProtocolError

HEAD = "POST /v1/execute HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


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
            assert sum(one.held for (whose, _), one in held.items() if whose == each) <= 30 * MIB
        assert receiving.held == sum(one.held for one in held.values()) <= 60 * MIB + 3 * FLOOR_BYTES
    for each in held.values():
        each.give_back()
    assert receiving.held == 0


def test_unfinished_messages_of_a_client_are_bounded_together() -> None:
    receiving = Receiving(10 * MIB, lambda tenant: 3 * MIB)
    held = receiving.reservation("a")
    channels = Channels(64 * MIB, 64, held)
    piece = bytes(PIECE_BYTES)
    with pytest.raises(RemoteProtocolError, match="may send 3145728 bytes at once"):
        for number in range(1, 64):
            for _ in range(3):
                channels.arrive(number, False, piece, may_open=True)
                channels.next_credit()
    assert 2 * MIB < receiving.held <= 3 * MIB
    channels.forget_all()
    assert receiving.held == 0


def test_a_message_counts_until_its_request_has_its_place() -> None:
    receiving = Receiving(10 * MIB, lambda tenant: 3 * MIB)
    channels = Channels(64 * MIB, 64, receiving.reservation("a"))
    assert channels.arrive(1, True, b"x" * 1000, may_open=True)
    channels.take(1)
    assert receiving.held == 1000
    channels.admitted(1)
    assert receiving.held == 0
    assert channels.arrive(1, True, b"y" * 500, may_open=False)
    assert receiving.held == 500
    channels.take(1)
    assert receiving.held == 0


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
        await until(lambda: service.receiving.held > 3 * MIB)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            def ask(token: str) -> Any:
                body = {"code": "1 + 1", "inputs": {"x": "x" * 500 * KIB}}
                return client.post("/v1/execute", json=body, headers={"authorization": f"Bearer {token}"})

            refused = await ask(hostile)
            assert (refused.status_code, refused.json()["code"]) == (503, "busy_receiving")
            assert "Retry-After" in refused.headers
            assert (await ask(polite)).json()["value"] == 2
            assert service.receiving.held <= 4 * MIB
            for writer in writers:
                writer.close()
            await until(lambda: service.receiving.held == 0)
            assert (await ask(hostile)).json()["value"] == 2
        async with Client(url, token=hostile) as remote:
            assert (await remote.execute_code("len(x)", inputs={"x": "x" * 500 * KIB})).value == 500 * KIB
        await until(lambda: service.receiving.held == 0)
