"""`MapItem`: what became of one input of `Runtime.map`, and which failures may be tried again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from toolcell.calls.call import CallableTools
from toolcell.control.suspension import IN_DOUBT
from toolcell.journal.identity import options_of
from toolcell.results import ErrorInfo, ExecutionResult, Outcome, PendingCall, Suspension

OF_THE_MACHINE: Final = frozenset({Outcome.UNAVAILABLE, Outcome.LOST})
"""Failures that are not the script's."""

UNDECIDED: Final = frozenset({Outcome.UNAVAILABLE, Outcome.LOST, Outcome.CANCELLED, Outcome.SUSPENDED})
"""An item that ended like this is not done: a map that is carried on takes it up again."""


@dataclass(frozen=True, slots=True)
class MapItem:
    """The result for one input of `Runtime.map`."""

    index: int
    """Number of the input, from 0."""
    inputs: Mapping[str, Any]
    run_id: str
    outcome: Outcome
    value: Any = None
    has_value: bool = False
    error: ErrorInfo | None = None
    attempts: int = 1
    """In this process."""
    result: ExecutionResult | None = field(default=None, repr=False)
    """Everything the run left behind. None of an item that had no run in this process."""
    suspension: Suspension | None = None
    """What it waits for: approvals, or decisions about calls in doubt. Give it to `Runtime.resume`."""
    is_recorded: bool = False
    """It ended in an earlier process, and this is what the map's file has: outcome, value and error."""
    unkept: str = ""
    """Why a recorded item has no value although its script had a result."""

    @property
    def ok(self) -> bool:
        """True when the script reached its end."""
        return self.outcome is Outcome.OK

    @property
    def in_doubt(self) -> tuple[PendingCall, ...]:
        """Calls that had started when their host ended. Their results are unknown, and they were not repeated."""
        calls = self.suspension.calls if self.suspension is not None else ()
        return tuple(call for call in calls if call.reason == IN_DOUBT)


def item_of(index: int, inputs: Mapping[str, Any], run_id: str, attempts: int, result: ExecutionResult) -> MapItem:
    """Return the item of a run that has a result."""
    return MapItem(
        index,
        inputs,
        run_id=run_id,
        outcome=result.outcome,
        value=result.value,
        has_value=result.has_value,
        error=result.error,
        attempts=attempts,
        result=result,
        suspension=result.suspension,
    )


def had_no_effect(result: ExecutionResult | None, tools: CallableTools) -> bool:
    """Return whether a run provably changed nothing: it made no call, or only of tools that may be called twice."""
    if result is None:  # it had no sandbox
        return True
    rules = [options_of(tools, tools.registered_name(call.name)) for call in result.calls]
    return all(rule.read_only or rule.idempotent for rule in rules)
