"""The compatible front from its start to its end: SIGTERM, SIGKILL, and who is let in."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.compat_server import answering, coded, compat_server, execute, refused

pytestmark = pytest.mark.isolation


@pytest.mark.conforms("Q40")
def test_sigterm_lets_a_run_finish_refuses_new_ones_and_leaves_no_process(tmp_path: Path) -> None:
    reached, release = threading.Event(), threading.Event()

    def hold(args: dict[str, Any]) -> str:
        reached.set()
        release.wait(30)
        return "finished"

    with answering(hold=hold) as tools, compat_server(tmp_path / "w") as (url, process), ThreadPoolExecutor(1) as pool:
        with httpx.Client(base_url=url, timeout=60) as client:
            running = pool.submit(execute, client, "set_result(call_tool('hold'))", callback_url=tools.url)
            assert reached.wait(30)
            process.send_signal(signal.SIGTERM)
            until = time.monotonic() + 30
            while client.get("/health").status_code == 200:
                assert time.monotonic() < until
            assert refused(client.post("/execute", json={"code": "1"}), 503) == "the service is stopping"
            release.set()
            assert json.loads(running.result()["output"]) == "finished"
        assert process.wait(30) == 0


@pytest.mark.conforms("Q-b18")
def test_a_run_that_a_kill_of_the_service_cut_off_is_not_run_again(tmp_path: Path) -> None:
    reached = threading.Event()

    def hold(args: dict[str, Any]) -> str:
        reached.set()
        return "x"

    code = "call_tool('hold')\nimport time\ntime.sleep(60)"
    with answering(hold=hold) as tools:
        body = {"code": code, "execution_id": "cut-off", "callback_url": tools.url, "session_id": "s"}
        with compat_server(tmp_path / "w") as (url, process), ThreadPoolExecutor(1) as pool:
            done = httpx.post(f"{url}/execute", json={"code": "set_result(6 * 7)", "execution_id": "done"}, timeout=60)
            running = pool.submit(httpx.post, f"{url}/execute", json=body, timeout=60)
            assert reached.wait(60)
            os.kill(process.pid, signal.SIGKILL)
            assert isinstance(running.exception(30), httpx.TransportError)
        with compat_server(tmp_path / "w") as (url, _):
            again = httpx.post(f"{url}/execute", json=body, timeout=60).json()
            kept = httpx.post(f"{url}/execute", json={"code": "set_result(6 * 7)", "execution_id": "done"}, timeout=60)

    assert again["exit_code"] == -1
    assert "execution interrupted" in again["error"]
    assert len(tools.calls) == 1
    assert kept.content == done.content


@pytest.mark.conforms("Q40")
def test_a_token_is_demanded_and_may_be_the_password_of_the_url(tmp_path: Path) -> None:
    token = "a-token-of-this-test-0123456789"
    with compat_server(tmp_path / "w", {"SANDBOX_TOKEN": token}) as (url, _), httpx.Client(base_url=url) as client:
        for given in (None, "Bearer wrong", "Basic !", f"Basic {coded(b'user:wrong')}"):
            headers = {"authorization": given} if given else {}
            refused(client.post("/execute", json={"code": "1"}, headers=headers), 401)
            refused(client.delete("/workspace/x", headers=headers), 401)
        assert client.get("/health").status_code == 200
        right = {"authorization": f"Bearer {token}"}
        assert client.post("/execute", json={"code": "1"}, headers=right, timeout=60).status_code == 200
        assert client.post("/execute", json={"code": "1"}, auth=("user", token), timeout=60).status_code == 200
