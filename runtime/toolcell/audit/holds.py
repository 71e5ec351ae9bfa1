"""Legal holds: single runs that are kept whatever the retention says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolcell.audit import records
from toolcell.audit.format import chain_directories, read_log_id
from toolcell.audit.keys import Verifier, by_id
from toolcell.audit.log import AuditLog
from toolcell.audit.query import RunSummary
from toolcell.audit.verify import check_chain, signed_holds
from toolcell.errors import UsageError


def hold(log: AuditLog, run: RunSummary, *, by: str, reason: str = "", is_held: bool = True) -> None:
    """Keep a run whatever the retention says, or release it; both are recorded and signed.

    Its segment stays, and with it all later ones of its chain.

    Raises:
        AuditError: the log is not open, or could not be written.
    """
    log.append(records.HELD, 0, (run.chain, run.seq, run.id, is_held, by, reason, {}))
    log.checkpoint()


def held_runs(directory: Path, keys: Iterable[Verifier]) -> list[dict[str, Any]]:
    """Return the holds that are in force, as they were recorded. One without a valid signature is none.

    Raises:
        AuditError: there is no log, or it cannot be read.
    """
    log, known = read_log_id(directory), by_id(keys)
    held = signed_holds(check_chain(path, log, known) for path in chain_directories(directory))
    return [dict(fields) for fields in held.values()]


def held_places(directory: Path, keys: Iterable[Verifier]) -> set[tuple[str, int]]:
    """Return chain and seq of the runs that are held."""
    return {(each["chain"], each["seq"]) for each in held_runs(directory, keys)}


def check_held(run: RunSummary, directory: Path, keys: Iterable[Verifier]) -> None:
    """Check that a run is held, before its release.

    Raises:
        UsageError: it is not.
    """
    if (run.chain, run.seq) not in held_places(directory, keys):
        raise UsageError(f"run {run.id} is not held; `toolcell audit hold {directory}` lists the runs that are")
