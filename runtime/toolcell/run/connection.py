"""`GuestConnection`: the host's end of the bridge to one sandbox, from its Hello to its last run.

Gathers what is sent into few writes, counts bytes, and holds the reason why a run stopped. Knows no tools and no clock;
the wire's `Connection` decides which message is legal when.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from typing import Literal

import anyio

from toolcell.errors import SandboxUnavailable
from toolcell.results import Outcome
from toolcell.run.outcome import Aborted, Failed, StopReason, can_go_on_after
from toolcell.sandbox.backend import ByteStream, LimitExceeded, Meter, Sandbox
from toolcell.sandbox.shortages import describe
from toolcell.sandbox.stream import SocketStream
from toolcell.support import event_loop
from toolcell.support.event_loop import shared_slice
from toolcell_bridge.guest.scripts import SCRIPT
from toolcell_bridge.wire.connection import Connection, State
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.framing import Part
from toolcell_bridge.wire.messages import Done, Hello, Leftover, Message
from toolcell_bridge.wire.table_frames import gathered

ASKED = frozenset({Outcome.TIMEOUT, Outcome.CPU_LIMIT})
"""Outcomes at which a script is asked."""

POLL_S = 0.001

_ANSWER = re.compile(
    rb"(?:Stack|(?:Current t|T)hread [^\n]{0,80}) \(most recent call first\):\n"
    rb"(?P<frames>(?:  File [^\n]{0,2000}\n){0,100}(?:  \.\.\.\n|[^\n]{0,2000}\Z)?)"
)
_OWN_FRAME = re.compile(rb'  File "%s", line (\d{1,9}) ' % re.escape(SCRIPT.encode()))


async def _wait_for_answer(sandbox: Sandbox, take_raw: Callable[[bytes, bytes], None]) -> bytes:
    """Return what the script writes to descriptor 2 until it has answered, has ended, or has had its time."""
    received, is_alive = b"", True
    with anyio.move_on_after(sandbox.answer_s):
        while is_alive and _OWN_FRAME.search(received) is None:
            await anyio.sleep(POLL_S)
            is_alive = sandbox.is_alive()  # before the look: it may answer and die in between
            out, err = sandbox.read_output()
            take_raw(out, b"")
            received += err
    return received


async def read_line(sandbox: Sandbox, take_raw: Callable[[bytes, bytes], None]) -> int | None:
    """Return the line of the script that its main thread is at; None when it does not say so in time.

    `take_raw` gets what else was written to descriptors 1 and 2.
    """
    async with anyio.create_task_group() as reading:
        reading.start_soon(sandbox.read_on)
        received = await _wait_for_answer(sandbox, take_raw)
        reading.cancel_scope.cancel()
    # Frames are written one by one: what is missing is written before the sandbox is dead, or never.
    sandbox.kill()
    await sandbox.ended()
    out, err = sandbox.read_output()
    received += err
    answer = _ANSWER.search(received)
    if answer is None:
        take_raw(out, received)
        return None
    take_raw(out, received[: answer.start()] + received[answer.end() :])
    found = _OWN_FRAME.search(answer["frames"])
    return int(found[1]) if found is not None else None


GATHERED_BYTES = 64 * 1024
"""Most that is gathered before it is written. Each write costs a system call, and wakes a guest that sleeps."""


Place = Literal["own", "pool", "extra"]


class GuestConnection:
    """The bridge to one sandbox. The pool holds these; a run needs one that `is_usable`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.meter: Meter = sandbox
        """Measures the run under way."""
        self.place: Place = "own"
        """What counts it: the pool; the sandboxes beside it for nested scripts; or nothing but its own run."""
        self.stopped: StopReason | None = None
        """Why the run under way stopped; None while it goes on. Only `stop` and `begin_run` set it."""
        self.was_asked = False
        """The sandbox was not killed at once, and its script was asked which line it is at."""
        self.stays = False
        """It serves a session: a run that is stopped is interrupted first, and the sandbox killed if that fails."""
        self.is_ending = False
        """The run is over, and its script was interrupted; whether it ends is not known yet."""
        self.interrupted_for = ""
        """Why the script was interrupted although its run goes on: it may handle that."""
        self.script_scope: anyio.CancelScope | None = None
        """The scope of the run under way, while the guest has its script."""
        self.leftover: Leftover | None = None
        """What still ran after the last script of a session, as the guest claims."""
        self.on_interrupt: Callable[[], object] = lambda: None
        """Called when the script is interrupted."""
        self.turn = shared_slice()
        """When to let other tasks have the event loop."""
        self.scope_type, self.now = event_loop.scope_type(), event_loop.clock()
        """The event loop's cancel scopes and clock, for the run."""
        self._stream: ByteStream = sandbox.stream
        self.wire = Connection.host(max_frame_bytes=sandbox.limits.frame_bytes, in_steps=True, joins_logs=True)
        """Knows the size of the last message, and whether `next_message` has only begun to decode one."""
        self.next_message = self.wire.next_message
        """Return the next message that was received, or None when more bytes are needed or when `wire.is_decoding`."""
        self._outgoing: list[Part] = []
        self.unsent_bytes = 0
        """Posted, and not yet flushed."""
        self._writing: anyio.Event | None = None
        """Parts of one message are being written."""
        self._is_broken = False
        """A write was cut short, perhaps in the middle of a message."""
        self._sent_before = self._received_before = 0

    def has_unread(self) -> bool:
        """Whether the guest has sent something that was not looked at, as far as that can be told."""
        stream = self._stream
        return bool(self.wire.frames.buffer) or (isinstance(stream, SocketStream) and stream.has_unread())

    @property
    def is_usable(self) -> bool:
        """True while another run may be sent."""
        return self.wire.state is State.IDLE and not self._is_broken and self.sandbox.is_alive()

    async def hello(self) -> None:
        """Wait for the guest's Hello. Whoever starts the sandbox bounds the time.

        Raises:
            SandboxUnavailable: the guest died or sent something else; the sandbox has been destroyed.
        """
        problem = "it sent something else than Hello"
        try:
            while (message := self.next_message()) is None:
                if not self.wire.is_decoding and not await self.receive():
                    problem = await self._last_words()
                    break
            if isinstance(message, Hello):
                self.sandbox.accept(message.layers)
                return
        except RemoteProtocolError as exc:
            problem = str(exc)
        except BaseException:
            await self.sandbox.destroy()
            raise
        await self.sandbox.destroy()
        raise SandboxUnavailable(f"a sandbox did not come up: {problem}")

    async def _last_words(self) -> str:
        end = await self.meter.ended()
        text = self.sandbox.read_output()[1].decode("utf-8", "replace").strip()
        return text or f"it ended with signal {end.signal}, exit code {end.code}"

    def begin_run(self) -> None:
        """Begin a run: forget why the one before stopped, and count bytes from here."""
        self.stopped, self.was_asked, self.is_ending, self.leftover = None, False, False, None
        self.interrupted_for, self.script_scope = "", None
        self.turn.begin()
        self._sent_before, self._received_before = self._stream.sent_bytes, self._stream.received_bytes

    def stop(self, reason: StopReason) -> None:
        """End the run. The first reason counts. Every reason but the guest's own `Done` kills the sandbox.

        A script whose time is over is asked first which line it is at: `Deadline` kills it a moment later. One of a
        session is interrupted.
        """
        if self.stopped is not None:
            return
        self.stopped = _as_shortage(reason) if type(reason) is Failed else reason
        if self.stays and can_go_on_after(reason) and self.sandbox.interrupted_s:
            self.is_ending = True
            self.on_interrupt()
            return
        may_ask = type(reason) is LimitExceeded and reason.outcome in ASKED and self.sandbox.is_alive()
        self.was_asked = may_ask and self.sandbox.ask_line()
        if type(reason) is not Done and not self.was_asked:
            self.sandbox.kill()

    def interrupt(self, why: str, patience_s: float) -> bool:
        """Interrupt the script of a session. It goes on if it handles that, but is stopped if it has not ended in time.

        Returns False while there is no script to interrupt.
        """
        if self.stopped is not None or self.script_scope is None:
            return False
        self.interrupted_for = why
        if not (self.stays and self.sandbox.interrupted_s):
            self.stop(Aborted(why))
            return True
        self.script_scope.deadline = min(self.script_scope.deadline, self.now() + patience_s)
        self.sandbox.interrupt()
        return True

    @property
    def was_interrupted(self) -> bool:
        """The script got a KeyboardInterrupt, whatever it made of that."""
        return self.is_ending or bool(self.interrupted_for)

    @property
    def sent_bytes(self) -> int:
        """Bytes the host has sent in this run."""
        return self._stream.sent_bytes - self._sent_before

    @property
    def received_bytes(self) -> int:
        """Bytes the guest has sent in this run: an upper bound of the size of everything in it."""
        return self._stream.received_bytes - self._received_before

    def post(self, message: Message) -> list[Part]:
        """Add a message to what the next `flush` writes; return its frame. Arrays and tables in it are not copied.

        Raises:
            UnsendableValue, ValueTooLarge: the message has no form on the wire, and nothing was added.
        """
        parts = self.wire.send_parts(message)
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        self._outgoing += parts
        self.unsent_bytes += size
        return parts

    def take_unsent(self) -> list[Part]:
        """Take what was posted, for `write`."""
        outgoing, self._outgoing, self.unsent_bytes = self._outgoing, [], 0
        return outgoing if len(outgoing) == 1 else gathered(outgoing)

    async def flush(self) -> None:
        """Write what was posted; see `write`."""
        if self._outgoing:
            await self.write(self.take_unsent())

    async def write(self, parts: Sequence[Part]) -> None:
        """Write whole messages, after whatever is being written already.

        Cancellation: no further run can be sent.
        """
        try:
            while self._writing is not None:
                await self._writing.wait()
            if len(parts) == 1:
                await self._stream.send(parts[0])
                return
            self._writing = anyio.Event()
            try:
                for part in parts:
                    await self._stream.send(part)
            finally:
                self._writing.set()
                self._writing = None
        except BaseException:
            self._is_broken = True
            raise

    async def receive(self) -> int:
        """Wait for bytes from the guest; return how many, 0 when it is gone. Messages come from `next_message`."""
        data = await self._stream.receive()
        if data:
            self.wire.receive_data(data)
        return len(data)


def _as_shortage(reason: Failed) -> Failed:
    """Give a want of memory in this process its name: it ends one run, as every shortage does."""
    if not isinstance(reason.error, MemoryError):
        return reason
    named = SandboxUnavailable(f"the run was ended: {describe(errno.ENOMEM, '')}")
    named.__cause__ = reason.error
    return Failed(named)
