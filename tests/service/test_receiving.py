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
from toolcell.service.socket.messages import CALLER_MESSAGES, FRAMES, PART_BYTES, SERVICE_MESSAGES, MessagePart
from toolcell.service.socket.streams import Stream, Streams
from toolcell.service.tokens import TokenDatabase
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


def served(receiving: Receiving) -> tuple[Streams, list[Stream]]:
    """Return the service's end of a caller of the tenant a, and the requests that it begins."""
    begun: list[Stream] = []
    streams = Streams(
        SERVICE_MESSAGES,
        CALLER_MESSAGES,
        message_bytes=64 * MIB,
        most=64,
        on_request=begun.append,
        reservation=receiving.reservation("a"),
    )
    return streams, begun


def part(request: int, number: int, is_last: bool, data: bytes) -> bytes:
    return FRAMES.encode_body(MessagePart(request, number, is_last, data))


def test_unfinished_messages_of_a_client_are_bounded_together() -> None:
    receiving = Receiving(10 * MIB, lambda tenant: 3 * MIB)
    streams, _ = served(receiving)
    with pytest.raises(RemoteProtocolError, match="may send 3145728 bytes at once"):
        for request in range(1, 64):
            for number in range(1, 4):
                streams.receive(part(request, number, False, bytes(PART_BYTES)))
                while streams.next_frame() is not None:
                    pass
    assert 2 * MIB < receiving.held_bytes <= 3 * MIB
    streams.lose_all("over")
    assert receiving.held_bytes == 0


def test_a_message_counts_until_its_request_has_its_place() -> None:
    receiving = Receiving(10 * MIB, lambda tenant: 3 * MIB)
    streams, begun = served(receiving)
    streams.receive(part(1, 1, True, b"x" * 1000))
    begun[0].take()
    assert receiving.held_bytes == 1000
    begun[0].admitted()
    assert receiving.held_bytes == 0
    streams.receive(part(1, 2, True, b"y" * 500))
    assert receiving.held_bytes == 500
    begun[0].take()
    assert receiving.held_bytes == 0


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
