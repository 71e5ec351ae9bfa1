"""What a person, or a program, may decide about a pending call, and how a decision is recorded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolcell.calls.call import Approve, Deny, Edit
from toolcell.errors import UsageError
from toolcell.journal.replay import RecordedDecision
from toolcell.results import PendingCall
from toolcell.support.checks import brief
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue


@dataclass(frozen=True, slots=True)
class AlreadyMade:
    """The call in doubt was made, and this is its result. It is not repeated."""

    value: Any = None


ResumeDecision = Approve | Deny | Edit | AlreadyMade


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
    except (UnsendableValue, ValueError, TypeError) as exc:
        raise UsageError(f"the decision about {ident} cannot be recorded: {exc}") from exc


def check_ids(decisions: Mapping[str, ResumeDecision], known: Mapping[str, object]) -> None:
    """Check that decisions are about calls that wait for one.

    Raises:
        UsageError: names those that are not, and the calls that wait; or they are not a mapping.
    """
    if not isinstance(decisions, Mapping):
        raise UsageError(f"decisions must be a dict from ids of calls to decisions, not {brief(decisions)}")
    unknown = [str(each) for each in decisions if each not in known]
    if unknown:
        raise UsageError(f"no call {', '.join(unknown)} waits for a decision; these do: {', '.join(known) or 'none'}")
