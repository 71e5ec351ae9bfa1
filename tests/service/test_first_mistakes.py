"""Mistakes that a newcomer makes with the service: each is found early, and its message says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rows import each_row
from toolcell.audit.databases import database_of
from toolcell.errors import BadInput, ServiceUnavailable, UsageError
from toolcell.service import Client, ServiceConfig, SyncClient, TenantConfig
from toolcell.service.service import Service
from toolcell.support.asgi import listening

COUNTED = """
from pathlib import Path

with Path(__file__).with_suffix(".loads").open("a") as ledger:
    ledger.write("x")


def price(item: str) -> float:
    '''Return the price of an item in euros.'''
    return 3.2
"""


@pytest.mark.parametrize("tenant", ["default", "acme"])
@pytest.mark.anyio
async def test_a_service_whose_tools_cannot_be_loaded_does_not_start(tmp_path: Path, tenant: str) -> None:
    wrong = TenantConfig(tools=(str(tmp_path / "tols.py"),))
    config = {"defaults": wrong} if tenant == "default" else {"tenants": {tenant: wrong}}
    with pytest.raises(UsageError, match=r"tols\.py: no such file"):
        await Service(ServiceConfig(state=tmp_path / "state", **config)).open()


@pytest.mark.isolation
@pytest.mark.anyio
async def test_tools_that_were_loaded_at_the_start_are_not_loaded_again(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(COUNTED)
    config = ServiceConfig(state=tmp_path / "state", defaults=TenantConfig(tools=(str(tmp_path / "tools.py"),)))
    async with Service(config) as service:
        tenant = await service.tenants.get("default")
        assert [each.name for each in tenant.registry.definitions()] == ["price"]
    assert (tmp_path / "tools.loads").read_text() == "x"


@each_row(
    ("method", "path", "status", "says"),
    [("POST", "/v1/exec", 404, "GET /v1/openapi.json"), ("GET", "/v1/execute", 405, "header Allow")],
)
def test_a_route_that_is_not_there_is_named(client: TestClient, method: str, path: str, status: int, says: str) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert f"{method} {path}" in answer.json()["detail"] and says in answer.json()["detail"]


@pytest.mark.anyio
async def test_a_blocking_client_is_called_by_its_own_name() -> None:
    client = SyncClient("http://127.0.0.1:9")
    with pytest.raises(UsageError, match=r"this SyncClient is not open; use it as `with SyncClient"):
        client.execute_code("1")
    with pytest.raises(UsageError, match=r"`with SyncClient\(...\)`; for `async with` there is Client"):
        await client.__aenter__()


def test_tools_that_are_given_to_a_client_are_its_registry() -> None:
    with pytest.raises(UsageError, match=r"no argument 'tools'; did you mean registry\?"):
        Client("http://127.0.0.1:9", tools=[])  # type: ignore[call-arg]


def test_a_service_that_does_not_run_is_missed_in_words_that_help() -> None:
    with pytest.raises(ServiceUnavailable, match="does `toolcell serve` run there"):
        SyncClient("http://127.0.0.1:9", connect_s=2).open()


def test_a_port_that_is_taken_is_named_with_a_way_out() -> None:
    with listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port}: Address already in use; choose another port"):
            listening("127.0.0.1", port)


def test_the_folder_of_a_service_names_the_record_of_a_tenant(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"there is no record {tmp_path}; it is a folder$"):
        database_of(tmp_path).id()
    (tmp_path / "acme.db").touch()
    with pytest.raises(BadInput, match=rf"a service keeps one for each tenant: take {tmp_path}/acme.db$"):
        database_of(tmp_path).id()
