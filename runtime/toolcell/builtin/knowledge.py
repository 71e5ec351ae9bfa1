"""`knowledge_search`: what the store knows about a question, from documents and past conversations."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from toolcell.builtin.package import ToolPackage, offered, required_text
from toolcell.builtin.retrieval import Retriever
from toolcell.builtin.stores.protocols import STORES, DocumentStore, MessageStore
from toolcell.builtin.stores.records import Chunk, Document, Message, Scored
from toolcell.support.checks import check_does, check_kind
from toolcell.support.embeddings import PROVIDERS, EmbeddingProvider, embed_texts
from toolcell.tools import ToolResult

TOP: Final = 5
"""Chunks, and past messages, of one answer."""
MAX_QUERY_CHARS: Final = 4000

FOUND_SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "kind": {"type": "string", "enum": ["document", "message"]},
            "title": {"type": "string", "description": "of the document, or the role of a message"},
            "url": {"type": "string", "description": "where the document is from, as far as is known"},
            "text": {"type": "string"},
            "score": {"type": "number", "description": "from 0 to 1, the best first"},
            "document_id": {"type": "string", "description": "empty for a message"},
            "metadata": {"type": "object"},
        },
        "required": ["kind", "title", "url", "text", "score", "document_id", "metadata"],
    },
}


class Knowledge(ToolPackage):
    """Search of a store that `Remember` or an ingestion has filled.

    Whoever may call it may read all of the store. Give each group of users that shares its knowledge a store.
    """

    package: ClassVar[str] = "knowledge"
    needs: ClassVar[tuple[str, ...]] = ("Store", "EmbeddingProvider")

    def __init__(
        self, store: DocumentStore, embeddings: EmbeddingProvider, *, retriever: Retriever | None = None
    ) -> None:
        check_does("Knowledge(store)", store, DocumentStore, STORES)
        check_does("Knowledge(embeddings)", embeddings, EmbeddingProvider, PROVIDERS)
        check_kind("Knowledge(retriever)", retriever, Retriever, type(None))
        self._store = store
        self._embeddings = embeddings
        self._retriever = retriever or Retriever()

    @offered(read_only=True, returns=FOUND_SCHEMA)
    async def knowledge_search(self, query: str) -> ToolResult:
        """Search the knowledge base and past conversations for what is known about a question or a topic.

        Args:
            query: What to look for, in a few words or a sentence.
        """
        query = required_text("query", query.strip(), MAX_QUERY_CHARS, "ask a shorter question")
        await self._store.use_embeddings(self._embeddings.name(), self._embeddings.dimensions())
        chunks = await self._retriever.search(self._store, self._embeddings, query, TOP)
        messages = await self._messages(query)
        value = [await self._row(each) for each in chunks] + [_message_row(each) for each in messages]
        return ToolResult.ok(_prose(query, chunks, messages), value=value)

    async def _messages(self, query: str) -> list[Scored[Message]]:
        if not isinstance(self._store, MessageStore):
            return []
        (vector,) = await embed_texts(self._embeddings, [query])
        return [each for each in await self._store.search_messages(vector, TOP) if each.score > 0]

    async def _row(self, found: Scored[Chunk]) -> dict[str, Any]:
        chunk = found.item
        document = await self._store.get_document(chunk.document_id) or Document()
        return {
            "kind": "document",
            "title": document.title,
            "url": str(chunk.metadata.get("source_url") or document.source),
            "text": chunk.content,
            "score": round(found.score, 4),
            "document_id": chunk.document_id,
            "metadata": dict(chunk.metadata),
        }


def _message_row(found: Scored[Message]) -> dict[str, Any]:
    message = found.item
    return {
        "kind": "message",
        "title": message.role,
        "url": "",
        "text": message.content,
        "score": round(found.score, 4),
        "document_id": "",
        "metadata": dict(message.metadata),
    }


def _prose(query: str, chunks: list[Scored[Chunk]], messages: list[Scored[Message]]) -> str:
    parts = []
    if chunks:
        lines = [f"{at}. {each.item.content}" for at, each in enumerate(chunks, start=1)]
        parts.append("\n".join(["From knowledge base:", *lines]))
    if messages:
        lines = [f"[{each.item.role}]: {each.item.content}" for each in messages]
        parts.append("\n".join(["From past conversations:", *lines]))
    return "\n\n".join(parts) or f'No relevant information found for "{query}".'
