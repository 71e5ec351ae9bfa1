"""What every store does alike. The same tests run over each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from builtin_stores import open_store
from toolcell.builtin import (
    Chunk,
    ChunkFilter,
    Document,
    DocumentStore,
    Message,
    MessageStore,
    ScheduledAction,
    ScheduledRun,
    ScheduleStore,
    Scored,
    Skill,
    SkillStore,
    Store,
)
from toolcell.builtin.stores.protocols import KeywordStore
from toolcell.errors import UsageError

pytestmark = pytest.mark.anyio

X, Y, XY = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]


@pytest.fixture(
    params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)],
)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(request, request.param, tmp_path) as made:
        yield made


def document(**fields: Any) -> Document:
    return Document(**{"title": "t", "source": "s", "content": "c", "created_at": 100, **fields})


async def filled(store: Store, *texts: str, **fields: Any) -> Document:
    """Store a document of chunks that have these texts and metadata {"n": index}."""
    doc = document(content="\n".join(texts), **fields)
    chunks = [
        Chunk(document_id=doc.id, content=text, chunk_index=at, embedding=[1.0, at / 10, 0.0], metadata={"n": at})
        for at, text in enumerate(texts)
    ]
    await store.store_document(doc, chunks)
    return doc


# Documents


@pytest.mark.conforms("S20", "S21")
async def test_what_was_stored_is_found_by_its_vector_with_the_cosine_as_score(store: Store) -> None:
    doc = document()
    near = Chunk(document_id=doc.id, content="near", embedding=X, metadata={"page_number": 3, "images": ["a.png"]})
    half = Chunk(document_id=doc.id, content="half", embedding=XY, chunk_index=1)
    far = Chunk(document_id=doc.id, content="far", embedding=[-1.0, 0.0, 0.0], chunk_index=2)

    assert await store.store_document(doc, [far, near, half]) == doc.id

    found = await store.search_chunks([2.0, 0.0, 0.0], 3)
    assert [each.item.content for each in found] == ["near", "half", "far"]
    assert [each.score for each in found] == pytest.approx([1.0, 0.5**0.5, 0.0], abs=1e-6)
    assert found[0].item == replace(near, embedding=None)
    assert await store.get_document(doc.id) == doc
    assert await store.get_document("none") is None
    assert [each.item.content for each in await store.search_chunks(X, 1)] == ["near"]


@pytest.mark.conforms("S20")
async def test_a_store_has_every_capability(store: Store) -> None:
    for capability in (DocumentStore, KeywordStore, MessageStore, ScheduleStore, SkillStore, Store):
        assert isinstance(store, capability)


async def test_the_same_content_is_stored_once_until_it_is_deleted(store: Store) -> None:
    first, again, other = document(), document(), document(source="elsewhere")
    assert await store.store_document(first, []) == first.id
    assert await store.store_document(again, [Chunk(document_id=again.id, embedding=X)]) == first.id
    assert await store.store_document(other, []) == other.id
    assert await store.search_chunks(X, 5) == []

    assert await store.delete_document(first.id)
    assert not await store.delete_document(first.id)
    assert await store.store_document(again, []) == again.id
    assert [each.id for each in await store.list_documents()] == sorted([again.id, other.id])
    assert [each.id for each in await store.list_documents(1, after=min(again.id, other.id))] == [
        max(again.id, other.id)
    ]


async def test_what_was_deleted_is_found_no_more_and_what_comes_after_is(store: Store) -> None:
    doc = await filled(store, "red apple", "green apple")
    kept = await filled(store, "blue plum", source="kept")
    assert len(await store.search_chunks(X, 9)) == 3
    assert await store.delete_document(doc.id)
    for found in (await store.search_chunks(X, 1), await store.search_chunks_keyword("red green plum", 1)):
        assert [each.item.content for each in found] == ["blue plum"]  # in place of the deleted
    await filled(store, "yellow pear", source="new")

    assert {each.item.content for each in await store.search_chunks(X, 9)} == {"blue plum", "yellow pear"}
    assert await store.search_chunks_keyword("apple", 9) == []
    assert [each.item.document_id for each in await store.search_chunks_keyword("plum", 9)] == [kept.id]
    assert await store.get_chunks_by_ids([each.item.id for each in await store.search_chunks(X, 9)])


async def test_a_document_is_stored_whole_or_not_at_all(store: Store) -> None:
    doc = document()
    good = Chunk(document_id=doc.id, embedding=X)
    for wrong, said in (
        (Chunk(document_id="other", embedding=X), "document_id"),
        (Chunk(document_id=doc.id, embedding=[1.0, 2.0]), "2 numbers"),
        (Chunk(document_id=doc.id, embedding=[1.0, float("nan"), 0.0]), "finite"),
        (Chunk(document_id=doc.id, parent_id="none", embedding=X), "parent"),
        (Chunk(id=good.id, document_id=doc.id, embedding=X), "taken"),
    ):
        with pytest.raises(UsageError, match=said):
            await store.store_document(doc, [good, wrong])
    assert await store.list_documents() == []
    assert await store.search_chunks(X, 5) == []

    await store.store_document(doc, [good])
    with pytest.raises(UsageError, match="taken"):
        await store.store_document(document(id=doc.id, content="other"), [])
    other = document(content="other")
    with pytest.raises(UsageError, match="taken"):
        await store.store_document(other, [replace(good, document_id=other.id)])


async def test_a_vector_of_another_length_is_refused_with_what_to_do(store: Store) -> None:
    await filled(store, "one")
    with pytest.raises(UsageError, match=r"2 numbers, and this store's vectors have 3.*another embedding provider"):
        await store.search_chunks([1.0, 2.0], 5)
    for top_k in (0, -1, 1001, True):
        with pytest.raises(UsageError, match="top_k must be between 1 and 1000"):
            await store.search_chunks(X, top_k)
    for search in (store.search_messages, store.search_skills):
        with pytest.raises(UsageError, match="2 numbers"):
            await search([1.0, 2.0], 5)


async def test_a_store_belongs_to_one_embedding_provider(store: Store) -> None:
    await filled(store, "one")
    await store.use_embeddings("hash-3", 3)
    await store.use_embeddings("hash-3", 3)
    for name, dimensions in (("hash-3", 4), ("other", 3)):
        with pytest.raises(UsageError, match="'hash-3'"):
            await store.use_embeddings(name, dimensions)


async def test_parents_are_not_searched_and_are_had_by_their_ids(store: Store) -> None:
    doc = document()
    parent = Chunk(document_id=doc.id, content="a long red story", embedding=X, chunk_index=0)
    child = Chunk(document_id=doc.id, parent_id=parent.id, content="red", embedding=XY, chunk_index=1)
    await store.store_document(doc, [parent, child])

    assert [each.item.id for each in await store.search_chunks(X, 5)] == [child.id]
    assert [each.item.id for each in await store.search_chunks_keyword("red story", 5)] == [child.id]
    wanted = [parent.id, "none", child.id, parent.id]
    assert [each.id for each in await store.get_chunks_by_ids(wanted)] == [parent.id, child.id, parent.id]


async def test_a_vector_of_zeros_finds_nothing_and_is_not_found(store: Store) -> None:
    doc = document()
    await store.store_document(doc, [Chunk(document_id=doc.id, embedding=[0.0] * 3)])
    assert await store.search_chunks(X, 5) == []
    await filled(store, "one", source="other")
    assert await store.search_chunks([0.0] * 3, 5) == []
    assert len(await store.search_chunks(X, 5)) == 1


# Words


async def test_words_are_found_without_case_and_accents_the_rarer_ones_first(store: Store) -> None:
    texts = "Crème brûlée from Paris", "the paris metro and the paris bus", "東京都の天気", "a bus"
    await filled(store, *texts, *["filler"] * 60)

    async def found(query: str) -> list[str]:
        return [each.item.content for each in await store.search_chunks_keyword(query, 9)]

    assert await found("CREME") == ["Crème brûlée from Paris"]
    assert await found("天気") == ["東京都の天気"]
    assert set(await found("paris")) == {"Crème brûlée from Paris", "the paris metro and the paris bus"}
    assert (await found("paris metro"))[0] == "the paris metro and the paris bus"
    assert await found("zebra") == []
    scores = [each.score for each in await store.search_chunks_keyword("paris metro bus", 9)]
    assert scores == sorted(scores, reverse=True)
    assert 1.0 >= scores[0] > scores[-1] > 0.0


HOSTILE_QUERIES = [
    "",
    " ",
    '"',
    "'",
    "a OR",
    "NEAR(",
    "*",
    "a:b",
    "-x",
    "(",
    "%",
    "_",
    "';--",
    "\\",
    "&|!<->",
    "\ud800",
]


async def test_every_text_is_a_query(store: Store) -> None:
    await filled(store, "one two")
    for query in ("".join(HOSTILE_QUERIES), *HOSTILE_QUERIES):
        assert len(await store.search_chunks_keyword(query + " two", 5)) == 1, query
        await store.search_chunks_keyword(query, 5)


# Filters


CONDITIONS: list[tuple[tuple[str, Any, Any], str]] = [
    (("source", "eq", "a"), "012"),
    (("source", "in", ["a", "b"]), "0123"),
    (("source", "gt", "a"), "3"),
    (("created_at", "lt", 150), "012"),
    (("created_at", "gt", 150), "3"),
    (("created_at", "in", [100, 7]), "012"),
    (("created_at", "eq", "100"), ""),
    (("source", "eq", 1), ""),
    (("document_id", "eq", "doc-a"), "012"),
    (("meta.page", "eq", 1), "0"),
    (("meta.page", "gt", 1), "12"),
    (("meta.page", "lt", 2.5), "01"),
    (("meta.page", "in", [1, 3, "x"]), "02"),
    (("meta.page", "eq", "1"), "3"),
    (("meta.page", "eq", True), ""),
    (("meta.flag", "eq", True), "0"),
    (("meta.flag", "eq", 1), "1"),
    (("meta.flag", "in", []), ""),
    (("meta.none", "eq", "x"), ""),
    (("meta.o'dd \"$.k%", "eq", "v"), "2"),
    (("meta.word", "gt", "Z"), "12"),
]


@pytest.mark.conforms("S20", "S21")
async def test_a_filter_finds_what_fulfils_it(store: Store) -> None:
    one = document(id="doc-a", source="a", created_at=100)
    other = document(id="doc-b", source="b", created_at=200)
    metadata: list[dict[str, Any]] = [
        {"page": 1, "flag": True, "word": "A"},
        {"page": 2, "flag": 1, "word": "a"},
        {"page": 3, "flag": "true", "o'dd \"$.k%": "v", "word": "é"},
        {"page": "1", "flag": False},
    ]
    chunks = [
        Chunk(document_id="doc-a" if at < 3 else "doc-b", content=f"word {at}", embedding=X, metadata=each)
        for at, each in enumerate(metadata)
    ]
    await store.store_document(one, chunks[:3])
    await store.store_document(other, chunks[3:])

    def numbers(hits: list[Scored[Chunk]]) -> str:
        return "".join(sorted(each.item.content[-1] for each in hits))

    for parts, found in CONDITIONS:
        condition = ChunkFilter(*parts)
        assert numbers(await store.search_chunks(X, 9, condition)) == found, parts
        assert numbers(await store.search_chunks_keyword("word", 9, condition)) == found, parts
        both = await store.search_chunks(X, 9, condition, ChunkFilter("document_id", "eq", "doc-b"))
        assert numbers(both) == "".join(set(found) & {"3"}), parts


# Messages


@pytest.mark.conforms("S20", "S21")
async def test_messages_are_found_by_vector_and_listed_by_thread(store: Store) -> None:
    first = Message(thread_id="a", role="user", content="one", embedding=X, created_at=1, metadata={"k": [1]})
    second = Message(thread_id="a", role="assistant", content="two", embedding=XY, created_at=2)
    other = Message(thread_id="b", role="user", content="three", created_at=3)
    for each in (second, first, other):
        await store.store_message(each)

    assert [each.item.content for each in await store.search_messages(X, 5)] == ["one", "two"]
    assert [each.content for each in await store.list_messages("a")] == ["one", "two"]
    assert await store.list_messages("a", 1) == [replace(second, embedding=None)]

    await store.store_message(replace(first, content="changed", embedding=Y))
    found = await store.search_messages(Y, 5)
    assert [(each.item.content, each.score) for each in found] == [
        ("changed", pytest.approx(1.0)),
        ("two", pytest.approx(0.5**0.5)),
    ]


# Schedules


def action(description: str, **fields: Any) -> ScheduledAction:
    return ScheduledAction(**{"description": description, "next_run": 100, "created_at": 1, **fields})


@pytest.mark.conforms("S20", "S21")
async def test_actions_are_kept_and_are_due_when_they_are_enabled(store: Store) -> None:
    early = action("early", next_run=10, tool_calls='[{"tool": "x"}]', synthesis_prompt="p", skill_id="k")
    late, paused = action("late"), action("paused", enabled=False, created_at=2)
    for each in (late, early, paused):
        await store.create_scheduled_action(each)
    with pytest.raises(UsageError, match="taken"):
        await store.create_scheduled_action(early)

    assert await store.get_due_scheduled_actions(9) == []
    assert await store.get_due_scheduled_actions(10) == [early]
    assert await store.get_due_scheduled_actions(100) == [early, late]
    assert len(await store.list_scheduled_actions()) == 3

    assert await store.update_scheduled_action(replace(early, enabled=False))
    assert await store.update_scheduled_action(replace(paused, enabled=True, description="going"))
    assert {each.description for each in await store.get_due_scheduled_actions(100)} == {"late", "going"}
    assert not await store.update_scheduled_action(action("none"))

    assert await store.delete_scheduled_action(late.id)
    assert not await store.delete_scheduled_action(late.id)
    assert await store.delete_all_scheduled_actions() == 2
    assert await store.delete_all_scheduled_actions() == 0


@pytest.mark.conforms("S-b6")
async def test_a_description_is_matched_as_it_is_written_whatever_the_case(store: Store) -> None:
    for each in ("100% of Österreich", "under_score", "plain"):
        await store.create_scheduled_action(action(each))

    async def found(query: str) -> list[str]:
        return [each.description for each in await store.find_scheduled_actions_by_description(query)]

    assert await found("%") == ["100% of Österreich"]
    assert await found("ÖSTERREICH") == ["100% of Österreich"]
    assert await found("_") == ["under_score"]
    assert await found("PLAIN") == ["plain"]
    for empty in ("", "  "):
        with pytest.raises(UsageError, match="empty"):
            await found(empty)


async def test_a_due_time_is_run_once_and_its_lease_ends_in_doubt(store: Store) -> None:
    run = ScheduledRun(action_id="a", due_at=100, owner="one", lease_until=200, started_at=100)
    assert await store.begin_run(run)
    assert not await store.begin_run(ScheduledRun(action_id="a", due_at=100, owner="two"))
    assert await store.begin_run(ScheduledRun(action_id="a", due_at=160, lease_until=500))

    assert await store.expire_runs(200) == []
    assert await store.extend_run(run.id, 300)
    assert await store.expire_runs(250) == []
    assert [(each.id, each.status, each.ended_at) for each in await store.expire_runs(301)] == [
        (run.id, "in_doubt", 301)
    ]
    assert await store.expire_runs(301) == []
    assert not await store.end_run(run.id, "done", 302)
    assert not await store.extend_run(run.id, 900)

    (other,) = await store.list_runs(status="running")
    assert await store.end_run(other.id, "failed", 302, "why")
    assert [(each.due_at, each.status, each.detail) for each in await store.list_runs("a")] == [
        (160, "failed", "why"),
        (100, "in_doubt", ""),
    ]
    assert await store.list_runs("b") == []
    with pytest.raises(UsageError, match="status"):
        await store.end_run(run.id, "running", 1)


async def test_only_one_moves_an_action_to_its_next_time(store: Store) -> None:
    mine = action("a")
    await store.create_scheduled_action(mine)
    moved: list[bool] = []

    async def move() -> None:
        moved.append(await store.reschedule(mine.id, 100, 200, True))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(move)

    assert sorted(moved) == [False, False, False, True]
    assert [each.next_run for each in await store.list_scheduled_actions()] == [200]


async def test_an_action_that_was_paused_is_not_moved_and_stays_paused(store: Store) -> None:
    mine = action("a")
    await store.create_scheduled_action(mine)
    await store.update_scheduled_action(replace(mine, enabled=False))

    assert not await store.reschedule(mine.id, 100, 200, True)
    assert [(each.next_run, each.enabled) for each in await store.list_scheduled_actions()] == [(100, False)]


async def test_of_several_that_begin_one_run_only_one_does(store: Store) -> None:
    begun: list[bool] = []

    async def begin() -> None:
        begun.append(await store.begin_run(ScheduledRun(action_id="a", due_at=100)))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(begin)

    assert sorted(begun) == [False] * 7 + [True]
    assert len(await store.list_runs()) == 1


# Skills


@pytest.mark.conforms("S20", "S21")
async def test_skills_are_kept_changed_and_found(store: Store) -> None:
    skill = Skill(
        name="n", description="d", instructions="i", tools=("a", "b"), model="m", tags=("t",), created_by="u",
        references=("r",), embedding=X, created_at=1, updated_at=2,
    )  # fmt: skip
    other = Skill(name="o", embedding=XY)
    await store.create_skill(skill)
    await store.create_skill(other)
    await store.create_skill(Skill(name="without"))
    with pytest.raises(UsageError, match="taken"):
        await store.create_skill(skill)

    assert await store.get_skill(skill.id) == skill
    assert await store.get_skill("none") is None
    assert [each.item.name for each in await store.search_skills(X, 5)] == ["n", "o"]
    assert await store.update_skill(replace(skill, embedding=Y, tags=()))
    assert [(each.item.name, each.item.tags) for each in await store.search_skills(Y, 1)] == [("n", ())]
    assert not await store.update_skill(Skill(name="none"))
    assert len(await store.list_skills()) == 3
    assert await store.delete_skill(skill.id)
    assert not await store.delete_skill(skill.id)


# Life


async def test_a_closed_store_opens_again(store: Store) -> None:
    await store.close()
    await store.close()
    await filled(store, "one")
    assert len(await store.search_chunks(X, 5)) == 1


async def test_a_filter_that_is_a_text_is_refused(store: Store) -> None:
    await store.store_document(
        Document(id="doc-a", content="a"), [Chunk(document_id="doc-a", content="a", embedding=X)]
    )
    for search, wanted in ((store.search_chunks, X), (store.search_chunks_keyword, "a")):
        with pytest.raises(UsageError, match=r"a filter must be ChunkFilter, not 'page<20'; write ChunkFilter"):
            await search(wanted, 9, "page<20")  # type: ignore[operator]
