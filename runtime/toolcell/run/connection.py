"""What one run sends and receives over the bridge: answers gathered into one write, bytes counted both ways.

Knows neither tools nor the clock; which message is legal when is the connection's to say.
"""

from __future__ import annotations

from typing import Protocol

from toolcell.errors import ToolAbort
from toolcell.run.ending import Ending
from toolcell.sandbox.backend import ByteStream
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import Message

GATHERED_BYTES = 64 * 1024
"""Answers that wait for their neighbours. Each write costs a system call, and wakes a guest that sleeps."""


class RunObserver(Protocol):
    """Notes what happened, in the moments when the guest is busy and nobody waits."""

    def script_sent(self) -> None:
        """The script is on its way; no call of it has been looked at.

        Raises:
            AuditError: it could not be noted; the run ends with that.
        """
        ...

    def answers_sent(self) -> None:
        """Every answer there was is on its way.

        Raises:
            ToolAbort: something could not be noted; the run ends with that.
        """
        ...


class GuestConnection:
    """The bridge of one sandbox, for as long as one run lasts."""

    def __init__(self, stream: ByteStream, connection: Connection, ending: Ending, witness: RunObserver | None) -> None:
        self._stream = stream
        self._connection = connection
        self._ending = ending
        self._witness = witness
        self._outgoing = bytearray()
        self.is_gathering = False
        """True while the messages of one read are being answered: what is sent then waits for what else they bring."""
        self._sent_before = stream.sent_bytes
        self._received_before = stream.received_bytes

    @property
    def sent_bytes(self) -> int:
        """Sent by the host since this run began."""
        return self._stream.sent_bytes - self._sent_before

    @property
    def received_bytes(self) -> int:
        """Sent by the guest since this run began: an upper bound of whatever it said."""
        return self._stream.received_bytes - self._received_before

    def owes(self, call_id: int) -> bool:
        """True while this call may still be answered."""
        return call_id in self._connection.outstanding

    async def send(self, message: Message) -> None:
        """Send now, or, while the messages of one read are being answered, together with what else they bring.

        Raises:
            UnsendableValue, ValueTooLarge: the message has no form on the wire, and nothing of it was sent.
        """
        self._outgoing += self._connection.send(message)
        if not self.is_gathering or len(self._outgoing) > GATHERED_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what was gathered."""
        if self._outgoing:
            data, self._outgoing = bytes(self._outgoing), bytearray()
            await self._stream.send(data)
        if self._witness is not None:
            try:
                self._witness.answers_sent()
            except ToolAbort as exc:
                self._ending.abort(str(exc))
