"""Clients that talk to a Jupyter Server get this kernel without a change: here the requests that Open WebUI makes.

It starts the default kernel over HTTP, sends one `execute_request` over a WebSocket, reads until the kernel is idle, and
deletes the kernel.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from toolcell.kernel import spec

pytestmark = [pytest.mark.isolation, pytest.mark.slow]

TOKEN = "token-of-the-server"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def server(jupyter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a Jupyter Server whose default kernel is ours; its address."""
    spec.install("toolcell-server", [], for_user=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    options = {
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": folder,
        "ServerApp.open_browser": False,
        "ServerApp.allow_root": True,
        "IdentityProvider.token": TOKEN,
        "MappingKernelManager.default_kernel_name": "toolcell-server",
    }
    command = [sys.executable, "-m", "jupyter_server", *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/api", timeout=PATIENCE_S)
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@dataclass
class Ran:
    """What Open WebUI keeps of an execution."""

    stdout: str = ""
    stderr: str = ""
    result: str = ""
    pictures: int = 0


def run(address: str, kernel: str, code: str) -> Ran:
    ran = Ran()
    ident = uuid.uuid4().hex
    request: dict[str, Any] = {
        "header": {
            "msg_id": ident,
            "msg_type": "execute_request",
            "username": "user",
            "session": uuid.uuid4().hex,
            "date": "",
            "version": "5.3",
        },
        "parent_header": {},
        "metadata": {},
        "content": {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        },
        "channel": "shell",
    }
    with connect(f"ws://{address}/api/kernels/{kernel}/channels?token={TOKEN}", max_size=None) as channels:
        channels.send(json.dumps(request))
        while True:
            message = json.loads(channels.recv(timeout=PATIENCE_S))
            if message.get("parent_header", {}).get("msg_id") != ident:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream" if content["name"] == "stdout":
                    ran.stdout += content["text"]
                case "stream":
                    ran.stderr += content["text"]
                case "execute_result" | "display_data":
                    ran.pictures += "image/png" in content["data"]
                    ran.result += content["data"].get("text/plain", "")
                case "error":
                    ran.stderr += "\n".join(content["traceback"])
                case "status" if content["execution_state"] == "idle":
                    return ran


def test_the_requests_of_open_webui_run_code_in_a_sandbox(server: str) -> None:
    with httpx.Client(base_url=f"http://{server}", params={"token": TOKEN}, timeout=PATIENCE_S) as client:
        started = client.post("/api/kernels")
        assert started.status_code == 201, started.text
        assert started.json()["name"] == "toolcell-server"
        kernel = started.json()["id"]

        ran = run(server, kernel, "import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
        assert (ran.stdout, ran.stderr, ran.result) == ("out\n", "err\n", "42")
        pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
        picture = (
            f"import base64\nfrom IPython.display import Image, display\ndisplay(Image(base64.b64decode('{pixel}')))"
        )
        assert run(server, kernel, picture).pictures == 1
        assert "ZeroDivisionError" in run(server, kernel, "1 / 0").stderr
        assert "blocked" in run(server, kernel, "import os\nos.system('id')").stderr
        assert run(server, kernel, f"open({str(Path(__file__))!r}).read()").stderr.count("FileNotFoundError")

        assert client.delete(f"/api/kernels/{kernel}").status_code == 204
        assert client.get("/api/kernels").json() == []
