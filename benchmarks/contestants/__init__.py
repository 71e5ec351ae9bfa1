"""Who takes part: one class per way of running a script, all behind `Contestant`."""

from __future__ import annotations

from benchmarks.contestants.contestant import Contestant
from benchmarks.contestants.monty import MontyPool, StartedMonty
from benchmarks.contestants.piped import Bubblewrap, PlainPython
from benchmarks.contestants.sandboxes import Toolcell

__all__ = ["FRESH", "SHARED", "Contestant", "all_contestants"]

FRESH, SHARED = "Monty, fresh worker", "Monty, shared worker"
"""The two that everybody is compared with."""


def all_contestants() -> list[Contestant]:
    """Everybody, in the order of the table's columns."""
    return [
        Toolcell("toolcell"),
        Toolcell("toolcell + numpy, pandas", packages=("numpy", "pandas")),
        MontyPool(FRESH, min_processes=2, max_checkouts_per_worker=1),
        StartedMonty("Monty, fresh worker, started ahead"),
        MontyPool(SHARED),
        Bubblewrap("bwrap + python"),
        PlainPython("python subprocess"),
    ]
