"""Which runs of a log are wanted, as data and as a condition on the rows of its runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

Place = tuple[int, int, str]
"""Start, seq and chain of a run: where it stands in a list of all runs."""

NEWEST_FIRST: Final = "started DESC, n DESC, writer DESC"

_HAS_TEXT: Final = """(
    WITH wanted(text) AS (VALUES (?))
    SELECT instr(lower(coalesce(id, '') || char(10) || coalesce(title, '')), text) > 0
        OR instr(lower(coalesce(user, '') || char(10) || coalesce(session, '')), text) > 0
        OR EXISTS (
            SELECT 1 FROM call WHERE call.writer = run.writer AND call.run = run.n AND instr(lower(tool), text) > 0
        )
    FROM wanted
)"""

_MAY_HOLD: Final = """(writer, n) IN (
    SELECT writer, run FROM event WHERE instr(body, ?) > 0 OR instr(body, CAST('_cut' AS BLOB)) > 0
        OR (kind = 'run_ended' AND instr(body, CAST('stdout' AS BLOB)) > 0 AND instr(body, CAST('stderr' AS BLOB)) > 0)
        OR instr(body, X'A57461626C65') > 0 OR instr(body, X'A56172726179') > 0
)"""
"""Runs with these bytes in an event; also those of which something was not recorded, those that printed to both
streams, and those with a table or an array: what is searched of them does not stand together in an event."""


_LIKE: Final = r"LIKE ? ESCAPE '\'"
_OF_CALLS: Final = "EXISTS (SELECT 1 FROM call WHERE call.writer = run.writer AND call.run = run.n AND {})"
_OF_REQUESTS: Final = "EXISTS (SELECT 1 FROM request WHERE request.writer = run.writer AND request.run = run.n AND {})"
_DECIDED_BY: Final = f"""EXISTS (
    WITH wanted(name) AS (VALUES (?))
    SELECT 1 FROM wanted WHERE run.decided_by = name OR {_OF_CALLS.format("call.decided_by = name")}
)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Selects runs. A field that is None selects all."""

    since_ns: int | None = None
    until_ns: int | None = None
    outcome: str | None = None
    tool: str | None = None
    """Name of a tool that the run called; `*` and `?` in it stand for any text and any letter."""
    sha256: str | None = None
    """Beginning of the script's digest."""
    session: str | None = None
    """Thread, chat or channel that the run belongs to, or its parent run."""
    user: str | None = None
    decided_by: str | None = None
    """Who decided about the run, or about one of its calls."""
    host: str | None = None
    """The same of a host that a request of the run went to."""
    secret: str | None = None
    """Name of a secret that went into a request of the run."""
    trust: str | None = None
    """verified, unsigned, unverified or broken."""
    text: str | None = None
    """Part of the id, title, user or session, or of the name of a tool that the run called; in either case."""
    may_hold: bytes | None = None
    """Part of a text that is recorded, as UTF-8. Some runs without it are selected too."""
    before: Place | None = None
    """Runs that stand behind this one in a list with the newest first."""
    after: Place | None = None
    """Runs that stand before it."""
    limit: int | None = 50
    """Select only this many of the newest runs."""


def like_pattern(glob: str | None) -> str | None:
    """Return the pattern of LIKE for a text in which `*` and `?` stand for others."""
    if glob is None:
        return None
    return re.sub(r"[\\%_]", r"\\\g<0>", glob).replace("*", "%").replace("?", "_")


def conditions(wanted: Filter) -> tuple[str, list[Any]]:
    """Return a WHERE clause and its values. No text of a caller becomes SQL."""
    rows: tuple[tuple[str, Any], ...] = (
        ("started >= ?", wanted.since_ns),
        ("started < ?", wanted.until_ns),
        ("outcome = ?", wanted.outcome),
        ("user = ?", wanted.user),
        ("session = ?", wanted.session),
        ("instr(sha256, ?) = 1", wanted.sha256.lower() if wanted.sha256 is not None else None),
        (_OF_CALLS.format(f"tool {_LIKE}"), like_pattern(wanted.tool)),
        (_DECIDED_BY, wanted.decided_by),
        (_OF_REQUESTS.format(f"host {_LIKE}"), like_pattern(wanted.host)),
        (_OF_REQUESTS.format("secret = ?"), wanted.secret),
        (_MAY_HOLD, wanted.may_hold),
    )
    chosen = [(text, value) for text, value in rows if value is not None]
    if wanted.text:
        chosen.append((_HAS_TEXT, wanted.text.lower()))
    where, values = ["1 = 1", *(text for text, _ in chosen)], [value for _, value in chosen]
    for comparison, place in (("<", wanted.before), (">", wanted.after)):
        if place is not None:
            where.append(f"(started, n, writer) {comparison} (?, ?, ?)")
            values += place
    return " AND ".join(where), values
