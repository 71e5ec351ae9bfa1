"""`remember`, `forget` and `knowledge_search`, and the hybrid search below them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from builtin.routes import by_model, by_plan
from builtin_stores import open_store
from rows import each_row
from toolcell.builtin import (
    Chunk,
    ChunkSizes,
    Document,
    HashEmbeddings,
    Knowledge,
    Message,
    Remember,
    Retriever,
    Scored,
    Section,
    SqliteStore,
    Store,
    index_document,
)
from toolcell.builtin.chunking import chunks_of, split
from toolcell.builtin.retrieval import fused, with_parents
from toolcell.errors import EmbeddingError, UsageError
from toolcell.tools import ToolRegistry

pytestmark = pytest.mark.anyio

EMBEDDINGS = HashEmbeddings(64)


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(request, request.param, tmp_path) as made:
        yield made


def registry_of(store: Store, **settings: Any) -> ToolRegistry:
    return ToolRegistry([Remember(store, EMBEDDINGS), Knowledge(store, EMBEDDINGS, **settings)])


@pytest.mark.conforms("S8", "S9", "S-b2", "S-b8")
async def test_what_is_remembered_is_found_and_what_is_forgotten_is_not(store: Store) -> None:
    registry = registry_of(store)
    first = await registry.dispatch("remember", {"content": "The capital of France is Paris."})
    second = await registry.dispatch("remember", {"content": "Bananas are yellow."})
    again = await registry.dispatch("remember", {"content": "  The capital of France is Paris. \n"})

    assert first.text == second.text == "Saved and indexed 1 chunk(s) to knowledge base."
    assert first.value["chunks"] == 1
    assert first.value["is_new"]
    assert again.value == {"document_id": first.value["document_id"], "chunks": 0, "is_new": False}

    found = await registry.dispatch("knowledge_search", {"query": "capital of France"})
    assert found.text.startswith("From knowledge base:\n1. The capital of France is Paris.")
    best = found.value[0]
    assert (best["kind"], best["title"], best["url"], best["text"]) == (
        "document",
        "The capital of France is Paris.",
        "message",
        "The capital of France is Paris.",
    )
    assert best["document_id"] == first.value["document_id"]
    assert 0 < best["score"] <= 1

    gone = await registry.dispatch("forget", {"document_id": first.value["document_id"]})
    assert gone.value == {"document_id": first.value["document_id"], "deleted": True}
    left = await registry.dispatch("knowledge_search", {"query": "capital of France"})
    assert "Paris" not in left.text
    assert (await registry.dispatch("forget", {"document_id": first.value["document_id"]})).is_error


@pytest.mark.conforms("S9")
async def test_nothing_known_is_said_and_past_messages_have_their_roles(store: Store) -> None:
    registry = registry_of(store)
    nothing = await registry.dispatch("knowledge_search", {"query": "zebra"})
    assert nothing.text == 'No relevant information found for "zebra".'
    assert nothing.value == []

    (vector,) = await EMBEDDINGS.embed(["I saw a zebra"])
    await store.store_message(Message(role="user", content="I saw a zebra", thread_id="t", embedding=vector))
    past = await registry.dispatch("knowledge_search", {"query": "zebra"})
    assert past.text == "From past conversations:\n[user]: I saw a zebra"
    assert past.value[0] | {"score": 0} == {
        "kind": "message",
        "title": "user",
        "url": "",
        "text": "I saw a zebra",
        "score": 0,
        "document_id": "",
        "metadata": {},
    }


@pytest.mark.conforms("S-b8")
@each_row(
    ("tool", "args", "said"),
    [
        ("remember", {"content": " \n "}, "content is required"),
        ("remember", {"content": "x" * 1_000_001}, "1000001 characters, and may have 1000000"),
        ("knowledge_search", {"query": " "}, "query is required"),
        ("knowledge_search", {"query": "x" * 4001}, "4001 characters, and may have 4000"),
        ("forget", {"document_id": "none"}, "no document 'none'"),
    ],
)
async def test_arguments_that_make_no_sense_are_refused(tool: str, args: dict[str, str], said: str) -> None:
    result = await registry_of(SqliteStore(":memory:")).dispatch(tool, args)
    assert result.is_error
    assert said in result.text


async def test_only_what_remember_saved_can_be_forgotten() -> None:
    store = SqliteStore(":memory:")
    kept = await index_document(store, EMBEDDINGS, Document(source="handbook.pdf", content="Rules"))
    result = await registry_of(store).dispatch("forget", {"document_id": kept.document_id})

    assert "not saved by remember" in result.text
    assert await store.get_document(kept.document_id) is not None


async def test_hostile_text_is_kept_without_what_no_store_can_hold(store: Store) -> None:
    registry = registry_of(store)
    saved = await registry.dispatch("remember", {"content": "evil\x00 \x1b[31mtext\u202e %s ' \" ; DROP TABLE chunks"})
    assert not saved.is_error, saved.text
    found = await registry.dispatch("knowledge_search", {"query": "evil\x00 OR \x1b' --"})
    assert not found.is_error, found.text
    assert "DROP TABLE" in found.text
    assert "\x1b" not in found.text


async def test_a_store_of_another_provider_is_a_clear_error(store: Store) -> None:
    await registry_of(store).dispatch("remember", {"content": "one"})
    other = ToolRegistry([Knowledge(store, HashEmbeddings(32)), Remember(store, HashEmbeddings(32))])
    for tool, args in (("remember", {"content": "two"}), ("knowledge_search", {"query": "two"})):
        result = await other.dispatch(tool, args)
        assert result.is_error
        assert "hash-64" in result.text
        assert "use that provider" in result.text


# Every route


@pytest.mark.conforms("S8", "S9", "S-b2")
async def test_a_plan_and_a_model_remember_and_then_find(tmp_path: Path) -> None:
    async with open_store(None, "sqlite", tmp_path) as store:
        registry = registry_of(store)
        saved = await by_plan(registry, "remember", {"content": "The launch code word is heliotrope."})
        found = await by_plan(registry, "knowledge_search", {"query": "launch code word"})
        assert found["value"][0]["document_id"] == saved["value"]["document_id"]
        assert "content is required" in (await by_plan(registry, "remember", {"content": ""}))["error"]

        assert await by_model(registry, "remember", {"content": "Tea is at four."}) == (
            "Saved and indexed 1 chunk(s) to knowledge base."
        )
        assert "1. Tea is at four." in await by_model(registry, "knowledge_search", {"query": "tea"})


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def test_one_store_works_on_several_event_loops(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with open_store(request, kind, tmp_path) as store:
        registry = registry_of(store)

        async def remember(text: str) -> None:
            assert (await registry.dispatch("remember", {"content": text})).value["is_new"]

        await remember("here")
        for backend in ("asyncio", "trio"):
            await anyio.to_thread.run_sync(partial(anyio.run, remember, backend, backend=backend))
        assert len(await store.list_documents()) == 3


# Retrieval


def hit(id_: str, score: float = 0.5, parent: str = "") -> Scored[Chunk]:
    return Scored(Chunk(id=id_, document_id="d", parent_id=parent), score)


@pytest.mark.conforms("S9")
async def test_two_rankings_are_fused_by_their_ranks() -> None:
    both = fused(([hit("a"), hit("b")], 0.7), ([hit("b"), hit("c")], 0.3))

    assert [each.item.id for each in both] == ["b", "a", "c"]
    assert [each.score for each in both] == pytest.approx([0.7 * 61 / 62 + 0.3, 0.7, 0.3 * 61 / 62])
    assert fused(([hit("a")], 0.7), ([hit("a")], 0.3))[0].score == pytest.approx(1.0)
    assert fused(([], 0.7), ([], 0.3)) == []


@pytest.mark.conforms("S9")
async def test_children_are_replaced_by_their_parent_once() -> None:
    store = SqliteStore(":memory:")
    text = "\n\n".join(f"Paragraph {word} says {word * 3}." for word in ("apple", "plum", "pear", "fig", "kiwi"))
    sizes = ChunkSizes(chars=40, overlap_chars=0, parent_chars=200)
    done = await index_document(store, EMBEDDINGS, Document(content=text), sizes=sizes)
    assert done.chunks >= 5

    found = await Retriever().search(store, EMBEDDINGS, "plum pear", 5)
    assert [each.item.content for each in found] == [text]
    assert [each.item.id for each in await with_parents(store, [hit("x", parent="gone")])] == ["x"]


class Backwards:
    """Finds best what is longest."""

    async def rerank(self, query: str, texts: list[str]) -> list[float]:
        return [len(text) / 100 for text in texts]


class Wrong:
    async def rerank(self, query: str, texts: list[str]) -> list[float]:
        return [0.5]


@pytest.mark.conforms("S9")
async def test_a_reranker_and_a_least_score_decide() -> None:
    store = SqliteStore(":memory:")
    for text in ("red", "red fox", "red fox runs"):
        await index_document(store, EMBEDDINGS, Document(content=text))

    found = await Retriever(reranker=Backwards()).search(store, EMBEDDINGS, "red", 2)
    assert [(each.item.content, each.score) for each in found] == [("red fox runs", 0.12), ("red fox", 0.07)]
    found = await Retriever(reranker=Backwards(), min_score=0.1).search(store, EMBEDDINGS, "red", 2)
    assert [each.item.content for each in found] == ["red fox runs"]
    assert len(await Retriever(min_score=1.0).search(store, EMBEDDINGS, "red", 3)) == 1
    with pytest.raises(EmbeddingError, match="must give 3 scores"):
        await Retriever(reranker=Wrong()).search(store, EMBEDDINGS, "red", 2)
    for settings in ({"min_score": 1.1}, {"keyword_weight": -0.1}):
        with pytest.raises(UsageError, match="between 0 and 1"):
            Retriever(**settings)


@pytest.mark.conforms("S9")
async def test_words_weigh_three_tenths_and_each_half_can_be_left_out() -> None:
    store = SqliteStore(":memory:")
    await index_document(store, EMBEDDINGS, Document(content="forecasting"))
    words_only, vectors_only = Retriever(keyword_weight=1.0), Retriever(keyword_weight=0.0)

    assert await words_only.search(store, EMBEDDINGS, "forecast", 3) == []
    assert len(await words_only.search(store, EMBEDDINGS, "forecasting", 3)) == 1
    assert len(await vectors_only.search(store, EMBEDDINGS, "forecast", 3)) == 1
    (by_vectors,) = await Retriever().search(store, EMBEDDINGS, "forecast", 3)
    (with_more_words,) = await Retriever(keyword_weight=0.6).search(store, EMBEDDINGS, "forecast", 3)
    assert by_vectors.score == pytest.approx(0.7) and with_more_words.score == pytest.approx(0.4)


# Chunks


@pytest.mark.conforms("S8")
def test_a_long_text_is_cut_at_2048_characters_with_an_overlap() -> None:
    text = " ".join(f"Sentence number {at} ends here." for at in range(300))
    pieces = split(text, 2048, 200)

    assert len(pieces) > 3
    assert all(len(piece) <= 2048 for piece in pieces)
    for one, other in itertools.pairwise(pieces):
        assert other[:50] in one
    assert split("short", 2048) == ["short"]
    assert split(" \n", 2048) == []


def test_no_chunk_crosses_a_section_and_each_has_what_is_known_of_it() -> None:
    doc = Document(content="x")
    sections = [Section("one", {"page_number": 1}), Section(" "), Section("two", {"page_number": 2})]
    chunks = chunks_of(doc, sections)

    assert [(each.content, each.metadata, each.chunk_index) for each in chunks] == [
        ("one", {"page_number": 1}, 0),
        ("two", {"page_number": 2}, 1),
    ]


@each_row("sizes", [{"chars": 15}, {"overlap_chars": -1}, {"chars": 100, "overlap_chars": 51}, {"parent_chars": 100}])
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        ChunkSizes(**sizes)
