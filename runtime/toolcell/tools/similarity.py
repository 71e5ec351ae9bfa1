"""The cosine of two vectors, as a score in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul


def cosine(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the score of two vectors of one length; None when one of them is all zeros and has no direction."""
    lengths = math.sqrt(sum(map(mul, one, one)) * sum(map(mul, other, other)))
    return score_of(sum(map(mul, one, other)) / lengths) if lengths else None


def score_of(value: float) -> float:
    """Return a cosine as a score: what points away counts as 0, and rounding gives no more than 1."""
    return min(1.0, max(0.0, value))
