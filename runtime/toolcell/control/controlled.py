"""Runs that can be carried on. `ControlledRuntime` is the base of `Runtime`."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import anyio

from toolcell.config import Policy
from toolcell.control.decisions import ResumeDecision, check_ids, recorded
from toolcell.control.run_control import Begin, Refresh, RunControl
from toolcell.control.scripts import Script, header_of, script_of
from toolcell.control.steps_of_plans import PlanRows
from toolcell.control.suspension import OnApproval, check_on_approval
from toolcell.errors import ResumeError, UsageError
from toolcell.journal.ledger import Journal, pending_entries
from toolcell.journal.store import JournalStore
from toolcell.keywords import keywords_known
from toolcell.results import ExecutionResult, Suspension
from toolcell.run.arguments import check_run_arguments
from toolcell.run.callbacks import OnLog, OnProgress
from toolcell.run.connection import GuestConnection
from toolcell.run.sandboxes import SandboxRuntime
from toolcell.tools.call import CallableTools, RunContext
from toolcell.tools.context import share_labels
from toolcell.tools.policy import CallPolicy
from toolcell_bridge.wire.messages import RunScript

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from toolcell.audit.recorder import Recorder
    from toolcell.quotas import Quotas

logger = logging.getLogger("toolcell.runtime")

PLAN: Final = "steps"
"""In the header of a journal: it is that of a plan."""

RunHandlers = tuple[anyio.Event | None, OnLog | None, OnProgress | None]
"""How a caller cancels a run, and what it is told while the script runs."""


def check_is_no_part(journal: Journal) -> None:
    """Check that a journal is that of a run by itself.

    Raises:
        ResumeError: it is that of a script of a session.
    """
    if name := journal.header.get("session"):
        raise ResumeError(
            f"run {journal.id} is script {journal.header['number']} of session {name!r}: open that session with "
            f"runtime.session({name!r}, restore=True), and call its resume(...)"
        )


class ControlledRuntime(SandboxRuntime):
    """The part of a runtime that carries runs on."""

    policy: Policy
    quotas: Quotas | None
    on_end: Callable[[ExecutionResult | PlanRows], object] | None = None
    """Called with what each script and each plan left behind, also those of sessions. What it raises is logged."""
    _journals: JournalStore
    _recorder: Recorder | None
    _tasks: TaskGroup
    """Of an open runtime: what is started in it ends with the runtime."""

    @abstractmethod
    async def _execute(
        self,
        script: Script,
        tools: CallableTools,
        context: RunContext | None,
        handlers: RunHandlers,
        begin: Begin,
        held: GuestConnection | None = None,
    ) -> ExecutionResult:
        """Run a script once, in a fresh sandbox or in that of a session."""

    @abstractmethod
    def _tools(self, tools: CallableTools | Iterable[Any] | None) -> CallableTools:
        """Return the tools of a run, unchanging."""

    def _seed_and_clock(
        self, seed: int | None, clock: float | None, is_repeatable: bool
    ) -> tuple[int | None, float | None]:
        seed, clock = self.policy.seed if seed is None else seed, self.policy.clock if clock is None else clock
        if is_repeatable:
            from toolcell.audit.recorder import replay_seed

            return replay_seed(seed, clock)
        return (seed, clock) if self._recorder is None else self._recorder.replay_seed(seed, clock)

    def _under_rules(self, context: RunContext) -> RunContext:
        """Return a run under the flows and quotas of this runtime, with the labels of the tool call that it begins in.

        Raises:
            QuotaExceeded: whoever it is for has used up the quota.
        """
        share_labels(context)
        context = self._ruled(context)
        for quotas in context.quotas:
            quotas.begin_run(context)
        return context

    def _ruled(self, context: RunContext) -> RunContext:
        """Return a run under the flows and quotas of this runtime."""
        if self.quotas is not None and self.quotas not in context.quotas:
            context = context.child(quotas=(*context.quotas, self.quotas))
        if not self.policy.flows:
            return context
        flows = CallPolicy()
        flows.add_flow(*self.policy.flows)
        return context.within(policies=(*context.scope.policies, flows))

    def _count_run(self, context: RunContext, cpu_s: float) -> None:
        """Count what a run has used."""
        for quotas in context.quotas:
            quotas.end_run(context, cpu_s)

    def _tell_end(self, result: ExecutionResult | PlanRows) -> None:
        try:
            assert self.on_end is not None
            self.on_end(result)
        except Exception:
            logger.exception("Runtime.on_end failed")

    def _first_run(
        self, script: Script, tools: CallableTools, on_approval: OnApproval, repairs: Any, refresh: Refresh
    ) -> Begin:
        """Return how the first run of a script begins."""
        if on_approval != "ask":
            check_on_approval(on_approval)
        repaired = self._journals.repaired(repairs) if repairs is not None else None
        if refresh not in ("", "reads"):
            raise UsageError(f'refresh must be "" or "reads", not {refresh!r:.40}')
        if refresh and repaired is None:
            raise UsageError("refresh= says what a repair makes again; pass repairs= too")

        def begin(message: RunScript, context: RunContext) -> RunControl:
            store = self._journals
            is_durable = store.is_durable and context.dry_run is None and not script.is_fed
            is_repeatable = is_durable or on_approval == "suspend"
            journal = store.make(context.run_id) if is_repeatable else Journal(os.urandom(16).hex())
            if repaired is not None:
                journal.past, journal.labels = list(repaired.all_entries()), repaired.labels
            journal.share_labels(context.state.labels)
            if is_repeatable:
                journal.header = header_of(
                    message.source, message.inputs, script, tools, on_approval, refresh, repaired
                )
            if is_durable:
                store.write(journal)
            name = repaired.id if repaired is not None else ""
            return RunControl(store, journal, tools, context, on_approval, refresh, name)

        return begin

    @keywords_known
    async def resume(
        self,
        token: str | Suspension,
        decisions: Mapping[str, ResumeDecision] | None = None,
        *,
        tools: CallableTools | Iterable[Any] | None = None,
        context: RunContext | None = None,
        cancel: anyio.Event | None = None,
        on_log: OnLog | None = None,
        on_progress: OnProgress | None = None,
    ) -> ExecutionResult:
        """Carry a suspended run on: its script runs again in a fresh sandbox, and its calls get their recorded answers.
        One that is still held (`hold_s`) goes on in its own sandbox instead.

        A plan is carried on too: the steps without a result run, and the rows of all are the `value`.

        `decisions`: by the id of the pending call; a call without one suspends the run again. A run that was
        interrupted, and has no token, is carried on with its id (`interrupted_runs`).

        Raises:
            ResumeError: the token is no token, changed, foreign, expired or used; its run is unknown or under way; or
                the tools are not those that it began with. Nothing was made.
            UsageError: a decision is about a call that does not wait for one, or an argument is of the wrong kind.
            SandboxUnavailable, AuditError: as from `execute_code`. The run can be resumed with its id.
        """
        registry = self._tools(tools)
        check_run_arguments(None, None, None, cancel, context, on_log=on_log, on_progress=on_progress)
        journal = self._taken(token, decisions, registry)
        if PLAN in journal.header:
            return await self._resume_plan(journal, registry, context)
        return await self._carry_on(journal, registry, context, (cancel, on_log, on_progress))

    async def _carry_on(
        self, journal: Journal, registry: CallableTools, context: RunContext | None, handlers: RunHandlers
    ) -> ExecutionResult:
        """Run the script of a journal that was taken."""
        store, header, controls = self._journals, journal.header, list[RunControl]()
        held = self._held.take(journal.id)
        journal.begin_again()

        def begin(message: RunScript, context: RunContext) -> RunControl:
            journal.share_labels(context.state.labels)
            settings = header["on_approval"], header["refresh"], header["repairs"]
            controls.append(RunControl(store, journal, registry, context, *settings))
            controls[0].held = held
            return controls[0]

        context = context or RunContext(run_id=f"{journal.id}.{os.urandom(4).hex()}")
        try:
            return await self._execute(script_of(header), registry, context, handlers, begin)
        finally:
            if not controls:
                store.put_down(journal)
            if held is not None:
                await self._held.end(held)

    def _taken(
        self,
        token: str | Suspension,
        decisions: Mapping[str, ResumeDecision] | None,
        tools: CallableTools,
        check: Callable[[Journal], None] = check_is_no_part,
        *,
        even_ended: bool = False,
    ) -> Journal:
        """Return the journal of a suspended or interrupted run, with these decisions. Its token is used up by that.

        `check` raises if it is not to be carried on here. `even_ended`: its result got lost.

        Raises:
            ResumeError, UsageError: as from `resume`.
        """
        store = self._journals
        journal = store.take(token, tools, even_ended=even_ended)
        try:
            check(journal)
            waiting, given = pending_entries(journal), decisions or {}
            check_ids(given, waiting)
            decided = {
                entry.number: recorded(given[ident], entry.pending, entry.is_in_doubt)
                for ident, entry in waiting.items()
                if ident in given and entry.pending is not None
            }
            store.use(journal, decided)
        except OSError as exc:
            store.put_down(journal)
            raise ResumeError(f"the journal of run {journal.id} cannot be written: {exc}") from exc
        except UsageError:
            store.put_down(journal)
            raise
        return journal

    @abstractmethod
    async def _resume_plan(self, journal: Journal, tools: CallableTools, context: RunContext | None) -> ExecutionResult:
        """Carry a plan on."""

    def suspended_runs(self) -> list[Suspension]:
        """Return what each suspended run waits for, with its token: also those whose token got lost with its host."""
        return self._journals.suspensions()

    def interrupted_runs(self) -> list[str]:
        """Return the ids of runs whose host was killed, or which were cancelled, and that `resume` can carry on."""
        return self._journals.interrupted()

    def calls_of_interrupted(self, run_id: str) -> list[dict[str, Any]] | None:
        """Return the calls that an interrupted run had made or begun, in order; None if it has no journal.

        Shape: `tool`, `args`, and `state`: `answered`, `in doubt` (its tool had begun), or `not begun`.
        """
        try:
            entries = self._journals.calls_of(run_id)
        except ResumeError:
            return None
        return [{"tool": each.tool, "args": each.args, "state": each.state} for each in entries]
