"""Put a text into a store: split it, embed the pieces, store all of it at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolcell.builtin.chunking import DEFAULT_SIZES, ChunkSizes, Section, chunks_of
from toolcell.builtin.stores.protocols import DocumentStore
from toolcell.builtin.stores.records import Document
from toolcell.support import daemon_threads
from toolcell.support.embeddings import EmbeddingProvider, embed_texts


@dataclass(frozen=True, slots=True)
class Indexed:
    document_id: str
    chunks: int
    """How many were stored; 0 when the store had the document already."""

    @property
    def is_new(self) -> bool:
        """False: the store had a document of this source and content, whose id this is."""
        return self.chunks > 0


async def index_document(
    store: DocumentStore,
    embeddings: EmbeddingProvider,
    document: Document,
    sections: Sequence[Section] | None = None,
    sizes: ChunkSizes = DEFAULT_SIZES,
) -> Indexed:
    """Store a document so that a search finds it, by vectors of its chunks and by their words.

    Raises:
        UsageError: the store's vectors come from another provider.
        StoreError: the store cannot be used.
        EmbeddingError: the provider gave no usable vectors.
    """
    await store.use_embeddings(embeddings.name(), embeddings.dimensions())
    parts = sections if sections is not None else [Section(document.content)]
    chunks = await daemon_threads.run_sync(chunks_of, document, parts, sizes)  # a megabyte takes a second
    parents = {chunk.parent_id for chunk in chunks}
    searched = [chunk for chunk in chunks if chunk.id not in parents]
    vectors = await embed_texts(embeddings, [chunk.content for chunk in searched])
    vector_of = {chunk.id: vector for chunk, vector in zip(searched, vectors, strict=True)}
    whole = [replace(chunk, embedding=vector_of.get(chunk.id)) for chunk in chunks]
    kept = await store.store_document(document, whole)
    return Indexed(kept, len(searched) if kept == document.id else 0)
