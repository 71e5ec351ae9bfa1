"""What a repaired script took over: the report of a run with `repairs=`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from toolcell.calls.options import ToolOptions
from toolcell.journal.ledger import Journal
from toolcell.journal.replay import CANCELLED, JournalEntry
from toolcell.results import Repair, RepairedCall
from toolcell.run.calls import PARTS

OptionsOf = Callable[[str, Any], ToolOptions]


ANSWERED, FAILED, IN_DOUBT = "answered", "failed", "in doubt"


def report(repaired: str, journal: Journal, reused: Iterable[JournalEntry], options: OptionsOf) -> Repair:
    """Sort the calls of a repaired script and of the run that it repairs. Parts of the bodies of requests are none."""
    reused = list(reused)
    new = [entry for entry in journal.entries.values() if entry not in reused]
    made = [each for each in journal.past if each is not None and not each.is_refused and each.pending is None]
    orphaned = [each for each in made if not options(each.tool, each.args).read_only]
    return Repair(repaired, _rows(reused), _rows(new), _rows(orphaned))


def _rows(entries: Iterable[JournalEntry]) -> tuple[RepairedCall, ...]:
    return tuple(RepairedCall(entry.tool, entry.args, _status(entry)) for entry in entries if entry.tool not in PARTS)


def _status(entry: JournalEntry) -> str:
    if entry.answer in (None, CANCELLED):
        return IN_DOUBT
    return FAILED if entry.is_failed else ANSWERED
