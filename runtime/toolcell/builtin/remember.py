"""`remember` and `forget`: what an agent keeps in the knowledge base."""

from __future__ import annotations

from typing import ClassVar, Final

from toolcell.builtin.chunking import DEFAULT_SIZES, ChunkSizes
from toolcell.builtin.indexing import index_document
from toolcell.builtin.package import ToolPackage, offered, required_text
from toolcell.builtin.stores.protocols import STORES, DocumentStore
from toolcell.builtin.stores.records import Document
from toolcell.errors import ToolError
from toolcell.support.checks import check_does, check_kind
from toolcell.support.embeddings import PROVIDERS, EmbeddingProvider
from toolcell.support.text import for_terminal
from toolcell.tools import ErrorCode, ToolResult

SOURCE: Final = "message"
"""Source of documents that `remember` stores. `forget` deletes no others."""
MAX_CHARS: Final = 1_000_000
TITLE_CHARS: Final = 80


class Remember(ToolPackage):
    """Tools with which a model saves texts to a store and deletes them."""

    package: ClassVar[str] = "remember"
    needs: ClassVar[tuple[str, ...]] = ("Store", "EmbeddingProvider")

    def __init__(
        self, store: DocumentStore, embeddings: EmbeddingProvider, *, sizes: ChunkSizes = DEFAULT_SIZES
    ) -> None:
        check_does("Remember(store)", store, DocumentStore, STORES)
        check_does("Remember(embeddings)", embeddings, EmbeddingProvider, PROVIDERS)
        check_kind("Remember(sizes)", sizes, ChunkSizes)
        self._store = store
        self._embeddings = embeddings
        self._sizes = sizes

    @offered(
        idempotent=True,
        returns={
            "type": "object",
            "properties": {
                "document_id": {"type": "string"},
                "chunks": {"type": "integer", "description": "0 when it was known already"},
                "is_new": {"type": "boolean"},
            },
            "required": ["document_id", "chunks", "is_new"],
        },
    )
    async def remember(self, content: str) -> ToolResult:
        """Save a text to the knowledge base, so that knowledge_search finds it later. Saving it twice saves it once.

        Args:
            content: The text to save. Write it so that it can be understood on its own.
        """
        text = for_terminal(content).strip()  # no store keeps NUL, and nobody should find invisible text
        required_text("content", text, MAX_CHARS, "save it in parts")
        document = Document(title=text.splitlines()[0][:TITLE_CHARS], source=SOURCE, content=text)
        done = await index_document(self._store, self._embeddings, document, sizes=self._sizes)
        value = {"document_id": done.document_id, "chunks": done.chunks, "is_new": done.is_new}
        if not done.is_new:
            return ToolResult.ok("Already in the knowledge base; nothing was saved.", value=value)
        return ToolResult.ok(f"Saved and indexed {done.chunks} chunk(s) to knowledge base.", value=value)

    @offered(
        idempotent=True,
        returns={
            "type": "object",
            "properties": {"document_id": {"type": "string"}, "deleted": {"type": "boolean"}},
            "required": ["document_id", "deleted"],
        },
    )
    async def forget(self, document_id: str) -> ToolResult:
        """Delete from the knowledge base what remember has saved. Documents from elsewhere cannot be deleted with it.

        Args:
            document_id: The id that remember or knowledge_search has given.
        """
        document = await self._store.get_document(document_id)
        if document is None:
            raise ToolError(f"no document {document_id!r:.80} in the knowledge base", code="not_found")
        if document.source != SOURCE:
            raise ToolError(
                f"document {document_id} was not saved by remember, and only such can be deleted",
                code=ErrorCode.NOT_PERMITTED,
            )
        deleted = await self._store.delete_document(document_id)
        return ToolResult.ok(f"Deleted: {document.title}", value={"document_id": document_id, "deleted": deleted})
