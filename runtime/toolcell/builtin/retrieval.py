"""Hybrid search: nearest vectors and matching words, merged by reciprocal rank fusion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from toolcell.builtin.stores.protocols import DocumentStore, KeywordStore
from toolcell.builtin.stores.records import Chunk, ChunkFilter, Scored, check_top_k
from toolcell.errors import EmbeddingError, UsageError
from toolcell.support.checks import check_kind
from toolcell.support.embeddings import EmbeddingProvider, embed_texts
from toolcell.support.vocabulary import fused_ranks

KEYWORD_WEIGHT: Final = 0.3
WIDER: Final = 3
"""Times `top_k`: how many chunks each of the two searches gives."""
MOST: Final = 1000 // WIDER
"""The largest `top_k`."""


class Reranker(Protocol):
    """Judges how well texts answer a query, better than vectors and words can; usually a cross-encoder."""

    async def rerank(self, query: str, texts: list[str]) -> list[float]:
        """Return a score in [0, 1] for each text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retriever:
    """Searches a store by vectors and by words."""

    keyword_weight: float = KEYWORD_WEIGHT
    """Weight of the search by words; that by vectors has the rest. 0 and 1 leave one of them out."""
    reranker: Reranker | None = None
    min_score: float = 0.0
    """Results below it are left out. The score is the reranker's where there is one. Otherwise it is that of the
    fusion, as a part of the most it can be: 1 is what both searches find first."""

    def __post_init__(self) -> None:
        for name in ("keyword_weight", "min_score"):
            value = getattr(self, name)
            check_kind(f"Retriever({name})", value, int, float)
            if not 0 <= value <= 1:
                raise UsageError(f"Retriever({name}) must be between 0 and 1, not {value}")

    async def search(
        self, store: DocumentStore, embeddings: EmbeddingProvider, query: str, top_k: int, *filters: ChunkFilter
    ) -> list[Scored[Chunk]]:
        """Return the chunks that answer the query best.

        Raises:
            UsageError: `top_k` is out of range, or the store's vectors come from another provider.
            EmbeddingError: the provider or the reranker gave no usable answer.
            StoreError: the store cannot be used.
        """
        check_top_k(top_k)
        if top_k > MOST:
            raise UsageError(f"top_k must be at most {MOST}, not {top_k}")
        found = await self._fused(store, embeddings, query, top_k * WIDER, filters)
        found = await with_parents(store, found)
        if self.reranker is not None:
            found = await _reranked(self.reranker, query, found)
        return [each for each in found if each.score >= self.min_score][:top_k]

    async def _fused(
        self,
        store: DocumentStore,
        embeddings: EmbeddingProvider,
        query: str,
        count: int,
        filters: Sequence[ChunkFilter],
    ) -> list[Scored[Chunk]]:
        by_vector: list[Scored[Chunk]] = []
        by_words: list[Scored[Chunk]] = []
        if self.keyword_weight < 1:
            (vector,) = await embed_texts(embeddings, [query])
            by_vector = [each for each in await store.search_chunks(vector, count, *filters) if each.score > 0]
        if self.keyword_weight > 0 and isinstance(store, KeywordStore):
            by_words = await store.search_chunks_keyword(query, count, *filters)
        return fused((by_vector, 1 - self.keyword_weight), (by_words, self.keyword_weight))


def fused(*rankings: tuple[Sequence[Scored[Chunk]], float]) -> list[Scored[Chunk]]:
    """Merge rankings, each with its weight.

    Shape: scores are a part of the most that all rankings together can give, so they are in [0, 1].
    """
    chunks = {each.item.id: each.item for ranking, _ in rankings for each in ranking}
    scores = fused_ranks(*(([each.item.id for each in ranking], weight) for ranking, weight in rankings))
    return [Scored(chunks[id_], score) for id_, score in scores.items()]


async def with_parents(store: DocumentStore, found: Sequence[Scored[Chunk]]) -> list[Scored[Chunk]]:
    """Replace each chunk that has a parent by it, once, with the best score of its children."""
    wanted = list(dict.fromkeys(each.item.parent_id for each in found if each.item.parent_id))
    parents = {chunk.id: chunk for chunk in await store.get_chunks_by_ids(wanted)} if wanted else {}
    best: dict[str, Scored[Chunk]] = {}
    for each in found:
        chunk = parents.get(each.item.parent_id, each.item)
        best.setdefault(chunk.id, replace(each, item=chunk))
    return _sorted(best.values())


async def _reranked(reranker: Reranker, query: str, found: Sequence[Scored[Chunk]]) -> list[Scored[Chunk]]:
    if not found:
        return []
    scores = await reranker.rerank(query, [each.item.content for each in found])
    if len(scores) != len(found) or not all(0 <= each <= 1 for each in scores):
        raise EmbeddingError(f"the reranker must give {len(found)} scores in [0, 1], not {scores!r:.80}")
    return _sorted(Scored(each.item, float(score)) for each, score in zip(found, scores, strict=True))


def _sorted(found: Iterable[Scored[Chunk]]) -> list[Scored[Chunk]]:
    return sorted(found, key=lambda each: -each.score)
