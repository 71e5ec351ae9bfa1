"""Dry runs and their commit, as methods of `Runtime`. `DraftingRuntime` is a base of it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from toolcell.control.draft import COMMITTED, COMMITTING, Approved, Draft, Drafts
from toolcell.control.revert import Reverts, revert_calls
from toolcell.control.steps_of_plans import PlanRows
from toolcell.control.suspension import OnApproval
from toolcell.effects import CommitResult, RevertResult
from toolcell.errors import UsageError
from toolcell.lifetime import Lifetime
from toolcell.results import ExecutionResult
from toolcell.tools.call import RunContext
from toolcell.tools.checks import shown
from toolcell.tools.context import share_labels
from toolcell.tools.placeholders import RecordedDryRun
from toolcell.tools.reverts import MadeCalls


def draft_of_plan(given: Draft | None) -> Draft | None:
    """Return the draft of a plan, which is the caller's own: nothing else would hand it on to a commit.

    Raises:
        UsageError: it is something else, such as True.
    """
    if not (given is None or isinstance(given, Draft)):
        raise UsageError(f"dry_run of a plan takes a Draft, not {shown(given)}: draft = Draft(), then commit(draft)")
    return given


class DraftingRuntime(ABC):
    """The part of a runtime that makes what dry runs have collected."""

    _drafts: Drafts
    _reverts: Reverts
    _lifetime: Lifetime

    @abstractmethod
    def _observed(self, context: RunContext, kind: str) -> AbstractContextManager[RunContext]:
        """Record the calls that are made with the yielded context, if there is an audit log."""

    def _begin_drafting(self) -> None:
        self._drafts, self._reverts = Drafts(), Reverts()

    def _drafting(
        self, dry_run: bool | Draft | None, context: RunContext | None, on_approval: OnApproval = "ask"
    ) -> RunContext | None:
        """Return the context of a run: with a draft, if it is to be a dry run.

        Raises:
            UsageError: `dry_run` is neither a bool nor a draft that can be used, or the run could be suspended.
        """
        if dry_run is False or dry_run is None:
            draft = context.dry_run if context is not None else None
        else:
            draft = self._drafts.make() if dry_run is True else dry_run
        if draft is None or isinstance(draft, RecordedDryRun):
            return context
        if not isinstance(draft, Draft):
            raise UsageError(f"dry_run takes True or a Draft, not {shown(draft)}")
        draft.check()
        if on_approval == "suspend":
            raise UsageError(
                "a dry run cannot be suspended: nothing of it waits for approval, because its commit is the approval; "
                'leave on_approval="suspend" out'
            )
        return (context or RunContext(run_id=os.urandom(16).hex())).child(dry_run=draft)

    async def commit(
        self,
        draft: ExecutionResult | Draft,
        approve: Approved = "all",
        *,
        recheck: bool = False,
        context: RunContext | None = None,
    ) -> CommitResult:
        """Make the effects of a dry run, in their order, as calls like any other; stop at the first that fails.

        `approve`: "all", or the ids of the effects to make. This is the approval that tools with `requires_approval`
        need. `recheck`: make the reads of the dry run again first, and make nothing if one has another result now.

        Raises:
            UsageError: the draft is none, of another Runtime, committed, or expired; an id is unknown; an effect needs
                the result of one that is not approved; a read has changed; or this Runtime is not open. Nothing was
                made.

        Cancellation: the effects before it are made, and the draft is used up.
        """
        from toolcell.control.commit import Commit, approved_ids, changed_read, settled

        self._lifetime.check()
        found = self._drafts.find(draft)
        chosen = approved_ids(found, approve)
        made = MadeCalls()
        given = (context or RunContext(run_id=os.urandom(16).hex())).child(made=made)
        journal_id = f"commit-{found.id}"
        share_labels(given)
        found.state = COMMITTING
        try:
            with self._observed(given, "commit") as run:
                if recheck and (changed := await changed_read(found, run)):
                    found.state = ""
                    raise UsageError(
                        f"{changed} has another result now than in the dry run; nothing was made. Make another dry run"
                    )
                commit = Commit(found, run)
                rows = await commit.make(chosen)
        finally:
            found.state = COMMITTED if found.state else ""
            found.reads = [] if found.state else found.reads
            self._reverts.keep(journal_id, made)
        value, has_value = None, False
        if isinstance(draft, ExecutionResult):
            value, has_value = settled(draft.value, found, commit.results), draft.has_value
        return CommitResult(given.run_id, tuple(rows), value, has_value, journal_id)

    async def revert(
        self, result: ExecutionResult | CommitResult | PlanRows, *, context: RunContext | None = None
    ) -> RevertResult:
        """Undo what a run or a commit has made, with the `revert=` of its tools: the last call first, until one fails.

        Raises:
            UsageError: `result` is of neither, or this Runtime knows of nothing to revert, or is not open.

        Cancellation: what was reverted until then is reverted; a second call goes on with the rest.
        """
        self._lifetime.check()
        made = self._reverts.find(result)
        given = context or RunContext(run_id=os.urandom(16).hex())
        with self._observed(given, "revert") as run:
            return await revert_calls(made, run)
