"""What a zygote was asked and has not answered. One that is stopped or stuck is killed."""

from __future__ import annotations

import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

import anyio

ANSWER_S = 10.0
"""A zygote answers a request within milliseconds. One that has not answered for this long is stopped or stuck; it is
killed, and the next start gets another."""


class AskedZygote(ABC):
    """The part of a zygote's handle that watches whether it answers."""

    is_dead: bool
    _process: subprocess.Popen[bytes]
    _control: socket.socket
    _asked: dict[int, float]
    """When each request was sent that has no answer yet, oldest first."""

    @abstractmethod
    def _mark_dead(self, why: str) -> None:
        """Take note that it is gone, and with it its children."""

    def check(self) -> None:
        """Kill it, and with it its children, if it is stuck: the runs of its children end, and starts go on."""
        waited_s = time.monotonic() - next(iter(self._asked.values()), time.monotonic())
        if self.is_dead or waited_s < ANSWER_S:
            return
        try:
            self._control.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            # Nothing has been overlooked while this process itself was busy.
            self._process.kill()
            self._mark_dead(f"the zygote did not answer for {waited_s:.0f} s and was killed; was it stopped?")
        except OSError:
            return  # `listen` finds that it is gone

    async def _wait(self, wait: Callable[[], Awaitable[object]]) -> None:
        """Wait for the zygote, and see to it that it is not stuck."""
        with anyio.move_on_after(ANSWER_S):
            await wait()
            return
        self.check()
