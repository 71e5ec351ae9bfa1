"""POST /v1/execute: a script goes in, and everything that it left behind comes back."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from service_host import client_of
from toolcell import ToolContext, ToolRegistry
from toolcell.service import ServiceConfig, create_app

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


def test_a_script_with_inputs_and_a_tool_answers_with_its_whole_result(client: TestClient) -> None:
    given = {"code": "print('hello')\ncall_tool('double', number=n)", "inputs": {"n": 21}}
    response = client.post("/v1/execute", json=given)

    result = response.json()
    assert response.status_code == 200, result
    assert (result["outcome"], result["value"], result["logs"]["stdout"]) == ("ok", 42, "hello\n")
    assert [(call["name"], call["args"]) for call in result["calls"]] == [("double", {"number": 21})]


def test_a_script_that_fails_is_an_ordinary_answer(client: TestClient) -> None:
    response = client.post("/v1/execute", json={"code": "1 / 0"})

    assert response.status_code == 200
    assert response.json()["outcome"] == "error"
    assert response.json()["error"]["type"] == "ZeroDivisionError"


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"Host": "evil.example"}, "host 'evil.example'"),
        ({"Origin": "http://evil.example"}, "web page"),
        ({"Origin": "http://localhost:9"}, "web page"),
        ({"X-Forwarded-For": "127.0.0.1"}, "proxy"),
        ({"Forwarded": "for=127.0.0.1"}, "proxy"),
    ],
)
def test_without_tokens_only_programs_of_this_machine_are_let_in(
    client: TestClient, headers: dict[str, str], says: str
) -> None:
    response = client.post("/v1/execute", json={"code": "1"}, headers=headers)

    assert response.status_code == 401
    assert response.headers["content-type"] == "application/problem+json"
    assert says in response.json()["detail"]


def test_another_machine_is_not_let_in_without_tokens(tmp_path: Path) -> None:
    app = create_app(ServiceConfig(state=tmp_path / "state"))
    with TestClient(app, base_url="http://localhost", client=("192.0.2.7", 50_000)) as client:
        response = client.post("/v1/execute", json={"code": "1"})

    assert response.status_code == 401
    assert "192.0.2.7 is not this machine" in response.json()["detail"]


def test_values_that_json_has_not_come_and_go_without_loss(client: TestClient) -> None:
    given = {"data": {"$bytes": "AP8="}, "number": {"$float": "-inf"}, "looks": {"$dict": {"$bytes": "no"}}}
    code = "assert data == b'\\x00\\xff' and number == float('-inf') and looks == {'$bytes': 'no'}\n"
    code += "[data, number, looks, float('nan'), 2**62, '\\u2028']"
    response = client.post("/v1/execute", json={"code": code, "inputs": given})

    result = response.json()
    assert result["outcome"] == "ok", result["error"]
    expected = [{"$bytes": "AP8="}, {"$float": "-inf"}, {"$dict": {"$bytes": "no"}}, {"$float": "nan"}, 2**62, "\u2028"]
    assert result["value"] == expected


def test_files_go_in_as_text_or_base64_and_come_out_as_base64(client: TestClient) -> None:
    files = [{"name": "a.txt", "text": "ä"}, {"name": "in/b.bin", "data": "AP8="}]
    code = "open('out.bin', 'wb').write(open('in/b.bin', 'rb').read() + open('a.txt', 'rb').read())\n"
    code += "set_result(1, files=['out.bin', 'missing'])"
    result = client.post("/v1/execute", json={"code": code, "files": files}).json()

    returned = {each["name"]: each for each in result["files"]}
    assert base64.b64decode(returned["out.bin"]["data"]) == b"\x00\xff\xc3\xa4"
    assert returned["missing"]["data"] is None and returned["missing"]["problem"] == "missing"


def test_a_request_may_lower_a_limit_and_not_raise_one(client: TestClient) -> None:
    low = client.post("/v1/execute", json={"code": "while True: pass", "limits": {"wall_s": 0.2}})
    high = client.post("/v1/execute", json={"code": "1", "limits": {"wall_s": 31}})

    assert low.json()["outcome"] == "timeout"
    assert (high.status_code, high.json()["code"], high.json()["limit"]) == (422, "limit_too_high", 30.0)
    assert "limits.wall_s = 31.0: this tenant may use at most 30" in high.json()["detail"]


def test_a_request_may_choose_some_of_the_tools(client: TestClient) -> None:
    code = "[tool.name if hasattr(tool, 'name') else tool['name'] for tool in list_tools()]"
    some = client.post("/v1/execute", json={"code": code, "tools": ["double"]})
    none = client.post("/v1/execute", json={"code": code, "tools": ["doubel"]})

    assert some.json()["value"] == ["double"]
    assert (none.status_code, none.json()["code"]) == (422, "unknown_tool")


def test_events_come_as_they_happen_with_ids_and_end_with_the_result(client: TestClient) -> None:
    code = "print('a')\nprogress({'done': b'x'})\ndouble = call_tool('double', number=2)\n"
    code += "set_result(double, files=['missing'])"
    response = client.post("/v1/execute", json={"code": code}, headers={"Accept": "text/event-stream"})

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response.text)
    names = [name for _, name, _ in events]
    assert names == ["log", "progress", "call_started", "call_ended", "file", "end"]
    assert [int(number) for number, _, _ in events] == [1, 2, 3, 4, 5, 6]
    assert events[1][2] == {"value": {"done": {"$bytes": "eA=="}}}
    assert events[4][2]["problem"] == "missing"
    assert (events[-1][2]["outcome"], events[-1][2]["value"]) == ("ok", 4)


def test_what_a_tool_reports_is_an_event(tmp_path: Path) -> None:
    tools = ToolRegistry()

    @tools.tool
    async def count(ctx: ToolContext) -> int:
        """Count, and report it."""
        ctx.update("half way", details={"done": 1})
        return 2

    with client_of(create_app(ServiceConfig(state=tmp_path / "state"), registry=tools)) as client:
        given = {"code": "call_tool('count')"}
        response = client.post("/v1/execute", json=given, headers={"Accept": "text/event-stream"})

    (told,) = [data for _, name, data in events_of(response.text) if name == "call_updated"]
    assert (told["tool"], told["text"], told["details"]) == ("count", "half way", {"done": 1})


def test_an_error_after_the_first_byte_is_the_last_event(client: TestClient) -> None:
    given = {"code": "1", "repairs": "no-such-run"}
    response = client.post("/v1/execute", json=given, headers={"Accept": "text/event-stream"})

    (event,) = events_of(response.text)
    assert event[1] == "problem" and event[2]["status"] == 422
    assert "no-such-run" in event[2]["detail"]


def test_a_script_of_a_session_is_known_by_its_ids_on_every_route(client: TestClient) -> None:
    client.post("/v1/sessions", json={"name": "ids"})
    waits = client.post("/v1/sessions/ids/execute", json={"code": "call_tool('pay', amount=3)"}).json()
    one = f"/v1/suspended/{waits['suspension']['run_id']}"
    assert client.get(one).json()["run_id"] == waits["suspension"]["run_id"]
    (call,) = waits["suspension"]["calls"]
    done = client.post(f"{one}/decide", json={"decisions": {call["id"]: {"decision": "approve"}}}).json()
    assert done["journal_id"].startswith("ids."), done
    assert client.get(f"/v1/runs/{done['run_id']}").json()["outcome"] == "ok"

    again = client.post(
        "/v1/execute", json={"code": "call_tool('pay', amount=3)", "repairs": done["journal_id"]}
    ).json()
    assert again["value"] == done["value"] == "paid 3" and again["repair"]["repaired"] == done["journal_id"], again
    assert client.post(f"/v1/runs/{done['journal_id']}/revert", json={}).json()["ok"]


def events_of(text: str) -> list[tuple[str, str, Any]]:
    """Return id, name and data of each event."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    lines = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
    return [(each["id"], each["event"], json.loads(each["data"])) for each in lines]
