"""Replays of recorded runs over the service, and routes that take the id of a run: who may, how much, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from service.client_serving import serving
from service_host import client_of, registry
from toolcell import Runtime
from toolcell.config import Limits
from toolcell.errors import UsageError
from toolcell.quotas import Quota
from toolcell.service import Client, ServiceConfig, TenantConfig, create_app
from toolcell.service.app import ENDPOINTS
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase
from wheels import make_wheel

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

Ask = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def tokens(folder: Path) -> Iterator[Callable[..., str]]:
    with closing(TokenDatabase(folder / "tokens.db")) as store:
        store.list()  # makes the file
        yield lambda *scopes, name="": store.create("acme", scopes, name=name).text


def config(folder: Path, **tenant: Any) -> ServiceConfig:
    return ServiceConfig(
        state=folder / "state", tokens=folder / "tokens.db", defaults=TenantConfig(record=folder / "runs", **tenant)
    )


def asking(client: TestClient, token: str) -> Ask:
    return lambda method, path, **given: client.request(
        method, path, headers={"Authorization": f"Bearer {token}"}, **given
    )


def test_a_token_that_may_not_read_runs_replays_and_mends_none(folder: Path, tokens: Callable[..., str]) -> None:
    with client_of(create_app(config(folder), registry=registry())) as client:
        ask, runner = asking(client, tokens(*Scope)), asking(client, tokens(Scope.EXECUTE))
        sent = {"code": "set_result([word, call_tool('double', number=20)])", "inputs": {"word": "abc"}}
        run = ask("POST", "/v1/execute", json=sent).json()["run_id"]

        stolen = {"code": "print(word)\nset_result([word, call_tool('double', number=20)])"}
        for path, body in ((f"/v1/runs/{run}/replay", stolen), ("/v1/execute", {**stolen, "repairs": run})):
            answer = runner("POST", path, json=body)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), path
            assert "abc" not in answer.text
        assert ask("POST", f"/v1/runs/{run}/replay", json={}).json()["ok"]
        assert ask("POST", "/v1/execute", json={"code": sent["code"], "inputs": {"word": 1}, "repairs": run}).json()[
            "repair"
        ]["reused"]


async def test_nor_does_one_over_a_websocket(folder: Path, tokens: Callable[..., str]) -> None:
    token = tokens(Scope.EXECUTE)
    settings = {"tokens": folder / "tokens.db"}
    async with serving(folder / "state", registry(), **settings) as (url, _), Client(url, token=token) as client:
        run = await client.execute_code("1")
        with pytest.raises(UsageError, match="needs the scope read"):
            await client.execute_code("2", repairs=run.run_id)


BY_ID = [each for each in ENDPOINTS if any(f"{{{name}}}" in each.path for name in ("run_id", "draft_id", "journal_id"))]


def test_the_beginning_of_an_id_is_no_id(folder: Path, tokens: Callable[..., str]) -> None:
    with client_of(create_app(config(folder), registry=registry())) as client:
        ask = asking(client, tokens(*Scope))
        run = ask("POST", "/v1/execute", json={"code": "1"}).json()
        waits = ask("POST", "/v1/execute", json={"code": "call_tool('pay', amount=1)"}).json()
        draft = ask("POST", "/v1/execute", json={"code": "call_tool('pay', amount=1)", "dry_run": True}).json()
        for endpoint in BY_ID:
            whole = draft["draft_id"] if "{draft_id}" in endpoint.path else run["run_id"]
            whole = waits["run_id"] if "/suspended/" in endpoint.path else whole
            for ident in (whole[:1], whole[:16] if len(whole) > 16 else whole[:8], whole[:-1], "last"):
                path = endpoint.path
                for name in ("run_id", "draft_id", "journal_id"):
                    path = path.replace(f"{{{name}}}", ident)
                body = {"json": {}} if endpoint.body is not None else {}
                assert ask(endpoint.method, path, **body).status_code in (404, 409), path


def test_a_replay_counts_against_the_quota_and_is_recorded(folder: Path, tokens: Callable[..., str]) -> None:
    tenant = {"quota": Quota(runs=2)}
    with client_of(create_app(config(folder, **tenant), registry=registry())) as client:
        ask = asking(client, tokens(*Scope, name="ada"))
        run = ask("POST", "/v1/execute", json={"code": "set_result(call_tool('double', number=20))"}).json()["run_id"]

        assert ask("POST", f"/v1/runs/{run}/replay", json={}).json()["ok"]
        assert ask("POST", f"/v1/runs/{run}/replay", json={}).status_code == 429
        found = ask("GET", "/v1/runs").json()["runs"]
        again = next(each for each in found if each["id"] != run)
        assert (len(found), again["user"], again["outcome"]) == (2, "ada", "ok")
        record = ask("GET", f"/v1/runs/{again['id']}").json()
        assert record["start"]["who"]["channel"] == "replay"
        assert record["start"]["who"]["chat"] == run
        assert 'toolcell_runs_total{outcome="ok",tenant="acme"} 2.0' in ask("GET", "/metrics").text


def test_a_replay_has_no_more_than_its_tenant(folder: Path, tokens: Callable[..., str]) -> None:
    token = tokens(*Scope)
    with client_of(create_app(config(folder, limits=Limits(wall_s=60)), registry=registry())) as client:
        run = asking(client, token)("POST", "/v1/execute", json={"code": "1"}).json()["run_id"]
    with client_of(create_app(config(folder, limits=Limits(wall_s=1, tool_calls=0)), registry=registry())) as client:
        ask = asking(client, token)
        body = {"code": "while True: pass"}
        assert ask("POST", f"/v1/runs/{run}/replay", json=body).json()["outcome"] == "timeout"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/execute", {"code": "1"}),
        ("/v1/plan", {"steps": [{"tool": "double", "args": {"number": 1}}]}),
        ("/v1/sessions/one/execute", {"code": "1"}),
        ("/v1/runs/{}/replay", {}),
    ],
)
def test_no_route_runs_anything_past_the_quota(
    folder: Path, tokens: Callable[..., str], path: str, body: dict[str, object]
) -> None:
    with client_of(create_app(config(folder, quota=Quota(runs=1)), registry=registry())) as client:
        ask = asking(client, tokens(*Scope))
        run = ask("POST", "/v1/execute", json={"code": "1"}).json()["run_id"]
        assert ask("POST", "/v1/sessions", json={"name": "one"}).status_code == 201
        answer: httpx.Response = ask("POST", path.format(run), json=body)
        assert (answer.status_code, answer.json()["code"]) == (429, "quota_exceeded"), answer.text


@pytest.mark.slow
def test_no_tenant_or_model_is_told_where_a_wheel_of_the_service_is(
    folder: Path, tokens: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder / "the-operators-folder"
    place.mkdir()
    wheel = make_wheel(place, "tinywheel", "2.0", {"tinywheel/__init__.py": "answer = 42\n"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with client_of(create_app(config(folder, packages=(str(wheel),)), registry=registry())) as client:
        ask = asking(client, tokens(*Scope))
        ran = ask("POST", "/v1/execute", json={"code": "import tinywheel; tinywheel.answer"})
        assert ran.json()["value"] == 42
        run = ran.json()["run_id"]
        told = [ran, *(ask("GET", path) for path in ("/v1/runs", f"/v1/runs/{run}", "/v1/tools", f"/ui/runs/{run}"))]
        told.append(ask("POST", f"/v1/runs/{run}/replay", json={}))
        assert told[2].json()["isolation"]["environment"]["packages"] == ["tinywheel 2.0"]
        assert told[-1].status_code == 200, told[-1].text
    assert not [each.url for each in told if place.name in each.text]


async def test_a_model_is_told_the_name_of_a_wheel_and_not_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    wheel = make_wheel(folder, "tinywheel", "2.0", {"tinywheel/__init__.py": "answer = 42\n"})
    tools, runtime = registry(), Runtime(packages=[str(wheel)])
    tools.enable_code_execution(runtime)
    for _ in ("before it is open", "while it is open"):
        described = str(tools.schemas())
        assert "tinywheel 2.0" in described and str(folder) not in described
        if not runtime.is_open:
            await runtime.open()
    await runtime.close()
