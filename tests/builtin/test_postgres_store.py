"""A `PostgresStore` on a real server: schemas that are not ours, versions, locks, addresses, processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from builtin_stores import new_schema
from toolcell.builtin import Chunk, ChunkFilter, Document, PostgresStore
from toolcell.builtin.stores import postgres
from toolcell.errors import StoreError, UsageError

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]

X = [1.0, 0.0]


@pytest.fixture
def schema() -> str:
    return new_schema()


@pytest.fixture
def server(postgres_server: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        yield connection


async def fill(store: PostgresStore, text: str, vector: list[float] = X) -> str:
    document = Document(content=text)
    chunk = Chunk(document_id=document.id, content=text, embedding=vector, metadata={"text": text})
    return await store.store_document(document, [chunk])


async def test_a_schema_with_other_tables_is_refused_and_not_changed(
    postgres_server: str, server: psycopg.Connection[Any], schema: str
) -> None:
    server.execute(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.chunks (a INTEGER)")  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=r"not a store of toolcell.*Nothing was changed"):
        await PostgresStore(postgres_server, schema=schema).init()
    tables = server.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
    assert tables == [("chunks",)]


async def test_a_newer_version_is_refused(postgres_server: str, server: psycopg.Connection[Any], schema: str) -> None:
    store = PostgresStore(postgres_server, schema=schema)
    await store.init()
    await store.close()
    server.execute(f"UPDATE {schema}.toolcell_version SET version = 99")  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="has version 99"):
        await PostgresStore(postgres_server, schema=schema).init()


async def test_a_locked_store_is_an_error_that_a_retry_may_mend(
    postgres_server: str, server: psycopg.Connection[Any], schema: str
) -> None:
    store = PostgresStore(postgres_server, schema=schema, lock_timeout_s=0.01)
    await fill(store, "one")
    with server.transaction():
        server.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (postgres.LOCK, schema))
        with pytest.raises(StoreError, match=r"is locked, for more than 0\.01 s") as caught:
            await fill(store, "two")
        assert len(await store.search_chunks(X, 5)) == 1  # reading goes on
    assert caught.value.retryable
    await fill(store, "two")
    await store.close()


async def test_a_server_that_cannot_be_reached_is_an_error_without_the_password(schema: str) -> None:
    store = PostgresStore("host=/none user=x password=hunter2", schema=schema)
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        await store.init()
    assert "hunter2" not in f"{caught.value}{store!r}"
    assert caught.value.retryable
    for wrong in ("a b", "A", "", 'x"; --'):
        with pytest.raises(UsageError, match="must match"):
            PostgresStore("", schema=wrong)


async def test_a_connection_that_the_server_has_closed_is_replaced(
    postgres_server: str, server: psycopg.Connection[Any], schema: str
) -> None:
    store = PostgresStore(f"{postgres_server} application_name={schema}", schema=schema)
    await fill(store, "one")
    server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", (schema,))
    assert len(await store.search_chunks(X, 5)) == 1
    await store.close()
    left = server.execute("SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND state = 'active'", (schema,))
    assert left.fetchall() == []


async def test_a_store_finds_at_once_what_another_one_has_stored_and_deleted(postgres_server: str, schema: str) -> None:
    store, other = PostgresStore(postgres_server, schema=schema), PostgresStore(postgres_server, schema=schema)
    gone = await fill(other, "left behind")
    await fill(store, "near", [2.0, 0.1])
    await fill(store, "far", [-1.0, 0.0])
    await fill(store, "zeros", [0.0, 0.0])
    found = await store.search_chunks(X, 9)
    assert [each.item.content for each in found] == ["left behind", "near", "far"]
    assert [each.score for each in found] == pytest.approx([1.0, 0.99875, 0.0], abs=1e-4)
    only = await store.search_chunks(X, 9, ChunkFilter("meta.text", "eq", "near"))
    assert [each.item.content for each in only] == ["near"]

    await other.delete_document(gone)
    assert [each.item.content for each in await store.search_chunks(X, 2)] == ["near", "far"]
    assert [each.item.content for each in await other.search_chunks(X, 2)] == ["near", "far"]
    await store.close()
    await other.close()


WRITER = """
import asyncio, sys
from toolcell.builtin import Chunk, Document, PostgresStore, ScheduledRun

async def main(address, schema, name, count):
    store, begun = PostgresStore(address, schema=schema, lock_timeout_s=120), 0
    for at in range(count):
        document = Document(content=f"{name} {at}")
        await store.store_document(document, [Chunk(document_id=document.id, content=name, embedding=[1.0, 0.0])])
        begun += await store.begin_run(ScheduledRun(action_id="a", due_at=at, owner=name))
    print(begun)
    await store.close()

asyncio.run(main(*sys.argv[1:4], int(sys.argv[4])))
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, text=True)


async def test_processes_that_write_at_once_lose_nothing_and_make_nothing_twice(
    postgres_server: str, schema: str
) -> None:
    count = 10
    writers = [started(postgres_server, schema, name, str(count)) for name in ("one", "two")]
    begun = [int(writer.communicate()[0]) for writer in writers]
    store = PostgresStore(postgres_server, schema=schema)

    assert sum(begun) == count
    assert len(await store.search_chunks(X, 1000)) == 2 * count
    assert len(await store.list_documents()) == 2 * count
    await store.close()
