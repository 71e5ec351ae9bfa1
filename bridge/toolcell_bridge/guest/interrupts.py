"""Interrupt a script of a session: the host sends a signal, and the script gets a KeyboardInterrupt.

A signal that comes while the harness sends or reads waits until that is done, and one for a script that has not begun
waits until it begins. Where a script has to end, the host repeats the signal until it has.
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
        self.has_come = False
        """The host has sent it, or a part of it."""
        self._is_over = self._is_due = False
        self._next = 0.0

    def install(self) -> None:
        """Begin to handle the signal. Runs in the main thread."""
        signal.signal(INTERRUPT_SIGNAL, self._handle)

    def allow(self) -> None:
        """The script begins.

        Raises:
            KeyboardInterrupt: it was interrupted before.
        """
        self.is_allowed = True
        if self._is_due:
            self._interrupt()

    def end(self) -> None:
        """The script is over, and what comes until there is another one is too late."""
        self.is_allowed = self._is_due = self.has_come = False
        self._is_over = True
        self._next = 0.0

    def listen(self) -> None:
        """Wait for the next script."""
        self._is_over = False

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        is_asleep = is_interruptible(frame)
        if not self.is_allowed:
            # The host interrupts no script that it has not sent: either that has come, or the one before is meant.
            if self.has_come or (not self._is_over and (not is_asleep or self._channel.has_input())):
                self._is_due = True
        elif time.monotonic() < self._next:
            return
        elif is_asleep:
            self._interrupt()
        else:
            self._channel.when_free = self._interrupt

    def _interrupt(self) -> None:
        if not self.is_allowed:
            return
        if threading.current_thread() is threading.main_thread():
            self._next, self._is_due = time.monotonic() + AGAIN_S, False
            raise KeyboardInterrupt("interrupted by the host")
        signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT_SIGNAL)
