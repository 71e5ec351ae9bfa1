"""A guest that plays a part: messages from a list or a generator, in this process, without any I/O.

Every end a run can have is one step away, so code that runs scripts can be tested against all of them. Executes no
script; what it says goes through the same protocol and the same verdicts as a real guest's.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anyio

from toolcell.config import Limits
from toolcell.sandbox.backend import Exit, Sample
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
"""SIGKILL, which Windows has no name for."""


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """Call a tool and wait for its answer, which `yield` returns; the id is found for you."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Die:
    """End without a word, as a crash does."""

    signal: int | None = KILLED
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Hang:
    """Say nothing more until killed."""


@dataclass(frozen=True, slots=True)
class RawOutput:
    """Write to descriptors 1 and 2, past the bridge."""

    stdout: bytes = b""
    stderr: bytes = b""


Step: TypeAlias = GuestMessage | ScriptedCall | Die | Hang | RawOutput | Sample | bytes
"""One thing to do. A `Sample` is what the host measures from then on; `bytes` go to the bridge as they are."""

Part: TypeAlias = Generator[Step, ToolReturn | ToolFail | None, None]
Guest: TypeAlias = Iterable[Step] | Callable[[RunScript], Part | Iterable[Step]]
"""What to play: the same steps for every run, or a function of the run that gives them."""


class ScriptedStream:
    """The bridge as two queues in memory."""

    def __init__(self, sandbox: ScriptedSandbox) -> None:
        self._sandbox = sandbox
        self._to_host: deque[bytes] = deque()
        self._changed = anyio.Event()
        self._is_closed = False
        self.sent_bytes = 0
        self.received_bytes = 0

    def put(self, data: bytes) -> None:
        """Give the host bytes to receive."""
        self._to_host.append(data)
        self._tell()

    def close(self) -> None:
        """After what is there, the end."""
        self._is_closed = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def receive(self) -> bytes:
        """Return the next bytes, or b"" when the guest is gone."""
        while not self._to_host:
            if self._is_closed:
                return b""
            await self._changed.wait()
        data = self._to_host.popleft()
        self.received_bytes += len(data)
        return data

    async def send(self, data: bytes) -> None:
        """Hand `data` to the guest, which acts on it at once."""
        self.sent_bytes += len(data)
        if not self._is_closed:
            self._sandbox.hear(data)


class ScriptedSandbox:
    """One part being played."""

    def __init__(self, ident: str, limits: Limits, guest: Guest, layers: Mapping[str, str]) -> None:
        self.id = ident
        self.limits = limits
        self.backend = "fake"
        self.layers: Mapping[str, str] = {}
        self.stream = ScriptedStream(self)
        self.runs: list[RunScript] = []
        """What it was asked to run."""
        self.files: dict[str, bytes] = {}
        """What was put into its workspace."""
        self._guest = guest
        self._connection = Connection.guest(max_frame_bytes=limits.frame_bytes)
        self._steps: Part | None = None
        self._waits_for: int | None = None
        self._last_id = 0
        self._output = RawOutput()
        self._sample = Sample()
        self._exit: Exit | None = None
        self._say(Hello(PROTOCOL_VERSION, __version__, sys.version.split()[0], dict(layers)))

    def accept(self, layers: Mapping[str, str]) -> None:
        """Take whatever layers it was told to claim."""
        self.layers = dict(layers)

    def is_alive(self) -> bool:
        """False once it has died or been killed."""
        return self._exit is None

    async def prepare(self, limits: Limits) -> None:
        """Limits bind nothing here; the session's own still do."""

    def read_output(self) -> tuple[bytes, bytes]:
        """Take what its steps wrote raw so far."""
        output, self._output = self._output, RawOutput()
        return output.stdout, output.stderr

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """The `Sample` it was last told to show."""
        return self._sample

    def kill(self) -> None:
        """End it as a signal would."""
        self._die(Exit(signal=KILLED))

    def freeze(self) -> bool:
        """It is destroyed right after its run."""
        return False

    async def ended(self) -> Exit:
        """How it ended; it never takes any time to."""
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

    # The conversation.

    def hear(self, data: bytes) -> None:
        """Take bytes from the host and play on as far as they allow."""
        try:
            self._connection.receive_data(data)
            while self._exit is None and (message := self._connection.next_message()) is not None:
                self._take(message)
        except ProtocolError:
            self._die(Exit(code=1))

    def _take(self, message: Message) -> None:
        match message:
            case PutFile(path, data):
                self.files[path] = self.files.get(path, b"") + data
            case RunScript():
                self.runs.append(message)
                self._steps = _part(self._guest, message)
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
                self._say(Done(True, None))
                return
            if self._is_last(step):
                return
            answer = None

    def _is_last(self, step: Step) -> bool:
        """Do one step; True when the next has to wait, or none follows."""
        match step:
            case ScriptedCall(name, args, line):
                self._last_id += 1
                self._waits_for = self._last_id
                self._say(CallTool(self._last_id, name, dict(args), line))
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
                self._say(step)
                return True
            case _:
                self._say(step)
        return False

    def _say(self, message: Message) -> None:
        if isinstance(message, CallTool):
            self._last_id = max(self._last_id, message.id)
        self.stream.put(self._connection.send(message))


def _part(guest: Guest, run: RunScript) -> Part:
    """The steps for one run as a generator, which can be told answers."""
    steps = guest(run) if callable(guest) else guest
    if isinstance(steps, Generator):
        return steps

    def each() -> Part:
        for step in steps:  # noqa: UP028 - `yield from` would hand answers on to an iterator that takes none
            yield step

    return each()
