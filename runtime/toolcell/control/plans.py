"""`PlanRuns`: run a plan, suspend it for approval, carry it on.

`JournaledSteps` records the result of each step, and the steps that wait for decisions. A plan is carried on by running
it again: steps that have a result are not called, whatever the order they end in.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from toolcell.calls.call import Block, Call, CallableTools, Denial, RunContext
from toolcell.calls.finalize import failure
from toolcell.calls.options import Origin
from toolcell.calls.placeholders import DryRun
from toolcell.calls.result import Status, ToolResult
from toolcell.calls.reverts import Reverts
from toolcell.calls.run_state import RunLink, open_jobs
from toolcell.calls.values import in_thread_if_large, is_large
from toolcell.control.dry_runs import DryRuns
from toolcell.control.script_header import continued_context, who_of
from toolcell.control.suspension import JournalApprovals, JournaledStarts, recorded_answer
from toolcell.errors import UsageError
from toolcell.journal.identity import options_of, tool_digests
from toolcell.journal.ledger import Journal, pending_of
from toolcell.journal.replay import JournalEntry
from toolcell.journal.store import JournalStore
from toolcell.results import ErrorInfo, ExecutionResult, Outcome, OutputFile, PendingCall, Suspension
from toolcell.run.options import RunOptions
from toolcell.run.runs import Runs
from toolcell.support.packing import value_digest
from toolcell.tools.plan import plan_of
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.codec import encode
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
        result = await recorded_answer(entry, options_of(call.registry, call.name), self.hold)
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
        except (ValueError, TypeError) as exc:
            self.journal.lose(f"the result of step {entry.number - 1} cannot be recorded: {exc}")


class SuspendingSteps(JournaledSteps, JournalApprovals):
    """The same, in a plan whose steps may wait for decisions."""


def _frame(number: int, result: ToolResult) -> bytes:
    if result.error is None or not result.is_error:
        return encode(ToolReturn(number, to_plain(result.guest_value(), "result")))
    return encode(failure(number, result))


PLAN: Final = "steps"
"""In the header of a journal: it is that of a plan."""


class PlanRuns:
    """Runs the plans of one runtime."""

    def __init__(self, runs: Runs, journals: JournalStore, dry_runs: DryRuns, reverts: Reverts) -> None:
        self._runs, self._journals, self._dry_runs, self._reverts = runs, journals, dry_runs, reverts

    async def execute(self, steps: Sequence[Mapping[str, Any]], options: RunOptions) -> PlanRows:
        """Run a plan; see `Runtime.execute_plan`."""
        plan = await in_thread_if_large(steps, partial(plan_of, steps))
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
            "source_sha256": await in_thread_if_large(plan["steps"], partial(value_digest, plan["steps"])),
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
