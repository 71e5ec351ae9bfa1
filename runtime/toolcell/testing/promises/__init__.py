"""Everything a backend promises, group by group."""

from toolcell.testing.case import Case
from toolcell.testing.promises import (
    calls,
    cancelling,
    deaths,
    files,
    hostile,
    life,
    limits,
    output,
    single_use,
    usage,
    values,
    walls,
)

ALL: tuple[Case, ...] = tuple(
    case
    for group in (values, calls, output, files, limits, usage, cancelling, single_use, hostile, deaths, walls, life)
    for case in group.promises.cases
)
"""In the order they are tried: what everything else rests on comes first."""
