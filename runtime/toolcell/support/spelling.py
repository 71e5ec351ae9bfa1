"""Find the name that was probably meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIKE = 0.6
"""difflib's ratio from which on two names count as alike."""

_MAX_COMPARED = 1000
_MAX_NAME_CHARS = 80
_MAX_EQUALS = 8


def closest(name: str, candidates: Iterable[str], alike: float = ALIKE) -> str | None:
    """Return the candidate most like `name`, if any is alike at all: of equals the one that begins so, then the first.

    Work is bounded, whatever the name is.
    """
    known = list(candidates)[:_MAX_COMPARED]
    name = name[:_MAX_NAME_CHARS]
    matches = difflib.get_close_matches(name, known, n=_MAX_EQUALS, cutoff=alike)

    def order(match: str) -> tuple[float, bool, int]:
        ratio = difflib.SequenceMatcher(None, match, name).ratio()
        return -ratio, not match.startswith(name), known.index(match)

    return min(matches, key=order, default=None)


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return 'did you mean x?', or `otherwise` when nothing is alike."""
    match = closest(name, known)
    return f"did you mean {match}?" if match else otherwise


def did_you_mean(name: str, candidates: Iterable[str], quote: str = "`") -> str:
    """Shape: ' (did you mean `query`?)', or nothing."""
    match = closest(name, candidates)
    return f" (did you mean {quote}{match}{quote}?)" if match else ""
