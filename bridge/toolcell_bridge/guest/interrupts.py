"""Interrupt a script of a session: the host sends a signal, and the script gets a KeyboardInterrupt.

A signal that comes while the harness sends a message waits until that is sent. One that comes while it reads is lost:
the host repeats the signal until the script has ended or its time is over.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

from toolcell_bridge.guest.channel import Channel, is_interruptible

INTERRUPT_SIGNAL = 51
"""A real-time signal that no library uses."""


AGAIN_S = 0.03
"""Time to clean up before the next KeyboardInterrupt. There may have to be one: Python drops what is raised while an
object is being destroyed."""


class Interrupts:
    """Whether the script may be interrupted now."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.is_allowed = False
        self._next = 0.0

    def install(self) -> None:
        """Begin to handle the signal. Runs in the main thread."""
        signal.signal(INTERRUPT_SIGNAL, self._handle)

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        if not self.is_allowed or time.monotonic() < self._next:
            return
        if is_interruptible(frame):
            self._interrupt()
        else:
            self._channel.after_send = self._interrupt

    def _interrupt(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._channel.after_send = self._interrupt
        elif self.is_allowed:
            self._next = time.monotonic() + AGAIN_S
            raise KeyboardInterrupt("interrupted by the host")
