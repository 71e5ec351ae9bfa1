"""Reciprocal rank fusion: one ranking from several that cannot be compared by their scores."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Final, TypeVar

RANK_OFFSET: Final = 60
"""Source: Cormack, Clarke and Büttcher, Reciprocal Rank Fusion, SIGIR 2009."""

Item = TypeVar("Item", bound=Hashable)


def fused_ranks(*rankings: tuple[Iterable[Item], float]) -> dict[Item, float]:
    """Return the items of some rankings, each with its weight, best first, with scores in [0, 1].

    An item scores the sum of weight / (60 + rank), as a part of the most that all rankings together can give.
    """
    most = math.fsum(weight for _, weight in rankings) or 1.0
    scores: dict[Item, float] = {}
    for ranking, weight in rankings:
        for rank, item in enumerate(ranking, start=1):
            scores[item] = scores.get(item, 0.0) + weight * (RANK_OFFSET + 1) / (RANK_OFFSET + rank) / most
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))
