"""`EmbeddingProvider`, the one way in which the tools use it, and the likeness of two of its vectors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul
from typing import Final, Protocol, runtime_checkable

from toolcell.errors import EmbeddingError


def cosine(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the score of two vectors of one length; None when one of them is all zeros and has no direction."""
    lengths = math.sqrt(sum(map(mul, one, one)) * sum(map(mul, other, other)))
    return score_of(sum(map(mul, one, other)) / lengths) if lengths else None


def nearest(wanted: Sequence[float], vectors: Iterable[Sequence[float]]) -> list[tuple[int, float]]:
    """Return the place and score of each vector that has a direction, the nearest first; of equals the first."""
    scores = [(at, cosine(wanted, each)) for at, each in enumerate(vectors)]
    return sorted(((at, score) for at, score in scores if score is not None), key=lambda found: -found[1])


def score_of(value: float) -> float:
    """Return a cosine as a score: what points away counts as 0, and rounding gives no more than 1."""
    return min(1.0, max(0.0, value))


BATCH: Final = 64
"""Texts of one request."""
PROVIDERS: Final = "such as HashEmbeddings()"
"""What errors name as a provider."""


@runtime_checkable
class EmbeddingProvider(Protocol):
    """Makes vectors of texts; those of texts with similar meaning have a small angle."""

    async def embed(self, texts: list[str]) -> list[list[float]]:
        """Return one vector for each text, in their order.

        Raises:
            EmbeddingError: there is no answer, or it cannot be used.
        """

    def dimensions(self) -> int:
        """Numbers in each vector."""

    def name(self) -> str:
        """Identifies the vectors: providers of the same name must make the same ones. A store checks the name."""


async def embed_texts(provider: EmbeddingProvider, texts: Sequence[str]) -> list[list[float]]:
    """Return the vectors of any number of texts.

    Raises:
        EmbeddingError: the provider gave another number of vectors, another dimension, or a value that is not a number.
    """
    vectors: list[list[float]] = []
    for at in range(0, len(texts), BATCH):
        batch = list(texts[at : at + BATCH])
        vectors += checked_vectors(provider, await provider.embed(batch), len(batch))
    return vectors


def checked_vectors(provider: EmbeddingProvider, vectors: object, count: int) -> list[list[float]]:
    """Return what a provider gave, when it is `count` vectors of its dimension.

    Raises:
        EmbeddingError: it is not.
    """
    name, dimensions = provider.name(), provider.dimensions()
    if not isinstance(vectors, list) or len(vectors) != count:
        got = len(vectors) if isinstance(vectors, list) else type(vectors).__name__
        raise EmbeddingError(f"the embedding provider {name!r} gave {got} vectors for {count} texts")
    for vector in vectors:
        if not isinstance(vector, list | tuple) or len(vector) != dimensions:
            got = len(vector) if isinstance(vector, list | tuple) else type(vector).__name__
            raise EmbeddingError(f"the embedding provider {name!r} gave a vector of {got} numbers, not {dimensions}")
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in vector):
            raise EmbeddingError(f"the embedding provider {name!r} gave a vector with something that is not a number")
    return [[float(each) for each in vector] for vector in vectors]
