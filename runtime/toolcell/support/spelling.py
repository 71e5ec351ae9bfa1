"""Find the name that was probably meant by one that does not exist."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

ALIKE = 0.6
"""difflib's ratio from which on two names count as alike."""

_MAX_COMPARED_CHARS = 20_000
"""Most characters of all candidates that are looked at, together."""
_MAX_NAME_CHARS = 80
_MAX_CLOSE = 4
"""Candidates that are compared in full, those with the most letters in common: each takes up to a millisecond."""


def closest(name: str, candidates: Iterable[str], alike: float = ALIKE) -> str | None:
    """Return the candidate most like `name`, if any is alike at all: of equals the one that begins so, then the first.

    Work is bounded, whatever the name is.
    """
    import difflib  # only for those who misspell

    name = name[:_MAX_NAME_CHARS]
    matcher = difflib.SequenceMatcher(None, "", name)
    likely = list[tuple[float, int, str]]()
    left = _MAX_COMPARED_CHARS
    for place, candidate in enumerate(candidates):
        if (left := left - len(candidate)) < 0:
            break
        if len(candidate) <= 2 * _MAX_NAME_CHARS:
            matcher.set_seq1(candidate)
            if matcher.real_quick_ratio() >= alike and (upper := matcher.quick_ratio()) >= alike:
                likely.append((-upper, place, candidate))
    found = list[tuple[float, bool, int, str]]()
    for _, place, candidate in heapq.nsmallest(_MAX_CLOSE, likely):
        matcher.set_seq1(candidate)
        if (ratio := matcher.ratio()) >= alike:
            found.append((-ratio, not candidate.startswith(name), place, candidate))
    return min(found)[-1] if found else None


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return 'did you mean x?', or `otherwise` when nothing is alike."""
    match = closest(name, known)
    return f"did you mean {match}?" if match else otherwise


def did_you_mean(name: str, candidates: Iterable[str], quote: str = "`") -> str:
    """Shape: ' (did you mean `query`?)', or nothing."""
    match = closest(name, candidates)
    return f" (did you mean {quote}{match}{quote}?)" if match else ""
