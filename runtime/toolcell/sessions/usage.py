"""What a session has used and read, and what is left of its limits. All of it counts, also of what left no state."""

from __future__ import annotations

from toolcell.config import Limits
from toolcell.errors import SessionError
from toolcell.flows import Labels
from toolcell.sessions.idle import IdleSandbox
from toolcell.sessions.record import SessionRecord
from toolcell.sessions.settings import SessionSettings


class SessionUsage(IdleSandbox):
    """The part of a session's state that is about its limits and labels."""

    record: SessionRecord
    labels: Labels
    used_calls: int
    _id: str
    _limits: Limits

    def check_left(self) -> None:
        """Check that the session may still run something. Raises as `_left`."""
        self._left(self._limits, self.used_cpu_s)

    def _begin_script(self) -> float:
        """Count from here; return the CPU seconds until now. Measured once, for the limits and for the run."""
        self._sandbox.begin_script()
        return self._ended_cpu_s + self._sandbox.used_before_s

    def _left(self, limits: Limits, used_cpu_s: float) -> Limits:
        """Return the limits of a script, lowered to what is left of the session's.

        Raises:
            SessionError: nothing is left.
        """
        settings = self.settings
        cpu_s, calls = settings.cpu_s - used_cpu_s, settings.tool_calls - self.used_calls
        if cpu_s <= 0:
            raise SessionError(
                f"session {self._id!r} has used {used_cpu_s:.3g} of its {settings.cpu_s:g} CPU seconds; open "
                "another one, or give it more with runtime.session(cpu_s=...)"
            )
        if cpu_s >= limits.cpu_s and calls >= limits.tool_calls:
            return limits
        lower = {"cpu_s": min(cpu_s, limits.cpu_s), "tool_calls": max(0, min(calls, limits.tool_calls))}
        return limits.model_copy(update=lower)

    def settings_left(self) -> SessionSettings:
        """Return the settings of a copy that uses what is left of this session. Raises as `_left`."""
        self.check_left()
        left: dict[str, float] = {"cpu_s": self.settings.cpu_s - self.used_cpu_s}
        left["tool_calls"] = max(0, self.settings.tool_calls - self.used_calls)
        return self.settings.model_copy(update=left)

    def count(self, copy: SessionUsage) -> None:
        """Count what a copy has used and read."""
        self._ended_cpu_s += copy.used_cpu_s
        self.used_calls += copy.used_calls
        self._note_used()

    def abandon(self) -> None:
        """Give up the script that waits. What it has read and how many calls it has made counts.

        Raises:
            SessionError: its journal is open elsewhere just now.
        """
        labels, calls = self.record.waiting_used()
        self.labels.add(labels)
        self.used_calls += calls
        if self.record.waiting:
            self._note_used()
        self.record.abandon()

    def _note_used(self) -> None:
        self.record.note_used((self.used_cpu_s, self.used_calls), self.labels.held)
