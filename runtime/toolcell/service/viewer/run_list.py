"""The list of runs: what the address asks for, and pages that cost the same wherever they are."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Final
from urllib.parse import urlencode

from toolcell.audit import ABORTED, TRUSTS, UNFINISHED, Filter, Index, Place, RunSummary
from toolcell.errors import UsageError
from toolcell.results import Outcome
from toolcell.support.times import parse_time

PAGE: Final = 50
MAX_LOOKED_AT: Final = 1000
"""Runs that one page looks at for one with the wanted trust: how far a run can be trusted is in no index."""
MAX_NEW: Final = 200
OUTCOMES: Final = (*map(str, Outcome), ABORTED, UNFINISHED)
FIELDS: Final = ("q", "outcome", "tool", "trust", "session", "user", "since", "until")
"""Fields of the form, and of the address."""

_PLACE: Final = re.compile(r"(\d{1,19})\.(\d{1,18})\.([0-9a-f]{12})")
_SPECIAL: Final = re.compile(r"([*?\[])")


@dataclass(frozen=True, slots=True)
class RunPage:
    """A part of the list, the newest run first."""

    runs: list[RunSummary]
    older: str = ""
    """Where the next page begins; empty at the end."""


def wanted_of(params: Mapping[str, str]) -> tuple[Filter, dict[str, str]]:
    """Return the filter that an address asks for, and its fields.

    Raises:
        UsageError: a value is not one of the possible ones.
    """
    asked = {name: value[:200] for name in FIELDS if (value := params.get(name, "").strip())}
    for name, known in (("outcome", OUTCOMES), ("trust", TRUSTS)):
        if name in asked and asked[name] not in known:
            raise UsageError(f"{name} {asked[name]!r}: want one of {', '.join(known)}")
    tool = asked.get("tool")
    return Filter(
        text=asked.get("q"),
        outcome=asked.get("outcome"),
        tool=_SPECIAL.sub(r"[\1]", tool) if tool else None,
        trust=asked.get("trust"),
        session=asked.get("session"),
        user=asked.get("user"),
        since_ns=parse_time(asked["since"], UTC) if "since" in asked else None,
        until_ns=parse_time(asked["until"], UTC) if "until" in asked else None,
        limit=PAGE,
    ), asked


def address(path: str, asked: Mapping[str, str], **more: str) -> str:
    """Return the address of a list with these fields."""
    query = urlencode({**asked, **{name: value for name, value in more.items() if value}})
    return f"{path}?{query}" if query else path


def place_text(run: RunSummary) -> str:
    """Return a run's place in the list as a part of an address."""
    return f"{run.started_ns}.{run.seq}.{run.chain}"


def place_of(text: str | None) -> Place | None:
    """Return the place that a part of an address names.

    Raises:
        UsageError: it names none.
    """
    if not text:
        return None
    match = _PLACE.fullmatch(text)
    if match is None or int(match[1]) >= 1 << 63:
        raise UsageError(f"{text[:100]!r} is not a place in the list; follow the links of the list")
    return int(match[1]), int(match[2]), match[3]


def page_before(index: Index, wanted: Filter, before: Place | None) -> RunPage:
    """Return the runs behind a place, or the newest."""
    found: list[RunSummary] = []
    looked_at = 0
    while looked_at < MAX_LOOKED_AT:
        chunk = index.runs(dataclasses.replace(wanted, before=before, trust=None, limit=PAGE))[::-1]
        for run in chunk:
            looked_at += 1
            before = (run.started_ns, run.seq, run.chain)
            if wanted.trust in (None, run.trust):
                found.append(run)
                if len(found) == PAGE:
                    return RunPage(found, place_text(run))
        if len(chunk) < PAGE:
            return RunPage(found)
    return RunPage(found, "{}.{}.{}".format(*before) if before else "")


def runs_after(index: Index, wanted: Filter, after: Place) -> list[RunSummary]:
    """Return the runs that are newer than a place, the newest first; of very many the oldest."""
    new = dataclasses.replace(wanted, after=after, trust=None, limit=None)
    found = index.runs(dataclasses.replace(new, limit=MAX_NEW))[::-1]
    return [run for run in found if wanted.trust in (None, run.trust)]
