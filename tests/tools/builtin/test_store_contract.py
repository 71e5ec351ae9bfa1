"""What every store does alike. The same tests run over each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from toolcell.tools.builtin import (
    Chunk,
    Document,
    MemoryStore,
    Store,
)

pytestmark = pytest.mark.anyio

X, Y, XY = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]


@pytest.fixture(params=["memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    made: Store = MemoryStore()
    await made.init()
    yield made
    await made.close()


def document(**fields: Any) -> Document:
    return Document(**{"title": "t", "source": "s", "content": "c", "created_at": 100, **fields})


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
    assert found[0].item == Chunk(
        id=near.id, document_id=doc.id, content="near", metadata={"page_number": 3, "images": ["a.png"]}
    )
    assert await store.get_document(doc.id) == doc


async def test_the_same_content_is_stored_once_until_it_is_deleted(store: Store) -> None:
    first, again, other = document(), document(), document(source="elsewhere")
    assert await store.store_document(first, []) == first.id
    assert await store.store_document(again, [Chunk(document_id=again.id, embedding=X)]) == first.id
    assert await store.store_document(other, []) == other.id
    assert await store.search_chunks(X, 5) == []

    assert await store.delete_document(first.id)
    assert not await store.delete_document(first.id)
    assert await store.store_document(again, []) == again.id
    assert {each.id for each in await store.list_documents()} == {again.id, other.id}
