"""/metrics: what a service counts, and who sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from rows import each_row
from toolcell import ToolRegistry
from toolcell.service import ServiceConfig, create_app
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase

pytestmark = pytest.mark.isolation

Samples = dict[tuple[str, ...], float]


def double(number: int) -> int:
    """Return twice the number, for the tests."""
    return 2 * number


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    path = tmp_path_factory.mktemp("tokens") / "tokens.db"
    with closing(TokenDatabase(path)) as store:
        user = (Scope.EXECUTE, Scope.READ)
        made = {
            "a": store.create("a", user).text,
            "b": store.create("b", user).text,
            "runner": store.create("a", (Scope.EXECUTE,)).text,
            "admin": store.create("a", (Scope.ADMIN, Scope.READ, Scope.EXECUTE, Scope.APPROVE)).text,
            "operator": store.create("ops", (Scope.OPERATOR,)).text,
        }
    return path, made


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, tokens: tuple[Path, dict[str, str]]) -> Iterator[TestClient]:
    config = ServiceConfig(state=tmp_path_factory.mktemp("state") / "service", tokens=tokens[0])
    with TestClient(create_app(config, registry=ToolRegistry([double])), base_url="http://localhost") as client:
        yield client


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, *(sample.labels[name] for name in sorted(sample.labels))] = sample.value
    return found


def seen_by(client: TestClient, token: str) -> Samples:
    response = client.get("/metrics", headers={"Authorization": f"Bearer {token}"})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return samples(response.text)


def test_every_route_that_runs_something_is_counted(client: TestClient, tokens: tuple[Path, dict[str, str]]) -> None:
    token = tokens[1]["a"]
    own = {"Authorization": f"Bearer {token}"}
    before = seen_by(client, token)

    for code in ("call_tool('double', number=1)", "1 / 0", "while True: pass"):
        assert client.post("/v1/execute", json={"code": code, "limits": {"wall_s": 0.5}}, headers=own).is_success
    assert client.post("/v1/sessions", json={"name": "one"}, headers=own).is_success
    assert client.post("/v1/sessions/one/execute", json={"code": "1"}, headers=own).is_success
    steps = [{"tool": "double", "args": {"number": 1}}, {"tool": "double", "args": {"number": "x"}}]
    assert client.post("/v1/plan", json={"steps": steps}, headers=own).is_success
    after = seen_by(client, token)

    def added(*key: str) -> float:
        return after.get(key, 0.0) - before.get(key, 0.0)

    assert added("toolcell_runs_total", "ok", "a") == 2
    assert added("toolcell_runs_total", "error", "a") == 1
    assert added("toolcell_runs_total", "timeout", "a") == 1
    assert added("toolcell_limits_hit_total", "wall_s", "a") == 1
    assert added("toolcell_plans_total", "a") == 1
    assert added("toolcell_calls_total", "ok", "a") == 2
    assert added("toolcell_calls_total", "error", "a") == 1
    assert added("toolcell_run_seconds_count", "a") == 4
    assert after["toolcell_sessions_open", "a"] == 1
    assert after["toolcell_requests_running", "a"] == 0


def test_a_tenant_sees_its_own_numbers_and_an_operator_those_of_all(
    client: TestClient, tokens: tuple[Path, dict[str, str]]
) -> None:
    for tenant in ("a", "b"):
        header = {"Authorization": f"Bearer {tokens[1][tenant]}"}
        assert client.post("/v1/execute", json={"code": "1"}, headers=header).is_success

    def tenants(token: str) -> set[str]:
        text = client.get("/metrics", headers={"Authorization": f"Bearer {tokens[1][token]}"}).text
        return {
            sample.labels.get("tenant", sample.name)
            for each in text_string_to_metric_families(text)
            for sample in each.samples
        }

    assert (tenants("a"), tenants("b"), tenants("admin")) == ({"a"}, {"b"}, {"a"})
    host = {"toolcell_host_memory_bytes", "toolcell_host_memory_available_bytes", "toolcell_host_load"}
    assert tenants("operator") >= {"a", "b", *host}


def test_an_operator_has_no_rights_of_a_tenant(client: TestClient, tokens: tuple[Path, dict[str, str]]) -> None:
    header = {"Authorization": f"Bearer {tokens[1]['operator']}"}
    for path in ("/v1/runs", "/v1/suspended", "/v1/sessions", "/v1/tools"):
        assert client.get(path, headers=header).status_code == 403
    assert client.post("/v1/execute", json={"code": "1"}, headers=header).status_code == 403


@each_row(("token", "status"), [("", 401), ("Bearer wrong", 401), ("runner", 403)])
def test_metrics_need_the_scope_read(
    client: TestClient, tokens: tuple[Path, dict[str, str]], token: str, status: int
) -> None:
    header = {"Authorization": f"Bearer {tokens[1].get(token, token)}"} if token else {}
    assert client.get("/metrics", headers=header).status_code == status


def test_a_failing_on_end_costs_no_result(caplog: pytest.LogCaptureFixture) -> None:
    from toolcell import SyncRuntime

    with SyncRuntime() as runtime:
        heard: list[object] = []

        def fail(result: object) -> None:
            heard.append(result)
            raise ValueError("mine")

        runtime.runtime.on_end = fail
        assert runtime.execute_code("41 + 1").value == 42
    assert len(heard) == 1
    assert "Runtime.on_end failed" in caplog.text
