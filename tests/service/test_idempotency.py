"""Idempotency keys: a request is carried out once, whatever happens to the process that carries it out."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from held import left_after
from service.clock import Clock
from toolcell.service.idempotency import Entry, IdempotencyStore, digest_of
from toolcell.support.sqlite import SqliteDatabase

pytestmark = pytest.mark.quick

ONE, OTHER = digest_of("POST", "/v1/execute", b"one"), digest_of("POST", "/v1/execute", b"other")


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[IdempotencyStore]:
    store = IdempotencyStore(tmp_path, keep_s=100, rows=4, answer_bytes=100, clock=clock)
    store.open()
    yield store
    store.close()


def test_the_same_request_is_answered_again_with_the_same_bytes(store: IdempotencyStore) -> None:
    assert store.begin("acme", "k", ONE, "run-1").state == "begun"
    assert store.begin("acme", "k", ONE, "run-2") == Entry("running", "run-1", True)
    store.finish("acme", "k", 200, "application/json", b'{"value": 1}')

    assert store.begin("acme", "k", ONE, "run-3") == Entry(
        "answered", "run-1", False, 200, "application/json", b'{"value": 1}'
    )


def test_a_key_belongs_to_one_request_and_one_tenant(store: IdempotencyStore) -> None:
    store.begin("acme", "k", ONE, "run-1")

    assert store.begin("acme", "k", OTHER, "run-2").state == "other request"
    assert store.begin("other", "k", ONE, "run-3").state == "begun"
    store.finish("acme", "k", 200, "text/plain", b"of acme")
    assert store.begin("acme", "k", OTHER, "run-2").state == "other request"
    assert store.begin("other", "k", ONE, "run-4") == Entry("running", "run-3", True)


def test_a_request_that_did_not_begin_frees_its_key(store: IdempotencyStore) -> None:
    store.begin("acme", "k", ONE, "run-1")
    store.release("acme", "k")
    assert store.begin("acme", "k", OTHER, "run-2").state == "begun"
    store.finish("acme", "k", 200, "text/plain", b"")
    store.release("acme", "k")
    assert store.begin("acme", "k", OTHER, "run-3").state == "answered"


def test_a_key_is_forgotten_after_its_time_and_not_before(store: IdempotencyStore, clock: Clock) -> None:
    store.begin("acme", "done", ONE, "run-1")
    store.finish("acme", "done", 200, "text/plain", b"x")
    store.begin("acme", "long", ONE, "run-2")

    clock.now += 100
    assert store.begin("acme", "done", ONE, "run-3").state == "answered"
    clock.now += 1
    assert store.begin("acme", "done", OTHER, "run-4").state == "begun"
    assert store.begin("acme", "long", ONE, "run-5") == Entry("running", "run-2", True), "it still runs"


def test_the_key_of_a_request_under_way_is_kept_however_long_that_takes(
    store: IdempotencyStore, tmp_path: Path, clock: Clock
) -> None:
    """Not when it is sent again, nor for want of room, nor by another process that begins."""
    for number in range(4):
        store.begin("acme", f"long-{number}", ONE, f"run-{number}")
    clock.now += 1000

    assert store.begin("acme", "new", ONE, "run-5").state == "full"
    others = [IdempotencyStore(tmp_path, keep_s=100, rows=4, clock=clock) for _ in range(2)]
    for other in others:
        other.open()
    for asked in (store, *others):
        for number in range(4):
            found = asked.begin("acme", f"long-{number}", ONE, "run-6")
            assert found == Entry("running", f"run-{number}", asked is store)
    for other in others:
        other.close()


@pytest.mark.slow
def test_a_store_that_is_closed_holds_nothing(tmp_path: Path) -> None:
    async def use() -> None:
        store = IdempotencyStore(tmp_path)
        store.open()
        store.begin("acme", "key", ONE, "run-1")
        store.release("acme", "key")
        store.close()

    assert not anyio.run(left_after, use)
    assert not [*(tmp_path / "lives").glob("[0-9a-f]*")]


def test_a_tenant_with_too_many_keys_is_refused_and_no_key_is_forgotten_early(
    store: IdempotencyStore, clock: Clock
) -> None:
    for number in range(4):
        assert store.begin("acme", f"k{number}", ONE, f"run-{number}").state == "begun"
        store.finish("acme", f"k{number}", 200, "text/plain", b"x")
        clock.now += 10

    assert store.begin("acme", "k4", ONE, "run-4") == Entry("full", retry_after_s=60.0)
    assert store.begin("other", "k4", ONE, "run-5").state == "begun"
    assert store.begin("acme", "k0", ONE, "run-6").state == "answered"
    clock.now += 60.5
    assert store.begin("acme", "k4", ONE, "run-7").state == "begun"


def test_the_oldest_answers_go_first_and_their_keys_stay(store: IdempotencyStore, clock: Clock) -> None:
    for number, size in enumerate((60, 30, 30)):
        store.begin("acme", f"k{number}", ONE, f"run-{number}")
        store.finish("acme", f"k{number}", 200, "text/plain", b"x" * size)
        clock.now += 1
    store.begin("acme", "large", ONE, "run-3")
    store.finish("acme", "large", 200, "text/plain", b"x" * 101)

    assert store.begin("acme", "k0", ONE, "run-9") == Entry("answered", "run-0", False, 200, "text/plain", None)
    assert store.begin("acme", "k1", ONE, "run-9") == Entry("answered", "run-1", False, 200, "text/plain", b"x" * 30)
    assert store.begin("acme", "large", ONE, "run-9") == Entry("answered", "run-3", False, 200, "text/plain", None)


@pytest.mark.slow
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["begin", "finish", "release", "wait"]), st.integers(0, 5), st.integers(0, 120))
    )
)
def test_the_counts_of_a_tenant_are_those_of_its_rows(
    steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    clock = Clock()
    store = IdempotencyStore(tmp_path_factory.mktemp("keys"), keep_s=100, rows=4, answer_bytes=100, clock=clock)
    store.open()
    for step, key, number in steps:
        if step == "begin":
            store.begin("acme", f"k{key}", ONE, "run")
        elif step == "finish":
            store.finish("acme", f"k{key}", 200, "text/plain", b"x" * number)
        elif step == "release":
            store.release("acme", f"k{key}")
        else:
            clock.now += number
        with store._database.reading() as rows:
            counted = rows.execute("SELECT count(*), coalesce(sum(length(body)), 0) FROM requests").fetchone()
            assert store._totals(rows, "acme") == counted
            assert counted[0] <= 4 and counted[1] <= 100
    store.close()


TABLES_OF_VERSION_1 = (
    "CREATE TABLE requests (tenant TEXT, key TEXT, sha256 BLOB NOT NULL, run TEXT NOT NULL, owner TEXT NOT NULL, "
    "began_at REAL NOT NULL, status INTEGER, type TEXT, body BLOB, PRIMARY KEY (tenant, key))",
    "CREATE TABLE totals (tenant TEXT PRIMARY KEY, keys INTEGER NOT NULL, bytes INTEGER NOT NULL)",
)


def test_a_store_that_an_earlier_version_made_keeps_its_keys_and_counts_them(tmp_path: Path, clock: Clock) -> None:
    earlier = SqliteDatabase(tmp_path / "requests.sqlite", [TABLES_OF_VERSION_1], application_id=0x746C6972)
    with earlier.writing() as rows:
        given = [("acme", f"k{n}", ONE, f"run-{n}", "dead", clock.now, 200, "text/plain", b"x" * 10) for n in range(3)]
        rows.executemany("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", given)
    earlier.close()
    store = IdempotencyStore(tmp_path, keep_s=100, rows=4, clock=clock)
    store.open()

    assert store.begin("acme", "k1", ONE, "run-9") == Entry("answered", "run-1", False, 200, "text/plain", b"x" * 10)
    assert store.begin("acme", "new", ONE, "run-9").state == "begun"
    assert store.begin("acme", "one more", ONE, "run-9").state == "full"
    store.close()


OTHER_PROCESS = """
import pathlib, sys
from toolcell.service.idempotency import IdempotencyStore
store = IdempotencyStore(pathlib.Path(sys.argv[1]))
store.open()
print(store.begin("acme", "k", bytes.fromhex(sys.argv[2]), "run-1").state, flush=True)
sys.stdin.read()
"""


def test_a_key_whose_process_was_killed_is_never_begun_again(tmp_path: Path) -> None:
    store = IdempotencyStore(tmp_path)
    store.open()
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path), ONE.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "begun\n"
        assert store.begin("acme", "k", ONE, "run-2") == Entry("running", "run-1", False)
        other.kill()
    assert store.begin("acme", "k", ONE, "run-3") == Entry("interrupted", "run-1")
    store.finish("acme", "k", 200, "text/plain", b"not mine to answer")
    store.release("acme", "k")
    store.close()

    again = IdempotencyStore(tmp_path)
    again.open()
    assert again.begin("acme", "k", ONE, "run-4") == Entry("interrupted", "run-1")
    assert again.begin("acme", "k", OTHER, "run-5").state == "other request"
    assert len(list((tmp_path / "lives").glob("[0-9a-f]*"))) == 1, "those of dead processes are removed"
    again.close()


def test_of_many_that_send_a_request_at_once_one_carries_it_out(tmp_path: Path) -> None:
    stores = [IdempotencyStore(tmp_path) for _ in range(4)]
    for each in stores:
        each.open()
    begun, barrier = list[str](), threading.Barrier(16)

    def send(store: IdempotencyStore, run: str) -> None:
        barrier.wait()
        if store.begin("acme", "k", ONE, run).state == "begun":
            begun.append(run)

    threads = [threading.Thread(target=send, args=(stores[n % 4], f"run-{n}")) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 1
    for each in stores:
        each.close()


def test_parts_of_a_request_are_told_apart() -> None:
    assert digest_of("ab", "c") != digest_of("a", "bc")
    assert digest_of("ab", b"c") == digest_of(b"ab", "c")
