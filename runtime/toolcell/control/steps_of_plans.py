"""The journal of a plan: the result of each step, and the steps that wait for decisions. Knows no runtime.

A plan is carried on by running it again: steps that have a result are not called, whatever the order they end in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from toolcell.calls.call import Block, Call
from toolcell.calls.result import Status, ToolResult
from toolcell.calls.run_state import RunLink
from toolcell.control.suspension import JournalApprovals, JournaledStarts, answer_in_doubt
from toolcell.journal.identity import options_of
from toolcell.journal.ledger import Journal
from toolcell.journal.replay import JournalEntry
from toolcell.results import OutputFile, PendingCall, Suspension
from toolcell.run.calls import failure
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import ToolReturn

WAITS: Final = "it waits for a decision"


class PlanRows(list[dict[str, Any]]):
    """The rows of a plan, one for each step, in order."""

    def __init__(self, rows: Iterable[dict[str, Any]], run_id: str, journal_id: str) -> None:
        super().__init__(rows)
        self.run_id, self.journal_id = run_id, journal_id
        self.suspension: Suspension | None = None
        """What the plan waits for; None when it is over."""
        self.files: tuple[OutputFile, ...] = ()
        """Files and images that the tools returned."""


class JournaledSteps(JournaledStarts):
    """The `PlanRecord` of one run of a plan."""

    def __init__(self, journal: Journal, link: RunLink | None = None) -> None:
        """`link`: names the run."""
        super().__init__(journal)
        self.link = link
        self.is_cut_short = False

    # What the plan asks

    async def recorded(self, call: Call, /) -> tuple[ToolResult, str] | None:
        """Take note of the call of a step. If no call is to be made for it: its result, and the run that has it."""
        entry = self._entry(call)
        result = entry.result() if entry.answer else None
        if entry.is_in_doubt:
            result = await answer_in_doubt(entry, options_of(call.registry, call.name), self.hold)
        return None if result is None else (result, entry.run or self.journal.run)

    def waits(self, call: Call, /) -> bool:
        """Return whether the step waits for a decision."""
        entry = self.journal.entry_of(call)
        return entry is not None and entry.pending is not None

    def _entry(self, call: Call) -> JournalEntry:
        assert call.step is not None
        number = call.step + 1
        entry = self.journal.ask(call.call_id, call.name, call.raw_args, self.journal.entries.get(number), number)
        entry.args = call.raw_args
        return entry

    async def hold(self, entry: JournalEntry, args: dict[str, Any], digest: str, reason: str) -> Block:
        """Let a step wait. The others of the plan go on."""
        if self.journal.lost:
            return Block(f"it needs a decision, and the plan cannot be suspended: {self.journal.lost}")
        ident = f"plan_step_{entry.number - 1}"
        entry.pending = PendingCall(ident, entry.tool, args=args, line=None, digest=digest, reason=reason)
        return Block(WAITS)

    # What the pipeline asks

    def call_ended(self, call: Call, /) -> None:
        """Record the result of a step. That of a call which was cut short is not known."""
        super().call_ended(call)
        entry, result = self.journal.entry_of(call), call.result
        is_known = result is not None and not (result.status is Status.CANCELLED and entry is not None)
        if entry is not None and entry.answer is None and entry.pending is None and is_known:
            assert result is not None
            entry.is_refused = not (call.is_executed or entry.is_started)
            self._keep(entry, result)

    def _keep(self, entry: JournalEntry, result: ToolResult) -> None:
        try:
            self.journal.keep_answer(entry, _frame(entry.number, result))
        except (UnsendableValue, ValueTooLarge, ValueError, TypeError) as exc:
            self.journal.lose(f"the result of step {entry.number - 1} cannot be recorded: {exc}")


class SuspendingSteps(JournaledSteps, JournalApprovals):
    """The same, in a plan whose steps may wait for decisions."""


def _frame(number: int, result: ToolResult) -> bytes:
    if result.error is None or not result.is_error:
        return encode(ToolReturn(number, to_plain(result.guest_value(), "result")))
    return encode(failure(number, result))
