"""The competitors: one class per way to run a script, all with the methods of `Competitor`."""

from __future__ import annotations

from benchmarks.competitors.competitor import Competitor
from benchmarks.competitors.monty import MontyPool, PrestartedMonty
from benchmarks.competitors.subprocesses import Bubblewrap, PlainPython
from benchmarks.competitors.toolcell import Toolcell

__all__ = ["FRESH", "SHARED", "Competitor", "all_competitors"]

FRESH, SHARED = "Monty, fresh worker", "Monty, shared worker"
"""Every competitor is compared with these two."""


def all_competitors() -> list[Competitor]:
    """Return all competitors, in the table's order."""
    return [
        Toolcell("toolcell"),
        Toolcell("toolcell + numpy, pandas", packages=("numpy", "pandas")),
        MontyPool(FRESH, min_processes=2, max_checkouts_per_worker=1),
        PrestartedMonty("Monty, fresh worker, started ahead"),
        MontyPool(SHARED),
        Bubblewrap("bwrap + python"),
        PlainPython("python subprocess"),
    ]
