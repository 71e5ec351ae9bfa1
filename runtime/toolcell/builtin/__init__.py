"""Tools that most agents need, ready to register: `registry.add(Remember(store, embeddings))`.

Nothing of it is imported before it is used. A package that needs an extra says which one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "PARSERS",
    "Chunk",
    "ChunkFilter",
    "ChunkSizes",
    "DataTools",
    "Document",
    "DocumentStore",
    "EmbeddingProvider",
    "Files",
    "HashEmbeddings",
    "Http",
    "HttpEmbeddings",
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
    "WebPolicy",
    "WebSearch",
    "Workspace",
    "index_document",
]

if TYPE_CHECKING:
    from toolcell.builtin.chunking import ChunkSizes, Section
    from toolcell.builtin.data import DataTools
    from toolcell.builtin.embeddings.hashing import HashEmbeddings
    from toolcell.builtin.embeddings.http import HttpEmbeddings
    from toolcell.builtin.embeddings.local import LocalEmbeddings
    from toolcell.builtin.file import Files
    from toolcell.builtin.http import Http
    from toolcell.builtin.indexing import index_document
    from toolcell.builtin.ingestion import PARSERS, Ingestion
    from toolcell.builtin.knowledge import Knowledge
    from toolcell.builtin.remember import Remember
    from toolcell.builtin.retrieval import Retriever
    from toolcell.builtin.schedule import Schedule
    from toolcell.builtin.scheduler import Scheduler, SchedulerConfig
    from toolcell.builtin.search import WebSearch
    from toolcell.builtin.shell import Shell
    from toolcell.builtin.skill import Skills
    from toolcell.builtin.stores.postgres import PostgresStore
    from toolcell.builtin.stores.protocols import (
        DocumentStore,
        KeywordStore,
        MessageStore,
        ScheduleStore,
        SkillStore,
        Store,
    )
    from toolcell.builtin.stores.records import (
        Chunk,
        ChunkFilter,
        Document,
        Message,
        ScheduledAction,
        ScheduledRun,
        Scored,
        Skill,
    )
    from toolcell.builtin.stores.sqlite import SqliteStore
    from toolcell.builtin.web.policy import WebPolicy
    from toolcell.builtin.workspace import Workspace
    from toolcell.support.embeddings import EmbeddingProvider
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.builtin.stores.records": (
                "Chunk ChunkFilter Document Message ScheduledAction ScheduledRun Scored Skill"
            ),
            "toolcell.builtin.stores.protocols": (
                "DocumentStore KeywordStore MessageStore ScheduleStore SkillStore Store"
            ),
            "toolcell.support.embeddings": "EmbeddingProvider",
            "toolcell.builtin.embeddings.hashing": "HashEmbeddings",
            "toolcell.builtin.embeddings.http": "HttpEmbeddings",
            "toolcell.builtin.embeddings.local": "LocalEmbeddings",
            "toolcell.builtin.schedule": "Schedule",
            "toolcell.builtin.scheduler": "Scheduler SchedulerConfig",
            "toolcell.builtin.workspace": "Workspace",
            "toolcell.builtin.file": "Files",
            "toolcell.builtin.http": "Http",
            "toolcell.builtin.data": "DataTools",
            "toolcell.builtin.search": "WebSearch",
            "toolcell.builtin.web.policy": "WebPolicy",
            "toolcell.builtin.stores.sqlite": "SqliteStore",
            "toolcell.builtin.stores.postgres": "PostgresStore",
            "toolcell.builtin.retrieval": "Retriever",
            "toolcell.builtin.chunking": "ChunkSizes Section",
            "toolcell.builtin.indexing": "index_document",
            "toolcell.builtin.knowledge": "Knowledge",
            "toolcell.builtin.ingestion": "PARSERS Ingestion",
            "toolcell.builtin.remember": "Remember",
            "toolcell.builtin.shell": "Shell",
            "toolcell.builtin.skill": "Skills",
        },
    )
