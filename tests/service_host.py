"""A service for tests: its tools, a client of it in this process, and `toolcell serve` as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
from starlette.applications import Starlette
from starlette.testclient import TestClient

from toolcell import ToolRegistry

TOOLS = '''
import time
from pathlib import Path
from toolcell import ToolRegistry

registry = ToolRegistry()
LEDGER = Path({ledger!r})


@registry.tool(read_only=True)
def double(number: int) -> int:
    """Return twice the number."""
    return 2 * number


@registry.tool(requires_approval=True, revert=lambda args, result: LEDGER.write_text("reverted"))
def pay(amount: int) -> str:
    """Pay an amount, and write it down in the ledger."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{{amount}}\\n")
    return f"paid {{amount}}"


@registry.tool
def wait_for(name: str) -> str:
    """Note that the call began, and wait until a file of this name is there."""
    folder = LEDGER.parent
    (folder / f"{{name}}.began").touch()
    while not (folder / name).exists():
        time.sleep(0.005)
    return name
'''


def registry() -> ToolRegistry:
    """Return tools for a service in this process."""
    made = ToolRegistry()

    @made.tool(read_only=True)
    def double(number: int) -> int:
        """Return twice the number."""
        return 2 * number

    @made.tool(requires_approval=True, revert=lambda args, result: None)
    def pay(amount: int) -> str:
        """Pay an amount to somebody."""
        return f"paid {amount}"

    return made


def client_of(app: Starlette, **options: Any) -> TestClient:
    """Return a client on this machine, which a service without tokens lets in."""
    return TestClient(app, base_url="http://localhost", client=("127.0.0.1", 50_000), **options)


def until(is_true: Callable[[], object], limit_s: float = 30.0) -> None:
    """Wait until something is true.

    Raises:
        TimeoutError: it is not, for too long.
    """
    end = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit_s} s")
        time.sleep(0.005)


class Served:
    """`toolcell serve` with the tools of `TOOLS`, in a folder. A second one in the same folder goes on with its state."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.ledger = folder / "ledger"
        tools = folder / "service_tools.py"
        tools.write_text(TOOLS.format(ledger=str(self.ledger)))
        given = ("--port", "0", "--state", str(folder / "state"), "--tools", str(tools), "--warm", "1")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "toolcell", "serve", *given, *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_STATE_HOME": str(folder / "xdg")},
        )
        assert self.process.stderr is not None
        self.said: list[str] = []
        while not (found := re.search(r"serving http://127\.0\.0\.1:(\d+)", self.said[-1] if self.said else "")):
            line = self.process.stderr.readline()
            if not line:
                self.process.wait()
                self.process.stderr.close()
                raise AssertionError("".join(self.said))
            self.said.append(line)
        self._reading = threading.Thread(target=self.said.extend, args=(self.process.stderr,))
        self._reading.start()
        self.port = int(found[1])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def execute(self, code: str, **given: Any) -> Any:
        """Run a script, and return its result."""
        response = self.client.post("/v1/execute", json={"code": code, **given})
        assert response.status_code == 200, response.text
        return response.json()

    def began(self, name: str) -> bool:
        """Return True once `wait_for(name)` was called."""
        return (self.folder / f"{name}.began").exists()

    def go_on(self, name: str) -> None:
        """Let `wait_for(name)` return."""
        (self.folder / name).touch()

    def is_ready(self) -> bool:
        """Return what /readyz says."""
        return self.client.get("/readyz").status_code == 200

    def end(self, sent: int = signal.SIGTERM) -> int:
        """End it with a signal, and return its exit status."""
        self.process.send_signal(sent)
        return self.process.wait(60)

    def talk(self, *pieces: bytes, ends: bool = False, timeout_s: float = 20.0) -> bytes:
        """Send bytes over a connection of their own, and return everything that comes until it is closed.

        `ends`: say that no more comes.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout_s) as connection:
            for piece in pieces:
                connection.sendall(piece)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            received = b""
            try:
                while data := connection.recv(65_536):
                    received += data
            except ConnectionResetError:
                pass
            return received
