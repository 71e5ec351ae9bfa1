"""A new Python process per run, bare or inside bubblewrap. Messages are lines of JSON on stdin and stdout.

There are no limits, no validation and no pool. Bubblewrap adds namespaces and drops capabilities. It is used without a
seccomp filter, Landlock rules or a cgroup.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

from benchmarks.competitors.competitor import NAP_S, Competitor, NotAvailable, check, intervals, server
from benchmarks.competitors.scripts import CPYTHON, ECHO, PRINTS, REQUESTS, counted

GUEST = r"""
import json, sys
def _send(*message):
    sys.stdout.write(json.dumps(message) + "\n")
def call_tools_parallel(calls):
    for i, (name, args) in enumerate(calls):
        _send("call", i, name, args)
    sys.stdout.flush()
    answers = dict(json.loads(sys.stdin.readline()) for _ in calls)
    return [answers[i] for i in range(len(calls))]
def call_tool(name, args):
    return call_tools_parallel([(name, args)])[0]
def set_result(value):
    _send("result", value)
    sys.stdout.flush()
names = globals()
while source := sys.stdin.readline():
    exec(compile(json.loads(source), "<code>", "exec"), names)
"""

PYTHON = os.path.realpath(sys.executable)
COMMAND = (PYTHON, "-I", "-S", "-c", GUEST)
"""Python without `site` starts fastest."""


class PythonPerRun(Competitor):
    """Runs `argv` once per script."""

    command = ("-c", "pass")

    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__()
        self._argv = list(argv)
        self._threads = ThreadPoolExecutor(64)

    async def __aexit__(self, *exc_info: object) -> None:
        self._threads.shutdown()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={})

    def _run(self, script: str, count: int = 0) -> PipedRun:
        with self._start() as process:
            return PipedRun(process, self._threads, counted(script, count))

    async def run(self) -> float:
        start = time.perf_counter()
        piped = self._run(CPYTHON.once)
        check(piped.result, ECHO)
        return piped.end - start

    async def call(self, calls: int) -> list[float]:
        piped = self._run(CPYTHON.calls, calls)
        check(piped.result, calls)
        return intervals(piped.stamps, calls)

    async def pipeline(self, calls: int) -> float:
        piped = self._run(CPYTHON.pipeline, calls)
        check(piped.result, calls)
        return piped.since_mark / calls

    async def fan_out(self, calls: int) -> float:
        piped = self._run(CPYTHON.fan_out, calls)
        check(piped.result, calls)
        return piped.since_mark

    async def many(self, runs: int, clients: int) -> float:
        with ThreadPoolExecutor(clients) as threads:
            start = time.perf_counter()
            for piped in threads.map(lambda _: self._run(CPYTHON.once), range(runs)):
                check(piped.result, ECHO)
            return time.perf_counter() - start

    async def session(self, scripts: int) -> list[float]:
        taken = []
        with self._start() as process:
            PipedRun(process, self._threads, CPYTHON.first)
            for _ in range(scripts):
                start = time.perf_counter()
                check(PipedRun(process, self._threads, CPYTHON.then).result, 2)
                taken.append(time.perf_counter() - start)
        return taken

    async def return_text(self, size_bytes: int) -> float:
        piped = self._run(CPYTHON.text, size_bytes)
        check(len(piped.result), size_bytes)
        return piped.since_mark

    async def return_records(self, records: int) -> float:
        piped = self._run(CPYTHON.records, records)
        check((len(piped.result), piped.result[-1]["id"]), (records, records - 1))
        return piped.since_mark

    @asynccontextmanager
    async def idle(self, count: int) -> AsyncIterator[None]:
        with ExitStack() as stack:
            for _ in range(count):
                process = stack.enter_context(self._start())
                stack.callback(process.kill)
            yield


class PipedRun:
    """Sends one script to a process, answers its calls, and reads its result."""

    def __init__(self, process: subprocess.Popen[bytes], threads: ThreadPoolExecutor, script: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin = process.stdin
        self._lock = threading.Lock()
        self.stamps: list[float] = []
        self._send(script)
        while (message := json.loads(process.stdout.readline()))[0] == "call":
            _, ident, name, args = message
            if name == "nap":
                threads.submit(self._answer_later, ident, args)
            else:
                self.stamps.append(time.perf_counter())
                self._send([ident, args])
        self.result: Any = message[1]
        self.end = time.perf_counter()

    @property
    def since_mark(self) -> float:
        """Return the seconds from the script's first call to its result."""
        return self.end - self.stamps[0]

    def _answer_later(self, ident: int, args: dict[str, Any]) -> None:
        time.sleep(NAP_S)
        self._send([ident, args])

    def _send(self, message: object) -> None:
        with self._lock:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()


class PlainPython(PythonPerRun):
    """A bare Python process, without isolation. Its kernel is ipykernel."""

    kernel_name = "python3"

    def __init__(self) -> None:
        super().__init__(COMMAND)

    async def prints(self, lines: int) -> float:
        return self._plain(counted(PRINTS, lines))

    async def requests(self, count: int) -> float:
        with server() as port:
            return self._plain(counted(REQUESTS, count).replace("PORT", str(port)))

    @staticmethod
    def _plain(script: str) -> float:
        start = time.perf_counter()
        subprocess.run([PYTHON, "-I", "-S", "-c", script], capture_output=True, check=True)
        return time.perf_counter() - start


class Bubblewrap(PythonPerRun):
    """A Python process in bubblewrap's namespaces, with a read-only root."""

    def __init__(self) -> None:
        super().__init__((shutil.which("bwrap") or "bwrap", *bubblewrap_options(), *COMMAND))

    async def __aenter__(self) -> Self:
        if shutil.which("bwrap") is None:
            raise NotAvailable("bwrap is not installed (Debian: apt-get install bubblewrap)")
        await self.run()
        return self


def bubblewrap_options() -> list[str]:
    """Return options for all namespaces, no capabilities, and a read-only interpreter with its libraries."""
    # With a process of its own before Python, bwrap does not wait for that, and most of the CPU time counts for nobody.
    options = ["--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for name in ("/usr", "/lib", "/lib64", "/bin"):
        path = Path(name)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            options += ["--ro-bind", name, name]
    base = os.path.realpath(sys.base_prefix)
    if not base.startswith("/usr"):
        options += ["--ro-bind", base, base]
    return [*options, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
