"""The life of `toolcell serve`: it drains at SIGTERM, and a second one goes on where the first one ended."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

import journals
from service_host import Served, until

pytestmark = pytest.mark.isolation

Serve = Callable[..., Served]

SLOW = "result = call_tool('wait_for', name='gate')\nset_result(result)"


class Asked:
    """A request that is made in a thread of its own."""

    def __init__(self, served: Served, code: str, path: str = "/v1/execute", **headers: str) -> None:
        self.response: httpx.Response | None = None
        self.error: Exception | None = None

        def ask() -> None:
            try:
                with httpx.Client(base_url=served.client.base_url, timeout=60, headers=headers) as client:
                    self.response = client.post(path, json={"code": code})
            except httpx.HTTPError as exc:
                self.error = exc

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    def answer(self) -> Any:
        self._thread.join(60)
        assert self.response is not None, self.error
        return self.response


def test_sigterm_lets_runs_finish_and_begins_no_new_ones(serve: Serve) -> None:
    served = serve()
    asked = Asked(served, SLOW)
    until(lambda: served.began("gate"))

    served.process.send_signal(signal.SIGTERM)
    until(lambda: not served.is_ready())
    refused = served.client.post("/v1/execute", json={"code": "1"})
    alive = served.client.get("/healthz")
    served.go_on("gate")

    assert (refused.status_code, refused.json()["code"]) == (503, "draining")
    assert int(refused.headers["Retry-After"]) > 0
    assert alive.status_code == 200
    assert asked.answer().json()["value"] == "gate"
    assert served.process.wait(60) == 0


@pytest.mark.slow
def test_runs_that_outlast_the_drain_are_cancelled_and_answered(serve: Serve) -> None:
    served = serve("--drain-s", "0.2")
    asked = Asked(served, "import time\ntime.sleep(25)")
    until(lambda: len(psutil.Process(served.process.pid).children()) > 0)
    until(lambda: "toolcell" in served.client.get("/v1/openapi.json").text)
    ready = served.execute("1")

    status = served.end()

    assert ready["outcome"] == "ok"
    assert asked.answer().json()["outcome"] == "cancelled"
    assert status == 0


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once_and_leaves_no_process(serve: Serve) -> None:
    served = serve("--drain-s", "600")
    asked = Asked(served, SLOW)
    until(lambda: served.began("gate"))
    below = psutil.Process(served.process.pid).children(recursive=True)

    served.process.send_signal(signal.SIGTERM)
    until(lambda: not served.is_ready())
    served.process.send_signal(signal.SIGTERM)
    served.go_on("gate")  # a thread of a synchronous tool cannot be ended

    served.process.wait(60)
    assert below
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below))
    asked._thread.join(60)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_suspended_runs_and_sessions_outlive_the_service(serve: Serve, sent: signal.Signals) -> None:
    first = serve()
    waits = first.execute("paid = call_tool('pay', amount=7)\nset_result([paid, 'end'])")["suspension"]
    first.client.post("/v1/sessions", json={"name": "notes"})
    first.client.post("/v1/sessions/notes/execute", json={"code": "x = [1, 2]"})
    first.client.put("/v1/sessions/notes/files/kept.txt", content=b"kept")
    waiting = first.client.post("/v1/sessions/notes/execute", json={"code": "y = call_tool('pay', amount=8)"}).json()
    first.end(sent)

    second = serve()
    listed = second.client.get("/v1/suspended").json()["suspended"]
    assert {each["run_id"] for each in listed} == {waits["run_id"], waiting["suspension"]["run_id"]}
    assert second.client.get("/v1/sessions").json()["sessions"][0]["state"] == "kept"
    unknown = {"name": "unknown", "restore": True}
    assert second.client.post("/v1/sessions", json=unknown).status_code == 404
    assert second.client.post("/v1/sessions", json=unknown | {"restore": "if_kept"}).status_code < 300
    assert second.client.post("/v1/sessions", json={"name": "notes", "restore": "if_kept"}).status_code < 300

    decided = decide(second, waits)
    assert decided.json()["value"] == ["paid 7", "end"]
    of_session = decide(second, waiting["suspension"])
    assert of_session.json()["outcome"] == "ok", of_session.text
    after = second.client.post("/v1/sessions/notes/execute", json={"code": "[x, y, open('kept.txt').read()]"})
    assert after.json()["value"] == [[1, 2], "paid 8", "kept"]
    assert second.ledger.read_text() == "7\n8\n"
    assert second.client.get("/v1/suspended").json() == {"suspended": [], "interrupted": []}

    again = decide(second, waits)
    assert (again.status_code, again.json()["code"]) == (409, "not_suspended")
    assert second.ledger.read_text() == "7\n8\n"


def decide(served: Served, suspension: Any) -> httpx.Response:
    decisions = {call["id"]: {"decision": "approve"} for call in suspension["calls"]}
    return served.client.post(f"/v1/suspended/{suspension['run_id']}/decide", json={"decisions": decisions})


@pytest.mark.slow
def test_a_run_that_was_killed_with_the_service_is_listed_and_carried_on_by_a_decision(serve: Serve) -> None:
    first = serve()
    Asked(first, "double = call_tool('double', number=4)\ncall_tool('wait_for', name='gate')\nset_result(double)")
    until(lambda: first.began("gate"))
    first.end(signal.SIGKILL)

    second = serve()
    (ident,) = second.client.get("/v1/suspended").json()["interrupted"]
    second.go_on("gate")
    once = second.client.post(f"/v1/suspended/{ident}/decide", json={}).json()
    (call,) = once["suspension"]["calls"]
    assert (once["outcome"], call["tool"], "in doubt" in call["reason"]) == ("suspended", "wait_for", True)
    made = {"decisions": {call["id"]: {"decision": "made", "value": "gate"}}}
    done = second.client.post(f"/v1/suspended/{ident}/decide", json=made).json()
    assert (done["outcome"], done["value"]) == ("ok", 8)


@pytest.mark.slow
def test_finished_runs_leave_nothing_in_the_journals(serve: Serve) -> None:
    served = serve()
    for number in range(3):
        served.execute(f"call_tool('double', number={number})")
        served.execute("1")

    record = served.folder / "state" / "tenants" / "default" / "runs.db"
    assert journals.rows(record, "SELECT * FROM kept") == []


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_a_client_that_goes_ends_its_run(serve: Serve, accept: str) -> None:
    served = serve()
    body = b'{"code": "call_tool(\'double\', number=1)\\nwhile True: pass"}'
    head = f"POST /v1/execute HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"

    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: busy(served))
    until(lambda: not busy(served))


def busy(served: Served) -> bool:
    """True while a script uses a processor below the service."""
    below = psutil.Process(served.process.pid).children(recursive=True)
    return any(each.status() == psutil.STATUS_RUNNING for each in below)


def test_away_from_this_machine_it_does_not_start_without_tokens(serve: Serve) -> None:
    with pytest.raises(AssertionError, match=r"whoever reaches 0\.0\.0\.0 could run code: make a token"):
        serve("--host", "0.0.0.0")
