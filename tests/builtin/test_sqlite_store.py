"""The file of a `SqliteStore`: who owns it, what is refused, several processes, older and newer versions."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rows import each_row
from toolcell.builtin import Chunk, Document, HashEmbeddings, Remember, SqliteStore
from toolcell.builtin.stores import sqlite
from toolcell.errors import StoreError, UsageError
from toolcell.tools import ToolRegistry

pytestmark = pytest.mark.anyio

X = [1.0, 0.0]


async def fill(store: SqliteStore, text: str) -> str:
    document = Document(content=text)
    return await store.store_document(document, [Chunk(document_id=document.id, content=text, embedding=X)])


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def test_what_is_stored_is_there_after_opening_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    id_ = await fill(store, "kept")
    await store.close()
    assert stat.S_IMODE(os.stat(tmp_path / "s.db").st_mode) == 0o600

    again = SqliteStore(tmp_path / "s.db")
    assert [each.id for each in await again.list_documents()] == [id_]
    assert [each.item.content for each in await again.search_chunks(X, 5)] == ["kept"]
    await again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["s.db"]


# Files that are not ours


def foreign_database(path: Path, application_id: int, wal: bool = False) -> None:
    connection = sqlite3.connect(path)
    if wal:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA application_id = {application_id}")
    connection.execute("CREATE TABLE chunks (a)")
    connection.execute("INSERT INTO chunks VALUES (1)")
    connection.commit()
    connection.close()


@each_row("kind", ["text", "short", "other id", "no id", "no id in WAL"])
async def test_a_foreign_file_is_refused_and_not_changed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    match kind:
        case "text":
            path.write_text("my diary " * 100)
        case "short":
            path.write_bytes(b"x")
        case "other id":
            foreign_database(path, 0x1234)
        case _:
            foreign_database(path, 0, wal=kind.endswith("WAL"))
    path.chmod(0o600)
    before = digest(path)
    store = SqliteStore(path)

    for _ in (1, 2):
        with pytest.raises(StoreError, match=r"(another database|a file of another kind).*othing was changed"):
            await store.init()
    await store.close()
    assert digest(path) == before
    assert [each.name for each in tmp_path.iterdir()] == ["foreign"]


async def test_a_store_of_a_newer_version_is_refused_and_not_changed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    await fill(store, "kept")
    await store.close()
    with sqlite3.connect(tmp_path / "s.db") as connection:
        (known,) = connection.execute("PRAGMA user_version").fetchone()
        connection.execute(f"PRAGMA user_version = {known + 1}")
    connection.close()

    said = f"has version {known + 1}, and this toolcell knows {known}; use a newer toolcell"
    with pytest.raises(StoreError, match=said):
        await SqliteStore(tmp_path / "s.db").init()


async def test_an_older_store_is_brought_up_to_date_and_a_failed_step_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "s.db")
    await fill(store, "kept")
    await store.close()
    steps = (*sqlite.MIGRATIONS, ("CREATE TABLE later (a)", "NONSENSE"))
    monkeypatch.setattr(sqlite, "MIGRATIONS", steps)
    with pytest.raises(StoreError, match="NONSENSE"):
        await SqliteStore(tmp_path / "s.db").init()

    monkeypatch.setattr(sqlite, "MIGRATIONS", (*steps[:-1], ("CREATE TABLE later (a)",)))
    newer = SqliteStore(tmp_path / "s.db")
    assert len(await newer.list_documents()) == 1
    await newer.close()
    connection = sqlite3.connect(tmp_path / "s.db")
    assert connection.execute("PRAGMA user_version").fetchone() == (len(steps),)
    assert connection.execute("SELECT count(*) FROM later").fetchone() == (0,)
    connection.close()


# A machine that does not help


async def test_a_path_that_cannot_be_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be opened: File exists"):
        await SqliteStore(tmp_path / "file" / "s.db").init()
    with pytest.raises(StoreError, match="is not a regular file"):
        await SqliteStore(tmp_path).init()
    with pytest.raises(UsageError):
        SqliteStore(3)


async def test_a_locked_store_is_an_error_that_a_retry_may_mend(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db", lock_timeout_s=0.01)
    await fill(store, "one")
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    with pytest.raises(StoreError, match=r"locked by another process, for more than 0\.01 s") as caught:
        await fill(store, "two")
    assert caught.value.retryable
    assert len(await store.search_chunks(X, 5)) == 1  # reading goes on
    result = await ToolRegistry([Remember(store, HashEmbeddings(8))]).dispatch("remember", {"content": "x"})
    assert result.is_error

    other.execute("ROLLBACK")
    other.close()
    await fill(store, "two")
    assert len(await store.list_documents()) == 2
    await store.close()


async def test_a_model_reads_that_a_store_is_in_use_and_not_where_it_is(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db", lock_timeout_s=0.01)
    await store.use_embeddings("hash-8", 8)
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    result = await ToolRegistry([Remember(store, HashEmbeddings(8))]).dispatch("remember", {"content": "x"})
    other.close()
    await store.close()

    assert result.error is not None
    assert (result.error.code, result.error.message, result.error.retryable) == (
        "unavailable",
        "the store is in use",
        True,
    )
    assert str(tmp_path) not in result.text


async def test_a_full_disk_leaves_what_was_stored(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    await fill(store, "one")
    size = 4096 * 40
    await store._database.write(lambda transaction: transaction.run(f"PRAGMA max_page_count = {size // 4096}"))
    with pytest.raises(StoreError, match="the disk is full"):
        await fill(store, "x" * size * 2)
    assert len(await store.list_documents()) == 1
    assert len(await store.search_chunks(X, 5)) == 1
    await store.close()


async def test_a_damaged_store_is_a_clear_error(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    await fill(store, "one")
    await store.close()
    with (tmp_path / "s.db").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * ((tmp_path / "s.db").stat().st_size - 4096))
    with pytest.raises(StoreError, match="damaged"):
        await SqliteStore(tmp_path / "s.db").list_documents()


# Several at once

WRITER = """
import asyncio, sys
from toolcell.builtin import Chunk, Document, ScheduledRun, SqliteStore

