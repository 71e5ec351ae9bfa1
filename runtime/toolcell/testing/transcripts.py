"""Record the bytes on a bridge of one backend, and replay them to a sandbox of another backend.

The same script with the same answers must make every guest send the same bytes. Only Hello, which names the layers, is
compared separately. Frames are decoded only to describe a difference.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import anyio

from toolcell.config import Limits
from toolcell.errors import UsageError
from toolcell.sandbox import Backend, ByteStream, Exit, Sample, Sandbox
from toolcell_bridge.wire.codec import decode
from toolcell_bridge.wire.errors import ProtocolError
from toolcell_bridge.wire.framing import FrameReader
from toolcell_bridge.wire.messages import Done, Hello, Message

SILENCE_S = 20.0
"""How long the replay waits for the next bytes of the guest."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """The bytes on one bridge, in the order the host saw them."""

    backend: str
    parts: tuple[tuple[Literal["host", "guest"], bytes], ...]
    """Sender and bytes. Where the bytes are split has no meaning."""
    limits: Limits

    def sent_by(self, who: Literal["host", "guest"]) -> bytes:
        """Return all bytes that one end sent."""
        return b"".join(data for speaker, data in self.parts if speaker == who)

    @property
    def hello(self) -> Hello | None:
        """The guest's first message."""
        first = _first_frame(self.sent_by("guest"))
        message = decode(first[4:]) if first else None
        return message if isinstance(message, Hello) else None

    @property
    def is_complete(self) -> bool:
        """True when the guest's last message is Done. A killed guest cannot be compared byte for byte."""
        return isinstance(_last_message(self.sent_by("guest"), self.limits.frame_bytes), Done)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        parts = [[who, base64.b64encode(data).decode("ascii")] for who, data in self.parts]
        plain = {"backend": self.backend, "limits": self.limits.model_dump(), "parts": parts}
        Path(path).write_text(json.dumps(plain, indent=1) + "\n", encoding="ascii")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        Raises:
            UsageError: the file is not a transcript.
        """
        try:
            plain = json.loads(Path(path).read_text(encoding="ascii"))
            parts = tuple((who, base64.b64decode(data, validate=True)) for who, data in plain["parts"])
            return cls(plain["backend"], parts, Limits(**plain["limits"]))
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise UsageError(f"{os.fspath(path)!r} is not a transcript: {exc}") from exc


# Recording.


class _RecordedStream:
    """Passes bytes on and records them."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self.parts: list[tuple[Literal["host", "guest"], bytes]] = []

    @property
    def sent_bytes(self) -> int:
        """Bytes counted by the stream."""
        return self._stream.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes counted by the stream."""
        return self._stream.received_bytes

    async def receive(self) -> bytes:
        """Return the next bytes, or b"" at the end."""
        data = await self._stream.receive()
        if data:
            self.parts.append(("guest", data))
        return data

    async def send(self, data: bytes | memoryview) -> None:
        """Write all of `data`."""
        self.parts.append(("host", bytes(data)))
        await self._stream.send(data)


class _RecordedSandbox(Sandbox):
    """A sandbox whose stream is recorded."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.recorded = _RecordedStream(sandbox.stream)
        self.stream: Any = self.recorded
        self.id = sandbox.id
        self.backend = sandbox.backend
        self.limits = sandbox.limits
        self.layers = sandbox.layers

    @property
    def transcript(self) -> Transcript:
        """The bytes recorded so far."""
        return Transcript(self.backend, tuple(self.recorded.parts), self.limits)

    def accept(self, layers: Mapping[str, str]) -> None:
        """Take Hello's layers."""
        self._sandbox.accept(layers)
        self.layers = self._sandbox.layers

    def is_alive(self) -> bool:
        """False once its end is known."""
        return self._sandbox.is_alive()

    async def prepare(self, limits: Limits) -> None:
        """Lower its limits."""
        await self._sandbox.prepare(limits)

    def read_output(self) -> tuple[bytes, bytes]:
        """Take what was written raw."""
        return self._sandbox.read_output()

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure it."""
        return self._sandbox.sample(brief=brief, last=last)

    def kill(self) -> None:
        """Kill it."""
        self._sandbox.kill()

    def kill_now(self) -> None:
        """Kill it from another thread."""
        self._sandbox.kill_now()

    def cpu_now(self) -> float | None:
        """What it has used, read in another thread."""
        return self._sandbox.cpu_now()

    async def ended(self) -> Exit:
        """How it ended."""
        return await self._sandbox.ended()

    async def destroy(self) -> None:
        """End it."""
        await self._sandbox.destroy()


class TranscriptRecorder(Backend):
    """A backend that records the bridges of its sandboxes. `record` makes one."""

    name: ClassVar[str] = "recorder"
    isolates: ClassVar[bool] = False

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sandboxes: list[_RecordedSandbox] = []

    @property
    def transcripts(self) -> list[Transcript]:
        """One transcript for each sandbox that was asked to run something, oldest first."""
        found = [sandbox.transcript for sandbox in self._sandboxes]
        return [transcript for transcript in found if transcript.sent_by("host")]

    async def open(self) -> None:
        """Open the recorded backend."""
        await self._backend.open()

    async def start(self, limits: Limits) -> Sandbox:
        """Start a sandbox of the recorded backend."""
        sandbox = _RecordedSandbox(await self._backend.start(limits))
        self._sandboxes.append(sandbox)
        return sandbox

    async def close(self) -> None:
        """Close the recorded backend."""
        await self._backend.close()


def record(backend: Backend) -> TranscriptRecorder:
    """Wrap `backend` so that `transcripts` records its bridges. Name and `isolates` stay those of `backend`."""
    made: type[TranscriptRecorder] = type(
        "TranscriptRecorder", (TranscriptRecorder,), {"name": backend.name, "isolates": backend.isolates}
    )
    return made(backend)


# Replaying.


@dataclass(frozen=True, slots=True)
class Replayed:
    """How the bytes of another guest compare with the recorded ones. Neither `expected` nor `got` includes Hello."""

    backend: str
    expected: bytes
    got: bytes
    hello: Hello | None
    difference: str = ""
    """Describes the first difference; empty when there is none."""

    @property
    def same(self) -> bool:
        """True when every byte is the same."""
        return self.expected == self.got


async def replay_transcript(transcript: Transcript, backend: Backend, *, silence_s: float = SILENCE_S) -> Replayed:
    """Send the host's bytes of `transcript` to a sandbox of `backend`, which must be open, and compare the answers.

    Each part of the host waits until the guest has sent as many bytes as in the recording, or different ones.

    Raises:
        UsageError: the transcript does not end with Done.
        SandboxUnavailable: no sandbox could be started.
    """
    if not transcript.is_complete:
        raise UsageError("only a transcript whose last message is Done can be replayed byte for byte")
    sandbox = await backend.start(transcript.limits)
    try:
        recorded = transcript.sent_by("guest")
        expected = recorded.removeprefix(_first_frame(recorded))
        guest = _ReplayedGuest(sandbox, expected, silence_s)
        hello = await guest.hello()
        due = len(expected) - len(recorded)
        for who, data in transcript.parts:
            if who == "guest":
                due += len(data)
            elif await guest.wait_for_bytes(due):
                await sandbox.stream.send(data)
            else:
                break
        await guest.wait_for_bytes(len(expected))
        sandbox.kill()
        await guest.read_to_end()
    finally:
        await sandbox.destroy()
    got = bytes(guest.sent)
    return Replayed(backend.name, expected, got, hello, _difference(expected, got, transcript.limits.frame_bytes))


class _ReplayedGuest:
    """The guest that the transcript is replayed to, and the bytes it has sent."""

    def __init__(self, sandbox: Sandbox, expected: bytes, silence_s: float) -> None:
        self._sandbox = sandbox
        self._expected = expected
        self._silence_s = silence_s
        self.sent = bytearray()

    async def hello(self) -> Hello | None:
        """Wait for Hello and remove it from the sent bytes."""
        while not (first := _first_frame(self.sent)):
            if not await self._read():
                return None
        del self.sent[: len(first)]
        message = decode(first[4:])
        if isinstance(message, Hello):
            self._sandbox.accept(message.layers)
            return message
        return None

    async def wait_for_bytes(self, size: int) -> bool:
        """Wait until the guest has sent `size` bytes. Return False when it does not, or sends something else."""
        while len(self.sent) < size:
            if not self._expected.startswith(self.sent) or not await self._read():
                return False
        return self._expected.startswith(self.sent)

    async def read_to_end(self) -> None:
        """Read until the end of the stream."""
        while await self._read():
            pass

    async def _read(self) -> bool:
        with anyio.move_on_after(self._silence_s):
            data = await self._sandbox.stream.receive()
            self.sent += data
            return bool(data)
        return False


def _first_frame(data: bytes | bytearray) -> bytes:
    """Return the first frame with its length prefix, or b"" while it is incomplete."""
    size = 4 + int.from_bytes(data[:4], "big")
    return bytes(data[:size]) if len(data) >= max(size, 5) else b""


def _messages(data: bytes, frame_bytes: int) -> list[Message | str]:
    """Return every message in `data`. The last item is an error text when a frame is illegal."""
    reader = FrameReader(frame_bytes)
    found: list[Message | str] = []
    try:
        reader.receive_data(data)
        while (body := reader.next_frame()) is not None:
            found.append(decode(body))
    except ProtocolError as exc:
        found.append(str(exc))
    return found


def _last_message(data: bytes, frame_bytes: int) -> Message | str | None:
    messages = _messages(data, frame_bytes)
    return messages[-1] if messages else None


def _difference(expected: bytes, got: bytes, frame_bytes: int) -> str:
    if expected == got:
        return ""
    wanted, sent = _messages(expected, frame_bytes), _messages(got, frame_bytes)
    for index, (one, other) in enumerate(zip(wanted, sent, strict=False)):
        if repr(one) != repr(other):
            return f"message {index + 1} after Hello: expected {one!r:.500}, got {other!r:.500}"
    if len(wanted) != len(sent):
        return f"{len(wanted)} messages after Hello expected, got {len(sent)}"
    return f"{len(expected)} bytes after Hello expected, got {len(got)}, in the same messages"
