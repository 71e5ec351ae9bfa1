"""`Deadline`: kills one run's sandbox when it is past `wall_s` or `cpu_s`, from a thread that needs no event loop.

The event loop reports the outcome when it runs again. It also has a timer of its own, for what the run waits for.
"""

from __future__ import annotations

import os
import threading
import time

from toolcell.config import Limits
from toolcell.results import Outcome
from toolcell.run.outcome import Failed
from toolcell.sandbox.backend import LimitExceeded, Sandbox

PROCESSORS = os.cpu_count() or 1


class Deadline:
    """The limits in time of one run, and the sandbox that they end."""

    def __init__(self, limits: Limits, sandbox: Sandbox, started: float) -> None:
        """`started`: by `time.perf_counter`."""
        self._limits = limits
        self._sandbox = sandbox
        self._started = self._wall_from = started
        self._is_over = self._is_killed = False
        self._enforcing = threading.Lock()
        """Invariant: `enforce` touches the sandbox only while it holds this lock and the run is not over."""
        self._exceeded_at = 0.0
        self._answer_s = sandbox.answer_s
        self.exceeded: LimitExceeded | Failed | None = None
        """Why `enforce` killed the sandbox."""

    def enforce(self) -> None:
        """Kill the sandbox if its time is over. Never raises: what fails here ends this run only.

        Called a few times a second. The event loop has one turn of it to ask the script where it is.
        """
        with self._enforcing:
            if self._is_over or self._is_killed:
                return
            try:
                if self.exceeded is None:
                    self.exceeded, self._exceeded_at = self._find_exceeded(), time.perf_counter()
                elif time.perf_counter() - self._exceeded_at >= self._answer_s:
                    self._is_killed = True
                    self._sandbox.kill_now()
            except Exception as exc:
                self.exceeded = Failed(exc)

    def restart(self) -> None:
        """Count `wall_s` from now on: text of the script has come."""
        self._wall_from = time.perf_counter()

    def left_s(self) -> float:
        """Return how much of `wall_s` is left."""
        return self._limits.wall_s - (time.perf_counter() - self._wall_from)

    def end(self) -> None:
        """The run is over: when this returns, `enforce` does not touch the sandbox any more."""
        with self._enforcing:
            self._is_over = True

    def timeout(self) -> LimitExceeded:
        """Return `wall_s` as the limit that was exceeded, now."""
        return LimitExceeded(Outcome.TIMEOUT, "wall_s", self._limits.wall_s, time.perf_counter() - self._wall_from)

    def _find_exceeded(self) -> LimitExceeded | None:
        limits, elapsed_s = self._limits, time.perf_counter() - self._started
        if self.left_s() < 0:
            return self.timeout()
        if elapsed_s * PROCESSORS > limits.cpu_s:  # it cannot have used more
            cpu_s = self._sandbox.cpu_now()
            if cpu_s is not None and cpu_s > limits.cpu_s:
                return LimitExceeded(Outcome.CPU_LIMIT, "cpu_s", limits.cpu_s, cpu_s)
        return None
