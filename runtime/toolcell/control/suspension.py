"""Suspend a run for a decision: wait until nothing else goes on in it, then end it with outcome `suspended`.

What is suspended is the journal. The sandbox is destroyed, or kept for a while, and no clock of the run goes on.
"""

from __future__ import annotations

from typing import Any, Final

import anyio

from toolcell.calls.call import Approvals, Block, Call, Decision, Feature
from toolcell.control.decisions import answer_of
from toolcell.errors import RunEnded
from toolcell.journal.identity import digest_of_call
from toolcell.journal.ledger import Journal, pending_of
from toolcell.journal.replay import JournalEntry
from toolcell.results import Outcome, PendingCall

SETTLE_S: Final = 0.02
"""A run in which nothing happens for so long, but for calls that wait for decisions, is suspended. Calls that a script
makes in parallel come together, so they are suspended together."""

IN_DOUBT: Final = "in doubt: it had started when its host ended, and its result is not known"

BELOW: Final = (
    "it needs approval, and a call below a script's own call cannot wait for it: let the tool that the script calls "
    "require approval, or answer with an approval hook (on_approval='ask')"
)


class Denial(Approvals):
    """The `Approvals` of a run in which nobody can be asked."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def decide(self, call: Call, /) -> Any:
        """Refuse."""
        return Block(f'tool "{call.name}" was refused: {self._why}')


class Suspender(Approvals):
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


class JournaledStarts(Feature):
    """Records starts of calls in the journal. The record writes its own start with it, at once."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._begun: dict[Call, JournalEntry] = {}
        """Calls that were started here and have not ended."""

    def start(self, call: Call, entry: JournalEntry | None) -> None:
        """Record that a tool is about to run, unless its call was refused.

        Raises:
            OSError, ToolError: this could not be recorded, and the tool must not run.
        """
        if entry is not None and call.refusal is None and not entry.is_started:
            self.journal.start(entry)
            self._begun[call] = entry

    def unrecorded(self, call: Call, /) -> None:
        """Take a start back."""
        if (entry := self._begun.pop(call, None)) is not None:
            self.journal.take_back(entry)

    def call_ended(self, call: Call, /) -> None:
        """Forget its start."""
        self._begun.pop(call, None)


class StartObserver(JournaledStarts):
    """Records starts of a script's calls. Answers are recorded when they are sent."""

    def call_started(self, call: Call, /) -> None:
        """Record that the tool of one of the script's own calls is about to run."""
        entry = self.journal.entry_of(call)
        self.journal.note_labels()
        is_recorded = entry is not None and (entry.answer is not None or entry.is_taken_over)  # then no tool runs
        self.start(call, None if is_recorded else entry)
