"""Near misses: what a model probably meant when a name it wrote does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LISTED = 20
"""Names a message lists before it only says how many more there are."""
_MAX_COMPARED = 1000
_MAX_NAME_CHARS = 80


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `name`, if any is alike at all. Bounded work whatever the name is."""
    known = list(candidates)[:_MAX_COMPARED]
    matches = difflib.get_close_matches(name[:_MAX_NAME_CHARS], known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, candidates: Iterable[str], quote: str = "`") -> str:
    """Shape: ' (did you mean `query`?)', or nothing."""
    match = nearest(name, candidates)
    return f" (did you mean {quote}{match}{quote}?)" if match else ""


def listed(names: Iterable[str]) -> str:
    """Shape: 'a, b, c and 7 more'."""
    every = list(names)
    more = f" and {len(every) - MAX_LISTED} more" if len(every) > MAX_LISTED else ""
    return ", ".join(every[:MAX_LISTED]) + more
