"""What is refused where a built-in package is made: another kind of argument would fail in the first call of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rows import each_row
from toolcell import Allow, SyncRuntime
from toolcell.builtin import (
    DataTools,
    Files,
    HashEmbeddings,
    Http,
    Ingestion,
    Knowledge,
    Remember,
    Schedule,
    Skills,
    SqliteStore,
    WebPolicy,
    WebSearch,
)
from toolcell.errors import UsageError

STORE, EMBEDDINGS = SqliteStore(":memory:"), HashEmbeddings(64)
WITH_BOTH: list[Callable[..., Any]] = [Knowledge, Remember, Skills, lambda *both: Ingestion(*both, runtime=None)]  # type: ignore[arg-type]


@each_row("make", WITH_BOTH)
@each_row("store", ["agent.db", None, EMBEDDINGS, SqliteStore])
def test_what_is_no_store_is_refused_with_what_to_write(make: Callable[..., Any], store: Any) -> None:
    with pytest.raises(
        UsageError, match=r"\(store\) must be of the kind (Document|Skill)Store, such as SqliteStore\(path\), not "
    ):
        make(store, EMBEDDINGS)


@each_row("make", WITH_BOTH)
@each_row("embeddings", ["text-embedding-3-small", None, STORE, HashEmbeddings])
def test_what_makes_no_vectors_is_refused_with_what_to_write(make: Callable[..., Any], embeddings: Any) -> None:
    with pytest.raises(
        UsageError, match=r"\(embeddings\) must be of the kind EmbeddingProvider, such as HashEmbeddings\(\), not "
    ):
        make(STORE, embeddings)


@each_row(
    ("make", "message"),
    [
        (lambda: Schedule("agent.db"), r"Schedule\(store\) must be of the kind ScheduleStore"),  # type: ignore[arg-type]
        (lambda: Knowledge(STORE, EMBEDDINGS, retriever=0.3), r"Knowledge\(retriever\) must be Retriever or None"),  # type: ignore[arg-type]
        (lambda: Remember(STORE, EMBEDDINGS, sizes=800), r"Remember\(sizes\) must be ChunkSizes, not 800"),  # type: ignore[arg-type]
        (lambda: Ingestion(STORE, EMBEDDINGS, SyncRuntime()), "a SyncRuntime will not do"),  # type: ignore[arg-type]
        (lambda: Http("example.com"), r"Http\(policy\) must be WebPolicy or None, not 'example.com'"),  # type: ignore[arg-type]
        (lambda: WebPolicy(egress=Allow("a.test")), r"WebPolicy\(egress\) must be Egress, not Allow"),  # type: ignore[arg-type]
        (lambda: WebSearch(EMBEDDINGS, None), r"WebSearch\(engine\) must be a Brave key or a search engine, not None"),  # type: ignore[arg-type]
        (lambda: WebSearch("key", EMBEDDINGS), r"WebSearch\(embeddings\) must be of the kind EmbeddingProvider"),  # type: ignore[arg-type]
        (lambda: WebSearch(EMBEDDINGS, "key", policy="x"), r"WebSearch\(policy\) must be WebPolicy"),  # type: ignore[arg-type]
        (lambda: Files(""), "the workspace must be a path, not an empty text; the current directory is '.'"),
        (lambda: DataTools(""), "the workspace must be a path, not an empty text"),
        (lambda: SqliteStore(""), r"SqliteStore\(path\) must be a path, not an empty text"),
    ],
)
def test_an_argument_of_another_kind_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
