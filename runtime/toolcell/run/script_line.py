"""Ask a script whose time is over which line it is at, before its sandbox is killed.

Its main thread writes its frames to the script's stderr. As everything that a guest says, the answer may be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import anyio

from toolcell.results import Outcome
from toolcell.sandbox.backend import Sandbox
from toolcell_bridge.guest.scripts import SCRIPT

ASKED = frozenset({Outcome.TIMEOUT, Outcome.CPU_LIMIT})
"""Outcomes at which a script is asked."""

POLL_S = 0.001

_ANSWER = re.compile(
    rb"(?:Stack|(?:Current t|T)hread [^\n]{0,80}) \(most recent call first\):\n"
    rb"(?P<frames>(?:  File [^\n]{0,2000}\n){0,100}(?:  \.\.\.\n|[^\n]{0,2000}\Z)?)"
)
_OWN_FRAME = re.compile(rb'  File "%s", line (\d{1,9}) ' % re.escape(SCRIPT.encode()))


def ask_line(sandbox: Sandbox) -> bool:
    """Ask the script which line it is at; False when the backend cannot ask."""
    return sandbox.is_alive() and sandbox.ask_line()


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
