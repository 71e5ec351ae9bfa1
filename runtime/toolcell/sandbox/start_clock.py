"""`StartClock`: gives up starts when none of them has succeeded for a while.

Many starts at once share the machine, and each takes longer the more there are. So the clock begins anew whenever one
has succeeded: what it finds is that starts are stuck, not that they are many.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from toolcell.errors import SandboxUnavailable

T = TypeVar("T")

STEP = 0.01
"""Of `start_s`: deadlines are moved no more often than this, because each is a timer of the event loop."""


class StartClock:
    """Times the starts of one runtime."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self._scopes: set[anyio.CancelScope] = set()
        self._progress_at = self._moved_at = 0.0

    async def run(self, start: Callable[[], Awaitable[T]]) -> T:
        """Start something.

        Raises:
            SandboxUnavailable: it did not start, and nothing else did, within `start_s`.
        """
        with anyio.CancelScope(deadline=anyio.current_time() + self.start_s) as scope:
            self._scopes.add(scope)
            try:
                started = await start()
            finally:
                self._scopes.discard(scope)
            self.note_progress()
            return started
        raise self.overdue("the machine is too slow, or whatever starts sandboxes is stuck")

    def note_progress(self) -> None:
        """Begin anew: something has started, or a place has become free for a start."""
        self._progress_at = now = anyio.current_time()
        if now - self._moved_at > STEP * self.start_s:
            self._moved_at = now
            for scope in self._scopes:
                scope.deadline = now + self.start_s

    def left_s(self, since: float) -> float:
        """How long somebody who waits since then still waits for a start."""
        return max(since, self._progress_at) + self.start_s - anyio.current_time()

    def overdue(self, why: object) -> SandboxUnavailable:
        """Return the error for whoever has waited long enough."""
        return SandboxUnavailable(f"no sandbox came up within {self.start_s:g} s (PoolConfig.start_s): {why}")
