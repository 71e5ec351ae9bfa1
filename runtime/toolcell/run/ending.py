"""The end of a run: interrupt its script, or wait until its sandbox has exited; measure it, and read what it left.

A script of a session that is interrupted gets a KeyboardInterrupt, so that its sandbox may go on with the next one. If
it has not ended a moment later, the sandbox is killed.
"""

from __future__ import annotations

from contextlib import suppress

import anyio

from toolcell.run.connection import GuestConnection
from toolcell.run.outcome import Failed, ProtocolViolation, highest
from toolcell.run.output import RunOutput
from toolcell.sandbox.backend import Exit, Sample
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.messages import Done

DRAIN_S = 0.25
"""For reading what a dead sandbox had sent. Part of what a run takes past `wall_s`."""

SIGNALS = 10
"""How often it is told meanwhile: it may be sending a message, which must not be torn."""


async def interrupt(connection: GuestConnection, output: RunOutput) -> int | None:
    """Interrupt the script and wait until it has ended; return the line it was at. Otherwise kill the sandbox."""
    done: Done | None = None
    sandbox = connection.sandbox
    until, pause_s = connection.now() + sandbox.interrupted_s, sandbox.interrupted_s / SIGNALS
    with suppress(RemoteProtocolError):
        while done is None and sandbox.is_alive():
            if (left_s := until - connection.now()) <= 0:
                break
            sandbox.interrupt()
            with anyio.move_on_after(min(pause_s, left_s)):
                done = await read_done(connection, output)
    if done is None:
        sandbox.kill()
        return None
    line = (done.error or {}).get("line")
    return line if type(line) is int else None


async def read_done(connection: GuestConnection, output: RunOutput) -> Done | None:
    """Take messages until `Done`; None when the guest is gone."""
    while True:
        if (message := connection.next_message()) is not None:
            if type(message) is Done:
                return message
            output.drain_message(message)
        elif not connection.wire.is_decoding and not await connection.receive():
            return None
        await connection.turn.give_way()


async def wait_for_exit(connection: GuestConnection, output: RunOutput, sample: Sample) -> tuple[Exit, Sample]:
    """After `Done`, measure for the last time. Otherwise wait for the process to exit, and read what is left.

    Shape: how it exited, and the most of what was measured. `sample`: what was measured before.
    """
    sandbox, stopped = connection.sandbox, connection.stopped
    if type(stopped) is Done or (connection.is_ending and connection.is_usable):
        is_ok = type(stopped) is Done and stopped.ok
        sample = sandbox.sample(brief=is_ok, last=not is_ok)
        take_printed(connection, output)
        return Exit(), sample
    if type(stopped) is Failed:
        return Exit(), sample
    sample = highest(sample, sandbox.sample())
    sandbox.kill()
    end = await sandbox.ended()
    sample = highest(sample, sandbox.sample())
    await _drain(connection, output)
    return end, sample


def take_printed(connection: GuestConnection, output: RunOutput) -> None:
    """Read what the script's processes have written to their output and error streams, as far as it is there."""
    out, err = connection.sandbox.read_output()
    if out or err:
        output.take_raw(out, err)


async def _drain(connection: GuestConnection, output: RunOutput) -> None:
    """Read what the script sent and printed before its sandbox died."""
    if not isinstance(connection.stopped, ProtocolViolation):
        try:
            with anyio.move_on_after(DRAIN_S, shield=True):
                if (done := await read_done(connection, output)) is not None:
                    connection.stop(done)
        except RemoteProtocolError as exc:
            connection.stop(ProtocolViolation(str(exc)))
    before = -1
    while output.printed_bytes != before:
        before = output.printed_bytes
        take_printed(connection, output)
