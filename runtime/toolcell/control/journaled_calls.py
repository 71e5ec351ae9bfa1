"""The journal of one run: recorded calls get recorded answers, the others are made; and what becomes of both when the
script has ended."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import anyio

from toolcell.calls.call import Call, Denial, RunContext, decided
from toolcell.calls.placeholders import DryRun
from toolcell.calls.result import ToolResult
from toolcell.config import OnApproval
from toolcell.control.suspension import (
    BELOW,
    JournaledStarts,
    Suspender,
    recorded_answer,
)
from toolcell.errors import RunEnded
from toolcell.journal.identity import options_of
from toolcell.journal.ledger import Journal
from toolcell.journal.replay import CANCELLED, JournalEntry
from toolcell.journal.store import JournalStore
from toolcell.results import SCRIPT_OUTCOMES, Divergence, ErrorInfo, ExecutionResult, Outcome
from toolcell.run.calls import end_script_alone
from toolcell.run.options import Refresh
from toolcell.run.run import Run, RunPart
from toolcell.tools.pipeline import answer_call

if TYPE_CHECKING:
    from toolcell.control.draft import Draft

RESUMABLE: Final = frozenset({Outcome.CANCELLED, Outcome.KILLED, Outcome.LOST})
"""Outcomes that the script did not decide: a run that can be repeated is carried on after them with its id."""

IN_DOUBT_CODE = "in_doubt"


class JournaledCalls(RunPart):
    """The journal's part in one run: it answers the calls or lets the tools make them, and keeps what they answered."""

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
        script only rebuilds a state, and makes no call, whatever the journal says."""
        self._tools, self._link, self._work = run.tools, run.context.scope.link, run.work
        self._store, self.journal, self.journal_id = store, journal, journal.id
        self._refresh_reads, self._repaired = refresh == "reads", repaired
        self._is_rebuilding, self._ends_journal = is_rebuilding, ends_journal
        self._suspender = Suspender(journal)
        self._is_first_run = journal.replay is None and not journal.past
        self._lookup = anyio.Lock()
        """Held while a call is looked up in the journal: the first of two identical calls gets the first answer."""
        self._divergence: Divergence | None = None
        """Divergence of a run without a record that makes a call, and must not."""
        self.options = partial(options_of, run.tools)
        """What is known about a tool, by its name."""
        self.reused = [entry for entry in journal.entries.values() if entry.is_taken_over]
        """Calls that were answered from the journal of a repaired run."""
        self._draft = _draft_of(run.context)
        self._first_effect = self._draft.count if self._draft is not None else 0
        if on_approval == "suspend":
            self.features = (self._suspender,)
        elif on_approval == "deny" or run.context.features.decide:
            self.features = (Denial() if on_approval == "deny" else Denial(BELOW),)
        if on_approval == "suspend" or journal.file is not None:
            self.features = (JournaledStarts(journal), *self.features)

    async def make_call(self, call: Call) -> ToolResult:
        """Answer a call from the journal, or make it.

        Raises:
            ToolAbort: a tool ended the run, the run is suspended, or it diverged.
            AuditError: the call could not be recorded.
        """
        suspender, recorded = self._suspender, None
        suspender.calls_asked += 1
        suspender.active += 1
        try:
            if self.journal.replay is not None:
                async with self._lookup:
                    recorded = await self.journal.recorded(call.name, call.raw_args)
            entry = self.journal.ask(call.call_id, call.name, call.raw_args, recorded)
            if not self._is_first_run and (answer := await self._recorded_answer(entry, recorded is not None)):
                call.facts = _facts(entry)
                return await answer_call(call, answer, entry.run or self.journal.run or self.journal.id)
            result = await self._tools.make(call)
            if result.error is not None:
                entry.is_refused = not result.meta.duration_ms
            return result
        except RunEnded as exc:
            end_script_alone(exc, call.run)
            raise
        finally:
            suspender.active -= 1

    # Carrying on

    async def _recorded_answer(self, entry: JournalEntry, is_known: bool) -> ToolResult | None:
        """Return the answer that a call has already; None when it is to be made."""
        replay = self.journal.replay
        has_no_answer = entry.answer is None and self._is_rebuilding  # the script ended before it got one
        if replay is not None and is_known and (entry.answer is not None or has_no_answer):
            was_cancelled = entry.answer == CANCELLED or has_no_answer
            return await replay.answer(entry.number, entry, None if was_cancelled else entry.result())
        if replay is not None:
            await replay.wait_for_all(entry)
        if self._is_rebuilding:
            self._refuse_new(entry)
        if entry.is_in_doubt:
            return await recorded_answer(entry, self.options(entry.tool, entry.args), self._suspender.hold)
        return None if is_known else await self._repaired_answer(entry)

    def _refuse_new(self, entry: JournalEntry) -> NoReturn:
        index = self.journal.index_of(entry)
        message = f"call {index} of {entry.tool} was not made before, and no call is made to rebuild a state"
        found = Divergence("extra_call", message, index, got={"tool": entry.tool, "args": entry.args})
        if self.journal.replay is not None:
            self.journal.replay.diverge(found)
        self._divergence = self._divergence or found
        raise RunEnded(message, Outcome.DIVERGED)

    @property
    def divergence(self) -> Divergence | None:
        """How the run first differed from its record."""
        replay = self.journal.replay
        return replay.divergence if replay is not None else self._divergence

    # Repair

    async def _repaired_answer(self, entry: JournalEntry) -> ToolResult | None:
        """Return the answer that an identical call got in the repaired run; None when it is to be made."""
        options = self.options(entry.tool, entry.args)
        if options.read_only and self._refresh_reads:
            return None
        async with self._lookup:
            past = await self.journal.take_past(entry.tool, entry.args)
        if past is None:
            return None
        entry.reused = past.number
        if past.is_refused or past.pending is not None:
            return None
        if past.answer and not (options.is_repeatable and past.is_failed):
            self.reused.append(entry)
            entry.is_refused, entry.is_taken_over, entry.run = False, True, past.run
            return past.result()
        if options.is_repeatable:
            return None
        entry.is_started = True
        message = f"{entry.tool} was called with these arguments in the run that this one repairs, and it is not known "
        message += "whether it did its work; it was not called again. Find out, or call it with other arguments"
        return ToolResult.fail(message, code=IN_DOUBT_CODE)

    # The end of the run

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

            made = report(self._repaired, self.journal, self.reused, self.options)
            result = dataclasses.replace(result, repair=made)
        header, is_waiting = self.journal.header, outcome is Outcome.SUSPENDED
        may_go_on = outcome in RESUMABLE and bool(header) and not self.journal.lost
        with suppress(OSError):  # then what is written next says so
            is_kept = is_waiting or may_go_on or not self._ends_journal or header.get("is_item", False)
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
        found, replay = self.divergence, self.journal.replay
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


def _facts(entry: JournalEntry) -> dict[str, Any]:
    """Return what the record has of a call that is answered from the journal: who decided about it."""
    found = entry.decision
    return {} if found is None or found.kind == "approve" else {"decided": decided(found.kind, found.by, found.why)}


def _draft_of(context: RunContext) -> Draft | None:
    """Return the draft of a dry run; None in any other run."""
    if context.feature(DryRun) is None:
        return None
    from toolcell.control.draft import Draft

    return context.feature(Draft)
