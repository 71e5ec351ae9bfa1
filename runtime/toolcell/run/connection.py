"""`GuestConnection`: the host's end of the bridge to one sandbox, from its Hello to its last run.

Gathers what is sent into few writes, counts bytes, and holds the reason why a run stopped. Knows no tools and no clock;
the wire's `Connection` decides which message is legal when.
"""

from __future__ import annotations

import anyio

from toolcell.errors import SandboxUnavailable
from toolcell.run.outcome import StopReason
from toolcell.sandbox.backend import Sandbox
from toolcell_bridge.wire.connection import Connection, State
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.messages import Done, Hello, Message

HELLO_S = 30.0
"""From the start of a sandbox to its Hello. It takes milliseconds; a machine this slow has another problem."""

GATHERED_BYTES = 64 * 1024
"""Most that is gathered before it is written. Each write costs a system call, and wakes a guest that sleeps."""


class GuestConnection:
    """The bridge to one sandbox. The pool holds these; a run needs one that `is_usable`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.stopped: StopReason | None = None
        """Why the run under way stopped; None while it goes on. Only `stop` and `begin_run` set it."""
        self._stream = sandbox.stream
        self._wire = Connection.host(max_frame_bytes=sandbox.limits.frame_bytes)
        self.next_message = self._wire.next_message
        """Return the next message that was received, or None when more bytes are needed."""
        self._outgoing: list[bytes] = []
        self.unsent_bytes = 0
        """Posted, and not yet flushed."""
        self._is_broken = False
        """A write was cut short, perhaps in the middle of a message."""
        self._sent_before = self._received_before = 0

    @property
    def is_usable(self) -> bool:
        """True while another run may be sent."""
        return self._wire.state is State.IDLE and not self._is_broken and self.sandbox.is_alive()

    async def hello(self) -> None:
        """Wait for the guest's Hello.

        Raises:
            SandboxUnavailable: the guest died or sent something else; the sandbox has been destroyed.
        """
        problem = f"it said nothing within {HELLO_S:g} s"
        try:
            with anyio.move_on_after(HELLO_S):
                while (message := self.next_message()) is None:
                    if not await self.receive():
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
        end = await self.sandbox.ended()
        text = self.sandbox.read_output()[1].decode("utf-8", "replace").strip()
        return text or f"it ended with signal {end.signal}, exit code {end.code}"

    def begin_run(self) -> None:
        """Begin a run: forget why the one before stopped, and count bytes from here."""
        self.stopped = None
        self._sent_before, self._received_before = self._stream.sent_bytes, self._stream.received_bytes

    def stop(self, reason: StopReason) -> None:
        """End the run. The first reason counts. Every reason but the guest's own `Done` kills the sandbox."""
        if self.stopped is not None:
            return
        self.stopped = reason
        if type(reason) is not Done:
            self.sandbox.kill()

    @property
    def sent_bytes(self) -> int:
        """Bytes the host has sent in this run."""
        return self._stream.sent_bytes - self._sent_before

    @property
    def received_bytes(self) -> int:
        """Bytes the guest has sent in this run: an upper bound of the size of everything in it."""
        return self._stream.received_bytes - self._received_before

    def post(self, message: Message) -> None:
        """Add a message to what the next `flush` writes.

        Raises:
            UnsendableValue, ValueTooLarge: the message has no form on the wire, and nothing was added.
        """
        data = self._wire.send(message)
        self._outgoing.append(data)
        self.unsent_bytes += len(data)

    def take_unsent(self) -> bytes:
        """Take what was posted, for `write`."""
        outgoing, self._outgoing, self.unsent_bytes = self._outgoing, [], 0
        return b"".join(outgoing)

    async def flush(self) -> None:
        """Write what was posted; see `write`."""
        if self._outgoing:
            await self.write(self.take_unsent())

    async def write(self, data: bytes) -> None:
        """Write whole messages.

        Cancellation: no further run can be sent.
        """
        try:
            await self._stream.send(data)
        except BaseException:
            self._is_broken = True
            raise

    async def receive(self) -> bool:
        """Wait for bytes from the guest; False when it is gone. The messages come from `next_message`."""
        data = await self._stream.receive()
        if not data:
            return False
        self._wire.receive_data(data)
        return True
