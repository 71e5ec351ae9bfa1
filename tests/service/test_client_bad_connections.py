"""A `Client` whose connections are cut: runs go on and are asked for, and nothing is run or called twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from rows import each_row
from toolcell import Outcome, SandboxUnavailable, ToolRegistry, UsageError
from toolcell.errors import ServiceError, SessionError, ToolAbort
from toolcell.service import Client
from toolcell.service.principal import Scope
from toolcell.service.socket import callers, link
from toolcell.service.socket.connection import Received
from toolcell.service.socket.link import socket_url
from toolcell.service.socket.messages import MESSAGES, SOCKET_VERSION, Message, Notification, Request, Response
from toolcell.service.socket.remote_tools import Channel, ServedRequest
from toolcell.service.tokens import TokenDatabase

from .client_serving import BadProxy, serving, until


def hello(name: str = "me", version: int = SOCKET_VERSION, asked: tuple[int, ...] = ()) -> bytes:
    params: dict[str, Any] = {"version": version, "name": name, "open": [*asked]}
    return MESSAGES.encode_body(Request(0, "hello", params))


async def heard(there: Any) -> Message:
    """Return the next message of the service, which is a short one."""
    async with asyncio.timeout(60):
        return MESSAGES.decode(await there.recv())


async def greeted(there: Any, name: str = "me", *asked: int) -> dict[str, Any]:
    """Say hello, and return what is answered."""
    await there.send(hello(name, asked=asked))
    answer = await heard(there)
    assert isinstance(answer, Response) and isinstance(answer.result, dict)
    return answer.result


def closed_by(caught: pytest.ExceptionInfo[ConnectionClosed]) -> tuple[int, str]:
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


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
set_result(sizes, files=['in.bin'])
"""


@pytest.mark.parametrize("seed", range(3))
async def test_runs_over_connections_that_are_cut_run_once_and_end_as_over_a_good_one(
    seed: int, tmp_path: Path
) -> None:
    registry, made = counting()
    data = bytes(range(256)) * 20
    async with serving(tmp_path, registry) as (url, _), BadProxy(url, seed, cut_after=(4_000, 60_000)) as proxy:
        proxy.is_bad = False
        async with Client(proxy.url) as client:
            proxy.is_bad = True
            proxy.cut_all()
            runs = [client.execute_code(SCRIPT, inputs={"run": n}, files=[("in.bin", data)]) for n in range(3)]
            results = await asyncio.gather(*runs)
            proxy.is_bad = False

    assert [result.value for result in results] == [[n * 500 + 1 for n in range(12)]] * 3
    assert [result.files[0].data for result in results] == [data] * 3
    assert [result.logs.text for result in results] == ["".join(f"line {n}\n" for n in range(12))] * 3
    assert made == {f"{run}-{n}": 1 for run in range(3) for n in range(12)}
    assert proxy.cuts > 1


async def test_a_call_under_way_when_the_connection_is_lost_is_unknown_and_not_made_again(tmp_path: Path) -> None:
    registry, began, made = ToolRegistry(), asyncio.Event(), Counter[str]()

    @registry.tool
    async def pay(to: str) -> int:
        """Pay somebody, which the first time takes for ever."""
        made[to] += 1
        if to == "ada":
            began.set()
            await asyncio.Event().wait()
        return made[to]

    script = """
try:
    call_tool('pay', to='ada')
except ToolError as exc:
    print(exc)
set_result(call_tool('pay', to='bob'))
"""
    async with serving(tmp_path) as (url, _), BadProxy(url, 0) as proxy:
        proxy.is_bad = False
        async with Client(proxy.url, registry=registry) as client:
            running = asyncio.create_task(client.execute_code(script))
            await began.wait()
            proxy.cut_all()
            result = await running

    assert result.value == 1 and made == {"ada": 1, "bob": 1}  # calls that come later are made over the next one
    assert "lost during the call; whether the call was carried out is not known" in result.logs.text


@pytest.mark.parametrize("way", ["stream", "on_log"])
async def test_a_run_of_which_something_was_cut_says_how_to_ask_for_it_and_goes_on(tmp_path: Path, way: str) -> None:
    registry, release = ToolRegistry(), asyncio.Event()

    @registry.tool
    async def wait() -> int:
        """Wait until the test says so."""
        await release.wait()
        return 7

    script = "print('on', flush=True)\nset_result(call_tool('wait'))"
    async with serving(tmp_path, registry) as (url, service), BadProxy(url, 0) as proxy:
        proxy.is_bad = False
        async with Client(proxy.url) as client, httpx.AsyncClient(base_url=url) as web:
            with pytest.raises(ServiceError, match=r"GET /v1/runs/\w+") as caught:
                if way == "on_log":
                    async with asyncio.timeout(15):
                        await client.execute_code(script, on_log=lambda *_: proxy.cut_all())
                async for _ in client.stream(script):
                    proxy.cut_all()
            assert (await client.execute_code("1 + 1")).value == 2
            assert len(service.runs) == 1
            release.set()
            await until(lambda: not len(service.runs))
            run = await web.get(str(caught.value).rpartition("GET ")[2])

    assert caught.value.may_have_begun and run.status_code == 200 and run.json()["outcome"] == "ok"