async def main(path, name, count):
    store, begun = SqliteStore(path, lock_timeout_s=120), 0
    for at in range(count):
        document = Document(content=f"{name} {at}")
        chunk = Chunk(document_id=document.id, content=f"{name} {at}", embedding=[1.0, at / count])
        await store.store_document(document, [chunk])
        both = Document(content=f"both {at}")
        await store.store_document(both, [Chunk(document_id=both.id, content="both", embedding=[0.0, 1.0])])
        begun += await store.begin_run(ScheduledRun(action_id="a", due_at=at, owner=name))
    print(begun)
    await store.close()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


async def test_processes_that_write_at_once_lose_nothing_and_make_nothing_twice(tmp_path: Path) -> None:
    path, count = tmp_path / "s.db", 15  # none of them has made the file: they also race for that
    watcher = SqliteStore(path, lock_timeout_s=120)
    writers = [started(WRITER, str(path), name, str(count)) for name in ("one", "two")]
    begun = [int(writer.communicate()[0]) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]

    assert sum(begun) == count
    assert len(await watcher.list_documents(1000)) == 3 * count
    found = {each.item.content for each in await watcher.search_chunks(X, 1000)}
    assert found == {f"{name} {at}" for name in ("one", "two") for at in range(count)} | {"both"}
    assert len(await watcher.search_chunks_keyword("both", 1000)) == count
    await watcher.close()


async def test_a_store_finds_at_once_what_another_one_has_stored_and_deleted(tmp_path: Path) -> None:
    one, other = SqliteStore(tmp_path / "s.db"), SqliteStore(tmp_path / "s.db")
    first = await fill(one, "first")
    for store in (one, other):
        assert [each.item.content for each in await store.search_chunks(X, 5)] == ["first"]
    await fill(other, "second")
    await other.delete_document(first)
    assert [each.item.content for each in await one.search_chunks(X, 1)] == ["second"]
    await one.close()
    await other.close()


def started(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)


KILLED = """
import os, signal, sys, asyncio
from toolcell.builtin import Document, Chunk, SqliteStore

async def main(path):
    store = SqliteStore(path)
    await store.store_document(Document(content="whole"), [])
    def work(transaction):
        transaction.run("DELETE FROM documents")
        os.kill(os.getpid(), signal.SIGKILL)
    await store._database.write(work)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_process_that_is_killed_in_a_change_leaves_the_state_before_it(tmp_path: Path) -> None:
    killed = started(KILLED, str(tmp_path / "s.db"))
    killed.communicate()
    assert killed.returncode == -9
    store = SqliteStore(tmp_path / "s.db")
    assert [each.content for each in await store.list_documents()] == ["whole"]
    await store.close()


async def test_a_store_in_memory_that_is_opened_again_is_a_new_one() -> None:
    store = SqliteStore(":memory:")
    for text in ("one", "two", "three"):
        await fill(store, text)
    assert len(await store.search_chunks(X, 9)) == 3
    await store.close()
    document = Document(content="four")
    await store.store_document(document, [Chunk(document_id=document.id, content="four", embedding=[0.0, 1.0])])
    assert [(each.item.content, each.score) for each in await store.search_chunks([0.0, 1.0], 9)] == [("four", 1.0)]
    await store.close()


async def test_no_descriptor_outlives_a_store(tmp_path: Path) -> None:
    def ours() -> list[str]:
        links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
        return [link for link in links if link.startswith(str(tmp_path))]

    store = SqliteStore(tmp_path / "s.db")
    await fill(store, "one")
    assert ours()
    await store.close()
    assert ours() == []
    (tmp_path / "text").write_text("no database")
    with pytest.raises(StoreError):
        await SqliteStore(tmp_path / "text").init()
    assert ours() == []


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")
