"""Start `toolcell serve --compat` as a program, and be its client: plain HTTP, nothing of ours."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

START_S = 60


@contextmanager
def compat_server(
    workspace: Path, env: Mapping[str, str] | None = None, *flags: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield its URL and its process."""
    command = [sys.executable, "-m", "toolcell", "serve", "--compat", *flags]
    given = {"SANDBOX_ADDR": "127.0.0.1:0", "SANDBOX_WORKSPACE": str(workspace), **(env or {})}
    kept = {name: each for name, each in os.environ.items() if not name.startswith("SANDBOX_")}
    process = subprocess.Popen(command, env={**kept, **given}, stderr=subprocess.PIPE)
    try:
        yield _url_of(process), process
    finally:
        process.kill()
        process.wait(30)
        assert process.stderr is not None
        process.stderr.close()


def _url_of(process: subprocess.Popen[bytes]) -> str:
    """Read the address from what it says."""
    assert process.stderr is not None
    said, until = b"", time.monotonic() + START_S
    while (found := re.search(rb"serving (http://\S+)", said)) is None:
        if not select.select([process.stderr], [], [], max(0, until - time.monotonic()))[0]:
            raise TimeoutError(f"the service did not start: {said!r}")
        piece = os.read(process.stderr.fileno(), 4096)
        assert piece, f"the service ended: {said!r}"
        said += piece
    return found.group(1).decode()


Tool = Callable[[dict[str, Any]], str]


class Tools:
    """Answers `POST /_oasis/dispatch` of one client."""

    def __init__(self, **tools: Tool) -> None:
        self.tools = tools
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                call = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.calls.append(call)
                outer.tokens.append(self.headers.get("authorization"))
                try:
                    said = {"data": outer.tools[call["name"]](call["args"])}
                except KeyError:
                    said = {"error": f"unknown tool: {call['name']}"}
                except ValueError as exc:
                    said = {"error": str(exc)}
                body = json.dumps(said).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/_oasis/dispatch"


@contextmanager
def answering(**tools: Tool) -> Iterator[Tools]:
    made = Tools(**tools)
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        thread.join()
        made.server.server_close()


def execute(client: httpx.Client, code: str, **fields: Any) -> Any:
    response = client.post("/execute", json={"code": code, "runtime": "python", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    return str(response.json()["error"])


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()
