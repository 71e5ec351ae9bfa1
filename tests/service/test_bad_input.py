"""What strangers may send: nothing of it ends the service, and each wrong request is told what is wrong."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import BaseModel, field_validator
from starlette.testclient import TestClient
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from rows import each_row
from service_host import Served, client_of, until
from toolcell.service import ServiceConfig, bodies, create_app
from toolcell.service.bodies import parsed_body
from toolcell.service.problems import Problem
from toolcell.service.socket.connection import PART_BYTES

pytestmark = pytest.mark.isolation

EXECUTE = "POST /v1/execute HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "service.toml").write_text("head_s = 0.5\nbody_s = 0.5\nbody_bytes = 100_000\nconnections = 24\n")
    with Served(folder, "--config", str(folder / "service.toml")) as served:
        yield served
        assert served.execute("1 + 1")["value"] == 2
        assert "Traceback" not in "".join(served.said)


def problem_in(received: bytes) -> tuple[int, Any]:
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head, received
    return int(head.split()[1]), json.loads(body)


def test_a_body_over_the_limit_is_refused_before_it_is_read(served: Served) -> None:
    status, problem = problem_in(served.talk((EXECUTE + "Content-Length: 104857600\r\n\r\n").encode()))

    assert (status, problem["code"], problem["limit"]) == (413, "body_too_large", 100_000)
    assert "104857600 bytes, and the limit is 100000" in problem["detail"]


def test_a_body_without_a_length_is_counted_while_it_comes(served: Served) -> None:
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    received = served.talk((EXECUTE + "Transfer-Encoding: chunked\r\n\r\n").encode(), *[chunk] * 8)

    assert problem_in(received)[0] == 413


def test_a_body_that_comes_slowly_is_given_up(served: Served) -> None:
    began = time.monotonic()
    status, problem = problem_in(served.talk((EXECUTE + 'Content-Length: 50\r\n\r\n{"co').encode()))

    assert (status, problem["code"]) == (408, "body_too_slow")
    assert "4 bytes of it came in 0.5 seconds" in problem["detail"]
    assert time.monotonic() - began < 15


@each_row("sent", [b"", b"POST /v1/exe", EXECUTE.encode()], ids=["nothing", "half a line", "no end"])
def test_half_a_request_is_given_up(served: Served, sent: bytes) -> None:
    assert served.talk(sent) == b""


def test_a_second_request_has_the_same_deadline(served: Served) -> None:
    received = served.talk(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")

    assert received.count(b"HTTP/1.1 200") == 1


def test_a_client_that_ends_in_the_middle_of_its_body_is_no_error(served: Served) -> None:
    served.talk((EXECUTE + 'Content-Length: 50\r\n\r\n{"co').encode(), ends=True)


@each_row(
    "framing",
    [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        "Content-Length: 4\r\nContent-Length: 5\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Content-Length: +4\r\n",
        "Content-Length: 4 4\r\n",
    ],
)
def test_a_request_with_two_meanings_is_refused_and_its_connection_closed(served: Served, framing: str) -> None:
    smuggled = "0\r\n\r\nGET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    received = served.talk((EXECUTE + framing + "\r\n" + smuggled).encode())

    assert received.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")), received
    assert received.count(b"HTTP/1.1") == 1
    assert b"ready" not in received


READY = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def test_silent_connections_past_the_limit_make_room(served: Served) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        first.settimeout(10)
        for _ in range(2):  # a client that is there already is served, however many others come
            first.sendall(READY.replace(b"close", b"keep-alive"))
            assert first.recv(65536).startswith(b"HTTP/1.1 200")
            for _ in range(40):
                stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        assert served.talk(READY).startswith(b"HTTP/1.1 200")
        until(served.is_ready)


def test_a_connection_too_many_is_told_so_while_each_has_a_request_under_way(tmp_path: Path) -> None:
    names = [f"room-{number}" for number in range(4)]
    (tmp_path / "service.toml").write_text("connections = 4\n")
    with Served(tmp_path, "--config", str(tmp_path / "service.toml")) as served, ExitStack() as stack:
        for name in names:
            busy = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            body = json.dumps({"steps": [{"tool": "wait_for", "args": {"name": name}}]})
            head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            busy.sendall(f"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\n{head}{body}".encode())
        until(lambda: all(map(served.began, names)))
        assert served.talk(READY).startswith(b"HTTP/1.1 503")
        for name in names:
            served.go_on(name)


WRONG = [
    (b"", 400, "EOF"),
    (b'{"code": ', 400, "EOF"),
    (b'{"code": "\xff"}', 400, "unicode"),
    (b'{"code": "1", "inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "recursion limit"),
    (b"[]", 422, "body = []"),
    (b"{}", 422, "code = {}: Field required"),
    (b'{"code": 1}', 422, "code = 1: Input should be a valid string"),
    (b'{"code": "1", "inputs": []}', 422, "inputs = []"),
    (b'{"code": "1", "no_such": 1}', 422, "no_such = 1"),
    (b'{"code": "1", "limits": {"wall_s": -1}}', 422, "wall_s = -1: must be greater than 0"),
    (b'{"code": "1", "limits": {"wall": 1}}', 422, "wall = 1: there is no such key; did you mean wall_s?"),
    (b'{"code": "1", "limits": {"memory_bytes": "%s"}}' % (b"9" * 400), 422, "is not a size such as"),
    (b'{"code": "1", "on_approval": "x"}', 422, "on_approval = 'x'"),
    (b'{"code": "1", "files": [{"name": "a"}]}', 422, "a file has either text or data"),
    (b'{"code": "1", "files": [{"name": "a", "data": "%"}]}', 422, "not base64"),
    (b'{"code": "1", "files": [{"name": "../a", "text": ""}]}', 422, "'../a' must be a relative path"),
    (b'{"code": "1", "files": [{"name": "/etc/passwd", "text": ""}]}', 422, "relative path"),
    (b'{"code": "1", "inputs": {"a": {"$bytes": 1}}}', 422, "$bytes has the wrong content"),
    (b'{"code": "1", "inputs": {"a": 18446744073709551616}}', 422, "64"),
    (b'{"code": "1", "repairs": "../../etc/passwd"}', 422, "repairs"),
    (b'{"code": "\\ud800"}', 400, ""),
    (b'{"code": "1", "inputs": {"a\\\\\\ud83d": 1}}', 400, ""),
]


@each_row(
    ("body", "status", "says"),
    WRONG,
)
def test_a_wrong_body_is_told_field_and_value(client: TestClient, body: bytes, status: int, says: str) -> None:
    response = client.post("/v1/execute", content=body, headers={"Content-Type": "application/json"})

    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert says in response.json()["detail"]


def test_a_large_body_is_wrong_where_a_small_one_is(client: TestClient) -> None:
    def answer(body: bytes) -> tuple[int, str]:
        response = client.post("/v1/execute", content=body, headers={"Content-Type": "application/json"})
        return response.status_code, response.json()["detail"] if response.status_code == 422 else ""

    def large(body: bytes) -> bytes:
        return body[:1] + b" " * bodies.SMALL_BYTES + body[1:]

    rows = [body for body, _, _ in WRONG if body[:1] == b"{"]
    assert {body: answer(large(body)) for body in rows} == {body: answer(body) for body in rows}
    whole = rb'{"code": "set_result(len(x))", "inputs": {"x": "\ud83d\ude00\\ud800"}}'
    assert client.post("/v1/execute", json=json.loads(whole)).json()["value"] == 7
    assert answer(large(whole)) == (200, "")


@each_row("kind", ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded", ""])
def test_a_body_of_another_type_is_refused_so_no_form_of_a_web_page_runs_code(client: TestClient, kind: str) -> None:
    response = client.post("/v1/execute", content=b'{"code": "1"}', headers={"Content-Type": kind})

    assert (response.status_code, response.json()["code"]) == (415, "unsupported_media_type")


def test_a_compressed_body_is_refused_by_name(client: TestClient) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = client.post("/v1/execute", content=gzip.compress(b'{"code": "1"}'), headers=headers)

    assert response.status_code == 415 and "'gzip'" in response.json()["detail"]


@each_row(
    "path",
    [
        "/v1/sessions/..%2F..%2Fetc",
        "/v1/sessions/%2e%2e",
        "/v1/sessions/a%00b",
        "/v1/sessions/" + "a" * 300,
        "/v1/runs/..%2Fruns",
        "/v1/suspended/..%2F..%2Fkey",
        "/v1/tools/%2e%2e",
    ],
)
def test_names_in_paths_lead_nowhere_else(client: TestClient, path: str) -> None:
    response = client.get(path)

    assert response.status_code in (404, 422)
    assert response.headers["content-type"] == "application/problem+json"


def test_files_of_a_session_stay_in_its_workspace(client: TestClient, tmp_path: Path) -> None:
    client.post("/v1/sessions", json={"name": "paths"})
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for name in ("../a", "..%2f..%2fa", "%2fetc/passwd", f"%2f{secret}", "a%00b", "%2e"):
        written = client.put(f"/v1/sessions/paths/files/{name}", content=b"x")
        read = client.get(f"/v1/sessions/paths/files/{name}")
        assert written.status_code in (404, 405, 422), name
        assert read.status_code in (404, 405, 422), name
        assert "secret" not in read.text.replace(str(tmp_path), "").replace("/secret", "")
    client.delete("/v1/sessions/paths")


def test_a_handler_that_breaks_is_a_500_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(ServiceConfig(state=tmp_path / "state"))
    with client_of(app, raise_server_exceptions=False) as client:

        async def broken(*args: object) -> None:
            raise RuntimeError("a secret path: /root")

        monkeypatch.setattr(app.state.service.tenants, "get", broken)
        response = client.post("/v1/execute", json={"code": "1"})

    assert (response.status_code, response.json()["code"]) == (500, "internal_error")
    assert "secret" not in response.text


def test_a_cursor_that_the_service_did_not_make_is_refused(client: TestClient) -> None:
    for text in ('[1, 1, "\\ud800"]', '[1, 1, "\u00e4"]', f'[{10**30}, 1, "a"]', '[1.5, 1, "a"]', "[" * 100):
        cursor = base64.urlsafe_b64encode(text.encode()).decode()
        assert client.get("/v1/runs", params={"cursor": cursor}).status_code == 422, text


def test_a_frame_that_is_too_long_is_refused_before_it_is_kept_or_unpacked(served: Served) -> None:
    with connect(f"ws://127.0.0.1:{served.port}/v1/connect", proxy=None) as there:
        assert there.protocol.extensions == []  # it offered to compress
        there.send(bytes(PART_BYTES + 1))
        with pytest.raises(ConnectionClosed) as caught:
            there.recv(timeout=20)

    assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009


class _Threads(BaseModel):
    """Notes the thread that reads it."""

    text: str
    rest: list[Any] = []

    @field_validator("text")
    @classmethod
    def _thread(cls, value: str) -> str:
        return f"{threading.get_ident()} {len(value)}"


@pytest.mark.slow
def test_a_large_body_is_read_in_a_thread_and_has_only_so_many_elements() -> None:
    def read(body: bytes) -> _Threads:
        return anyio.run(parsed_body, _Threads, body, nullcontext())

    here = threading.get_ident()
    assert read(b'{"text": "a"}').text == f"{here} 1"
    # Commas in a text are not elements.
    text = read(b'{"text": "' + b',[{\\"' * 3_000_000 + b'"}').text
    assert text.split()[0] != f"{here}" and text.split()[1] == "12000000"
    for element in (b"1,", b"[],", b"{},", b'"",', b'"\\"",'):
        with pytest.raises(Problem) as caught:
            read(b'{"text": "a", "rest": [' + element * 2_100_000 + b"1]}")
        assert caught.value.status == 413 and "elements" in caught.value.detail
