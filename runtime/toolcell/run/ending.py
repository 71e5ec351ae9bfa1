"""What brings a run to its end, noted in the moment it happens: a passed limit, a broken rule, an abort, the last word.

What the host ends, it ends by killing the sandbox there and then. Does not say what it all amounts to: that is the
verdict's, once nothing more can happen. Knows no tools and no bytes.
"""

from __future__ import annotations

from toolcell.sandbox.backend import LimitExceeded, Sandbox
from toolcell_bridge.wire.messages import Done


class Ending:
    """Why one run is over; all None while it goes on."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.breached: LimitExceeded | None = None
        self.violation: str | None = None
        """How the guest broke the protocol."""
        self.aborted: str | None = None
        self.done: Done | None = None
        """The guest's last word."""

    def breach(self, breach: LimitExceeded) -> None:
        """End the run because a limit was passed. The first breach is the one that counts."""
        if self.breached is None and self.done is None:
            self.breached = breach
            self._sandbox.kill()

    def violate(self, problem: str) -> None:
        """End the run because the guest broke the protocol."""
        self.violation = problem
        self._sandbox.kill()

    def abort(self, why: str) -> None:
        """End the run from the host's side, as a cancellation."""
        self.aborted = why
        self._sandbox.kill()
