"""Runs one attack twice: in a plain interpreter, where it must succeed, and in a sandbox, where it must fail.

`outside` is the plain interpreter; `Victim.run` is the sandbox, under a host process that a test may lose.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest

import toolcell_bridge
from machine import ESCAPE_PROFILE
from toolcell import ExecutionResult, Outcome
from toolcell.config import AUTO_FLOOR, PROFILES
from toolcell.sandbox.docker.hardening import CONTAINER_LAYERS

HERE = Path(__file__).parent

BACKEND = os.environ.get("TOOLCELL_ESCAPE_BACKEND", "process")
"""What the victim's sandboxes are made by, as in victim.py."""

IS_PROCESS = BACKEND in ("process", "ray")
"""They are processes of a host's kernel, the victim's own host or a node of a Ray cluster, and not containers."""

OWN_LAYERS = (
    (AUTO_FLOOR["full"] if ESCAPE_PROFILE == "auto" else PROFILES[ESCAPE_PROFILE]) if IS_PROCESS else CONTAINER_LAYERS
)
"""What every result must say was up."""

PATIENCE_S = 60.0
"""Far more than any run here may take. A host that needs longer has been stopped by its guest."""

ENDED_S = 20.0
"""What a run of a few seconds may take in all, its end included, on a machine that is busy with others."""

SECRET_PATTERN = "HOST" + "SECRET-[0-9a-f]{32}"
"""What a guest looks for; it does not match itself."""

ENOUGH_BYTES = 2 << 20
"""The unsuspecting host hangs up after so much of a flood."""

SPARE = 2 if BACKEND == "process" else 64
"""Descriptors and threads that an event loop may open once, when it first needs them. The Docker SDK keeps connections
for the last 25 addresses it asked; the host has one SDK client and the victim's eyes have another. Ray has threads of
its own."""

IS_CONTAINED = ESCAPE_PROFILE == "container"
HAS_LANDLOCK = "landlock" in OWN_LAYERS

RUNS_AFTER = 1 if IS_PROCESS else 5
"""Every how manieth look at the host's health has a run of its own. A container takes longer to make than most attacks
to fail, and the next attack of the suite is a run after this one, too."""

MIB = 1 << 20
GROWTH_BYTES = 128 * MIB
"""Most that a host may hold of one guest's doing: a few frames, what is kept of output, a result, returned files."""


OTHERS_BYTES = 64 * MIB if BACKEND == "ray" else 0
"""What Ray's own threads in the host may hold after hundreds of attacks."""


def process_only(reason: str, *, on_nodes: bool = True) -> pytest.MarkDecorator:
    """Leave a test out under any other backend; `reason` says what keeps the same promise there.

    Left out, not skipped: in CI a skipped test is a failure. conftest.py does it and says how many there were.
    """
    return pytest.mark.process_only(reason, also={"process", *(["ray"] if on_nodes else [])})


def full_only(reason: str) -> pytest.MarkDecorator:
    """Leave a test out in the profile `container`; `reason` says what is promised there instead, in PROMISES.md."""
    return pytest.mark.full_only(reason)


def new_secret() -> str:
    return f"HOST{'SECRET'}-{secrets.token_hex(16)}"


# Outside.

_OUTSIDE = """\
import json as _json, os as _os, sys as _sys
_sys.path += _json.loads(_sys.argv[2])
_given = _json.loads(_sys.stdin.read())
globals().update(_given["inputs"])
isolated = False
def set_result(data=None, files=None, _write=_os.write, _dumps=_json.dumps, _to=int(_sys.argv[1])):
    _write(_to, _dumps(data).encode() + b"\\n")
exec(compile(_given["source"], "<code>", "exec"))
"""


@dataclass
class Outside:
    """What an attack achieved without isolation."""

    value: Any
    status: int | None
    """Exit status; None if it was still running when its time was up."""
    output: bytes
    believed: list[Any] = field(default_factory=list)
    """Messages that a host without checks took from the bridge."""
    received_bytes: int = 0


