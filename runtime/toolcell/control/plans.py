"""`PlanRuns`: run a plan, suspend it for approval, carry it on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.options import Origin
from toolcell.calls.placeholders import DryRun
from toolcell.calls.reverts import Reverts
from toolcell.calls.run_state import RunLink, open_jobs
from toolcell.calls.values import is_large
from toolcell.control.dry_runs import DryRuns
from toolcell.control.script_header import continued_context, who_of
from toolcell.control.steps_of_plans import JournaledSteps, PlanRows, SuspendingSteps
from toolcell.control.suspension import Denial
from toolcell.errors import UsageError
from toolcell.journal.identity import tool_digests
from toolcell.journal.ledger import Journal, pending_of
from toolcell.journal.store import JournalStore
from toolcell.results import ErrorInfo, ExecutionResult, Outcome, OutputFile, Suspension
from toolcell.run.options import RunOptions
from toolcell.run.runs import Runs
from toolcell.support.packing import value_digest
from toolcell.tools.plan import plan_of

PLAN: Final = "steps"
"""In the header of a journal: it is that of a plan."""


class PlanRuns:
    """Runs the plans of one runtime."""

    def __init__(self, runs: Runs, journals: JournalStore, dry_runs: DryRuns, reverts: Reverts) -> None:
        self._runs, self._journals, self._dry_runs, self._reverts = runs, journals, dry_runs, reverts

    async def execute(self, steps: Sequence[Mapping[str, Any]], options: RunOptions) -> PlanRows:
        """Run a plan; see `Runtime.execute_plan`."""
        plan = plan_of(steps)
        registry: Any = self._runs.tools(options.tools)
        on_approval = options.on_approval
        context = await self._dry_runs.begin(options.dry_run, options.context, on_approval)
        context = context or RunContext(run_id=os.urandom(16).hex())
        if on_approval == "deny":
            context = context.having(Denial())
        store = self._journals
        if not (on_approval == "suspend" or (store.is_durable and context.feature(DryRun) is None)):
            rows, _ = await self._run_plan(registry, plan, context, Journal(os.urandom(16).hex()), None)
            await self._dry_runs.keep(context)
            return rows
        journal = store.make(context.run_id)
        journal.header = {
            PLAN: plan["steps"],
            "source_sha256": value_digest(plan["steps"]),
            "origin": str(Origin.PLAN),
            "tools": tool_digests(registry, Origin.PLAN),
            "on_approval": on_approval,
            "who": who_of(context),
        }
        if store.is_durable:
            await store.begin(journal, is_large=is_large(plan["steps"]))
        return (await self._journaled_plan(registry, context, journal))[0]

    async def carry_on(self, journal: Journal, tools: CallableTools, context: RunContext | None) -> ExecutionResult:
        journal.begin_again()
        context = continued_context(journal, context)
        rows, suspension = await self._journaled_plan(tools, context, journal)
        outcome = Outcome.OK if suspension is None else Outcome.SUSPENDED
        error = None
        if suspension is not None:
            named = ", ".join(f"{each.tool} ({each.id})" for each in suspension.calls)
            error = ErrorInfo("Suspended", f"it waits for a decision about {named}")
        return ExecutionResult(
            context.run_id,
            outcome,
            list(rows),
            True,
            files=rows.files,
            error=error,
            suspension=suspension,
            journal_id=rows.journal_id,
        )

    async def _journaled_plan(
        self, registry: Any, context: RunContext, journal: Journal
    ) -> tuple[PlanRows, Suspension | None]:
        """Run what is left of a plan, and suspend it if steps wait."""
        store, steps = self._journals, journal.header[PLAN]
        try:
            journal.share_labels(context.state.labels)
            rows, record = await self._run_plan(registry, {"steps": steps}, context, journal, journal.header)
            assert record is not None
            journal.entries = dict(sorted(journal.entries.items()))
            assert record.link is not None
            is_waiting = bool(pending_of(journal.entries.values())) and not record.is_cut_short
            with suppress(OSError):  # then what is written next says so
                journal.end_run(record.link.id, is_waiting)
            if is_waiting:
                if not journal.lost:
                    rows.suspension = store.suspend(journal)
                    await store.settle()
                    return rows, rows.suspension
                why = f"it needs a decision, and the plan cannot be suspended: {journal.lost}"
                failed = {"status": "error", "error": why}
                rows[:] = [row | failed if row["status"] == "waiting" else row for row in rows]
        except BaseException:
            if journal.entries:
                store.put_down(journal)
            else:  # no step has begun: there is nothing to carry on
                store.finish(journal, context.run_id, str(Outcome.ERROR), 0)
            raise
        store.finish(journal, context.run_id, str(Outcome.OK), 0)
        return rows, None

    async def _run_plan(
        self,
        registry: Any,
        plan: Mapping[str, Any],
        context: RunContext,
        journal: Journal,
        header: Mapping[str, Any] | None,
    ) -> tuple[PlanRows, JournaledSteps | None]:
        begun, record, link = None, None, journal.link or RunLink()
        try:
            async with self._runs.observed(
                context.within(abandoned=self._runs.abandoned, runtime=self._runs.runtime),
                "plan",
                link,
            ) as run:
                run = begun = self._runs.begin(run)
                if header is not None:
                    kind = SuspendingSteps if header["on_approval"] == "suspend" else JournaledSteps
                    record = kind(journal, link)
                    run = run.having(record)
                async with open_jobs(run.state, self._runs.task_group()):
                    result = await registry.run_plan(plan, run, record)
                if record is not None and not record.is_cut_short:
                    link.waits = tuple(pending_of(journal.entries.values()))
        finally:
            for finished in begun.features.finished if begun is not None else ():
                finished(begun, journal.id)
        if result.is_error:
            raise UsageError(result.text)
        rows = PlanRows(result.value, context.run_id, journal.id)
        rows.files = tuple(OutputFile(each.name, each.media_type, len(each.data), each.data) for each in result.files)
        self._runs.tell_end(rows)
        return rows, record
