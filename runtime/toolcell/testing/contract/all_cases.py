"""Everything a backend promises, group by group."""

from toolcell.testing.contract import (
    calls,
    cancelling,
    deaths,
    files,
    hostile,
    isolation,
    life,
    limits,
    output,
    single_use,
    usage,
    values,
)
from toolcell.testing.contract.case import Case

ALL: tuple[Case, ...] = tuple(
    case
    for group in (values, calls, output, files, limits, usage, cancelling, single_use, hostile, deaths, isolation, life)
    for case in group.promises.cases
)
"""In the order they are tried: what everything else rests on comes first."""
