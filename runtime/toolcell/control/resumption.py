"""`Resumption`: carry on suspended and interrupted runs, with what was decided about their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from toolcell.calls.call import CallableTools, ResumeDecision, RunContext, decided
from toolcell.calls.run_state import RunLink
from toolcell.control.plans import PLAN, PlanRuns
from toolcell.control.script_runs import ScriptRuns
from toolcell.control.suspension import check_ids, recorded
from toolcell.errors import ResumeError, UsageError
from toolcell.journal.ledger import Journal
from toolcell.journal.replay import JournalEntry, RecordedDecision
from toolcell.journal.store import JournalStore
from toolcell.results import ExecutionResult, Suspension
from toolcell.run.options import RunOptions
from toolcell.run.runs import Runs
from toolcell.support import daemon_threads


def check_stands_alone(journal: Journal) -> None:
    """Check that a journal is that of a run by itself.

    Raises:
        ResumeError: it is that of a script of a session.
    """
    if name := journal.header.get("session"):
        raise ResumeError(
            f"run {journal.id} is script {journal.header['number']} of session {name!r}: open that session with "
            f"runtime.session({name!r}, restore=True), and call its resume(...)"
        )


def decider(context: RunContext | None) -> str:
    """Return who has a run go on, as the context says that this is done with."""
    return context.user_id if context is not None else ""


def _told(entry: JournalEntry, decision: RecordedDecision) -> dict[str, Any]:
    """Return what the record says of a decision."""
    assert entry.pending is not None
    about = {"call": entry.pending.id, "tool": entry.tool, "line": entry.pending.line}
    said = {"reason": decision.why, "at_ns": decision.at_ns, "digest": decision.digest}
    told = about | decided(decision.kind, decision.by) | {name: value for name, value in said.items() if value}
    if decision.kind == "deny" and decision.data:
        told["reason"] = decision.data
    return told | ({"args": decision.data} if decision.kind in ("edit", "made") else {})


class Resumption:
    """Carries on what has a journal here."""

    def __init__(self, runs: Runs, journals: JournalStore, scripts: ScriptRuns, plans: PlanRuns) -> None:
        self._runs, self._journals, self._scripts, self._plans = runs, journals, scripts, plans

    async def resume(
        self, token: str | Suspension, decisions: Mapping[str, ResumeDecision] | None, options: RunOptions
    ) -> ExecutionResult:
        """Carry a script or a plan on; see `Runtime.resume`."""
        tools = self._runs.tools(options.tools)
        journal = await self.take(token, decisions, tools, decided_by=decider(options.context))
        if PLAN in journal.header:
            return await self._plans.carry_on(journal, tools, options.context)
        return await self._scripts.carry_on(journal, tools, options.context, options)

    async def take(
        self,
        token: str | Suspension,
        decisions: Mapping[str, ResumeDecision] | None,
        tools: CallableTools,
        check: Callable[[Journal], None] = check_stands_alone,
        *,
        even_ended: bool = False,
        decided_by: str = "",
    ) -> Journal:
        """Return the journal of a suspended or interrupted run, with these decisions. Its token is used up by that.

        `check` raises if it is not to be carried on here. `even_ended`: its result got lost. `decided_by`: who has it
        go on.

        Raises:
            ResumeError, UsageError: as from `Runtime.resume`.
        """
        store = self._journals
        taking = partial(store.take, token, tools, even_ended=even_ended)
        journal = await daemon_threads.run_sync(taking) if store.is_durable else taking()  # it may be long
        try:
            check(journal)
            waiting, given = (
                {each.pending.id: each for each in journal.entries.values() if each.pending},
                decisions or {},
            )
            check_ids(given, waiting)
            decided = {
                entry.number: recorded(given[ident], entry.pending, entry.is_in_doubt, decided_by)
                for ident, entry in waiting.items()
                if ident in given and entry.pending is not None
            }
            told = tuple(_told(entry, decided[entry.number]) for entry in waiting.values() if entry.number in decided)
            journal.link = RunLink("", "resumes", journal.run, decided_by, told)
            store.use(journal, decided)
        except OSError as exc:
            store.put_down(journal)
            raise ResumeError(f"the journal of run {journal.id} cannot be written: {exc}") from exc
        except UsageError:
            store.put_down(journal)
            raise
        return journal

    def calls_of_interrupted(self, run_id: str) -> list[dict[str, Any]] | None:
        """Return the calls that an interrupted run had made or begun; see `Runtime.calls_of_interrupted`."""
        try:
            entries = [*self._journals.look(run_id).entries.values()]
        except ResumeError:
            return None
        return [{"tool": each.tool, "args": each.args, "state": each.state} for each in entries]
