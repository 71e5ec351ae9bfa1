"""The competitors: one class per way to run a script, all with the methods of `Competitor`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.competitors.competitor import Competitor
from benchmarks.competitors.monty import MontyPool, PrestartedMonty
from benchmarks.competitors.subprocesses import Bubblewrap, PlainPython
from benchmarks.competitors.toolcell import Toolcell

__all__ = ["COMPETITORS", "FRESH", "Competitor"]

FRESH = "Monty, fresh worker"

COMPETITORS: dict[str, Callable[[], Competitor]] = {
    "toolcell": Toolcell,
    "toolcell + numpy, pandas": partial(Toolcell, packages=("numpy", "pandas")),
    FRESH: partial(MontyPool, min_processes=2, max_checkouts_per_worker=1),
    "Monty, fresh worker, started ahead": PrestartedMonty,
    "Monty, shared worker": MontyPool,
    "bwrap + python": Bubblewrap,
    "python subprocess": PlainPython,
}
"""In the table's order."""
