"""The end of a run: measure its sandbox for the last time, wait until it has exited, and read what it left."""

from __future__ import annotations

import anyio

from toolcell.errors import SandboxUnavailable
from toolcell.run.connection import GuestConnection
from toolcell.run.interruption import read_done
from toolcell.run.outcome import Failed, ProtocolViolation, highest
from toolcell.run.output import RunOutput
from toolcell.sandbox.backend import Exit, Sample, Sandbox
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.messages import Done

DRAIN_S = 0.25
"""For reading what a dead sandbox had sent. Part of what a run takes past `wall_s`."""


async def wait_for_exit(connection: GuestConnection, output: RunOutput, sample: Sample) -> tuple[Exit, Sample]:
    """After `Done`, measure for the last time. Otherwise wait for the process to exit, and read what is left.

    Shape: how it exited, and the most of what was measured. `sample`: what was measured before.
    """
    sandbox, stopped = connection.sandbox, connection.stopped
    if type(stopped) is Done or (connection.was_interrupted and connection.is_usable):
        is_ok = type(stopped) is Done and stopped.ok
        sample = sandbox.sample(brief=is_ok, last=not is_ok)
        take_printed(connection, output)
        return Exit(), sample
    if type(stopped) is Failed:
        return Exit(), sample
    if connection.is_held:
        connection.is_held = await _pause(sandbox)
        if connection.is_held:
            take_printed(connection, output)
            return Exit(), highest(sample, sandbox.sample())
    sample = highest(sample, sandbox.sample())
    sandbox.kill()
    end = await sandbox.ended()
    sample = highest(sample, sandbox.sample())
    await _drain(connection, output)
    return end, sample


async def _pause(sandbox: Sandbox) -> bool:
    """Stop everything in a sandbox that is to be kept; False when something may go on, or nothing is left."""
    try:
        return sandbox.is_alive() and await sandbox.pause()
    except (OSError, SandboxUnavailable):
        return False


def take_printed(connection: GuestConnection, output: RunOutput) -> None:
    """Read what the script's processes have written to their output and error streams, as far as it is there."""
    out, err = connection.read_output()
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