async def test_a_request_that_never_arrived_is_sent_again(tmp_path: Path) -> None:
    registry, made = counting()
    async with serving(tmp_path, registry) as (url, _), BadProxy(url, 0) as proxy:
        proxy.is_bad = False
        async with Client(proxy.url) as client:
            proxy.is_silent = True
            running = asyncio.create_task(client.execute_code("len(call_tool('count', key='a'))"))
            await until(lambda: proxy.held_bytes)
            proxy.cut_all()
            proxy.is_silent = False
            assert (await running).value == 10
    assert made == {"a": 1}


async def test_a_request_that_is_given_up_without_a_connection_is_ended_over_the_next_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, service), BadProxy(url, 0) as proxy:
        proxy.is_bad = False
        async with Client(proxy.url, connect_s=30) as client:
            running = asyncio.create_task(client.execute_code("while True: pass"))
            await until(lambda: len(service.runs) == 1)
            proxy.is_closed_to_all = True
            proxy.cut_all()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            proxy.is_closed_to_all = False
            await until(lambda: not len(service.runs))


async def test_an_answer_is_kept_until_its_caller_forgets_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, _):
        async with connect(socket_url(url), proxy=None) as there:
            await greeted(there)
            await there.send(MESSAGES.encode_body(Request(1, "kept_sessions", {})))
            first = await heard(there)
            there.transport.abort()
        async with connect(socket_url(url), proxy=None) as there:
            assert (await greeted(there, "me", 1, 2))["open"] == [1]
            assert await heard(there) == first == Response(1, None, [])
            await there.send(MESSAGES.encode_body(Notification("forget", {"request": 1})))
            there.transport.abort()
        async with connect(socket_url(url), proxy=None) as there:
            assert (await greeted(there, "me", 1))["open"] == []


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
            assert caught.value.may_have_begun
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
            proxy.port = int(url.rpartition(":")[2])
            client = Client(proxy.url, registry=registry)
            await client.open()
            running = asyncio.create_task(client.execute_code("call_tool('count', key='a')\nwhile True: pass"))
            await until(lambda: made["a"] == 1)
            proxy.cut_all()
            proxy.is_closed_to_all = True
            for run in service.runs:
                run.cancel.set()
        async with serving(tmp_path / "b") as (url, _):
            proxy.port = int(url.rpartition(":")[2])
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


async def test_a_client_that_is_closed_has_no_connection_though_the_service_is_silent_or_gone(
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
        proxy.is_silent = False
        async with Client(proxy.url):
            proxy.is_closed_to_all = True
            proxy.cut_all()
            await until(lambda: made[-1].transport.is_closing())
        assert [connection.transport.is_closing() for connection in made] == [True, True]


@pytest.mark.slow
async def test_a_slow_reader_holds_its_own_run_up_and_no_other(tmp_path: Path) -> None:
    registry, reached = ToolRegistry(), list[str]()

    @registry.tool
    def reach(who: str) -> None:
        """Note that a script has come this far."""
        reached.append(who)

    release, told = asyncio.Event(), list[str]()

    async def on_log(stream: str, text: str) -> None:
        told.append(text)
        await release.wait()

    script = "for n in range(40000): print('x' * 50)\ncall_tool('reach', who=who)"
    async with serving(tmp_path, registry) as (url, service), Client(url) as client:
        slow = asyncio.create_task(client.execute_code(script, inputs={"who": "slow"}, on_log=on_log))
        await until(lambda: told)
        quick = await client.execute_code(script, inputs={"who": "quick"}, on_log=lambda stream, text: None)
        assert quick.ok and reached == ["quick"]
        (caller,) = service.callers
        assert caller.channel.connection is not None and caller.channel.connection.waiting_bytes < 4_000_000
        release.set()
        result = await slow

    assert result.outcome is Outcome.OK and sum(map(len, told)) == 40000 * 51 and reached == ["quick", "slow"]


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
        await flood.send(hello())
        await flood.recv()

        async def pour() -> None:
            while True:
                await flood.send(MESSAGES.encode_body(Notification("forget", {"request": 1})))
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
        MESSAGES.encode_body(Notification("forget", {"request": 1})),
        hello(version=99),
        hello(name="n" * 65),
    ],
    ids=["empty", "garbage", "text", "no hello", "version", "name"],
)
async def test_a_connection_that_does_not_speak_the_protocol_is_told_so_and_closed(first: Any, tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, service), connect(socket_url(url), proxy=None) as there:
        await there.send(first)
        with pytest.raises(ConnectionClosed) as caught:
            await there.recv()
        code, reason = closed_by(caught)
        assert code == 1002 and reason
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
            found = await greeted(there, caller.name, 1)
            assert found["home"] != caller.home and found["open"] == []
        assert not running.done() and len(service.runs) == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_caller_who_comes_back_before_its_old_connection_is_missed_keeps_what_it_has(tmp_path: Path) -> None:
    async with serving(tmp_path, grace_s=0.2) as (url, service), connect(socket_url(url), proxy=None) as old:
        first = await greeted(old)
        (caller,) = service.callers
        for _ in range(3):
            was = caller.channel.connection
            again = await connect(socket_url(url), proxy=None)
            assert (await greeted(again))["home"] == first["home"]
            assert caller.channel.connection not in (None, was)
        with pytest.raises(ConnectionClosed) as caught:
            await old.recv()
        assert closed_by(caught) == (1008, "another connection of this client took its place")
        assert len(service.callers) == 1
        again.transport.abort()
        await until(lambda: len(service.callers) == 0)


