"""Suspend a run for a decision: wait until nothing else goes on in it, then end it with outcome `suspended`.

What is suspended is the journal. The sandbox is destroyed, and no clock of the run goes on. Also what may be decided
about a call that waits, and how it is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import anyio

from toolcell.calls.call import (
    AlreadyMade,
    Approvals,
    Approve,
    Block,
    Call,
    Decision,
    Deny,
    Edit,
    Feature,
    ResumeDecision,
)
from toolcell.calls.options import ToolOptions
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.calls.values import MAX_STEP_CHARS, list_names
from toolcell.errors import RunEnded, UsageError
from toolcell.journal.identity import digest_of_call
from toolcell.journal.ledger import Journal, pending_of
from toolcell.journal.replay import JournalEntry, RecordedDecision
from toolcell.results import Outcome, PendingCall
from toolcell.support.checks import brief
from toolcell_bridge.guest.values import to_plain


def recorded(
    decision: ResumeDecision, pending: PendingCall, is_in_doubt: bool = False, by: str = ""
) -> RecordedDecision:
    """Return a decision about a pending call as it is recorded. `by`: who decided, if it does not say so itself.

    Raises:
        UsageError: it is none, or none for a call of this kind.
    """
    ident, about = pending.id, (pending.digest, pending.reason)
    said: dict[str, Any] = {"by": getattr(decision, "by", "") or by, "why": getattr(decision, "reason", "")}
    said["at_ns"] = time.time_ns()
    match decision:
        case Approve():
            return RecordedDecision("approve", None, *about, **said)
        case Deny(reason):
            return RecordedDecision("deny", reason, *about, **said)
        case Edit(args) if not is_in_doubt:
            return RecordedDecision("edit", _plain(dict(args), ident), *about, **said)
        case AlreadyMade(value) if is_in_doubt:
            return RecordedDecision("made", _plain(value, ident), *about, **said)
        case Edit():
            raise UsageError(f"{ident} is in doubt: decide with Approve(), Deny(...) or AlreadyMade(result), not Edit")
        case AlreadyMade():
            raise UsageError(f"{ident} was not made: decide with Approve(), Deny(...) or Edit(...), not AlreadyMade")
    raise UsageError(f"the decision about {ident} is Approve(), Deny(...) or Edit(...), not {brief(decision)}")


def answer_of(decision: RecordedDecision) -> Approve | Deny | Edit:
    """Return a recorded decision as the pipeline takes it."""
    if decision.kind == "edit":
        return Edit(decision.data, decision.why, decision.by)
    if decision.kind == "approve":
        return Approve(decision.why, decision.by)
    return Deny(decision.data or "", decision.by)


def _plain(value: Any, ident: str) -> Any:
    try:
        return to_plain(value, "value")
    except (ValueError, TypeError) as exc:
        raise UsageError(f"the decision about {ident} cannot be recorded: {exc}") from exc


def check_ids(decisions: Mapping[str, ResumeDecision], known: Mapping[str, object]) -> None:
    """Check that decisions are about calls that wait for one.

    Raises:
        UsageError: names those that are not, and the calls that wait; or they are not a mapping.
    """
    if not isinstance(decisions, Mapping):
        raise UsageError(f"decisions must be a dict from ids of calls to decisions, not {brief(decisions)}")
    if unknown := [str(each)[:MAX_STEP_CHARS] for each in decisions if each not in known]:
        raise UsageError(f"no call {list_names(unknown)} waits for a decision; these do: {list_names(known) or 'none'}")


SETTLE_S: Final = 0.02
"""A run in which nothing happens for so long, but for calls that wait for decisions, is suspended. Calls that a script
makes in parallel come together, so they are suspended together."""

IN_DOUBT: Final = "in doubt: it had started when its host ended, and its result is not known"

BELOW: Final = (
    "it needs approval, and a call below a script's own call cannot wait for it: let the tool that the script calls "
    "require approval, or answer with an approval hook (on_approval='ask')"
)


class JournalApprovals(Approvals):
    """Decides about calls with what their journal says. A call without a decision waits."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def waited(self, call: Call, /) -> bool:
        """Return true for a call that was decided about."""
        entry = self.journal.entry_of(call)
        return entry is not None and entry.decision is not None

    async def decide(self, call: Call, /) -> Decision | Block:
        """Return what was decided about a call; without a decision, hold it."""
        entry = self.journal.entry_of(call)
        if entry is None or entry.is_started:
            return Block(f'tool "{call.name}" was refused: {BELOW}')
        digest, decision = await digest_of_call(call.name, call.args), entry.decision
        if decision is not None and decision.digest != digest:
            return self.changed(entry, digest, decision)
        if decision is None or decision.reason != call.approval_reason:
            return await self.hold(entry, dict(call.args), digest, call.approval_reason)
        return answer_of(decision)

    def changed(self, entry: JournalEntry, digest: str, decided: RecordedDecision) -> Block:
        """Refuse a call whose arguments are not those that were decided about."""
        return Block("its arguments are not those that were decided about; it was not made")

    async def hold(self, entry: JournalEntry, args: dict[str, Any], digest: str, reason: str) -> Block:
        """Let a call wait; return what it is answered meanwhile."""
        raise NotImplementedError


