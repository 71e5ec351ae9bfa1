"""`HashEmbeddings`: vectors of words, without a model. The same on every machine, offline and for tests."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from typing import Final

from toolcell.builtin.stores.records import MAX_DIMENSIONS
from toolcell.errors import UsageError
from toolcell.support import daemon_threads
from toolcell.support.checks import check_count
from toolcell.support.vocabulary import STOP_WORDS, words

GRAM: Final = 3
GRAM_WEIGHT: Final = 0.3
"""Weight of each triple of characters in a word, beside the word itself: `forecast` is near `forecasts`."""

SHORT_CHARS: Final = 4000
"""More than this is embedded on a worker thread: a megabyte takes a second or more."""


class HashEmbeddings:
    """Feature hashing: each word and each triple of its characters adds to one of the numbers.

    It knows spelling and no meaning: `car` is not near `automobile`. Use a model where that matters.

    Source: Weinberger et al., Feature Hashing for Large Scale Multitask Learning, 2009.
    """

    def __init__(self, dimensions: int = 256) -> None:
        check_count("HashEmbeddings(dimensions)", dimensions, 8)
        if dimensions > MAX_DIMENSIONS:
            raise UsageError(f"HashEmbeddings(dimensions) must be at most {MAX_DIMENSIONS}, not {dimensions}")
        self._dimensions = dimensions

    async def embed(self, texts: list[str]) -> list[list[float]]:
        """Return a vector of length 1 for each text; of length 0 for one without words."""
        if sum(map(len, texts)) <= SHORT_CHARS:
            return self._vectors(texts)
        return await daemon_threads.run_sync(self._vectors, texts)

    def dimensions(self) -> int:
        return self._dimensions

    def name(self) -> str:
        """`hash-` and the dimensions."""
        return f"hash-{self._dimensions}"

    def _vectors(self, texts: list[str]) -> list[list[float]]:
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> list[float]:
        vector = [0.0] * self._dimensions
        found = words(text)
        counts = Counter([word for word in found if word not in STOP_WORDS] or found)
        for word, count in counts.items():
            weight = 1.0 + math.log(count)
            self._add(vector, word, weight)
            marked = f"^{word}$"
            for at in range(len(marked) - GRAM + 1):
                self._add(vector, f"#{marked[at : at + GRAM]}", weight * GRAM_WEIGHT)
        length = math.sqrt(math.fsum(each * each for each in vector)) or 1.0
        return [each / length for each in vector]

    def _add(self, vector: list[float], feature: str, weight: float) -> None:
        code = zlib.crc32(feature.encode("utf-8", "replace"))
        vector[(code >> 1) % self._dimensions] += weight if code & 1 else -weight
