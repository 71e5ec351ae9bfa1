"""Tools that most agents need, ready to register: `registry.add(Remember(store, embeddings))`.

Nothing of it is imported before it is used. A package that needs an extra says which one.
"""

from __future__ import annotations

from toolcell.support.lazy import lazy_names

__all__ = [
    "PARSERS",
    "Chunk",
    "ChunkFilter",
    "ChunkSizes",
    "Credential",
    "DataTools",
    "Document",
    "DocumentStore",
    "EmbeddingProvider",
    "Files",
    "HashEmbeddings",
    "Http",
    "HttpEmbeddings",
    "Ingested",
    "Ingestion",
    "KeywordStore",
    "Knowledge",
    "LocalEmbeddings",
    "Message",
    "MessageStore",
    "PostgresStore",
    "Remember",
    "Retriever",
    "Schedule",
    "ScheduleStore",
    "ScheduledAction",
    "ScheduledRun",
    "Scheduler",
    "SchedulerConfig",
    "Scored",
    "Section",
    "Shell",
    "Skill",
    "SkillStore",
    "Skills",
    "SqliteStore",
    "Store",
    "ToolPackage",
    "WebPolicy",
    "WebSearch",
    "Workspace",
    "index_document",
]

_ROOT = "toolcell.builtin"

__getattr__, __dir__ = lazy_names(
    _ROOT,
    f"{_ROOT}.stores.records",
    f"{_ROOT}.stores.protocols",
    "toolcell.tools.embeddings",
    f"{_ROOT}.embeddings.hashing",
    f"{_ROOT}.embeddings.http",
    f"{_ROOT}.embeddings.local",
    f"{_ROOT}.package",
    f"{_ROOT}.schedule",
    f"{_ROOT}.scheduler",
    f"{_ROOT}.workspace",
    f"{_ROOT}.file",
    f"{_ROOT}.http",
    f"{_ROOT}.data",
    f"{_ROOT}.search",
    f"{_ROOT}.web.policy",
    f"{_ROOT}.stores.sqlite",
    f"{_ROOT}.stores.postgres",
    f"{_ROOT}.retrieval",
    f"{_ROOT}.chunking",
    f"{_ROOT}.indexing",
    f"{_ROOT}.knowledge",
    f"{_ROOT}.ingestion",
    f"{_ROOT}.remember",
    f"{_ROOT}.shell",
    f"{_ROOT}.skill",
)
