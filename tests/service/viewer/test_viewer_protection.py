"""Who is let in to the viewer, what every answer says, and which forms are obeyed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from audit.ledger import Ledger
from toolcell.service.log_reader import LogReader
from toolcell.service.viewer.app import ROUTES, create_viewer
from toolcell.service.viewer.protection import HEADERS, MAX_FORM_BYTES
from toolcell.service.viewer.visitors import OneLog

pytestmark = pytest.mark.quick

PATHS = ("/", "/runs", "/runs/older", "/tools", "/verify", "/static/viewer.css", "/nothing", "/runs/0123456789ab/1")
FORMS = [route.path for route in ROUTES if isinstance(route, Route) and "POST" in (route.methods or ())]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[OneLog]:
    ledger = Ledger(tmp_path / "runs")
    ledger.fill(1)
    log = LogReader(ledger.path, [ledger.key])
    yield OneLog(log, 80)
    log.close_now()


@pytest.fixture
def stranger(host: OneLog) -> Iterator[TestClient]:
    with TestClient(create_viewer(host, ["testserver"]), follow_redirects=False) as client:
        yield client


@pytest.mark.anyio
async def test_answers_are_kept_until_the_log_changes_and_never_many(tmp_path: Path) -> None:
    ledger, asked = Ledger(tmp_path / "runs"), list[int]()
    await anyio.to_thread.run_sync(ledger.fill, 1)
    log = LogReader(ledger.path, [ledger.key], is_patient=False)

    async def ask(key: int) -> None:
        await log.read_kept(key, lambda index: asked.append(key))

    for key in (0, *range(65), 0, 64):
        await ask(key)
    assert asked == [*range(65), 0]
    await anyio.to_thread.run_sync(ledger.fill, 1)
    await ask(0)
    assert asked[-2:] == [0, 0]
    await log.close()


@pytest.fixture
def client(stranger: TestClient, host: OneLog) -> TestClient:
    stranger.get("/", params={"token": host.token})
    return stranger


def token_of(client: TestClient) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', client.get("/verify").text)
    assert found
    return found[1]


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_carries_the_headers(client: TestClient, path: str) -> None:
    answer = client.get(path)

    assert {name: answer.headers.get(name) for name in HEADERS} == dict(HEADERS)
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_the_answer_to_an_error_of_ours_carries_the_headers_too(host: OneLog, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: object) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr(host, "log_of", fail)
    with TestClient(create_viewer(host, ["testserver"]), raise_server_exceptions=False) as client:
        client.get("/static/viewer.css", params={"token": host.token})
        client.cookies.set("toolcell-viewer-80", host.token)
        answer = client.get("/runs")
    assert answer.status_code == 500
    assert "planned" not in answer.text
    assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize("path", [path for path in PATHS if not path.startswith(("/static", "/nothing"))])
def test_without_the_token_nothing_is_shown(stranger: TestClient, path: str) -> None:
    for address in (path, f"{path}?token=", f"{path}?token=wrong", f"{path}?token=%ff%00"):
        answer = stranger.get(address)
        assert answer.status_code == 403
        assert "toolcell ui" in answer.text
        assert "set-cookie" not in answer.headers


def test_the_token_of_the_address_becomes_a_cookie_that_scripts_and_other_sites_do_not_see(
    stranger: TestClient, host: OneLog
) -> None:
    answer = stranger.get("/runs", params={"token": host.token})

    assert (answer.status_code, answer.headers["location"]) == (303, "/runs")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert stranger.get("/runs").status_code == 200


def test_the_redirect_after_the_token_leads_nowhere_else(stranger: TestClient, host: OneLog) -> None:
    for path in ("//evil.example/runs", "///evil.example", "/\\evil.example"):
        answer = stranger.get(f"http://testserver{path}", params={"token": host.token})
        assert not answer.headers.get("location", "/").startswith(("//", "/\\", "http")), path


@pytest.mark.parametrize(
    "name", ["evil.example", "127.0.0.1.evil.example", "", "testserver:81", "testserver@evil.example"]
)
def test_a_request_for_another_name_is_refused(client: TestClient, name: str) -> None:
    for path in PATHS:
        assert client.get(path, headers={"host": name}).status_code == 421


def filled(path: str) -> str:
    return path.replace("{chain}", "0123456789ab").replace("{seq:int}", "1")


@pytest.mark.parametrize("path", FORMS)
def test_a_form_without_the_right_token_or_from_elsewhere_is_refused(client: TestClient, path: str) -> None:
    address, token = filled(path), token_of(client)
    good = {"csrf": token}
    attempts = [
        ({"a": "b"}, {}),
        ({"csrf": ""}, {}),
        ({"csrf": token[:-1]}, {}),
        ({"csrf": "0" * 64}, {}),
        (good, {"x-csrf-token": "wrong"}),
        (good, {"origin": "http://evil.example"}),
        (good, {"origin": "http://testserver.evil.example"}),
        (good, {"origin": "http://eviltestserver"}),
        (good, {"sec-fetch-site": "cross-site"}),
        (good, {"sec-fetch-site": "same-site"}),
        (good, {"sec-fetch-site": "none"}),
    ]
    for fields, headers in attempts:
        answer = client.post(address, data=fields, headers=headers)
        assert answer.status_code == 403, (fields, headers)
    for allowed in ({}, {"origin": "http://testserver"}, {"origin": "null", "sec-fetch-site": "same-origin"}):
        assert client.post(address, data=good, headers=allowed).status_code != 403
    assert client.post(address, headers={"x-csrf-token": token}, data={"a": "b"}).status_code != 403


@pytest.mark.parametrize("path", FORMS)
def test_a_form_is_obeyed_by_no_other_method_and_for_no_stranger(
    client: TestClient, stranger: TestClient, path: str
) -> None:
    token = token_of(client)
    stranger.cookies.clear()
    assert stranger.post(filled(path), data={"csrf": token}).status_code == 403
    for method in ("PUT", "DELETE", "PATCH"):
        assert client.request(method, filled(path), data={"csrf": token}).status_code == 405


def test_what_is_no_form_or_too_large_is_refused(client: TestClient) -> None:
    token = token_of(client)
    as_json = client.post("/verify", json={"csrf": token})
    assert as_json.status_code == 415
    plain = client.post("/verify", content=f"csrf={token}", headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    large = client.post("/verify", data={"csrf": token, "x": "a" * MAX_FORM_BYTES})
    assert large.status_code == 413
    form_type = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/verify", content="&".join(["a=1"] * 3000), headers=form_type).status_code == 400
    assert client.post("/verify", content=b"csrf=\xff", headers=form_type).status_code == 400


def test_shipped_files_are_the_only_files(client: TestClient) -> None:
    assert client.get("/static/viewer.css").status_code == 200
    for path in (
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/",
    ):
        assert client.get(path).status_code == 404, path
