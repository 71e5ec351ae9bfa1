"""The host's ends of a sandbox that has a supervisor: bridge, raw output, and the supervisor's control pipe."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from toolcell.sandbox.stream import SocketStream, read_available
from toolcell_bridge.entry.shared_protocol import KILL


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
        self.stream.rest()
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
