"""`MemoryStore`: everything in this process, gone with it. For tests, examples and short-lived agents."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import Final, TypeVar

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
    check_filters,
    check_top_k,
    check_vector,
)
from toolcell.builtin.stores.rules import (
    check_chunks,
    check_description_query,
    check_provider,
    check_run_end,
    filtered_value,
)
from toolcell.errors import UsageError
from toolcell.support import daemon_threads
from toolcell.tools.embeddings import cosine
from toolcell.tools.words import query_words, words

BM25_K1: Final = 1.2
BM25_B: Final = 0.75
"""Source: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009; SQLite's FTS5 uses the same."""

T = TypeVar("T")


@dataclass
class _Tables:
    documents: dict[str, Document] = field(default_factory=dict)
    by_digest: dict[str, str] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    parents: set[str] = field(default_factory=set)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """Words of each chunk that is searched."""
    messages: dict[str, Message] = field(default_factory=dict)
    actions: dict[str, ScheduledAction] = field(default_factory=dict)
    runs: dict[str, ScheduledRun] = field(default_factory=dict)
    skills: dict[str, Skill] = field(default_factory=dict)
    provider: tuple[str, int] | None = None


class MemoryStore:
    """A store with every capability, in memory. It takes no files and no extras."""

    def __init__(self) -> None:
        self._tables = _Tables()
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._tables.documents)} documents)"

    async def init(self) -> None:
        """Do nothing: it is always open."""

    async def close(self) -> None:
        """Do nothing: what it holds stays until it is dropped."""

    async def use_embeddings(self, name: str, dimensions: int) -> None:
        """Remember the provider, or check that it is the same."""
        with self._lock:
            check_provider(self._tables.provider, name, dimensions)
            self._tables.provider = (name, dimensions)

    def _dimensions(self, vectors: Iterable[Vector | None]) -> int | None:
        """Check vectors against those that are stored, and return how many numbers they have."""
        known = self._tables.provider[1] if self._tables.provider else None
        for vector in vectors:
            if vector is not None:
                check_vector("an embedding", vector, known)
                known = len(vector)
        return known

    def _remember(self, dimensions: int | None) -> None:
        if dimensions is not None and self._tables.provider is None:
            self._tables.provider = ("", dimensions)

    # Documents

    async def store_document(self, document: Document, chunks: Sequence[Chunk]) -> str:
        """Store a document with all its chunks, and return its id, or that of the one with the same content."""
        counts = await daemon_threads.run_sync(_counts_of, chunks)  # of a megabyte, that takes a second
        with self._lock:
            tables = self._tables
            if known := tables.by_digest.get(document.digest):
                return known
            taken = [each for each in (document.id,) if each in tables.documents]
            taken += [chunk.id for chunk in chunks if chunk.id in tables.chunks]
            check_chunks(document, chunks, taken)
            dimensions = self._dimensions(chunk.embedding for chunk in chunks)
            self._remember(dimensions)
            tables.documents[document.id] = document
            tables.by_digest[document.digest] = document.id
            parents = {chunk.parent_id for chunk in chunks if chunk.parent_id}
            tables.parents |= parents
            for chunk in chunks:
                tables.chunks[chunk.id] = chunk
                if chunk.id not in parents:
                    tables.counts[chunk.id] = counts[chunk.id]
            return document.id

    async def get_document(self, document_id: str) -> Document | None:
        """Return the document, or None."""
        return self._tables.documents.get(document_id)

    async def list_documents(self, limit: int = 100, after: str = "") -> list[Document]:
        """Return documents in the order of their ids."""
        with self._lock:
            return [self._tables.documents[id_] for id_ in sorted(self._tables.documents) if id_ > after][:limit]

    async def delete_document(self, document_id: str) -> bool:
        """Delete a document with its chunks."""
        with self._lock:
            tables = self._tables
            if (document := tables.documents.pop(document_id, None)) is None:
                return False
            del tables.by_digest[document.digest]
            for id_ in [id_ for id_, chunk in tables.chunks.items() if chunk.document_id == document_id]:
                del tables.chunks[id_]
                tables.counts.pop(id_, None)
                tables.parents.discard(id_)
            return True

    async def search_chunks(self, embedding: Vector, top_k: int, *filters: ChunkFilter) -> list[Scored[Chunk]]:
        """Return the chunks whose vectors are nearest."""
        check_top_k(top_k)
        with self._lock:
            self._dimensions([embedding])
            found = [each for each in self._searched(filters) if each.embedding is not None]
            return [Scored(_bare(each.item), each.score) for each in _nearest(embedding, found, top_k)]

    async def search_chunks_keyword(self, query: str, top_k: int, *filters: ChunkFilter) -> list[Scored[Chunk]]:
        """Return the chunks that hold words of `query`, by BM25."""
        check_top_k(top_k)
        wanted = query_words(query)
        with self._lock:
            scores = self._bm25(wanted)
            found = [(scores[each.id], each) for each in self._searched(filters) if scores.get(each.id, 0.0) > 0]
            best = nlargest(top_k, found, key=lambda pair: pair[0])
            return [Scored(_bare(chunk), score / (1.0 + score)) for score, chunk in best]

    def _searched(self, filters: Sequence[ChunkFilter]) -> list[Chunk]:
        check_filters(filters)
        tables = self._tables
        return [
            chunk
            for id_, chunk in tables.chunks.items()
            if id_ in tables.counts
            and all(each.accepts(filtered_value(each, chunk, tables.documents[chunk.document_id])) for each in filters)
        ]

    def _bm25(self, wanted: Sequence[str]) -> dict[str, float]:
        counts = self._tables.counts
        average = sum(each.total() for each in counts.values()) / (len(counts) or 1)
        scores: dict[str, float] = defaultdict(float)
        for word in wanted:
            holders = [(id_, each) for id_, each in counts.items() if word in each]
            rarity = math.log(1.0 + (len(counts) - len(holders) + 0.5) / (len(holders) + 0.5))
            for id_, each in holders:
                length = 1.0 - BM25_B + BM25_B * each.total() / average
                scores[id_] += rarity * each[word] * (BM25_K1 + 1.0) / (each[word] + BM25_K1 * length)
        return scores

    async def get_chunks_by_ids(self, ids: Sequence[str]) -> list[Chunk]:
        """Return the chunks that exist, in the order of `ids`."""
        with self._lock:
            return [_bare(self._tables.chunks[id_]) for id_ in ids if id_ in self._tables.chunks]

    # Messages

    async def store_message(self, message: Message) -> None:
        """Store a message. One of the same id is replaced."""
        with self._lock:
            self._remember(self._dimensions([message.embedding]))
            self._tables.messages[message.id] = message

    async def list_messages(self, thread_id: str, limit: int = 100) -> list[Message]:
        """Return the last messages of a thread, the oldest first."""
        with self._lock:
            found = [each for each in self._tables.messages.values() if each.thread_id == thread_id]
            found.sort(key=lambda each: (each.created_at, each.id))
            return [replace(each, embedding=None) for each in found[max(0, len(found) - limit) :]]

    async def search_messages(self, embedding: Vector, top_k: int) -> list[Scored[Message]]:
        """Return the messages whose vectors are nearest."""
        check_top_k(top_k)
        with self._lock:
            self._dimensions([embedding])
            found = [each for each in self._tables.messages.values() if each.embedding is not None]
            return [
                Scored(replace(each.item, embedding=None), each.score) for each in _nearest(embedding, found, top_k)
            ]

    # Schedules

    async def create_scheduled_action(self, action: ScheduledAction) -> None:
        """Store a new action."""
        with self._lock:
            _add(self._tables.actions, action.id, action)

    async def list_scheduled_actions(self) -> list[ScheduledAction]:
        """Return all actions, the oldest first."""
        with self._lock:
            return sorted(self._tables.actions.values(), key=lambda each: (each.created_at, each.id))

    async def get_due_scheduled_actions(self, now: int) -> list[ScheduledAction]:
        """Return the enabled actions whose `next_run` is not after `now`, the earliest first."""
        with self._lock:
            due = [each for each in self._tables.actions.values() if each.enabled and each.next_run <= now]
            return sorted(due, key=lambda each: (each.next_run, each.id))

    async def update_scheduled_action(self, action: ScheduledAction) -> bool:
        """Replace the action of this id."""
        return self._change(self._tables.actions, action.id, lambda _: action)

    async def update_scheduled_action_enabled(self, action_id: str, enabled: bool) -> bool:
        """Pause an action or let it go on."""
        return self._change(self._tables.actions, action_id, lambda was: replace(was, enabled=enabled))

    async def delete_scheduled_action(self, action_id: str) -> bool:
        """Delete an action; its runs stay."""
        with self._lock:
            return self._tables.actions.pop(action_id, None) is not None

    async def delete_all_scheduled_actions(self) -> int:
        """Delete every action and return how many there were."""
        with self._lock:
            count = len(self._tables.actions)
            self._tables.actions.clear()
            return count

    async def find_scheduled_actions_by_description(self, substring: str) -> list[ScheduledAction]:
        """Return the actions whose description holds `substring`, whatever the case."""
        wanted = check_description_query(substring)
        return [each for each in await self.list_scheduled_actions() if wanted in each.description.casefold()]

    async def reschedule(self, action_id: str, was: int, next_run: int, enabled: bool) -> bool:
        """Set `next_run` and `enabled` if `next_run` is still `was` and the action is enabled."""

        def moved(action: ScheduledAction) -> ScheduledAction | None:
            is_same = action.enabled and action.next_run == was
            return replace(action, next_run=next_run, enabled=enabled) if is_same else None

        return self._change(self._tables.actions, action_id, moved)

    async def begin_run(self, run: ScheduledRun) -> bool:
        """Record a run of an action and due time; False when there is one already."""
        with self._lock:
            runs = self._tables.runs
            if any((each.action_id, each.due_at) == (run.action_id, run.due_at) for each in runs.values()):
                return False
            _add(runs, run.id, run)
            return True

    async def extend_run(self, run_id: str, lease_until: int) -> bool:
        """Move the end of a running run's lease."""
        return self._change_running(run_id, lambda was: replace(was, lease_until=lease_until))

    async def end_run(self, run_id: str, status: RunStatus, ended_at: int, detail: str = "") -> bool:
        """Record how a running run ended."""
        check_run_end(status)
        return self._change_running(run_id, lambda was: replace(was, status=status, ended_at=ended_at, detail=detail))

    async def expire_runs(self, now: int) -> list[ScheduledRun]:
        """Mark running runs whose lease ended before `now` as in doubt, and return them."""
        with self._lock:
            runs = self._tables.runs
            late = [each for each in runs.values() if each.status == "running" and each.lease_until < now]
            marked = [replace(each, status="in_doubt", ended_at=now) for each in late]
            runs.update({each.id: each for each in marked})
            return marked

    async def list_runs(self, action_id: str = "", status: str = "", limit: int = 100) -> list[ScheduledRun]:
        """Return runs, the latest due time first."""
        with self._lock:
            found = [
                each
                for each in self._tables.runs.values()
                if action_id in ("", each.action_id) and status in ("", each.status)
            ]
            return sorted(found, key=lambda each: (each.due_at, each.id), reverse=True)[:limit]

    def _change_running(self, run_id: str, change: Callable[[ScheduledRun], ScheduledRun]) -> bool:
        return self._change(self._tables.runs, run_id, lambda was: change(was) if was.status == "running" else None)

    def _change(self, table: dict[str, T], id_: str, change: Callable[[T], T | None]) -> bool:
        with self._lock:
            now = change(table[id_]) if id_ in table else None
            if now is not None:
                table[id_] = now
            return now is not None

    # Skills

    async def create_skill(self, skill: Skill) -> None:
        """Store a new skill."""
        with self._lock:
            self._remember(self._dimensions([skill.embedding]))
            _add(self._tables.skills, skill.id, skill)

    async def get_skill(self, skill_id: str) -> Skill | None:
        """Return the skill, or None."""
        return self._tables.skills.get(skill_id)

    async def list_skills(self) -> list[Skill]:
        """Return all skills in the order of their ids."""
        with self._lock:
            return [self._tables.skills[id_] for id_ in sorted(self._tables.skills)]

    async def update_skill(self, skill: Skill) -> bool:
        """Replace the skill of this id."""
        with self._lock:
            self._remember(self._dimensions([skill.embedding]))
            return self._change(self._tables.skills, skill.id, lambda _: skill)

    async def delete_skill(self, skill_id: str) -> bool:
        """Delete a skill."""
        with self._lock:
            return self._tables.skills.pop(skill_id, None) is not None

    async def search_skills(self, embedding: Vector, top_k: int) -> list[Scored[Skill]]:
        """Return the skills whose vectors are nearest."""
        check_top_k(top_k)
        with self._lock:
            self._dimensions([embedding])
            found = [each for each in self._tables.skills.values() if each.embedding is not None]
            return _nearest(embedding, found, top_k)


Embedded = TypeVar("Embedded", Chunk, Message, Skill)


def _counts_of(chunks: Sequence[Chunk]) -> dict[str, Counter[str]]:
    return {chunk.id: Counter(words(chunk.content)) for chunk in chunks}


def _bare(chunk: Chunk) -> Chunk:
    return replace(chunk, embedding=None)


def _add(table: dict[str, T], id_: str, record: T) -> None:
    if id_ in table:
        raise UsageError(f"the id {id_!r} is taken; leave it out to get a new one")
    table[id_] = record


def _nearest(embedding: Vector, records: Sequence[Embedded], top_k: int) -> list[Scored[Embedded]]:
    scores = [(each, cosine(embedding, each.embedding)) for each in records if each.embedding is not None]
    found = [Scored(each, score) for each, score in scores if score is not None]
    return nlargest(top_k, found, key=lambda each: each.score)