async def test_the_clients_of_one_tenant_do_not_keep_another_out(tmp_path: Path) -> None:
    store = TokenDatabase(tmp_path / "tokens")
    many, other = (store.create(name, [Scope.EXECUTE]).text for name in ("many", "other"))

    async def comes(url: str, token: str, name: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        there = await connect(socket_url(url), additional_headers=headers, proxy=None)
        try:
            await greeted(there, name)
        finally:
            there.transport.abort()  # it may come back

    async with serving(tmp_path / "state", tokens=store.path) as (url, service):
        service.callers.most_of_tenant = 2
        for name in "ab":
            await comes(url, many, name)
        with pytest.raises(ConnectionClosed) as caught:
            await comes(url, many, "c")
        assert "2 of this tenant are connected already" in closed_by(caught)[1]
        await comes(url, other, "a")


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
    "no draft": ("commit", {}),
    "revert": ("revert", {"result": {}}),
    "nothing to revert": ("revert", {}),
    "session name": ("session.open", {"name": "../x"}),
}


@pytest.fixture(scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with serving(tmp_path_factory.mktemp("state")) as (url, _):
        yield url


@each_row("name", REQUESTS)
async def test_a_request_that_is_wrong_fails_alone_and_says_why(name: str, url: str) -> None:
    async with connect(socket_url(url), proxy=None) as there:
        await greeted(there, name)
        await there.send(MESSAGES.encode_body(Request(1, *REQUESTS[name])))
        while not isinstance(said := await heard(there), Response):
            pass  # that a run began

    assert said.error is not None and said.error["message"]
    assert said.error["code"] not in ("internal_error", "service_error")


ILLEGAL: dict[str, list[Message]] = {
    "a request twice": [Request(1, "kept_sessions", {})] * 2,
    "a request of an older number": [Request(7, "kept_sessions", {}), Request(6, "kept_sessions", {})],
    "more requests than there may be": [Request(n, "execute_code", {"source": "while 1: 1"}) for n in range(1, 99)],
    "a notification that there is not": [Notification("hello", {})],
}


@pytest.mark.parametrize("name", ILLEGAL)
async def test_who_breaks_the_protocol_is_ended_with_all_that_it_has(name: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, service), connect(socket_url(url), proxy=None) as there:
        await greeted(there)
        with pytest.raises(ConnectionClosed) as caught:
            for message in ILLEGAL[name]:
                await there.send(MESSAGES.encode_body(message))
            while True:
                await there.recv()
        assert closed_by(caught)[0] == 1002
        await until(lambda: len(service.callers) == 0 and len(service.runs) == 0)


STRANGE: dict[str, list[Message]] = {
    "an answer to nothing": [Response(7, None, 1)],
    "an answer twice": [Response(1, None, {}), Response(1, None, {})],
    "what is said about nothing": [Notification(name, {"request": 9}) for name in ("cancel", "abort", "forget")],
    "what is said about no number": [Notification("forget", {"request": "1"}), Notification("cancel", {})],
}


@pytest.mark.parametrize("name", STRANGE)
async def test_what_comes_too_late_is_dropped(name: str, url: str) -> None:
    async with connect(socket_url(url), proxy=None) as there:
        await greeted(there, name)
        for message in [*STRANGE[name], Request(1, "kept_sessions", {})]:
            await there.send(MESSAGES.encode_body(message))
        assert await heard(there) == Response(1, None, [])


async def test_why_a_callers_tool_ends_its_run_is_cut() -> None:
    class Talkative(Channel):
        async def call(self, method: str, params: dict[str, Any]) -> Any:
            return {"abort": "x" * 1_000_000}

    ask = Request(1, "execute_code", {})
    request = ServedRequest(Talkative(), ask, None, Received(ask, 0, was_free=False))  # type: ignore[arg-type]
    with pytest.raises(ToolAbort) as ended:
        await request.call("call", "t", {}, None)

    assert len(str(ended.value)) == 4_000
