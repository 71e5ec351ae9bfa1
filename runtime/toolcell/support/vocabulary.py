"""Words of a text for search by keywords. Every store uses these, so all stores find the same words.

Letters are folded: no case, no accents. A run of Chinese, Japanese or Thai characters has no spaces; its words are its
pairs of characters.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Hashable, Iterable
from typing import Final, TypeVar

MAX_WORD_CHARS: Final = 64
"""The beginning of longer words counts."""
MAX_QUERY_WORDS: Final = 64

_WORD: Final = re.compile(r"[^\W_]+")
_UNSPACED: Final = r"([\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+)"
"""`re` compiles it when it is first used, which takes a millisecond."""

STOP_WORDS: Final = frozenset(
    [
        "a",
        "about",
        "all",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "be",
        "been",
        "but",
        "by",
        "can",
        "could",
        "did",
        "do",
        "does",
        "for",
        "from",
        "had",
        "has",
        "have",
        "he",
        "her",
        "his",
        "how",
        "i",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "me",
        "my",
        "no",
        "not",
        "of",
        "on",
        "or",
        "our",
        "she",
        "should",
        "so",
        "some",
        "than",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "up",
        "us",
        "was",
        "we",
        "were",
        "what",
        "when",
        "where",
        "which",
        "who",
        "whose",
        "why",
        "will",
        "with",
        "would",
        "you",
        "your",
    ]
)
"""Words of a query that say nothing, in English. A query of nothing else keeps them."""


def words(text: str) -> list[str]:
    """Return the words of a text, in order, as they are indexed."""
    if text.isascii():
        return [word[:MAX_WORD_CHARS] for word in _WORD.findall(text.lower())]
    plain = "".join(map(_without_marks, text.casefold()))
    return [word for run in _WORD.findall(plain) for word in _spaced(run)]


@functools.lru_cache(maxsize=4096)
def _without_marks(letter: str) -> str:
    """One letter at a time: to put a row of marks in order, `normalize` takes quadratic time."""
    return "".join(each for each in unicodedata.normalize("NFKD", letter) if not unicodedata.combining(each))


def _spaced(run: str) -> list[str]:
    parts = re.split(_UNSPACED, run)  # every second one has no spaces
    found = [part[:MAX_WORD_CHARS] for part in parts[::2] if part]
    for part in parts[1::2]:
        found += [part[at : at + 2] for at in range(len(part) - 1)] or [part]
    return found


def query_words(query: str) -> list[str]:
    """Return the words of a query that say something, each once."""
    found = list(dict.fromkeys(words(query)))
    return ([word for word in found if word not in STOP_WORDS] or found)[:MAX_QUERY_WORDS]


# Reciprocal rank fusion: one ranking from several that cannot be compared by their scores.

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
