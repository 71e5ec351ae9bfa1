"""The journal of a session: its scripts with their answers, and how to run them again in a new sandbox."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

from toolcell.control.run_control import Begin, RunControl
from toolcell.control.scripts import Script
from toolcell.copies import changed
from toolcell.eager import EagerReport
from toolcell.journal.ledger import Journal
from toolcell.journal.store import JournalStore
from toolcell.packing import pack
from toolcell.results import ExecutionResult, Outcome
from toolcell.tools.call import CallableTools, RunContext
from toolcell_bridge.wire.messages import RunScript

STEPS_BYTES = 64 << 20
"""Sources, inputs, files and answers that a session keeps. With more it cannot be rebuilt."""


@dataclass(frozen=True, slots=True)
class KeptScript:
    """One script that has left its state in the session."""

    script: Script
    tools: CallableTools
    journal: Journal
    outcome: Outcome
    context: RunContext | None
    """For whom it ran; None when another process ran it."""

    def size(self) -> int:
        """Return about how many bytes it keeps."""
        script = self.script
        files = sum(len(file.data) for file in script.files)
        return len(script.source) + len(pack(dict(script.inputs or {}))) + files + self.journal.size

    def journal_again(self) -> Journal:
        """Return the journal for another run of the script. Sessions that were forked share the entries."""
        journal = Journal(self.journal.id, entries=list(self.journal.entries))
        journal.begin_again()
        return journal

    def context_again(self, given: RunContext | None) -> RunContext:
        """Return the context for another run of the script; `given` is for a script that another process ran."""
        return context_again(self.context or given)


def context_again(before: RunContext | None) -> RunContext:
    """Return the context for a run that repeats or checks something: for the same user, and a run of its own."""
    if before is None:
        return RunContext()
    return RunContext(
        secrets=before.secrets,
        user_id=before.user_id,
        thread_id=before.thread_id,
        channel=before.channel,
        chat_id=before.chat_id,
        custom=before.custom,
        quotas=before.quotas,
    )


class KeptNowhere(JournalStore):
    """The store of a run that only repeats another one: its journal is kept by the session."""

    def __init__(self) -> None:
        super().__init__(None)

    def finish(self, journal: Journal, run_id: str, outcome: str, calls_bytes: int) -> None:
        """Keep nothing."""

    def put_down(self, journal: Journal) -> None:
        """Keep nothing."""


class Repetition:
    """Begins the second run of a step."""

    def __init__(self, step: KeptScript) -> None:
        self._step = step

    def begin(self, _message: RunScript, context: RunContext) -> RunControl:
        """Answer the calls from the journal of the step; make none."""
        step = self._step
        return RunControl(KeptNowhere(), step.journal_again(), step.tools, context, "deny", is_rebuilding=True)


def begin_without_calls(tools: CallableTools) -> Begin:
    """Return how a script of ours begins that makes no call and is kept nowhere."""

    def begin(_message: RunScript, context: RunContext) -> RunControl:
        return RunControl(KeptNowhere(), Journal(os.urandom(16).hex()), tools, context, "deny", is_rebuilding=True)

    return begin


def as_sent(script: Script, message: RunScript, eager: EagerReport | None) -> Script:
    """Return the script with the inputs that were sent, which the caller may change from now on, and with the text."""
    if eager is not None:
        script = changed(script, source=eager.source, feed=None)
    return changed(script, inputs=copy.deepcopy(message.inputs) if message.inputs else None)


def difference(step: KeptScript, again: ExecutionResult) -> str:
    """Return how the second run of a step differs from the first one, as text; empty when it does not."""
    if again.divergence is not None:
        return again.divergence.message
    if again.outcome is not step.outcome:
        said = again.error.message if again.error is not None else ""
        return f"its outcome was {step.outcome}, and is now {again.outcome} {said}".rstrip()
    return ""
