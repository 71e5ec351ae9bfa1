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
from toolcell.errors import AuditError, RunEnded
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
        self.below = below

    def around(self, record: CallObserver) -> StartObserver:
        """Return the same above another observer: what it writes is written with what we write, at once."""
        return StartObserver(self._journal, record)

    def call_started(self, call: Call, /) -> Awaitable[None] | None:
        """Record that the tool of one of the script's own calls is about to run."""
        entry = self._journal.entry_of(call)
        self._journal.note_labels()
        is_recorded = entry is not None and (entry.answer is not None or entry.is_taken_over)  # then no tool runs
        return start(self._journal, None if is_recorded else entry, call, self.below)

    def call_ended(self, call: Call, /) -> Awaitable[None] | None:
        """Answers are recorded when they are sent."""
        return self.below.call_ended(call) if self.below is not None else None


def start(
    journal: Journal, entry: JournalEntry | None, call: Call, below: CallObserver | None
) -> Awaitable[None] | None:
    """Record that a tool is about to run, unless its call was refused, and tell the observer below.

    Raises:
        OSError, ToolError, AuditError: this could not be recorded, and the tool must not run.
    """
    starts = entry if entry is not None and call.refusal is None and not entry.is_started else None
    if starts is not None:
        journal.start(starts)
    if below is None:
        return None
    try:
        noted = below.call_started(call)
    except AuditError:
        if starts is not None:
            journal.take_back(starts)
        raise
    return noted if noted is None or starts is None else _settled(journal, starts, noted)


async def _settled(journal: Journal, entry: JournalEntry, noted: Awaitable[None]) -> None:
    try:
        await noted
    except AuditError:
        journal.take_back(entry)
        raise
