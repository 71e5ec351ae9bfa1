"""A sandbox that a zygote has forked, wherever the zygote is: what it reported, and the ways to guest and supervisor.

Sandboxes of the profile `container`, also those of pods, have a supervisor each. They are one
`SupervisedSandbox`; a subclass says how its zygote is asked and how it is measured.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from toolcell.config import Limits
from toolcell.sandbox.backend import INTERRUPTED_S, Exit, Sandbox
from toolcell.sandbox.stream import SocketStream, read_available
from toolcell.support.event_loop import ChangeEvent
from toolcell_bridge.entry.supervisor_protocol import ASK, FREEZE, INTERRUPT, KILL, THAW


class ForkedSandbox:
    """One sandbox, as reported by its zygote."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_started = False
        self.is_lowered = True
        """It has the rlimits that were last asked for."""
        self.problem = ""
        """Why it was not started, or why nobody will report its end."""
        self.end: Exit | None = None
        self.changed = ChangeEvent()

    @property
    def is_over(self) -> bool:
        """Its end is known, or nobody can report it any more."""
        return self.end is not None or bool(self.problem)

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        self.changed.notify()

    def fail(self, problem: str) -> None:
        """Record why nobody will report its end."""
        self.problem = problem or "for a reason that was not told"
        self.notify()


def exit_of(status: int, cpu_s: float, peak_memory_bytes: int, problem: str = "") -> Exit:
    """Return how a process ended whose wait status was reported; -1: it was not among those reaped.

    Not `os.waitstatus_to_exitcode`: a host may get any number.
    """
    if status < 0:
        return Exit(cpu_s=cpu_s, peak_memory_bytes=peak_memory_bytes, problem=problem)
    number, code = status & 0x7F, status >> 8 & 0xFF
    return Exit(number or None, None if number else code, cpu_s, peak_memory_bytes, problem)


class SupervisorChannel:
    """The host's ends of one sandbox's bridge, raw output and control pipe."""

    def __init__(self, bridge: socket.socket, raw_output: Sequence[int], control_pipe: int) -> None:
        self.stream = SocketStream(bridge)
        self._raw_output = tuple(raw_output)
        self._control_pipe = control_pipe
        self._hangup = select.poll()
        self._hangup.register(bridge, select.POLLRDHUP)
        self._is_closed = False
        self._closing = threading.Lock()

    def has_hung_up(self) -> bool:
        """Return True when no process holds the other end of the bridge any more."""
        return self._is_closed or bool(self._hangup.poll(0))

    def read_raw(self) -> tuple[bytes, bytes]:
        """Take the raw output so far, without waiting."""
        if self._is_closed:
            return b"", b""
        return read_available(self._raw_output[0]), read_available(self._raw_output[1])

    def send_control(self, word: bytes) -> bool:
        """Write to the supervisor's control pipe. Return False when the supervisor is gone."""
        self.stream.expect_nothing()
        try:
            return not self._is_closed and os.write(self._control_pipe, word) > 0
        except OSError:
            return False

    def kill_now(self) -> None:
        """Have the supervisor kill the sandbox. Any thread may call it."""
        with self._closing, suppress(OSError):
            if not self._is_closed:
                os.write(self._control_pipe, KILL)

    def close(self) -> None:
        """Close all descriptors, which ends the sandbox. Safe to call twice."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self.stream.close()
            for descriptor in (*self._raw_output, self._control_pipe):
                os.close(descriptor)


class SupervisedSandbox(Sandbox):
    """One guest and its supervisor."""

    def __init__(
        self, child: ForkedSandbox, channel: SupervisorChannel, *, ident: str, limits: Limits, required: frozenset[str]
    ) -> None:
        self.child, self.channel = child, channel
        self.required = required
        self.is_killed = False
        self.id = ident
        self.stream = channel.stream
        self.limits = limits
        self.layers: Mapping[str, str] = {}

    def is_alive(self) -> bool:
        """Return False once its end is known."""
        return not (self.child.is_over or self.is_killed or self.channel.has_hung_up())

    def read_output(self) -> tuple[bytes, bytes]:
        """Take what was written raw to descriptors 1 and 2 so far, without waiting."""
        return self.channel.read_raw()

    def kill(self) -> None:
        """Have the supervisor kill every process inside, without waiting."""
        self.is_killed = True
        self.channel.send_control(KILL)

    def kill_now(self) -> None:
        """Have the supervisor kill it, from another thread."""
        self.channel.kill_now()

    def ask_line(self) -> bool:
        """Have the supervisor ask the script which line it is at."""
        return self.channel.send_control(ASK)

    interrupted_s = INTERRUPTED_S

    def interrupt(self) -> None:
        """Have the supervisor interrupt the script of a session."""
        self.channel.send_control(INTERRUPT)

    async def pause(self) -> bool:
        """Have the supervisor stop every process inside until `unpause` or the end."""
        return self.is_alive() and self.channel.send_control(FREEZE)

    async def unpause(self) -> None:
        """Let everything run again."""
        self.channel.send_control(THAW)