class UnsuspectingHost(threading.Thread):
    """Reads frames and believes them: no size, depth, type, state or id is checked."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(daemon=True)
        self._sock = sock
        self.believed: list[Any] = []
        self.received_bytes = 0

    def run(self) -> None:
        buffer = b""
        while self.received_bytes < ENOUGH_BYTES:
            try:
                data = self._sock.recv(65536)
            except OSError:
                break
            if not data:
                break
            self.received_bytes += len(data)
            buffer = self._believe(buffer + data)
        self._sock.close()

    def end(self) -> None:
        """Take what was sent; a descriptor in flight may keep the other end open for ever."""
        try:
            self._sock.shutdown(socket.SHUT_RD)
        except OSError:
            pass
        self.join(PATIENCE_S)

    def _believe(self, buffer: bytes) -> bytes:
        while len(buffer) >= 4 and len(buffer) >= 4 + (size := struct.unpack(">I", buffer[:4])[0]):
            body, buffer = buffer[4 : 4 + size], buffer[4 + size :]
            try:
                told = msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass")
            except Exception as exc:
                told = type(exc).__name__
            if len(self.believed) < (10_000 if size < 100_000 else 20):
                self.believed.append(told)
            if isinstance(told, list) and told[:1] == [17]:
                self._answer(told[1])
        return buffer

    def _answer(self, call: Any) -> None:
        body = msgpack.packb([3, call, "answer"])
        try:
            self._sock.send(struct.pack(">I", len(body)) + body, socket.MSG_DONTWAIT)
        except OSError:
            return


def outside(
    source: str,
    *,
    bridge: bool = False,
    environment: dict[str, str] | None = None,
    within_s: float = PATIENCE_S,
    may_fail: bool = False,
    **inputs: Any,
) -> Outside:
    """Run `source` without isolation, in a process group of its own that ends with it.

    `may_fail`: dying of an exception is not a mistake of the attack's author.
    """
    ours, theirs = socket.socketpair()
    host = UnsuspectingHost(ours)
    extra = [str(Path(package.__file__).parents[1]) for package in (msgpack, toolcell_bridge)] if bridge else []
    # Files and not pipes: a child that outlives the attack keeps a pipe open.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as workspace,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as told,
        tempfile.TemporaryFile() as printed,
        theirs,
        ours,
    ):
        given.write(json.dumps({"source": textwrap.dedent(source), "inputs": inputs}).encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _OUTSIDE, str(told.fileno()), json.dumps(extra)],
            stdin=given,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=workspace,
            env={"LANG": "C.UTF-8", **(environment or {})},
            pass_fds=[told.fileno(), *([theirs.fileno()] if bridge else [])],
            start_new_session=True,
        )
        theirs.close()
        if bridge:
            host.start()
        try:
            status: int | None = process.wait(within_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
        if bridge:
            host.end()
        told.seek(0)
        printed.seek(0)
        lines, output = told.read().splitlines(), printed.read()
    value = json.loads(lines[-1]) if lines else None
    has_failed = status not in (0, None) and not lines and b"Traceback" in output
    assert may_fail or not has_failed, output[-2000:].decode("utf-8", "replace")
    return Outside(value, status, output, host.believed, host.received_bytes)


def _available(stream: Any) -> bytes:
    """Return what was written, also if a surviving child of the attack keeps the pipe open."""
    pieces = []
    while select.select([stream], [], [], 0.0)[0] and (piece := os.read(stream.fileno(), 65536)):
        pieces.append(piece)
    return b"".join(pieces)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that we started, and its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                pass


# Inside.


class HostHung(AssertionError):
    """The host did not answer: one guest stopped it for all others."""


@dataclass
class Inside:
    """What an attack achieved in a sandbox, and what it did to the host."""

    result: ExecutionResult
    before: dict[str, int]
    peak_bytes: int
    effects: list[str]

    @property
    def value(self) -> Any:
        """What the attack reported; a run that reported nothing shows why."""
        assert self.result.has_value, f"{self.result.outcome}: {self.result.error}\n{self.result.logs.text[-2000:]}"
        return self.result.value

    @property
    def outcome(self) -> Outcome:
        return self.result.outcome

    @property
    def growth_bytes(self) -> int:
        """Most the host held during the run beyond what it held before."""
        return self.peak_bytes - self.before["resident_bytes"]


class Victim:
    """A host process with a Runtime. It is started on first use, and again after it died."""

    def __init__(self, *, environment: dict[str, str] | None = None, before: str = "", **options: Any) -> None:
        """`before` is source that runs in the host process before toolcell is imported."""
        self.secret = new_secret()
        self._options = options
        self._before = before
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._looks = 0
        self.baseline: dict[str, int] = {}

    @property
    def pid(self) -> int:
        self.start()
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        options = pickle.dumps(self._options).hex()
        program = f"{self._before}\nimport runpy, sys\nrunpy.run_path({str(HERE / 'victim.py')!r}, run_name='__main__')"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "VICTIM_SECRET": self.secret, **self._environment},
            start_new_session=True,
        )
        ready = self._read(60)
        assert ready == "ready", ready
        self.baseline = self._ask({"op": "settle", "expected": {}})

    def run(self, source: str, *, limits: dict[str, Any] | None = None, **inputs: Any) -> Inside:
        """Run one attack to its end.

        Raises:
            HostHung: the host did not come back.
        """
        (inside,) = self.run_together([(source, inputs)], limits=limits)
        return inside

    def run_together(
        self,
        attacks: list[tuple[str, dict[str, Any]]],
        *,
        limits: dict[str, Any] | None = None,
        limits_of: list[dict[str, Any]] | None = None,
    ) -> list[Inside]:
        """Run several sandboxes at the same time, all with the same `limits` or each with its own of `limits_of`."""
        runs = [
            {"source": textwrap.dedent(source), "inputs": {"isolated": True, **inputs}, "limits": own}
            for (source, inputs), own in zip(attacks, limits_of or [limits or {}] * len(attacks), strict=True)
        ]
        answer = self.ask({"op": "run", "runs": runs})
        for result in answer["results"]:
            assert isinstance(result, ExecutionResult), f"the host's own call raised {result!r}"
        return [
            Inside(result, answer["before"], answer["peak_bytes"], answer["effects"]) for result in answer["results"]
        ]

    def attempt(self, source: str, **inputs: Any) -> Any:
        """Run one attack that may raise in the host; returns the result or the exception."""
        runs = [{"source": textwrap.dedent(source), "inputs": {"isolated": True, **inputs}, "limits": {}}]
        return self.ask({"op": "run", "runs": runs})["results"][0]

    def assert_healthy(self) -> None:
        """The next run works, and memory, descriptors, threads and processes are what they were."""
        if self._looks % RUNS_AFTER == 0:
            inside = self.run("set_result(call_tool('echo', {'text': 'well'}))")
            assert (inside.outcome, inside.value) == ("ok", "well"), inside.result
        self._looks += 1
        expected = {**self.baseline, "descriptors": self.baseline["descriptors"] + SPARE}
        now = self.ask({"op": "settle", "expected": expected})
        assert now["descriptors"] <= self.baseline["descriptors"] + SPARE, (self.baseline, now)
        assert now["processes"] <= expected["processes"], (self.baseline, now)
        assert now.get("containers", 0) <= expected.get("containers", 0), (self.baseline, now)
        assert now["threads"] <= self.baseline["threads"] + SPARE, (self.baseline, now)
        assert now["resident_bytes"] <= self.baseline["resident_bytes"] + GROWTH_BYTES + OTHERS_BYTES, (
            self.baseline,
            now,
        )

    def named(self, name: str) -> list[int]:
        """Processes below the host that go by this name."""
        found: list[int] = self.ask({"op": "named", "name": name})
        return found

    def ask(self, request: dict[str, Any]) -> Any:
        self.start()
        return self._ask(request)

    def _ask(self, request: dict[str, Any], within_s: float = PATIENCE_S) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        data = pickle.dumps(request)
        self._process.stdin.write(struct.pack(">I", len(data)) + data)
        self._process.stdin.flush()
        return self._read(within_s)

    def _read(self, within_s: float) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            self.kill()
            raise HostHung(f"the host did not answer within {within_s:g} s")
        head = self._process.stdout.read(4)
        if len(head) < 4:
            assert self._process.stderr is not None
            words = _available(self._process.stderr)[-4000:].decode("utf-8", "replace")
            self.kill()
            raise HostHung(f"the host died: {words}")
        return pickle.loads(self._process.stdout.read(struct.unpack(">I", head)[0]))

    def kill(self) -> None:
        """SIGKILL, as if the machine's memory killer had chosen it."""
        if self._process is not None:
            end_group(self._process)
            self._process = None

    def close(self) -> None:
        """Let it end by itself."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        self._process.stdin = None
        self.kill()
