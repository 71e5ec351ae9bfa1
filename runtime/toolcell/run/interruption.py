"""Interrupt a script of a session, so that its sandbox may go on with the next one.

The script gets a KeyboardInterrupt. If it has not ended a moment later, the sandbox is killed.
"""

from __future__ import annotations

from typing import Protocol

import anyio

from toolcell.run.connection import GuestConnection
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.messages import Done, Message

SIGNALS = 10
"""How often it is told meanwhile: it may be sending a message, which must not be torn."""


class Drained(Protocol):
    """Takes what a script sends when its run is over."""

    def drain_message(self, message: Message) -> None:
        """Take a message."""


async def interrupt(connection: GuestConnection, output: Drained) -> int | None:
    """Interrupt the script and wait until it has ended; return the line it was at. Otherwise kill the sandbox."""
    done: Done | None = None
    sandbox = connection.sandbox
    wait_s = sandbox.interrupted_s
    with anyio.move_on_after(wait_s):
        try:
            while done is None and sandbox.is_alive():
                sandbox.interrupt()
                with anyio.move_on_after(wait_s / SIGNALS):
                    done = await read_done(connection, output)
        except RemoteProtocolError:
            pass
    if done is None:
        sandbox.kill()
        return None
    line = (done.error or {}).get("line")
    return line if type(line) is int else None


async def read_done(connection: GuestConnection, output: Drained) -> Done | None:
    """Take messages until `Done`; None when the guest is gone."""
    while True:
        if (message := connection.decode_on()) is not None:
            if type(message) is Done:
                return message
            output.drain_message(message)
        elif not connection.wire.is_decoding and not await connection.receive():
            return None
        await connection.turn.give_way()
