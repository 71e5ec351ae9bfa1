"""`SessionHost`: the parts of a runtime that its sessions use."""

from __future__ import annotations

from dataclasses import dataclass

from toolcell.control.dry_runs import DryRuns
from toolcell.control.resumption import Resumption
from toolcell.control.script_runs import ScriptChecks
from toolcell.journal.store import JournalStore
from toolcell.run.runs import Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHost:
    """What the sessions of one runtime have in common."""

    runs: Runs
    journals: JournalStore
    checks: ScriptChecks
    dry_runs: DryRuns
    resumption: Resumption
