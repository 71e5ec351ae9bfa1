"""A scripted guest: plays a list of messages in this process, without any I/O.

It can end a run in every possible way, so code that runs scripts can be tested against all outcomes. It executes no
script. Its messages go through the same protocol and the same outcome rules as those of a real guest.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from toolcell.config import Limits
from toolcell.sandbox import Exit, Sample, Sandbox
from toolcell.support.event_loop import ChangeEvent
from toolcell_bridge import __version__
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.errors import ProtocolError
from toolcell_bridge.wire.messages import (
    PROTOCOL_VERSION,
    CallTool,
    Done,
    GuestMessage,
    Hello,
    Message,
    PutFile,
    RunScript,
    ToolFail,
    ToolReturn,
)

KILLED = 9
"""SIGKILL. Windows has no name for it."""


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """Call a tool and wait for its answer, which `yield` returns. The id is chosen automatically."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Die:
    """End without a message, as a crash does."""

    signal: int | None = KILLED
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Hang:
    """Send nothing more until killed."""


@dataclass(frozen=True, slots=True)
class RawOutput:
    """Write to descriptors 1 and 2, around the bridge."""

    stdout: bytes = b""
    stderr: bytes = b""


Step: TypeAlias = GuestMessage | ScriptedCall | Die | Hang | RawOutput | Sample | bytes
"""One thing to do. A `Sample` is what the host measures from then on; `bytes` are sent unchanged over the bridge."""

Steps: TypeAlias = Generator[Step, ToolReturn | ToolFail | None, None]
Guest: TypeAlias = Iterable[Step] | Callable[[RunScript], Steps | Iterable[Step]]
"""The steps of every run, or a function of the run that returns the steps."""


class ScriptedStream:
    """The bridge as two queues in memory."""

    def __init__(self, sandbox: ScriptedSandbox) -> None:
        self._sandbox = sandbox
        self._to_host: deque[bytes] = deque()
        self._changed = ChangeEvent()
        self._is_closed = False
        self.sent_bytes = 0
        self.received_bytes = 0

    def put(self, data: bytes) -> None:
        """Give the host bytes to receive."""
        self._to_host.append(data)
        self._changed.notify()

    def close(self) -> None:
        """End the stream after the bytes that are queued."""
        self._is_closed = True
        self._changed.notify()

    async def receive(self) -> bytes:
        """Return the next bytes, or b"" when the guest is gone."""
        while not self._to_host:
            if self._is_closed:
                return b""
            await self._changed.wait()
        data = self._to_host.popleft()
        self.received_bytes += len(data)
        return data

    async def send(self, data: bytes | memoryview) -> None:
        """Give `data` to the guest, which acts on it at once."""
        self.sent_bytes += len(data)
        if not self._is_closed:
            self._sandbox.receive(bytes(data))


class ScriptedSandbox(Sandbox):
    """A sandbox whose guest is scripted."""

    def __init__(self, ident: str, limits: Limits, guest: Guest, layers: Mapping[str, str]) -> None:
        self.id = ident
        self.limits = limits
        self.backend = "fake"
        self.layers: Mapping[str, str] = {}
        self.stream: ScriptedStream = ScriptedStream(self)
        self.runs: list[RunScript] = []
        """The runs it was asked for."""
        self.files: dict[str, bytes] = {}
        """The files that were put into its workspace."""
        self._guest = guest
        self._connection = Connection.guest(max_frame_bytes=limits.frame_bytes)
        self._steps: Steps | None = None
        self._waits_for: int | None = None
        self._last_id = 0
        self._output = RawOutput()
        self._sample = Sample()
        self._exit: Exit | None = None
        self._send(Hello(PROTOCOL_VERSION, __version__, sys.version.split()[0], dict(layers)))

    def accept(self, layers: Mapping[str, str]) -> None:
        """Take the layers that it claims."""
        self.layers = dict(layers)

    def is_alive(self) -> bool:
        """Return False once it has died or been killed."""
        return self._exit is None

    async def prepare(self, limits: Limits) -> None:
        """Do nothing: limits of the sandbox do not apply to a scripted guest, those of the run do."""

    def read_output(self) -> tuple[bytes, bytes]:
        """Take the raw output of its steps so far."""
        output, self._output = self._output, RawOutput()
        return output.stdout, output.stderr

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Return the `Sample` of its last such step."""
        return self._sample

    def kill(self) -> None:
        """End it as SIGKILL would."""
        self._die(Exit(signal=KILLED))

    def kill_now(self) -> None:
        """Do nothing: it plays in the event loop, so it does not go on while that does not run."""

    def cpu_now(self) -> float | None:
        """Return None: only its steps say what it has used."""
        return None

    async def ended(self) -> Exit:
        """Return how it ended, without waiting."""
        return self._exit or Exit()

    async def destroy(self) -> None:
        """End it."""
        self.kill()

    def _die(self, end: Exit) -> None:
        if self._exit is None:
            self._exit = end
            self.stream.close()
            if self._steps is not None:
                self._steps.close()

    # Messages.

    def receive(self, data: bytes) -> None:
        """Take bytes from the host, and play until a step has to wait."""
        try:
            self._connection.receive_data(data)
            while self._exit is None and (message := self._connection.next_message()) is not None:
                self._handle_message(message)
        except ProtocolError:
            self._die(Exit(code=1))

    def _handle_message(self, message: Message) -> None:
        match message:
            case PutFile(path, data):
                self.files[path] = self.files.get(path, b"") + data
            case RunScript():
                self.runs.append(message)
                self._steps = _steps(self._guest, message)
                self._play(None)
            case ToolReturn() | ToolFail() if message.id == self._waits_for:
                self._waits_for = None
                self._play(message)
            case _:
                pass

    def _play(self, answer: ToolReturn | ToolFail | None) -> None:
        assert self._steps is not None
        while self._exit is None:
            try:
                step = self._steps.send(answer)
            except StopIteration:
                self._send(Done(True, None))
                return
            if self._do(step):
                return
            answer = None

    def _do(self, step: Step) -> bool:
        """Do one step. Return True when the next step has to wait or there is none."""
        match step:
            case ScriptedCall(name, args, line):
                self._last_id += 1
                self._waits_for = self._last_id
                self._send(CallTool(self._last_id, name, dict(args), line))
                return True
            case Die(signal, code):
                self._die(Exit(signal, code, self._sample.cpu_s, self._sample.peak_memory_bytes))
            case RawOutput(stdout, stderr):
                self._output = RawOutput(self._output.stdout + stdout, self._output.stderr + stderr)
            case Sample():
                self._sample = step
            case bytes():
                self.stream.put(step)
            case Hang():
                return True
            case Done():
                self._send(step)
                return True
            case _:
                self._send(step)
        return False

    def _send(self, message: Message) -> None:
        if isinstance(message, CallTool):
            self._last_id = max(self._last_id, message.id)
        self.stream.put(self._connection.send(message))


def _steps(guest: Guest, run: RunScript) -> Steps:
    """Return the steps of one run as a generator, which receives answers."""
    steps = guest(run) if callable(guest) else guest
    if isinstance(steps, Generator):
        return steps

    def each() -> Steps:
        for step in steps:  # noqa: UP028 - `yield from` would send answers to an iterator that takes none
            yield step

    return each()
