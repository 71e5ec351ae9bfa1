"""The compatible front, and a client that was written from the text of its requirements: plain HTTP, nothing of ours.

The service is the program `toolcell serve --compat`.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.compat_server import answering, coded, compat_server, execute, refused

pytestmark = pytest.mark.isolation


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sandbox") / "workspaces"


@pytest.fixture(scope="module")
def client(workspace: Path) -> Iterator[httpx.Client]:
    with compat_server(workspace) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.conforms("Q36")
def test_a_script_answers_with_its_result_as_json_text_its_logs_and_its_exit_code(client: httpx.Client) -> None:
    answer = execute(client, "print('working')\nset_result({'answer': 42})", execution_id="first", timeout=10)

    assert json.loads(answer.pop("output")) == {"answer": 42}
    assert answer == {"logs": "working\n", "exit_code": 0}


@pytest.mark.conforms("Q36")
def test_a_script_that_fails_says_where_and_has_an_exit_code(client: httpx.Client) -> None:
    failed = execute(client, "x = 1\nraise ValueError('bad input')")
    ended = execute(client, "import sys; sys.exit(7)")

    assert failed["exit_code"] == 1
    assert "line 2" in failed["error"]
    assert "ValueError: bad input" in failed["error"]
    assert ended["exit_code"] == 7


@pytest.mark.conforms("Q31", "Q36", "EX-44")
def test_files_go_in_and_come_back_with_name_type_and_data(client: httpx.Client) -> None:
    code = (
        "import os\nrows = open('in/data.csv').read()\nopen('chart.png', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n!')\n"
        "set_result(rows, files=['chart.png', 'in/data.csv'])"
    )
    answer = execute(client, code, files=[{"name": "in/data.csv", "mime": "text/csv", "data": coded(b"a,b\n1,2\n")}])

    assert json.loads(answer["output"]) == "a,b\n1,2\n"
    assert answer["files"] == [
        {"name": "chart.png", "mime": "image/png", "data": coded(b"\x89PNG\r\n\x1a\n!")},
        {"name": "in/data.csv", "mime": "text/csv", "data": coded(b"a,b\n1,2\n")},
    ]


@pytest.mark.conforms("Q32")
def test_files_that_are_missing_or_outside_are_left_out_and_the_logs_say_so(client: httpx.Client) -> None:
    answer = execute(client, "set_result(1, files=['nothing.txt', '/etc/passwd', '../up'])")

    assert "files" not in answer
    assert "'nothing.txt' was not returned: missing" in answer["logs"]
    assert answer["logs"].count("outside the workspace") == 2


@pytest.mark.conforms("Q33")
def test_a_file_over_ten_mebibytes_has_a_name_and_a_type_and_no_data(client: httpx.Client) -> None:
    code = f"open('big.csv', 'wb').write(b'x' * {10 * 2**20 + 1}); set_result(1, files=['big.csv'])"
    answer = execute(client, code)

    assert answer["files"] == [{"name": "big.csv", "mime": "text/csv"}]
    assert "10485761 bytes" in answer["logs"]


@pytest.mark.conforms("Q37")
def test_health_says_ready(client: httpx.Client) -> None:
    response = client.get("/health")

    assert (response.status_code, response.json()) == (200, {"status": "ready"})


@pytest.mark.conforms("Q34", "Q37", "EX-44", "EX-45")
def test_a_session_keeps_its_files_until_it_is_deleted(client: httpx.Client, workspace: Path) -> None:
    execute(
        client, "import os; os.mkdir('d'); open('d/note.txt', 'w').write('kept'); secret = 1", session_id="user-123"
    )
    again = execute(client, "set_result([open('d/note.txt').read(), 'secret' in globals()])", session_id="user-123")
    other = execute(client, "import os; set_result(os.path.exists('d'))", session_id="user-456")
    folder = workspace / "user-123"
    modes = [oct(each.stat().st_mode & 0o777) for each in (folder, folder / "d", folder / "d" / "note.txt")]

    assert json.loads(again["output"]) == ["kept", False]
    assert json.loads(other["output"]) is False
    assert modes == ["0o750", "0o750", "0o640"]
    deleted = client.delete("/workspace/user-123")
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert not folder.exists()
    gone = execute(client, "import os; set_result(os.path.exists('d'))", session_id="user-123")
    assert json.loads(gone["output"]) is False


@pytest.mark.conforms("Q34")
def test_a_file_that_a_script_deletes_is_gone_in_the_next_script_of_the_session(client: httpx.Client) -> None:
    execute(client, "open('a', 'w').write('1'); open('b', 'w').write('2')", session_id="deletes")
    execute(client, "import os; os.remove('a')", session_id="deletes")
    left = execute(client, "import os; set_result(sorted(os.listdir('.')))", session_id="deletes")

    assert json.loads(left["output"]) == ["b"]


@pytest.mark.conforms("Q34")
def test_runs_without_a_session_share_nothing(client: httpx.Client) -> None:
    execute(client, "open('left.txt', 'w').write('x')", session_id="")
    answer = execute(client, "import os; set_result(os.listdir('.'))")

    assert json.loads(answer["output"]) == []


@pytest.mark.conforms("Q-b17")
def test_runs_of_one_session_take_turns(client: httpx.Client) -> None:
    code = (
        "import os, time\nn = int(open('n').read()) if os.path.exists('n') else 0\ntime.sleep(0.1)\n"
        "open('n', 'w').write(str(n + 1)); set_result(n + 1)"
    )
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: execute(client, code, session_id="turns"), range(4)))

    assert sorted(json.loads(each["output"]) for each in answers) == [1, 2, 3, 4]


@pytest.mark.conforms("Q37")
def test_deleting_a_workspace_that_is_unknown_is_no_error_and_an_empty_name_is_one(client: httpx.Client) -> None:
    assert client.delete("/workspace/never-seen").status_code == 204
    assert refused(client.delete("/workspace/"), 400) == "session_id is required"


@pytest.mark.conforms("Q-b17")
@pytest.mark.parametrize("name", ["..", ".", "a/x", "a%2Fx", ".executions", ".state", "x" * 65, "a b", "é"])
def test_a_session_name_that_is_a_path_is_refused(client: httpx.Client, workspace: Path, name: str) -> None:
    says = refused(client.post("/execute", json={"code": "1", "session_id": name}), 400)
    deleted = client.delete(f"/workspace/{name}")

    assert "session_id" in says
    assert deleted.status_code in (400, 404, 405)
    assert (workspace / ".executions").exists()


@pytest.mark.conforms("Q38")
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "invalid JSON"),
        (b"[]", "invalid request"),
        (b"\xff", "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b"{}", "code is required"),
        (b'{"code": ""}', "code is required"),
        (b'{"code": 1}', "invalid request: code"),
        (b'{"code": "1", "runtime": "node"}', "unsupported runtime: node"),
        (b'{"code": "1", "runtime": "ruby"}', "unsupported runtime: ruby"),
        (b'{"code": "1", "timeout": -1}', "timeout"),
        (b'{"code": "1", "timeout": "5"}', "timeout"),
        (b'{"code": "1", "timeout": NaN}', "timeout must be"),
        (b'{"code": "1", "callback_url": "file:///etc/passwd"}', "callback_url"),
        (b'{"code": "1", "callback_url": "http://[::1"}', "callback_url"),
        (b'{"code": "1", "files": [{"name": "a", "data": "%"}]}', "file write error"),
        (b'{"code": "1", "files": [{"name": "a", "url": "http://x/"}]}', "'a' has a url"),
    ],
)
def test_a_request_that_is_wrong_gets_400_and_the_reason(client: httpx.Client, body: bytes, says: str) -> None:
    assert says in refused(client.post("/execute", content=body), 400)


@pytest.mark.conforms("Q31", "Q38")
@pytest.mark.parametrize("name", ["../up.txt", "/etc/passwd", "a/../../up", "", "a\\b", "a\0b", "x" * 300])
def test_a_file_name_that_leaves_the_workspace_is_refused_by_name(client: httpx.Client, name: str) -> None:
    body = {"code": "1", "session_id": "tricks", "files": [{"name": name, "data": ""}]}
    says = refused(client.post("/execute", json=body), 400)

    assert says.startswith("file write error")
    assert repr(name)[1:20].rstrip("'") in says


@pytest.mark.conforms("Q38")
def test_other_methods_get_405_and_other_paths_404(client: httpx.Client) -> None:
    assert refused(client.get("/execute"), 405) == "method not allowed"
    assert refused(client.post("/health"), 405) == "method not allowed"
    assert refused(client.get("/workspace/x"), 405) == "method not allowed"
    assert refused(client.get("/nowhere"), 404) == "not found"


@pytest.mark.conforms("Q39")
def test_a_body_over_32_mebibytes_is_refused_before_it_is_read(client: httpx.Client) -> None:
    host, port = client.base_url.host, client.base_url.port or 80
    with socket.create_connection((host, port), timeout=10) as connection:
        head = f"POST /execute HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {32 * 2**20 + 1}\r\n\r\n"
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"error"' in answer


@pytest.mark.conforms("Q23", "Q39", "Q-b24")
def test_a_timeout_below_a_second_works_and_keeps_the_logs(client: httpx.Client) -> None:
    began = time.monotonic()
    answer = execute(client, "print('before')\nwhile True: pass", timeout=0.5)

    assert time.monotonic() - began < 10
    assert answer["error"] == "execution timed out after 0.5s"
    assert (answer["exit_code"], answer["logs"]) == (-1, "before\n")


@pytest.mark.conforms("Q39", "Q-b24")
def test_logs_are_cut_at_512_kib(client: httpx.Client) -> None:
    answer = execute(client, "print('x' * 2_000_000)\nprint('the end')")

    assert len(answer["logs"].encode()) <= 512 * 1024
    assert answer["logs"].endswith("the end\n")
    assert answer["exit_code"] == 0


@pytest.mark.conforms("Q41", "Q-b19", "Q-b20")
def test_tool_calls_go_to_the_callback_url_with_the_runs_token_and_an_id_of_their_own(client: httpx.Client) -> None:
    with answering(double=lambda args: json.dumps({"is": 2 * args["n"]})) as tools:
        answer = execute(
            client,
            "found = call_tools_parallel([('double', {'n': n}) for n in range(3)])\nset_result(found)",
            execution_id="calls-1",
            callback_url=tools.url,
            callback_token="token-of-this-run",
        )

    assert json.loads(answer["output"]) == [{"is": 0}, {"is": 2}, {"is": 4}]
    assert {call["execution_id"] for call in tools.calls} == {"calls-1"}
    assert len({call["call_id"] for call in tools.calls}) == 3
    assert set(tools.tokens) == {"Bearer token-of-this-run"}


@pytest.mark.conforms("Q41", "Q-b13")
def test_an_error_of_a_tool_is_an_exception_and_plain_text_stays_text(client: httpx.Client) -> None:
    def fails(args: dict[str, Any]) -> str:
        raise ValueError("no such row")

    with answering(fails=fails, digits=lambda args: "123", words=lambda args: "true") as tools:
        answer = execute(
            client,
            "try: call_tool('fails')\nexcept RuntimeError as e: said = str(e)\n"
            "set_result([said, call_tool('digits'), call_tool('words')])",
            callback_url=tools.url,
        )

    assert json.loads(answer["output"]) == ["Tool 'fails' failed: no such row", "123", "true"]
    assert tools.tokens == [None] * 3


@pytest.mark.conforms("Q41")
def test_a_client_that_answers_no_calls_is_an_error_in_the_script_and_not_of_the_service(client: httpx.Client) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/_oasis/dispatch"
        answer = execute(client, "call_tool('x')", callback_url=url)
    none = execute(client, "call_tool('x')")

    assert "did not answer the call" in answer["error"]
    assert "unknown tool: x" in none["error"]


@pytest.mark.conforms("Q38", "EX-45", "Q-b18")
def test_the_fifth_of_five_requests_at_once_is_told_at_once_that_the_server_is_busy(client: httpx.Client) -> None:
    release = threading.Event()

    def hold(args: dict[str, Any]) -> str:
        release.wait(30)
        return "go"

    with answering(hold=hold) as tools, ThreadPoolExecutor(5) as pool:
        running = [pool.submit(execute, client, "call_tool('hold')", callback_url=tools.url) for _ in range(4)]
        until = time.monotonic() + 30
        while len(tools.calls) < 4:
            assert time.monotonic() < until
            time.sleep(0.01)
        began = time.monotonic()
        fifth = client.post("/execute", json={"code": "1", "callback_url": tools.url})
        took = time.monotonic() - began
        release.set()
        answers = [each.result() for each in running]

    assert refused(fifth, 503) == "server busy: execution capacity reached"
    assert int(fifth.headers["retry-after"]) >= 1
    assert took < 5
    assert [each["exit_code"] for each in answers] == [0] * 4


@pytest.mark.conforms("Q-b18")
def test_a_request_that_is_sent_again_gets_the_first_answer_and_runs_once(client: httpx.Client) -> None:
    with answering(count=lambda args: "1") as tools:
        body = {"code": "import os\ncall_tool('count')\nset_result(os.urandom(8).hex())"}
        body |= {"execution_id": "once", "callback_url": tools.url}
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda _: client.post("/execute", json=body), range(2)))
        third = client.post("/execute", json=body)
        other = client.post("/execute", json=body | {"code": "2"})

    assert len({response.content for response in (*both, third)}) == 1
    assert len(tools.calls) == 1
    assert "another request" in refused(other, 409)


@pytest.mark.conforms("Q-b18")
def test_a_client_that_loses_its_connection_gets_the_answer_of_the_run_that_went_on(client: httpx.Client) -> None:
    reached, release = threading.Event(), threading.Event()

    def hold(args: dict[str, Any]) -> str:
        reached.set()
        release.wait(30)
        return "go"

    host, port = client.base_url.host, client.base_url.port or 80
    with answering(hold=hold) as tools:
        body = {"code": "set_result(call_tool('hold'))", "execution_id": "lost", "callback_url": tools.url}
        sent = json.dumps(body).encode()
        with socket.create_connection((host, port), timeout=30) as connection:
            head = f"POST /execute HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(sent)}\r\n\r\n"
            connection.sendall(head.encode() + sent)
            assert reached.wait(30)
        release.set()
        answer = client.post("/execute", content=sent).json()

    assert json.loads(answer["output"]) == "go"
    assert len(tools.calls) == 1


def test_without_a_token_a_web_page_of_this_machines_browser_is_not_let_in(client: httpx.Client) -> None:
    page = client.post("/execute", json={"code": "1"}, headers={"origin": "http://evil.example"})
    rebound = client.post("/execute", json={"code": "1"}, headers={"host": "evil.example"})

    assert "web page" in refused(page, 401)
    assert "evil.example" in refused(rebound, 401)
