"""What a store can do, by capability. A tool asks for the capability it needs, and any object with it will do.

Every method may be called from any task, and from more than one event loop. Invariant: what returned is stored; what
raised is not, also not in part.

Every method raises:
    UsageError: an argument is wrong.
    StoreError: the store is locked, full, read-only, damaged, of a newer version, or cannot be reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from toolcell.builtin.stores.records import (
    Chunk,
    ChunkFilter,
    Document,
    Message,
    RunStatus,
    ScheduledAction,
    ScheduledRun,
    Scored,
    Skill,
    Vector,
)

STORES = "such as SqliteStore(path)"
"""What errors name as a store."""


class OpenableStore(Protocol):
    """What every store has."""

    async def init(self) -> None:
        """Open the store and bring its tables up to date. Any other method does it when it has not been done."""

    async def close(self) -> None:
        """Let go of files and connections. A later call opens the store again. Safe to call twice."""

    async def use_embeddings(self, name: str, dimensions: int) -> None:
        """Remember which provider makes this store's vectors, or check that it is the one that did.

        Raises:
            UsageError: the store's vectors come from another provider.
        """


@runtime_checkable
class DocumentStore(OpenableStore, Protocol):
    """Documents and their chunks."""

    async def store_document(self, document: Document, chunks: Sequence[Chunk]) -> str:
        """Store a document with all its chunks, and return its id.

        When the store already has a document of the same digest, nothing is stored and that one's id is returned.

        Raises:
            UsageError: the id is taken, a chunk belongs to another document, or a vector has the wrong length.
        """

    async def get_document(self, document_id: str) -> Document | None:
        """Return the document, or None."""

    async def list_documents(self, limit: int = 100, after: str = "") -> list[Document]:
        """Return documents in the order of their ids, from the first whose id is greater than `after`."""

    async def delete_document(self, document_id: str) -> bool:
        """Delete a document with its chunks; False when there was none."""

    async def search_chunks(self, embedding: Vector, top_k: int, *filters: ChunkFilter) -> list[Scored[Chunk]]:
        """Return the chunks whose vectors are nearest. The chunks come without their embeddings."""

    async def get_chunks_by_ids(self, ids: Sequence[str]) -> list[Chunk]:
        """Return the chunks that exist, in the order of `ids`, without their embeddings."""


@runtime_checkable
class KeywordStore(Protocol):
    """An optional part of `DocumentStore`: search by words."""

    async def search_chunks_keyword(self, query: str, top_k: int, *filters: ChunkFilter) -> list[Scored[Chunk]]:
        """Return the chunks that hold words of `query`, by BM25 or the like. Every text is a valid query."""


@runtime_checkable
class MessageStore(OpenableStore, Protocol):
    """Messages of conversations."""

    async def store_message(self, message: Message) -> None:
        """Store a message. One of the same id is replaced."""

    async def list_messages(self, thread_id: str, limit: int = 100) -> list[Message]:
        """Return the last messages of a thread, the oldest first, without their embeddings."""

    async def search_messages(self, embedding: Vector, top_k: int) -> list[Scored[Message]]:
        """Return the messages whose vectors are nearest, without their embeddings."""


@runtime_checkable
class ScheduleStore(OpenableStore, Protocol):
    """Scheduled actions, and the runs that were made of them."""

    async def create_scheduled_action(self, action: ScheduledAction) -> None:
        """Store a new action.

        Raises:
            UsageError: the id is taken.
        """

    async def list_scheduled_actions(self) -> list[ScheduledAction]:
        """Return all actions, the oldest first."""

    async def get_due_scheduled_actions(self, now: int) -> list[ScheduledAction]:
        """Return the enabled actions whose `next_run` is not after `now`, the earliest first."""

    async def update_scheduled_action(self, action: ScheduledAction) -> bool:
        """Replace the action of this id; False when there is none."""

    async def delete_scheduled_action(self, action_id: str) -> bool:
        """Delete an action; its runs stay. False when there was none."""

    async def delete_all_scheduled_actions(self) -> int:
        """Delete every action and return how many there were."""

    async def find_scheduled_actions_by_description(self, substring: str) -> list[ScheduledAction]:
        """Return the actions whose description holds `substring`, whatever the case. No character is a wildcard.

        Raises:
            UsageError: `substring` is empty.
        """

    async def reschedule(self, action_id: str, was: int, next_run: int, enabled: bool) -> bool:
        """Set `next_run` and `enabled` if `next_run` is still `was` and the action is enabled; False otherwise.

        Atomic across processes. A paused action stays paused.
        """

    async def begin_run(self, run: ScheduledRun) -> bool:
        """Record a run of an action and due time; False when there is one already. Atomic across processes."""

    async def extend_run(self, run_id: str, lease_until: int) -> bool:
        """Move the end of a running run's lease; False when it is no longer running."""

    async def end_run(self, run_id: str, status: RunStatus, ended_at: int, detail: str = "") -> bool:
        """Record how a running run ended; False when it is no longer running."""

    async def expire_runs(self, now: int) -> list[ScheduledRun]:
        """Mark running runs whose lease ended before `now` as in doubt, and return those that this call marked."""

    async def list_runs(self, action_id: str = "", status: str = "", limit: int = 100) -> list[ScheduledRun]:
        """Return runs, the latest due time first; of one action and one status, where they are given."""


@runtime_checkable
class SkillStore(OpenableStore, Protocol):
    """Skills."""

    async def create_skill(self, skill: Skill) -> None:
        """Store a new skill.

        Raises:
            UsageError: the id is taken.
        """

    async def get_skill(self, skill_id: str) -> Skill | None:
        """Return the skill, or None."""

    async def list_skills(self) -> list[Skill]:
        """Return all skills in the order of their ids."""

    async def update_skill(self, skill: Skill) -> bool:
        """Replace the skill of this id; False when there is none."""

    async def delete_skill(self, skill_id: str) -> bool:
        """Delete a skill; False when there was none."""

    async def search_skills(self, embedding: Vector, top_k: int) -> list[Scored[Skill]]:
        """Return the skills whose vectors are nearest, with their embeddings."""


@runtime_checkable
class Store(DocumentStore, KeywordStore, MessageStore, ScheduleStore, SkillStore, Protocol):
    """All capabilities in one store. `SqliteStore` and `PostgresStore` are such stores."""
