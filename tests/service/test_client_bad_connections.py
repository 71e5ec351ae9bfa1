"""A `Client` whose connections are cut, late and split at random gets the results of one with a good connection."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from toolcell import Outcome, SandboxUnavailable, ToolRegistry, UsageError
from toolcell.errors import ServiceError, SessionError
from toolcell.service import Client
from toolcell.service.principal import Scope
from toolcell.service.socket import callers, link, messages
from toolcell.service.socket.link import socket_url
from toolcell.service.socket.messages import FRAMES, SOCKET_VERSION
from toolcell.service.tokens import TokenDatabase

from .client_serving import BadProxy, serving, until

HELLO = messages.CallerHello(SOCKET_VERSION, "me", {})

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]


def counting() -> tuple[ToolRegistry, Counter[str]]:
    registry, made = ToolRegistry(), Counter[str]()

    @registry.tool
    async def count(key: str, size: int = 10) -> str:
        """Count a call, and return a text of that size."""
        made[key] += 1
        return "x" * size

    return registry, made


SCRIPT = """
sizes = []
for n in range(12):
    sizes.append(len(call_tool('count', key=f'{run}-{n}', size=n * 500 + 1)))
    print('line', n)
progress(sizes)
set_result(sizes, files=['in.bin'])
"""


@pytest.mark.parametrize("seed", range(6))
async def test_runs_over_connections_that_are_cut_end_as_over_a_good_one(seed: int, tmp_path: Path) -> None:
    registry, made = counting()
    data = bytes(range(256)) * 20
    async with serving(tmp_path) as (url, _), BadProxy(url, seed, cut_after=(4_000, 60_000)) as proxy:
        proxy.is_bad = False
        async with Client(proxy.url, registry=registry) as client:
            proxy.is_bad = True
            proxy.cut_all()
            heard: list[list[str]] = [[] for _ in range(3)]
            runs = [
                client.execute_code(
                    SCRIPT,
                    inputs={"run": n},
                    files=[("in.bin", data)],
                    on_log=lambda _, text, n=n: heard[n].append(text),
                )
                for n in range(3)
            ]
            results = await asyncio.gather(*runs)
            proxy.is_bad = False

    expected = [n * 500 + 1 for n in range(12)]
    assert [result.value for result in results] == [expected] * 3
    assert [result.files[0].data for result in results] == [data] * 3
    assert ["".join(each) for each in heard] == ["".join(f"line {n}\n" for n in range(12))] * 3
    assert made == {f"{run}-{n}": 1 for run in range(3) for n in range(12)}  # each call was made once
    assert proxy.cuts > 1


@pytest.mark.slow
async def test_a_client_that_stays_away_has_its_runs_and_sessions_ended(tmp_path: Path) -> None:
    registry = ToolRegistry()
    waiting, ended = asyncio.Event(), asyncio.Event()

    @registry.tool
    async def wait() -> None:
        """Wait until this is cancelled."""
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(tmp_path, grace_s=0.3) as (url, service), BadProxy(url, 0) as proxy:
        proxy.is_bad = False
        async with Client(proxy.url, registry=registry, connect_s=5) as client:
            session = client.session()
            await session.open()
            running = asyncio.create_task(client.execute_code("call_tool('wait')"))
            await waiting.wait()
            proxy.is_closed_to_all = True
            proxy.cut_all()
            tenant = await service.tenants.get("default")
            await until(lambda: not (len(service.callers) or len(service.runs) or tenant.runtime.sessions._open))
            with pytest.raises(ServiceError, match="wait") as caught:
                await running
            assert caught.value.may_have_begun and not caught.value.is_safe_to_retry
            assert [call.name for call in caught.value.calls] == ["wait"] and ended.is_set()
            with pytest.raises(SandboxUnavailable, match="cannot be reached"):
                await client.execute_code("1")
            proxy.is_closed_to_all = False
            assert (await client.execute_code("1 + 1")).value == 2
            with pytest.raises(SessionError, match="lost this session"):
                await session.execute_code("1")


async def test_a_service_that_starts_again_fails_what_ran_and_serves_what_comes(tmp_path: Path) -> None:
    registry, made = counting()
    async with BadProxy("http://127.0.0.1:1", 0) as proxy:
        proxy.is_bad = False
        async with serving(tmp_path / "a") as (url, service):
            proxy._port = int(url.rpartition(":")[2])
            client = Client(proxy.url, registry=registry)
            await client.open()
            running = asyncio.create_task(client.execute_code("call_tool('count', key='a')\nwhile True: pass"))
            await until(lambda: made["a"] == 1)
            proxy.cut_all()
            proxy.is_closed_to_all = True
            for run in service.runs:
                run.cancel.set()
        async with serving(tmp_path / "b") as (url, _):
            proxy._port = int(url.rpartition(":")[2])
            proxy.is_closed_to_all = False
            with pytest.raises(ServiceError, match="restarted") as caught:
                await running
            assert caught.value.may_have_begun and [call.name for call in caught.value.calls] == ["count"]
            assert (await client.execute_code("len(call_tool('count', key='b'))")).value == 10
            await client.close()
    assert made == {"a": 1, "b": 1}


async def test_closing_a_client_ends_everything_of_it_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, grace_s=60) as (url, service):
        client = Client(url)
        await client.open()
        running = asyncio.create_task(client.execute_code("while True: pass"))
        await until(lambda: len(service.runs) == 1)
        await client.close()
        await until(lambda: len(service.callers) == 0 and len(service.runs) == 0)
        with pytest.raises(ServiceError):
            await running
        await client.close()


async def test_a_client_that_is_closed_has_no_connection_though_the_service_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    async def noting(*args: Any, **kwargs: Any) -> Any:
        made.append(await connect(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(link, "connect_websocket", noting)
    monkeypatch.setattr(link, "END_S", 0.0)
    async with serving(tmp_path) as (url, _), BadProxy(url, 0) as proxy:
        proxy.is_bad = False
        async with Client(proxy.url):
            proxy.is_silent = True
        assert [connection.transport.is_closing() for connection in made] == [True]


@pytest.mark.slow
async def test_a_slow_reader_holds_its_own_run_up_and_no_other(tmp_path: Path) -> None:
    release, told = asyncio.Event(), []

    async def on_log(stream: str, text: str) -> None:
        told.append(text)
        await release.wait()

    async with serving(tmp_path) as (url, service), Client(url) as client:
        slow = asyncio.create_task(client.execute_code("for n in range(40000): print('x' * 50)", on_log=on_log))
        await until(lambda: told)
        assert (await client.execute_code("1 + 1")).value == 2
        (caller,) = service.callers
        await until(lambda: max(stream.waiting_bytes for stream in caller.streams))
        assert max(stream.waiting_bytes for stream in caller.streams) < 4_000_000
        release.set()
        result = await slow

    assert result.outcome is Outcome.OK and sum(map(len, told)) == 40000 * 51


# Connections that are not a client's.


class _Flood:
    """A WebSocket that has another frame whenever one is asked for."""

    received = 0

    async def receive(self) -> dict[str, Any]:
        self.received += 1
        return {"type": "websocket.receive", "bytes": b"x"}


async def test_a_flood_of_frames_is_read_no_faster_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "FRAMES_PER_S", 100.0)
    monkeypatch.setattr(callers, "BURST", 50.0)
    flood: Any = _Flood()
    transport = callers.ServerTransport(flood)
    began = asyncio.get_running_loop().time()
    for _ in range(80):
        await transport.recv()

    assert asyncio.get_running_loop().time() - began >= 0.25  # 30 of them are past the burst


async def test_others_are_served_while_one_connection_is_flooded(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, _), connect(socket_url(url), compression=None, proxy=None) as flood:
        await flood.send(FRAMES.encode_body(HELLO))
        await flood.recv()

        async def pour() -> None:
            while True:
                await flood.send(FRAMES.encode_body(messages.Taken(1, 1)))
                await asyncio.sleep(0)

        pouring = asyncio.create_task(pour())
        async with Client(url, connect_s=30) as client:
            assert (await client.execute_code("1 + 1")).value == 2
        pouring.cancel()


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"\xc1",
        "text",
        FRAMES.encode_body(messages.Taken(1, 1)),
        FRAMES.encode_body(messages.CallerHello(99, "me", {})),
        b"x" * 70_000,
    ],
    ids=["empty", "garbage", "text", "no hello", "version", "long"],
)
async def test_a_connection_that_does_not_speak_the_protocol_is_told_so_and_closed(first: Any, tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, service), connect(socket_url(url), proxy=None) as there:
        await there.send(first)
        said = FRAMES.decode(await there.recv())
        assert isinstance(said, messages.Goodbye) and said.code == "protocol"
        with pytest.raises(ConnectionClosed):
            await there.recv()
        assert len(service.callers) == 0


async def test_a_page_of_another_site_cannot_connect(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, _):
        for origin in ("http://evil.example", "null", "http://[", "http://127.0.0.1:1"):
            with pytest.raises(InvalidStatus) as caught:
                await connect(socket_url(url), additional_headers={"Origin": origin}, proxy=None)
            assert caught.value.response.status_code in (401, 403)


async def test_who_is_not_let_in_is_told_why(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, _):
        with pytest.raises(UsageError, match="does not let this client in"):
            await Client(url, headers={"X-Forwarded-For": "192.0.2.1"}).open()


async def test_the_name_of_a_caller_is_of_no_use_to_somebody_else(tmp_path: Path) -> None:
    store = TokenDatabase(tmp_path / "tokens")
    owner, thief = (store.create("shop", [Scope.EXECUTE], name=name).text for name in ("owner", "thief"))

    async with serving(tmp_path / "state", tokens=store.path) as (url, service), Client(url, token=owner) as client:
        running = asyncio.create_task(client.execute_code("while True: pass"))
        await until(lambda: len(service.runs) == 1)
        (caller,) = service.callers
        headers = {"Authorization": f"Bearer {thief}"}
        async with connect(socket_url(url), additional_headers=headers, proxy=None) as there:
            await there.send(FRAMES.encode_body(messages.CallerHello(SOCKET_VERSION, caller.name, {"1": 0})))
            hello = FRAMES.decode(await there.recv())
            assert isinstance(hello, messages.ServiceHello)
            assert hello.home != caller.home and hello.received == {}
        assert not running.done() and len(service.runs) == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_caller_who_comes_back_before_its_old_connection_is_missed_keeps_what_it_has(tmp_path: Path) -> None:
    async with serving(tmp_path, grace_s=0.2) as (url, service), connect(socket_url(url), proxy=None) as old:
        await old.send(FRAMES.encode_body(HELLO))
        first = FRAMES.decode(await old.recv())
        assert isinstance(first, messages.ServiceHello)
        (caller,) = service.callers
        for _ in range(3):
            carrying = caller.carrying
            again = await connect(socket_url(url), proxy=None)
            await again.send(FRAMES.encode_body(HELLO))
            hello = FRAMES.decode(await again.recv())
            assert isinstance(hello, messages.ServiceHello) and hello.home == first.home
            await until(lambda was=carrying: caller.carrying not in (None, was))
            assert caller.leaving is None
        await again.close()
        await until(lambda: len(service.callers) == 0)


async def test_the_clients_of_one_tenant_do_not_keep_another_out(tmp_path: Path) -> None:
    store = TokenDatabase(tmp_path / "tokens")
    many, other = (store.create(name, [Scope.EXECUTE]).text for name in ("many", "other"))

    async def greeted(url: str, token: str, name: str) -> messages.Frame:
        headers = {"Authorization": f"Bearer {token}"}
        async with connect(socket_url(url), additional_headers=headers, proxy=None) as there:
            await there.send(FRAMES.encode_body(messages.CallerHello(SOCKET_VERSION, name, {})))
            found: messages.Frame = FRAMES.decode(await there.recv())
            return found

    async with serving(tmp_path / "state", tokens=store.path) as (url, service):
        service.callers.most_of_tenant = 2
        assert [type(await greeted(url, many, name)) for name in "ab"] == [messages.ServiceHello] * 2
        refused = await greeted(url, many, "c")
        assert isinstance(refused, messages.Goodbye) and refused.code == "too_many_sessions"
        assert isinstance(await greeted(url, other, "a"), messages.ServiceHello)


def ask(method: Any, arguments: Any) -> bytes:
    return FRAMES.encode_body(messages.MessagePart(1, 1, True, msgpack.packb([1, method, arguments])))


REQUESTS: dict[str, tuple[Any, Any]] = {
    "unknown method": ("__class__", {}),
    "private": ("_place", {}),
    "unknown argument": ("execute_code", {"source": "1", "backend": "none"}),
    "no source": ("execute_code", {}),
    "source of a wrong type": ("execute_code", {"source": 7}),
    "files": ("execute_code", {"source": "1", "files": [["../../x", b""]]}),
    "limits": ("execute_code", {"source": "1", "limits": {"wall_s": 99999.0}}),
    "unknown limit": ("execute_code", {"source": "1", "limits": {"x": 1}}),
    "context": ("execute_code", {"source": "1", "context": {"user_id": "root"}}),
    "toolset": ("execute_code", {"source": "1", "toolset": 5}),
    "session": ("session.execute_code", {"source": "1", "session": 5}),
    "tools": ("offer_tools", {"toolset": 1, "tools": 7}),
    "a tool": ("offer_tools", {"toolset": 1, "tools": [7]}),
    "a tool without schema": ("offer_tools", {"toolset": 1, "tools": [{"name": "x", "description": "d" * 20}]}),
    "a tool with options": (
        "offer_tools",
        {
            "toolset": 1,
            "tools": [
                {"name": "x", "description": "d" * 20, "parameters": {"type": "object"}, "options": {"blocking": False}}
            ],
        },
    ),
    "a tool with a bad schema": (
        "offer_tools",
        {
            "toolset": 1,
            "tools": [{"name": "x", "description": "d" * 20, "parameters": {"type": "object", "$ref": "#/x"}}],
        },
    ),
    "token": ("resume", {"token": "x"}),
    "decision": ("resume", {"token": "x", "decisions": {"a": {"kind": "shrug"}}}),
    "draft": ("commit", {"draft": "../../x"}),
    "revert": ("revert", {"result": {}}),
    "session name": ("session.open", {"name": "../x"}),
}


@pytest.fixture(scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with serving(tmp_path_factory.mktemp("state")) as (url, _):
        yield url


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_that_is_wrong_fails_alone_and_says_why(name: str, url: str) -> None:
    async with connect(socket_url(url), proxy=None) as there:
        await there.send(FRAMES.encode_body(messages.CallerHello(SOCKET_VERSION, name, {})))
        await there.recv()
        await there.send(ask(*REQUESTS[name]))
        tag, code, message, _ = await _message_of(there)

    assert tag == 22 and code not in ("internal_error", "service_error") and message


async def _message_of(there: Any) -> list[Any]:
    while True:
        frame = FRAMES.decode(await there.recv())
        if isinstance(frame, messages.MessagePart):
            found: list[Any] = msgpack.unpackb(frame.data)
            return found
