"""What is open for long ends when its token is revoked: on every route, and with nothing more of the run told."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from toolcell import ToolRegistry
from toolcell.errors import ServiceError, UsageError
from toolcell.service import Client
from toolcell.service.principal import Scope
from toolcell.service.service import Service
from toolcell.service.tokens import IssuedToken, TokenDatabase

from .client_serving import serving, until

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

ENDLESS = "import time\nfor n in range(10**9): print('secret', n, flush=True); time.sleep(0.01)"
EVENTS = {"Accept": "text/event-stream"}


class Shop:
    """A service with a tenant that has two tokens."""

    def __init__(self, url: str, service: Service, store: TokenDatabase, *tokens: IssuedToken) -> None:
        self.url, self.service, self._store = url, service, store
        self.ended, self.other = tokens

    def revoke(self) -> None:
        self._store.revoke(self.ended.record.id)

    def http(self, token: IssuedToken, **headers: str) -> httpx.AsyncClient:
        headers["Authorization"] = f"Bearer {token.text}"
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    store = TokenDatabase(tmp_path / "tokens")
    tokens = [store.create("shop", list(Scope), name=name) for name in ("ended", "other")]
    async with serving(tmp_path / "state", tokens=store.path) as (url, service):
        yield Shop(url, service, store, *tokens)


async def followed(answer: httpx.Response, told: list[str]) -> str:
    async for text in answer.aiter_text():
        told += [text]
    return "".join(told)


@pytest.mark.parametrize("is_session", [False, True])
async def test_a_stream_of_events_ends_with_why_and_others_go_on(shop: Shop, is_session: bool) -> None:
    path = "/v1/sessions/one/execute" if is_session else "/v1/execute"
    async with shop.http(shop.ended, **EVENTS) as one, shop.http(shop.other, **EVENTS) as two:
        if is_session:
            await one.post("/v1/sessions", json={"name": "one"}, headers={"Accept": "application/json"})
        async with (
            one.stream("POST", path, json={"code": ENDLESS}) as ended,
            two.stream("POST", "/v1/execute", json={"code": ENDLESS}) as other,
        ):
            told: list[str] = []
            others: list[str] = []
            goes_on = asyncio.create_task(followed(other, others))
            reading = asyncio.create_task(followed(ended, told))
            await until(lambda: "secret" in "".join(told) and "secret" in "".join(others))
            shop.revoke()
            text = await reading
            last = text.rstrip("\n").rpartition("\n\n")[2]
            assert "event: problem" in last and '"status": 401' in last and "revoked" in last
            assert "event: end" not in text
            await until(lambda: len(shop.service.runs) == 1)
            was = len(others)
            await until(lambda: len(others) > was)
            goes_on.cancel()


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "once"}], ids=["plain", "with a key"])
async def test_an_answer_that_is_waited_for_says_why_and_nothing_of_the_run(shop: Shop, headers: Any) -> None:
    async with shop.http(shop.ended, **headers) as client:
        waiting = asyncio.create_task(client.post("/v1/execute", json={"code": ENDLESS}))
        await until(lambda: len(shop.service.runs) == 1)
        shop.revoke()
        answer = await waiting
    assert answer.status_code == 401 and "revoked" in answer.json()["detail"] and "secret" not in answer.text
    assert len(shop.service.runs) == 0


async def test_what_a_client_has_under_way_ends_and_it_does_not_come_back(shop: Shop) -> None:
    registry, ended = ToolRegistry(), asyncio.Event()
    began = asyncio.Event()

    @registry.tool
    async def wait() -> None:
        """Wait until this is cancelled."""
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with (
        Client(shop.url, token=shop.ended.text, registry=registry) as client,
        Client(shop.url, token=shop.other.text) as neighbour,
    ):
        session = client.session()
        await session.open()
        goes_on = asyncio.create_task(neighbour.execute_code(ENDLESS))
        running = asyncio.create_task(client.execute_code("call_tool('wait')"))
        await began.wait()
        shop.revoke()
        with pytest.raises(ServiceError, match="revoked") as caught:
            await running
        assert caught.value.may_have_begun and [call.name for call in caught.value.calls] == ["wait"]
        assert ended.is_set()
        await until(lambda: len(shop.service.callers) == 1 and len(shop.service.runs) == 1)
        tenant = await shop.service.tenants.get("shop")
        await until(lambda: tenant.sessions.open_count == 0)
        with pytest.raises(UsageError, match="does not let this client in"):
            await client.execute_code("1")
        goes_on.cancel()
        await asyncio.gather(goes_on, return_exceptions=True)


async def test_a_store_that_cannot_be_read_ends_nothing_and_stops_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    find = TokenDatabase.find

    def failing(self: TokenDatabase, text: str) -> Any:
        asked.append(text)
        raise OSError("the disk is gone")

    async with shop.http(shop.ended) as client:
        waiting = asyncio.create_task(client.post("/v1/execute", json={"code": ENDLESS}))
        await until(lambda: len(shop.service.runs) == 1)
        monkeypatch.setattr(TokenDatabase, "find", failing)
        await until(lambda: len(asked) > 1)
        assert not waiting.done() and len(shop.service.runs) == 1
        monkeypatch.setattr(TokenDatabase, "find", find)
        shop.revoke()
        assert (await waiting).status_code == 401


@pytest.mark.slow
async def test_a_client_that_is_away_is_not_waited_for(shop: Shop) -> None:
    async with Client(shop.url, token=shop.ended.text) as client:
        running = asyncio.create_task(client.execute_code(ENDLESS))
        await until(lambda: len(shop.service.runs) == 1)
        (caller,) = shop.service.callers
        client._link._headers["Authorization"] = "Bearer nothing"  # so that it does not come back
        assert caller.channel.connection is not None
        caller.channel.connection.end(1011, "lost")
        await until(lambda: caller.leaving is not None)
        shop.revoke()
        await until(lambda: len(shop.service.callers) == len(shop.service.runs) == 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_run_on_a_page_ends_and_so_does_each_page_that_follows_it(shop: Shop) -> None:
    async with shop.http(shop.ended) as api, httpx.AsyncClient(base_url=shop.url, timeout=60) as browser:
        await api.post("/v1/sessions", json={"name": "one"})
        await log_in(browser, shop.ended.text)
        csrf = csrf_of(await browser.get("/sessions/one"))
        entry = await browser.post("/sessions/one/run", data={"code": ENDLESS, "csrf": csrf})
        path = "/sessions/one/runs/" + entry.text.partition("/runs/")[2].partition("/events")[0] + "/events"
        async with browser.stream("GET", path) as events:
            told: list[str] = []
            reading = asyncio.create_task(followed(events, told))
            await until(lambda: "secret" in "".join(told))
            shop.revoke()
            await reading
        await until(lambda: len(shop.service.runs) == 0)


async def log_in(browser: httpx.AsyncClient, token: str) -> None:
    answer = await browser.post("/login", data={"token": token, "csrf": csrf_of(await browser.get("/login"))})
    assert answer.status_code == 303, answer.text


def csrf_of(page: httpx.Response) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', page.text)
    assert found, page.text
    return found[1]