Hold = Callable[[JournalEntry, dict[str, Any], str, str], Awaitable[Block]]
"""Lets a call wait: its entry, arguments and their digest, and why."""


async def recorded_answer(entry: JournalEntry, options: ToolOptions, hold: Hold | None) -> ToolResult | None:
    """Return the answer of a call that has one, or had started when its host ended; None when it is to be made.

    `hold`: None where every call in doubt was decided about.
    """
    if entry.answer or not entry.is_in_doubt:
        return entry.result() if entry.answer else None
    if options.is_repeatable:
        entry.is_started = False
        return None
    if (decision := entry.decision) is None:
        assert hold is not None
        args = dict(entry.args if entry.edited is None else entry.edited)
        return refusal((await hold(entry, args, await digest_of_call(entry.tool, args), IN_DOUBT)).reason)
    return ToolResult.of(decision.data) if decision.kind == "made" else refusal(decision.data)


def refusal(reason: str) -> ToolResult:
    """Return the answer of a call that was not made."""
    return ToolResult.fail(reason or "a person refused this call", code=ErrorCode.BLOCKED, status=Status.BLOCKED)


class Suspender(JournalApprovals):
    """Ends a run when calls of it wait for decisions. The `Approvals` of a run with `on_approval="suspend"`."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal)
        self.active = 0
        """Calls of the script that are not answered."""
        self.calls_asked = 0
        """Calls of the script in all."""

    def changed(self, entry: JournalEntry, digest: str, decided: RecordedDecision) -> Block:
        """End the run."""
        raise RunEnded(
            f"call {self.journal.index_of(entry)} of {entry.tool} has other arguments than those that were decided "
            f"about (sha256 {digest[:16]}, decided about {decided.digest[:16]}); it was not made",
            Outcome.DIVERGED,
        )

    async def hold(self, entry: JournalEntry, args: dict[str, Any], digest: str, reason: str) -> Block:
        """Suspend the run for a call, together with others that wait.

        Raises:
            RunEnded: always, but for a run that cannot be suspended: its call is refused.
        """
        if self.journal.lost:
            return Block(f"it needs a decision, and the run cannot be suspended: {self.journal.lost}")
        entry.pending = PendingCall(
            f"call_{entry.number}", entry.tool, args=args, line=None, digest=digest, reason=reason
        )
        seen = -1
        while seen != self.calls_asked or self.active > len(pending_of(self.journal.current.values())):
            seen = self.calls_asked
            await anyio.sleep(SETTLE_S)
        raise RunEnded("it waits for a decision", Outcome.SUSPENDED)


class JournaledStarts(Feature):
    """Records starts of calls in the journal. The record writes its own start with it, at once."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._begun: dict[Call, JournalEntry] = {}
        """Calls that were started here and have not ended."""

    def call_started(self, call: Call, /) -> None:
        """Record that the tool of one of the script's own calls, or of a step, is about to run.

        Raises:
            OSError, ToolError: this could not be recorded, and the tool must not run.
        """
        self.journal.note_labels()
        entry = self.journal.entry_of(call)
        if entry is None or call.refusal is not None or entry.is_started:
            return
        if entry.answer is None and not entry.is_taken_over:  # else no tool runs
            self.journal.start(entry)
            self._begun[call] = entry

    def unrecorded(self, call: Call, /) -> None:
        """Take a start back."""
        if (entry := self._begun.pop(call, None)) is not None:
            self.journal.take_back(entry)

    def call_ended(self, call: Call, /) -> None:
        """Forget its start."""
        self._begun.pop(call, None)
