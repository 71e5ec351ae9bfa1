"""`RunControl`: what the journal does for one run, and what becomes of both when the script has ended."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from toolcell.calls.call import RunContext
from toolcell.calls.placeholders import DryRun
from toolcell.control.journaled_calls import JournaledCalls
from toolcell.control.suspension import BELOW, DENIED, Denial, JournaledStarts, Suspender
from toolcell.journal.ledger import Journal
from toolcell.journal.store import JournalStore
from toolcell.results import Divergence, ErrorInfo, ExecutionResult, Outcome
from toolcell.results.result import SCRIPT_OUTCOMES
from toolcell.run.options import OnApproval, Refresh
from toolcell.run.run import Run, RunPart

if TYPE_CHECKING:
    from toolcell.control.draft import Draft

RESUMABLE: Final = frozenset({Outcome.CANCELLED, Outcome.KILLED, Outcome.LOST})
"""Outcomes that the script did not decide: a run that can be repeated is carried on after them with its id."""


class RunControl(RunPart):
    """The journal's part in one run."""

    def __init__(
        self,
        run: Run,
        *,
        store: JournalStore,
        journal: Journal,
        on_approval: OnApproval,
        refresh: Refresh = "",
        repaired: str = "",
        is_rebuilding: bool = False,
        ends_journal: bool = True,
    ) -> None:
        """`ends_journal`: False where the caller does, once the run is over and does not wait. `is_rebuilding`: the
        script only rebuilds a state, and makes no call."""
        self._store = store
        self._repaired, self._ends_journal = repaired, ends_journal
        self.journal = journal
        suspender = Suspender(journal)
        self._calls = JournaledCalls(
            tools=run.tools,
            journal=journal,
            suspender=suspender,
            refresh_reads=refresh == "reads",
            is_rebuilding=is_rebuilding,
        )
        context = run.context
        self._draft = _draft_of(context)
        self._first_effect = self._draft.count if self._draft is not None else 0
        if on_approval == "suspend":
            context = context.having(suspender)
        elif on_approval == "deny" or context.features.decide:
            context = context.having(Denial(DENIED if on_approval == "deny" else BELOW))
        if on_approval == "suspend" or journal.file is not None:
            context = context.having(JournaledStarts(journal))
        self._link, self._work = context.scope.link, run.work
        run.context, run.journal_id, run.make_call = context, journal.id, self._calls.dispatch
        run.parts += (self,)

    def answered(self, call_number: int, frame: bytes) -> None:
        """Keep the answer to a call."""
        self.journal.answer(call_number, frame)

    def finish(self, result: ExecutionResult) -> ExecutionResult:
        """Return the result with what its journal adds, and keep the journal for what may come after."""
        outcome, self.journal.labels = result.outcome, self.journal.run_labels.names
        if (draft := self._draft) is not None:  # its journal is not kept: what it has was not made
            return draft.finish(result, self._first_effect, lambda call: self.journal.entry_of(call) is not None)
        if self.journal.replay is not None or outcome in (Outcome.SUSPENDED, Outcome.DIVERGED):
            result = self._compared(result)
        if self._repaired:
            from toolcell.control.repair import report

            made = report(self._repaired, self.journal, self._calls.reused, self._calls.options)
            result = dataclasses.replace(result, repair=made)
        header, is_waiting = self.journal.header, outcome is Outcome.SUSPENDED
        may_go_on = outcome in RESUMABLE and bool(header) and not self.journal.lost
        with suppress(OSError):  # then what is written next says so
            is_kept = is_waiting or may_go_on or header.get("is_item", False)
            self.journal.end_run(self._link.id if self._link is not None else result.run_id, is_kept)
        if is_waiting:
            return self._suspended(result)
        if self._ends_journal and may_go_on:
            self._store.put_down(self.journal)
        elif self._ends_journal:
            self._store.finish(self.journal, result.run_id, str(outcome), self._work.calls + self._work.uploaded)
        return result

    async def failed(self, error: BaseException) -> None:
        """Put its journal down. A run that can be repeated may be carried on."""
        if self._ends_journal:
            self._store.put_down(self.journal)

    def _compared(self, result: ExecutionResult) -> ExecutionResult:
        found, replay = self._calls.divergence, self.journal.replay
        if found is None and replay is not None and result.outcome in SCRIPT_OUTCOMES:
            found = replay.missing()
        if found is None and result.outcome is Outcome.DIVERGED and result.error is not None:
            found = Divergence("call", result.error.message)
        if found is None:
            return result
        current = {ident: entry.number for ident, entry in self.journal.current.items()}
        lines = {current.get(call.id, 0): call.line for call in result.calls}
        line = lines.get(max(lines, default=0))
        found = dataclasses.replace(found, line=line)
        error = ErrorInfo("Diverged", f"{found.message}; nothing more was made", line)
        return dataclasses.replace(result, outcome=Outcome.DIVERGED, error=error, divergence=found)

    def _suspended(self, result: ExecutionResult) -> ExecutionResult:
        journal, store = self.journal, self._store
        lines = {call.id: call.line for call in result.calls}
        for call_id, entry in journal.current.items():
            if entry.pending is not None:
                entry.pending = dataclasses.replace(entry.pending, id=call_id, line=lines.get(call_id))
        suspension = store.suspend(journal)
        named = ", ".join(f"{each.tool} (line {each.line})" for each in suspension.calls)
        error = ErrorInfo("Suspended", f"it waits for a decision about {named}", suspension.calls[0].line)
        return dataclasses.replace(result, error=error, suspension=suspension)


def _draft_of(context: RunContext) -> Draft | None:
    """Return the draft of a dry run; None in any other run."""
    if context.feature(DryRun) is None:
        return None
    from toolcell.control.draft import Draft

    return context.feature(Draft)
