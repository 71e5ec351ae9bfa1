"""`DryRuns`: dry runs and their commits: what a dry run has collected is made once, when somebody says so."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.context import share_labels
from toolcell.calls.placeholders import DryRun, RecordedDryRun
from toolcell.calls.reverts import MadeCalls, Reverts
from toolcell.calls.run_state import RunLink
from toolcell.config import OnApproval
from toolcell.control.draft import COMMITTED, COMMITTING, Approved, Draft, Drafts
from toolcell.errors import UsageError
from toolcell.journal.database import ENDED
from toolcell.journal.store import JournalStore
from toolcell.results import CommitResult, EffectResult, ExecutionResult
from toolcell.run.options import RunOptions
from toolcell.run.runs import Runs
from toolcell.support import daemon_threads
from toolcell.support.checks import brief

if TYPE_CHECKING:
    from toolcell.control.kept_drafts import EffectDecision
    from toolcell.journal.ledger import Journal


class DryRuns:
    """The dry runs of one runtime, and their commits."""

    def __init__(self, runs: Runs, journals: JournalStore, reverts: Reverts) -> None:
        self._runs, self._journals, self._reverts = runs, journals, reverts
        self.drafts = Drafts()

    async def begin(
        self,
        dry_run: bool | DryRun | None,
        context: RunContext | None,
        on_approval: OnApproval = "ask",
        source: object = None,
    ) -> RunContext | None:
        """Return the context of a run: with a draft, if it is to be a dry run. `source`: of a script, if it is known.

        Raises:
            UsageError: `dry_run` is neither a bool nor a draft that can be used, or the run could be suspended.
        """
        if dry_run is False or dry_run is None:
            draft = context.feature(DryRun) if context is not None else None
        else:
            draft = self.drafts.make() if dry_run is True else dry_run
        if draft is None or isinstance(draft, RecordedDryRun):
            return context
        if not isinstance(draft, Draft):
            raise UsageError(f"dry_run takes True or a Draft, not {brief(draft)}")
        draft.check()
        if draft.kept_in is not None:
            from toolcell.control.kept_drafts import check_uncommitted

            await daemon_threads.run_sync(check_uncommitted, self._journals, draft)
        if on_approval == "suspend":
            raise UsageError(
                "a dry run cannot be suspended: nothing of it waits for approval, because its commit is the approval; "
                'leave on_approval="suspend" out'
            )
        if isinstance(source, str):
            draft.add_script(source)
        return (context or RunContext(run_id=os.urandom(16).hex())).having(draft)

    async def commit(
        self,
        draft: ExecutionResult | Draft | str,
        approve: Approved,
        *,
        recheck: bool,
        decisions: Mapping[str, EffectDecision] | None,
        options: RunOptions,
    ) -> CommitResult:
        """Make the effects of a dry run; see `Runtime.commit`."""
        from toolcell.control.commit import approved_ids, settled
        from toolcell.control.kept_drafts import settle_doubt
        from toolcell.journal.ledger import Journal

        registry = self._runs.tools(options.tools)
        context = options.context
        is_kept = self._journals.is_durable
        kept = await daemon_threads.run_sync(self._draft_on_disk, draft) if is_kept else self._draft_on_disk(draft)
        journal = kept or Journal("")
        try:
            found, value, has_value = self._find_draft(draft, kept, registry, context)
            if journal.entries:
                chosen = {found.collected[number - 1].id for number in journal.entries}
            else:
                digest = draft.draft_digest if isinstance(draft, ExecutionResult) else ""
                chosen = approved_ids(found, approve, digest)
            if decisions and kept is None:
                raise UsageError("decisions= are about effects in doubt, and this draft has none")
            settle_doubt(journal, found, decisions, registry)
            made = MadeCalls()
            given = (context or RunContext(run_id=os.urandom(16).hex())).having(made)
            made.link = found.link_of_commit(chosen, given.user_id)
            made.user_id = next(iter(found.users), given.user_id)
            given = given.child(user_id=made.user_id)
            share_labels(given)
            found.state = COMMITTING
            try:
                rows, results = await self._make_effects(found, journal, chosen, recheck, given, made.link)
            finally:
                found.state = COMMITTED if found.state else ""
                found.reads = [] if found.state else found.reads
                self._reverts.keep(f"commit-{found.id}", made)
        except OSError as exc:
            raise UsageError(f"the commit cannot be recorded: {exc}; commit the draft again") from exc
        finally:
            journal.close()
        value = settled(value, found, results) if has_value else None
        return CommitResult(given.run_id, tuple(rows), value, has_value, f"commit-{found.id}")

    async def _make_effects(
        self,
        draft: Draft,
        journal: Journal,
        chosen: set[str],
        recheck: bool,
        context: RunContext,
        link: RunLink,
    ) -> tuple[list[EffectResult], Mapping[str, Any]]:
        """Make the chosen effects of a draft; return what became of each effect, and their results by their ids."""
        from toolcell.control.commit import Commit, changed_read

        async with self._runs.observed(context, "commit", link) as run:
            if recheck and (changed := await changed_read(draft, run)):
                draft.state = ""
                raise UsageError(
                    f"{changed} has another result now than in the dry run; nothing was made. Make another one"
                )
            if not journal.entries:
                numbered = enumerate(draft.collected, 1)
                journal.approve([(number, each.call.name) for number, each in numbered if each.id in chosen])
            commit = Commit(draft, run, journal)
            rows = await commit.make()
            journal.write(ENDED, "committed")
        return rows, commit.results

    def waiting(self) -> list[Draft]:
        """Return the drafts of this runtime's dry runs that can be committed, the oldest first."""
        from toolcell.control.kept_drafts import check_uncommitted

        found = []
        for draft in self.drafts:
            with suppress(UsageError):
                check_uncommitted(self._journals, draft)
                draft.check()
                found.append(draft)
        return [draft for draft in found if draft.collected]

    def _draft_on_disk(self, given: ExecutionResult | Draft | str) -> Journal | None:
        """Return the journal of a draft, open; None when it is in memory alone."""
        from toolcell.control.kept_drafts import check_place, find_draft, is_kept

        store = self._journals
        if isinstance(given, ExecutionResult | Draft):
            ident = given.id if isinstance(given, Draft) else given.draft_id
            if (here := self.drafts.in_memory(given)) is not None:
                check_place(store, here)
            if not (store.is_durable and ident and is_kept(store, ident)):
                return None
            return find_draft(store, ident)
        return find_draft(store, given)

    def _find_draft(
        self,
        given: ExecutionResult | Draft | str,
        journal: Journal | None,
        tools: CallableTools,
        context: RunContext | None,
    ) -> tuple[Draft, Any, bool]:
        """Return a draft, with the result of its script and whether it had one."""
        from toolcell.control.kept_drafts import rebuilt

        if journal is not None and journal.ended:
            raise UsageError(f"this draft {COMMITTED}: a draft is committed once; make another dry run")
        is_here = not isinstance(given, str) and self.drafts.in_memory(given) is not None
        if journal is None or (is_here and not journal.entries):
            assert not isinstance(given, str)
            found = self.drafts.find(given)
            result = given if isinstance(given, ExecutionResult) else None
            return found, result.value if result is not None else None, result is not None and result.has_value
        context = self._runs.under_rules(context or RunContext()).within(runtime=self._runs.runtime)
        found = rebuilt(journal, tools, context)
        found.check()
        return found, journal.header["value"], journal.header["has_value"]

    async def keep(self, context: RunContext | None, result: ExecutionResult | None = None) -> None:
        """Write the draft of a run to disk, if it has one, where journals are."""
        draft = context.feature(Draft) if context is not None else None
        if self._journals.is_durable and draft is not None:
            from toolcell.control.kept_drafts import keep_draft

            with anyio.CancelScope(shield=True):  # its run is over, and a draft that is not kept cannot be committed
                await daemon_threads.run_sync(keep_draft, self._journals, draft, result)
