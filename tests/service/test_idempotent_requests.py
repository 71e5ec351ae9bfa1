"""Idempotency keys over HTTP: sent twice, carried out once; and what becomes of it when client or server go away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from toolcell import SandboxUnavailable, ToolRegistry
from toolcell.audit import AuditLog, RecordConfig
from toolcell.journal.database import REQUEST, JournalDatabase, OpenJournal
from toolcell.sandbox.pool import Pool
from toolcell.service import ServiceConfig, create_app
from toolcell.service.config import TenantConfig
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


class Ledger:
    """Tools that note that they were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.started, self.go_on = threading.Semaphore(0), threading.Event()
        self.go_on.set()

    def note(self, text: str) -> int:
        """Note a text in the ledger of the test."""
        self.calls.append(text)
        self.started.release()
        assert self.go_on.wait(60)
        return len(self.calls)


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, ledger: Ledger) -> Iterator[TestClient]:
    defaults = TenantConfig(concurrent_runs=2, queued_runs=0)
    config = ServiceConfig(state=tmp_path_factory.mktemp("state") / "service", defaults=defaults)
    app = create_app(config, registry=ToolRegistry([ledger.note]))
    with TestClient(app, base_url="http://localhost", client=("127.0.0.1", 50000)) as client:
        yield client


@pytest.fixture(autouse=True)
def _fresh(ledger: Ledger) -> None:
    ledger.calls.clear()
    while ledger.started.acquire(blocking=False):
        pass
    ledger.go_on.set()


def send(client: TestClient, key: str, code: str = "call_tool('note', text='x')", **headers: str) -> httpx.Response:
    return client.post("/v1/execute", json={"code": code}, headers={"Idempotency-Key": key, **headers})


def test_a_request_that_is_sent_again_gets_the_same_answer_and_calls_nothing(
    client: TestClient, ledger: Ledger
) -> None:
    first, second = send(client, "same"), send(client, "same")

    assert (first.status_code, second.status_code) == (200, 200), first.text
    assert first.content == second.content
    assert "Idempotency-Replayed" not in first.headers
    assert second.headers["Idempotency-Replayed"] == "true"
    assert second.headers["Content-Type"] == first.headers["Content-Type"]
    assert ledger.calls == ["x"]


def test_a_key_with_another_body_or_path_is_refused(client: TestClient, ledger: Ledger) -> None:
    send(client, "once")
    other_body = send(client, "once", code="1")
    headers = {"Idempotency-Key": "once"}
    other_path = client.post("/v1/plan", json={"steps": [{"tool": "note", "args": {"text": "y"}}]}, headers=headers)

    for each in (other_body, other_path):
        assert (each.status_code, each.json()["code"]) == (422, "key_reused")
    assert ledger.calls == ["x"]


def test_a_plan_is_carried_out_once(client: TestClient, ledger: Ledger) -> None:
    given, headers = {"steps": [{"tool": "note", "args": {"text": "y"}}]}, {"Idempotency-Key": "plan"}
    answers = [client.post("/v1/plan", json=given, headers=headers) for _ in range(2)]

    assert answers[0].status_code == 200, answers[0].text
    assert answers[0].content == answers[1].content
    assert ledger.calls == ["y"]


def test_a_script_of_a_session_is_carried_out_once(client: TestClient) -> None:
    assert client.post("/v1/sessions", json={"name": "counted"}).status_code == 201
    headers = {"Idempotency-Key": "session"}
    given = {"code": "n = globals().get('n', 0) + 1\nn"}
    url = "/v1/sessions/counted/execute"
    answers = [client.post(url, json=given, headers=headers).json()["value"] for _ in range(3)]

    assert answers == [1, 1, 1]
    assert client.post(url, json={"code": "n"}).json()["value"] == 1


def test_while_it_is_under_way_others_are_told_when_to_ask_again(client: TestClient, ledger: Ledger) -> None:
    ledger.go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(send, client, "slow")
        assert ledger.started.acquire(timeout=60)
        told = send(client, "slow")
        ledger.go_on.set()
        answers = [first.result(60), send(client, "slow")]

    assert (told.status_code, told.json()["code"], told.headers["Retry-After"]) == (409, "in_progress", "1")
    assert told.json()["run_id"] == answers[0].json()["run_id"]
    assert answers[0].content == answers[1].content
    assert ledger.calls == ["x"]


def test_what_did_not_begin_can_be_sent_again_with_its_key(client: TestClient, ledger: Ledger) -> None:
    ledger.go_on.clear()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(send, client, f"busy-{number}") for number in range(2)]
        for _ in running:
            assert ledger.started.acquire(timeout=60)
        refused = send(client, "later")
        ledger.go_on.set()
        assert [each.result(60).status_code for each in running] == [200, 200]

    assert (refused.status_code, refused.json()["code"]) == (503, "busy")
    assert int(refused.headers["Retry-After"]) >= 1
    again = send(client, "later")
    assert again.status_code == 200 and "Idempotency-Replayed" not in again.headers
    assert len(ledger.calls) == 3


