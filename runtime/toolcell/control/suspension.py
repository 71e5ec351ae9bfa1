"""Suspend a run for a decision: wait until nothing else goes on in it, then end it with outcome `suspended`.

What is suspended is the journal. The sandbox is destroyed, or kept for a while, and no clock of the run goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final

import anyio

from toolcell.calls.call import Call, CallObserver
from toolcell.calls.hooks import Block, Decision
from toolcell.control.decisions import answer_of
from toolcell.errors import RunEnded
from toolcell.journal.identity import digest_of_call
from toolcell.journal.ledger import Journal, JournalEntry, pending_of
from toolcell.results import Outcome, PendingCall

SETTLE_S: Final = 0.02
"""A run in which nothing happens for so long, but for calls that wait for decisions, is suspended. Calls that a script
makes in parallel come together, so they are suspended together."""

IN_DOUBT: Final = "in doubt: it had started when its host ended, and its result is not known"

BELOW: Final = (
    "it needs approval, and a call below a script's own call cannot wait for it: let the tool that the script calls "
    "require approval, or answer with an approval hook (on_approval='ask')"
)


class Denial:
    """The `Approvals` of a run in which nobody can be asked."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def decide(self, call: Call, /) -> Any:
        """Refuse."""
        return Block(f'tool "{call.name}" was refused: {self._why}')

    def waited(self, call: Call, /) -> bool:
        """Return false: nothing waits."""
        return False


class Suspender:
    """Ends a run when calls of it wait for decisions. The `Approvals` of a run with `on_approval="suspend"`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.active = 0
        """Calls of the script that are not answered."""
        self.calls_asked = 0
        """Calls of the script in all."""
        self.divergence: Any = None

    async def decide(self, call: Call, /) -> Decision | Block:
        """Return what was decided about a call; without a decision, suspend the run.

        Raises:
            RunEnded: the run is suspended now, or its arguments are not those that were decided about.
        """
        entry = self._journal.entry_of(call)
        if entry is None or entry.is_started:
            return Block(f'tool "{call.name}" was refused: {BELOW}')
        digest = await digest_of_call(call.name, call.args)
        decision = entry.decision
        if decision is not None and decision.digest != digest:
            raise RunEnded(
                f"call {self._journal.index_of(entry)} of {call.name} has other arguments than those that were decided "
                f"about (sha256 {digest[:16]}, decided about {decision.digest[:16]}); it was not made",
                Outcome.DIVERGED,
            )
        if decision is None or decision.reason != call.approval_reason:
            return await self.hold(entry, dict(call.args), digest, call.approval_reason)
        return answer_of(decision)

    def waited(self, call: Call, /) -> bool:
        """Return true for a call that was decided about."""
        entry = self._journal.entry_of(call)
        return entry is not None and entry.decision is not None

    async def hold(self, entry: JournalEntry, args: dict[str, Any], digest: str, reason: str) -> Block:
        """Suspend the run for a call, together with others that wait.

        Raises:
            RunEnded: always, but for a run that cannot be suspended: its call is refused.
        """
        if self._journal.lost:
            return Block(f"it needs a decision, and the run cannot be suspended: {self._journal.lost}")
        entry.pending = PendingCall(
            f"call_{entry.number}", entry.tool, args=args, line=None, digest=digest, reason=reason
        )
        seen = -1
        while seen != self.calls_asked or self.active > len(pending_of(self._journal.current.values())):
            seen = self.calls_asked
            await anyio.sleep(SETTLE_S)
        raise RunEnded("it waits for a decision", Outcome.SUSPENDED)


class StartObserver:
    """The `CallObserver` that records starts in the journal. `below`: the observer that was there before."""

    def __init__(self, journal: Journal, below: CallObserver | None) -> None:
        self._journal = journal
        self._below = below

    def call_started(self, call: Call, /) -> Awaitable[None] | None:
        """Record that the tool of one of the script's own calls is about to run."""
        entry = self._journal.entry_of(call)
        self._journal.note_labels()
        if entry is not None and call.refusal is None:
            is_recorded = entry.answer is not None or entry.is_taken_over  # then no tool runs
            if not (entry.is_started or is_recorded):
                self._journal.start(entry)
        return self._below.call_started(call) if self._below is not None else None

    def call_ended(self, call: Call, /) -> Awaitable[None] | None:
        """Answers are recorded when they are sent."""
        return self._below.call_ended(call) if self._below is not None else None
