"""When a server that ended is started again, and when it is given up. Pure: the time is an argument."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from toolcell.support.checks import check_count, check_seconds

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
"""Before a server that ended is started again: doubled each time, until it answers a call."""
MAX_RESTARTS, RESTART_WINDOW_S = 10, 300.0

State = Literal["connected", "restarting", "given_up", "closed"]


class Restarts:
    """The ends of one server's connections, and what follows from them."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        """A server is given up at its next end, once it was started again `max_restarts` times within `window_s`."""
        check_count("max_restarts", max_restarts, least=0)
        check_seconds("restart_window_s", window_s)
        self._most, self._window_s = max_restarts, window_s
        self._ends = deque[float]()
        self._pause_s = FIRST_PAUSE_S
        self._last_try = -math.inf
        self.count = 0
        """How often the server was started or connected to again."""
        self.is_given_up = False
        self.last_problem = ""

    @property
    def why(self) -> str:
        """Why the server is given up."""
        times = f"{len(self._ends)} times within {self._window_s:g} s" if self._most else "and max_restarts is 0"
        return f"it ended or could not be reached, {times}; the last time: {self.last_problem}"

    def pause_after(self, problem: str, now: float) -> float:
        """Take note of an end; return the seconds until the next start, infinity for a server that is given up."""
        self.last_problem, self._last_try = problem, now
        self._ends.append(now)
        while now - self._ends[0] > self._window_s:
            self._ends.popleft()
        if self.is_given_up or len(self._ends) > self._most:
            self.is_given_up = True
            return math.inf
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, LONGEST_PAUSE_S)
        return pause_s

    def note_answer(self) -> None:
        """A call was answered: the next end is a first one, as far as the pause goes."""
        self._pause_s = FIRST_PAUSE_S

    def note_connected(self) -> None:
        """It is there again, also one that was given up."""
        self.is_given_up = False

    def begin_anew(self) -> None:
        """Forget all ends: somebody asks for the server."""
        self._ends.clear()
        self._pause_s, self.is_given_up = FIRST_PAUSE_S, False

    def may_try(self, now: float) -> bool:
        """Return whether a server that was given up is tried once more: once in each `window_s`."""
        if now - self._last_try <= self._window_s:
            return False
        self._last_try = now
        return True