def test_what_found_no_sandbox_can_be_sent_again_with_its_key(
    client: TestClient, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acquire(_: Any) -> Any:
        raise SandboxUnavailable("no room on this machine")

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "acquire", acquire)
        refused = [send(client, "no-room", "1") for _ in range(2)]
    again = send(client, "no-room", code="1")

    assert [(each.status_code, each.json()["code"]) for each in refused] == [(503, "sandbox_unavailable")] * 2
    assert again.status_code == 200 and "Idempotency-Replayed" not in again.headers, again.text


def test_a_body_that_is_refused_uses_up_no_key(client: TestClient) -> None:
    headers = {"Idempotency-Key": "typo"}
    assert client.post("/v1/execute", json={"cod": "1"}, headers=headers).status_code == 422
    unknown = client.post("/v1/execute", json={"code": "1", "tools": ["nothing"]}, headers=headers)
    assert (unknown.status_code, unknown.json()["code"]) == (422, "unknown_tool")
    assert send(client, "typo", code="1").status_code == 200


@pytest.mark.parametrize("key", ["", " ", "a b", "x" * 256, "\x7f"], ids=["empty", "blank", "space", "long", "control"])
def test_a_key_that_is_none_is_refused(client: TestClient, key: str) -> None:
    response = send(client, key, code="1")
    assert (response.status_code, response.json()["code"]) == (400, "invalid_key")


def test_two_keys_and_keys_where_they_mean_nothing_are_refused(client: TestClient) -> None:
    two: Any = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    answers = [
        client.post("/v1/execute", json={"code": "1"}, headers=two),
        client.post("/v1/sessions", json={"name": "s"}, headers={"Idempotency-Key": "a"}),
        send(client, "events", Accept="text/event-stream"),
    ]
    assert [(each.status_code, each.json()["code"]) for each in answers] == [(400, "invalid_key")] * 3


def test_a_key_may_stand_in_quotes(client: TestClient) -> None:
    assert send(client, '"quoted"', code="1").content == send(client, "quoted", code="1").content


def test_an_answer_is_kept_for_those_who_have_the_same_rights(tmp_path: Path, ledger: Ledger) -> None:
    tokens = TokenDatabase(tmp_path / "tokens.db")
    every = tokens.create("default", [Scope.EXECUTE, Scope.READ]).text
    some = tokens.create("default", [Scope.EXECUTE]).text
    tokens.close()
    config = ServiceConfig(
        state=tmp_path / "service", tokens=tmp_path / "tokens.db", tenants={"default": TenantConfig()}
    )
    app = create_app(config, registry=ToolRegistry([ledger.note]))
    with TestClient(app, base_url="http://localhost", client=("127.0.0.1", 50000)) as client:
        first, again, other = (
            send(client, "rights", Authorization=f"Bearer {secret}") for secret in (every, every, some)
        )

    assert (first.status_code, again.content) == (200, first.content), first.text
    assert other.status_code == 422, other.text
    assert len(ledger.calls) == 1


def test_a_key_that_another_process_has_just_taken_names_no_run(tmp_path: Path, ledger: Ledger) -> None:
    config = ServiceConfig(state=tmp_path / "service")
    app = create_app(config, registry=ToolRegistry([ledger.note]))
    with TestClient(app, base_url="http://localhost", client=("127.0.0.1", 50000)) as client:
        send(client, "other")
        record = config.tenant("default").record
        with (
            AuditLog(record) as log,
            closing(JournalDatabase(log)) as database,
            closing(OpenJournal(database, REQUEST, "default k")),
        ):
            told = send(client, "k")
    assert (told.status_code, told.json()["code"]) == (409, "in_progress")
    assert "run_id" not in told.json()


def test_a_tenant_whose_record_keeps_nothing_runs_a_request_once(tmp_path: Path, ledger: Ledger) -> None:
    defaults = TenantConfig(record_config=RecordConfig(continue_bytes=0))
    app = create_app(ServiceConfig(state=tmp_path / "s", defaults=defaults), registry=ToolRegistry([ledger.note]))
    with TestClient(app, base_url="http://localhost", client=("127.0.0.1", 50000)) as client:
        assert client.post("/v1/execute", json={"code": "1"}).status_code == 200
        first, second = send(client, "once"), send(client, "once")
    assert (first.status_code, second.status_code, second.json()["code"]) == (200, 409, "answer_not_kept")
    assert ledger.calls == ["x"]


def test_tenants_with_one_record_never_get_the_answer_of_another(tmp_path: Path, ledger: Ledger) -> None:
    tokens = TokenDatabase(tmp_path / "tokens.db")
    secrets = [tokens.create(name, [Scope.EXECUTE]).text for name in ("acme", "bolt")]
    tokens.close()
    tenants = {name: TenantConfig(record=tmp_path / "one.db") for name in ("acme", "bolt")}
    config = ServiceConfig(state=tmp_path / "service", tokens=tmp_path / "tokens.db", tenants=tenants)
    app = create_app(config, registry=ToolRegistry([ledger.note]))
    with TestClient(app, base_url="http://localhost", client=("127.0.0.1", 50000)) as client:
        answers = [send(client, "k", Authorization=f"Bearer {secret}") for secret in secrets]
    assert [each.json()["value"] for each in answers] == [1, 2]
