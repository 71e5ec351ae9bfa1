"""How `toolcell mcp` and `toolcell serve` end at a signal, with clients that are connected and calls under way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rows import each_row
from toolcell.errors import ToolcellError
from toolcell.service import Client

pytestmark = [pytest.mark.isolation, pytest.mark.slow]

TOOLS = '''
import asyncio, os, threading

async def wait(name: str) -> str:
    """Wait for the end of the server."""
    os.write({mark}, name.encode())
    await asyncio.sleep(600)

def wait_in_a_thread(name: str) -> str:
    """Wait for the end of the server, in a thread."""
    os.write({mark}, name.encode())
    threading.Event().wait(600)
'''
CODES = [f"call_tool({tool!r}, name='{tool[-1]}')" for tool in ("wait", "wait_in_a_thread")]
INITIALIZE = {
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}
BOTH = {"accept": "application/json, text/event-stream"}


class Server:
    """A command that serves, and what the tools of its clients have said."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._reader, writer = os.pipe()
        (folder / "tools.py").write_text(TOOLS.format(mark=writer))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "toolcell", *words, "--tools", str(folder / "tools.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(writer,),
            env={**os.environ, "XDG_STATE_HOME": str(folder)},
        )
        os.close(writer)

    def url(self) -> str:
        assert self.process.stderr is not None
        while b"serving" not in (line := self.process.stderr.readline()):
            assert line
        return line.split()[1].decode()

    def say(self, *messages: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        for each in messages:
            self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **each}).encode() + b"\n")
        self.process.stdin.flush()

    def wait_for_calls(self, count: int) -> None:
        said = b""
        while len(said) < count:
            said += os.read(self._reader, count)

    def end(self, sent: int) -> tuple[int, str]:
        """Send a signal; return the exit status and what was written to stderr."""
        self.process.send_signal(sent)
        _, err = self.process.communicate(timeout=60)
        os.close(self._reader)
        return self.process.returncode, err.decode()


@contextmanager
def in_threads(*functions: Any) -> Iterator[None]:
    threads = [threading.Thread(target=each) for each in functions]
    for each in threads:
        each.start()
    yield
    for each in threads:
        each.join()


def call(ident: int, code: str) -> dict[str, Any]:
    return {
        "jsonrpc": "2.0",
        "id": ident,
        "method": "tools/call",
        "params": {"name": "execute_code", "arguments": {"code": code}},
    }


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_server_on_stdio_ends_at_a_signal_without_a_traceback(sent: int, tmp_path: Path) -> None:
    server = Server(tmp_path, "mcp")
    server.say({"id": 1, **INITIALIZE}, {"method": "notifications/initialized"})
    server.say(*(call(2 + number, code) for number, code in enumerate(CODES)))
    server.wait_for_calls(2)
    assert server.end(sent) == (0, "")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_server_over_http_ends_at_a_signal_without_a_traceback(sent: int, tmp_path: Path) -> None:
    server = Server(tmp_path, "mcp", "--http", "127.0.0.1:0")
    url = server.url()
    answers: list[Any] = []

    def ask(code: str, headers: dict[str, str]) -> None:
        try:
            answers.append(httpx.post(url, json=call(2, code), headers=headers, timeout=60).status_code)
        except httpx.HTTPError as exc:
            answers.append(type(exc))

    def listen(headers: dict[str, str]) -> None:
        try:
            with httpx.stream("GET", url, headers=headers, timeout=60) as stream:
                listening.set()
                stream.read()
        except httpx.HTTPError:
            pass

    listening = threading.Event()
    begun = httpx.post(url, json={"jsonrpc": "2.0", "id": 1, **INITIALIZE}, headers=BOTH, timeout=60)
    session = {**BOTH, "mcp-session-id": begun.headers["mcp-session-id"], "mcp-protocol-version": "2025-06-18"}
    httpx.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session, timeout=60)
    calls = [lambda code=code: ask(code, session) for code in CODES]
    with in_threads(lambda: listen(session), *calls):
        assert listening.wait(60)
        server.wait_for_calls(2)
        status, err = server.end(sent)

    assert status == 0
    assert "Traceback" not in err and "Exception" not in err, err
    assert len(answers) == 2


@pytest.mark.anyio
@each_row(("sent", "signals"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
async def test_a_service_ends_at_a_signal_without_a_traceback(sent: int, signals: int, tmp_path: Path) -> None:
    server = Server(tmp_path, "serve", "--port", "0", "--drain-s", "0" if signals == 1 else "60")
    url = await asyncio.to_thread(server.url)
    streamed = httpx.AsyncClient(base_url=url, timeout=60)

    async def ask(code: str, **headers: str) -> int:
        try:
            return (await streamed.post("/v1/execute", json={"code": code}, headers=headers)).status_code
        except httpx.HTTPError:
            return 0

    async def run(client: Client, code: str) -> None:
        try:
            await client.execute_code(code)
        except ToolcellError:
            pass

    async with streamed, Client(url) as client:
        asked = [ask(CODES[0]), ask(CODES[1], accept="text/event-stream"), run(client, CODES[0])]
        tasks = [asyncio.ensure_future(each) for each in asked]
        await asyncio.to_thread(server.wait_for_calls, 3)
        if signals == 2:
            server.process.send_signal(sent)
            assert server.process.stderr is not None
            while b"draining" not in (await asyncio.to_thread(server.process.stderr.readline)):
                pass
        status, err = await asyncio.to_thread(server.end, sent)
        for each in tasks:
            each.cancel()  # the client would try to connect again
        await asyncio.gather(*tasks, return_exceptions=True)

    own = [line for line in err.splitlines() if not line.startswith(("{", "draining"))]
    assert (status, own) == (0, [])
