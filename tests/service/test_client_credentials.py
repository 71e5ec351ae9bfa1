"""A client's credential and its tenant's bounds hold while it is connected, not only when it connects."""

from __future__ import annotations

import logging
from pathlib import Path

import httpx
import pytest
import websockets

from toolcell.errors import ToolcellError, UsageError
from toolcell.service import Client
from toolcell.service.config import TenantConfig
from toolcell.service.principal import Scope
from toolcell.service.socket.failures import failed
from toolcell.service.tokens import TokenDatabase

from .client_serving import serving

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]


async def test_a_token_that_is_revoked_ends_its_client_at_the_next_request(tmp_path: Path) -> None:
    store, elsewhere = TokenDatabase(tmp_path / "tokens"), TokenDatabase(tmp_path / "tokens")
    token, other = (store.create("a", [Scope.EXECUTE]) for _ in range(2))
    async with (
        serving(tmp_path / "state", tokens=store.path) as (url, _),
        Client(url, token=token.text) as client,
        Client(url, token=other.text) as neighbour,
    ):
        async with client.session() as session:
            assert (await client.execute_code("1")).value == 1
            assert (await session.execute_code("2")).value == 2
            elsewhere.revoke(token.record.id)

            for work in (
                lambda: client.execute_code("1"),
                lambda: session.execute_code("2"),
                lambda: client.execute_plan([{"tool": "x", "args": {}}]),
                client.kept_sessions,
                client.suspended_runs,
            ):
                with pytest.raises(ToolcellError, match="revoked"):
                    await work()
        assert (await neighbour.execute_code("3")).value == 3


async def test_a_client_sends_nothing_through_a_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (url, _):
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "")
        async with Client(url, connect_s=5) as client:
            assert (await client.execute_code("1")).value == 1


async def test_sessions_of_all_clients_and_of_http_count_together(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, defaults=TenantConfig(sessions=2)) as (url, _),
        Client(url) as one,
        Client(url) as two,
        httpx.AsyncClient(base_url=url) as web,
    ):
        async with one.session(), two.session():
            for client in (one, two):
                with pytest.raises(ToolcellError, match="may have 2"):
                    async with client.session():
                        pass
            assert (await web.post("/v1/sessions", json={})).status_code == 429
        assert (await web.post("/v1/sessions", json={"name": "web"})).status_code == 201
        async with two.session() as session:
            with pytest.raises(ToolcellError, match="may have 2"):
                await session.fork("copy")
            with pytest.raises(ToolcellError, match="may have 2"):
                async with one.session():
                    pass
        async with one.session():
            pass


async def test_no_message_names_a_folder_of_the_service(tmp_path: Path) -> None:
    twice = failed(UsageError(f"{tmp_path}/a is not {tmp_path}/b"), [tmp_path])
    assert twice["message"] == ".../a is not .../b"
    async with serving(tmp_path / "state") as (url, _), Client(url) as client:
        for work in (
            lambda: client.resume("unknown", {}),
            lambda: client.resume("rs1_" + "A" * 60, {}),
            lambda: client.commit("0" * 32),
        ):
            with pytest.raises(ToolcellError) as refused:
                await work()
            assert str(tmp_path) not in str(refused.value)


async def test_a_refused_connection_is_no_error_in_the_log_of_the_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path / "state", log_level="error") as (url, _):
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)  # made anew by each server's configuration
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(f"ws{url.removeprefix('http')}/v1/connect", origin="http://elsewhere.example")
        assert refused.value.response.status_code == 403
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert not [each for each in caplog.records if "handshake" in each.message]
