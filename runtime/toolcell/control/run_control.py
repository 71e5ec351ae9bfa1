"""`RunControl`: what the journal does for one run, and what becomes of both when the script has ended."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.placeholders import DryRun
from toolcell.control.journaled_calls import JournaledCalls
from toolcell.control.suspension import BELOW, Denial, StartObserver, Suspender
from toolcell.journal.ledger import Journal
from toolcell.journal.store import JournalOwner
from toolcell.results import Divergence, ErrorInfo, ExecutionResult, Outcome
from toolcell.results.result import SCRIPT_OUTCOMES
from toolcell.run.options import OnApproval, Refresh

if TYPE_CHECKING:
    from toolcell.control.draft import Draft

DENIED: Final = "this run cannot ask for approval (on_approval='deny')"

RESUMABLE: Final = frozenset({Outcome.CANCELLED, Outcome.KILLED, Outcome.LOST})
"""Outcomes that the script did not decide: a run that can be repeated is carried on after them with its id."""


class RunControl:
    """The journal's part in one run."""

    def __init__(
        self,
        *,
        store: JournalOwner,
        journal: Journal,
        tools: CallableTools,
        context: RunContext,
        on_approval: OnApproval,
        refresh: Refresh = "",
        repaired: str = "",
        is_rebuilding: bool = False,
    ) -> None:
        """`is_rebuilding`: the script only rebuilds a state, and makes no call."""
        self._store = store
        self._repaired = repaired
        self.journal = journal
        self.answer = journal.answer
        """Takes the answer to a call before it is sent."""
        suspender = Suspender(journal)
        self._calls = JournaledCalls(
            tools=tools,
            journal=journal,
            suspender=suspender,
            refresh_reads=refresh == "reads",
            is_rebuilding=is_rebuilding,
        )
        self.dispatch = self._calls.dispatch
        """Answers a call from the journal, or makes it."""
        self.context = context
        self._draft = _draft_of(context)
        self._first_effect = self._draft.count if self._draft is not None else 0
        if on_approval == "suspend":
            self.context = self.context.having(suspender)
        elif on_approval == "deny" or context.features.decide:
            denial = Denial(DENIED if on_approval == "deny" else BELOW)
            self.context = self.context.having(denial)
        if on_approval == "suspend" or journal.records is not None:
            self.context = self.context.having(StartObserver(journal))

    @property
    def journal_id(self) -> str:
        """The name of its journal."""
        return self.journal.id

    def finish(self, result: ExecutionResult) -> ExecutionResult:
        """Return the result with what its journal adds, and keep the journal for what may come after."""
        outcome, self.journal.labels = result.outcome, self.journal.run_labels.names
        link = self.context.scope.link
        if (draft := self._draft) is not None:  # its journal is not kept: what it has was not made
            return draft.finish(result, self._first_effect, lambda call: self.journal.entry_of(call) is not None)
        if self.journal.replay is not None or outcome in (Outcome.SUSPENDED, Outcome.DIVERGED):
            result = self._compared(result)
        if self._repaired:
            from toolcell.control.repair import report

            made = report(self._repaired, self.journal, self._calls.reused, self._calls.options)
            result = dataclasses.replace(result, repair=made)
        with suppress(OSError):  # then what is written next says so
            self.journal.end_run(link.id if link is not None else result.run_id)
        if outcome is Outcome.SUSPENDED:
            return self._suspended(result)
        if outcome in RESUMABLE and self.journal.header and not self.journal.lost:
            self._store.put_down(self.journal)
        else:
            work = self.context.scope.work
            calls_bytes = work.calls + work.uploaded if work is not None else 0
            self._store.finish(self.journal, result.run_id, str(outcome), calls_bytes)
        return result

    def abandon(self) -> None:
        """The run has no result. One that can be repeated may be carried on."""
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
