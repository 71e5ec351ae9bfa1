"""Idempotency keys: a request is carried out once, whatever happens to the process that carries it out."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from held import left_after
from record_places import drop, record_url, rows
from service.clock import Clock
from toolcell.audit import AuditLog, RecordConfig
from toolcell.audit import store as audit_store
from toolcell.journal import request_keys
from toolcell.journal.database import JournalDatabase
from toolcell.journal.request_keys import Entry, RequestKeys
from toolcell.service.idempotency import digest_of

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]

ONE, OTHER = digest_of("POST", "/v1/execute", b"one"), digest_of("POST", "/v1/execute", b"other")
CONFIG = RecordConfig(continue_bytes=4000)
"""Answers may take a quarter of it."""

Place = Path | str


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "sqlite":
        yield tmp_path / "runs.db"
        return
    url = record_url(request.getfixturevalue("postgres_server"))
    yield url
    drop(url)


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.now = time.time()
    return clock


@contextmanager
def opened(place: Place, config: RecordConfig = CONFIG, **options: Any) -> Iterator[RequestKeys]:
    """The keys of one process of a service."""
    with AuditLog(place, config=config) as log, closing(RequestKeys(log, "ann", **options)) as keys:
        yield keys


@pytest.fixture
def keys(place: Place, clock: Clock) -> Iterator[RequestKeys]:
    with opened(place, keep_s=100, rows=4, clock=clock) as keys:
        yield keys


def done(keys: RequestKeys, key: str, answer: bytes = b"", status: int = 200) -> None:
    keys.finish(key, (status, "text/plain", answer))


def test_the_same_request_is_answered_again_with_the_same_bytes(keys: RequestKeys) -> None:
    assert keys.begin("k", ONE, "run-1").state == "begun"
    assert keys.begin("k", ONE, "run-2") == Entry("running", "run-1")
    done(keys, "k", b"\x00\xff1", status=201)

    for _ in range(2):
        assert keys.begin("k", ONE, "run-3") == Entry("answered", "run-1", 201, "text/plain", b"\x00\xff1")


def test_a_key_belongs_to_one_request(keys: RequestKeys) -> None:
    keys.begin("k", ONE, "run-1")
    assert keys.begin("k", OTHER, "run-2").state == "other request"
    done(keys, "k")
    assert keys.begin("k", OTHER, "run-2").state == "other request"


def test_a_request_that_did_not_begin_frees_its_key(keys: RequestKeys) -> None:
    for number in range(6):  # more than there may be keys
        assert keys.begin("k", ONE, f"run-{number}").state == "begun"
        keys.finish("k", None)
    assert keys.begin("k", OTHER, "run-9").state == "begun"


def test_a_key_is_forgotten_after_its_time_and_not_before(keys: RequestKeys, clock: Clock) -> None:
    keys.begin("done", ONE, "run-1")
    done(keys, "done", b"x")
    keys.begin("long", ONE, "run-2")

    clock.now += 95
    assert keys.begin("done", ONE, "run-3").state == "answered"
    clock.now += 65
    assert keys.begin("done", OTHER, "run-4").state == "begun"
    assert keys.begin("long", ONE, "run-5") == Entry("running", "run-2"), "it still runs"


def test_what_is_too_old_is_removed_when_a_key_is_used_and_not_while_the_record_is_opened(
    keys: RequestKeys, place: Place, clock: Clock
) -> None:
    keys.begin("a", ONE, "run-1")
    done(keys, "a", b"x" * 50)
    clock.now += 160
    keys.begin("b", ONE, "run-2")
    assert rows(place, "SELECT DISTINCT name FROM kept WHERE kind = 'request'") == [("ann b",)]
    done(keys, "b")
    with opened(place) as others:
        assert others.begin("b", ONE, "run-3").state == "answered", "others keep it for longer"
    config = RecordConfig(continue_s=1e-3, token_s=1e-3)
    with AuditLog(place, config=config) as log, closing(JournalDatabase(log)) as database:
        database.open()  # in the event loop, and there may be very many
        assert rows(place, "SELECT DISTINCT name FROM kept WHERE kind = 'request'") == [("ann b",)]
    with opened(place, keep_s=1e-3) as others:
        others.begin("c", ONE, "run-4")
        assert rows(place, "SELECT DISTINCT name FROM kept WHERE kind = 'request'") == [("ann c",)]


def test_an_old_key_whose_process_died_is_removed_and_one_under_way_is_not(place: Place, clock: Clock) -> None:
    with opened(place) as killed:
        killed.begin("died", ONE, "run-1")
        killed.end("died")
    with opened(place, keep_s=100, clock=clock) as keys:
        assert keys.begin("died", ONE, "run-2") == Entry("interrupted", "run-1")
        keys.begin("long", ONE, "run-3")
        clock.now += 200
        keys.begin("new", ONE, "run-4")
        found = rows(place, "SELECT name FROM kept WHERE kind = 'request' ORDER BY name")
        assert found == [("ann long",), ("ann new",)]


def test_tenants_that_have_one_record_have_keys_of_their_own(place: Place) -> None:
    with (
        AuditLog(place, config=CONFIG) as log,
        closing(RequestKeys(log, "ann", rows=1)) as ann,
        closing(RequestKeys(log, "bob", rows=1)) as bob,
    ):
        for keys, run in ((ann, "run-1"), (bob, "run-2")):
            assert keys.begin("k", ONE, run) == Entry("begun", run)
            done(keys, "k", run.encode())
        for keys, run in ((ann, "run-1"), (bob, "run-2")):
            assert keys.begin("k", ONE, "run-3") == Entry("answered", run, 200, "text/plain", run.encode())


def test_a_record_that_keeps_nothing_keeps_which_keys_were_used(place: Place) -> None:
    with opened(place, RecordConfig(continue_bytes=0)) as keys:
        for number, answer in enumerate((b"", b"x")):
            assert keys.begin(f"k{number}", ONE, "run-1").state == "begun"
            done(keys, f"k{number}", answer)
            assert keys.begin(f"k{number}", ONE, "run-2") == Entry("answered", "run-1", 200, "text/plain")


def test_an_answer_is_written_at_once_and_never_in_part(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked between its status and its bytes would be told that it is not kept."""
    with opened(place) as other:
        found = list[Entry]()

        class Looking(JournalDatabase):
            def check_room(self, size: int) -> None:
                self.settle()
                found.append(other.begin("k", ONE, "run-2"))
                super().check_room(size)

        monkeypatch.setattr(request_keys, "JournalDatabase", Looking)
        with opened(place) as keys:
            keys.begin("k", ONE, "run-1")
            done(keys, "k", b"x")
            assert found == [Entry("running", "run-1")]
            assert other.begin("k", ONE, "run-2") == Entry("answered", "run-1", 200, "text/plain", b"x")


def test_keys_are_counted_rarely_and_nobody_waits_for_that(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be very many."""
    looks = list[int]()

    class Looked(JournalDatabase):
        @contextmanager
        def reading_alone(self) -> Iterator[Any]:
            looks.append(len(looks))
            with super().reading_alone() as db:
                self.check_room(1)
                if len(looks) > 2:  # the first one must be waited for
                    assert keys.begin(f"meanwhile-{len(looks)}", ONE, "run-2").state == "begun"
                yield db

    monkeypatch.setattr(request_keys, "JournalDatabase", Looked)
    with opened(place, clock=clock, rows=250) as keys:
        for number in range(120):
            assert keys.begin(f"k{number}", ONE, "run-1").state == "begun"
            done(keys, f"k{number}", b"x" * 100 if number < 11 else b"")  # once more than there is room for
            clock.now += 1
    assert 0 < len(looks) <= 6


def test_the_key_of_a_request_under_way_is_kept_however_long_that_takes(
    keys: RequestKeys, place: Place, clock: Clock
) -> None:
    """Not when it is sent again, nor for want of room, nor by another process that begins."""
    for number in range(4):
        keys.begin(f"long-{number}", ONE, f"run-{number}")
    clock.now += 1000

    assert keys.begin("new", ONE, "run-5").state == "full"
    with opened(place, keep_s=100, rows=4, clock=clock) as other:
        assert other.begin("new", ONE, "run-5").state == "full"
        for asked in (keys, other):
            for number in range(4):
                assert asked.begin(f"long-{number}", ONE, "run-6") == Entry("running", f"run-{number}")


@pytest.mark.slow
def test_a_record_with_keys_that_is_closed_holds_nothing(tmp_path: Path) -> None:
    async def use() -> None:
        with opened(tmp_path / "runs.db") as keys:
            keys.begin("key", ONE, "run-1")
            keys.begin("other", ONE, "run-1")
            keys.finish("key", None)

    assert not anyio.run(left_after, use)


def test_a_tenant_with_too_many_keys_is_refused_and_no_key_is_forgotten_early(keys: RequestKeys, clock: Clock) -> None:
    for number in range(4):
        assert keys.begin(f"k{number}", ONE, f"run-{number}").state == "begun"
        done(keys, f"k{number}")
        clock.now += 10

    entry = keys.begin("k4", ONE, "run-4")
    assert entry.state == "full" and 50 < entry.retry_after_s < 90
    assert keys.begin("k0", ONE, "run-6").state == "answered"
    clock.now += entry.retry_after_s + 30
    assert keys.begin("k4", ONE, "run-7").state == "begun"


def test_the_oldest_answers_go_first_and_their_keys_stay(keys: RequestKeys, place: Place, clock: Clock) -> None:
    with opened(place) as other:  # what other processes keep counts too
        for number, size in enumerate((600, 300, 300)):
            by = keys if number else other
            by.begin(f"k{number}", ONE, f"run-{number}")
            done(by, f"k{number}", b"x" * size)
    clock.now += 2
    keys.begin("large", ONE, "run-3")
    done(keys, "large", b"x" * 1001)

    assert keys.begin("k0", ONE, "run-9") == Entry("answered", "run-0", 200, "text/plain", None)
    assert keys.begin("k1", ONE, "run-9") == Entry("answered", "run-1", 200, "text/plain", b"x" * 300)
    assert keys.begin("large", ONE, "run-9") == Entry("answered", "run-3", 200, "text/plain", None)


OTHER_PROCESS = """
import sys
from toolcell.audit import AuditLog
from toolcell.journal.request_keys import RequestKeys
keys = RequestKeys(AuditLog(sys.argv[1]).open(), "ann")
print(keys.begin("k", bytes.fromhex(sys.argv[2]), "run-1").state, flush=True)
sys.stdin.read()
"""


def test_a_key_whose_process_was_killed_is_never_begun_again(place: Place) -> None:
    """Whoever asks may be on another host, where they share a PostgreSQL database."""
    with opened(place) as keys:
        command = [sys.executable, "-c", OTHER_PROCESS, os.fspath(place), ONE.hex()]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "begun\n"
            assert keys.begin("k", ONE, "run-2") == Entry("running", "run-1")
            other.kill()
        until = time.monotonic() + 60
        while (entry := keys.begin("k", ONE, "run-3")).state == "running" and time.monotonic() < until:
            pass  # a server needs a moment to see it
        assert entry == Entry("interrupted", "run-1")
    with opened(place) as again:
        assert again.begin("k", ONE, "run-4") == Entry("interrupted", "run-1")
        assert again.begin("k", OTHER, "run-5").state == "other request"


def test_of_many_that_send_a_request_at_once_one_carries_it_out(place: Place) -> None:
    with opened(place) as first, opened(place) as second, opened(place) as third:
        begun, barrier = list[str](), threading.Barrier(15)

        def send(keys: RequestKeys, run: str) -> None:
            barrier.wait()
            if keys.begin("k", ONE, run).state == "begun":
                begun.append(run)

        threads = [threading.Thread(target=send, args=((first, second, third)[n % 3], f"run-{n}")) for n in range(15)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(begun) == 1


def test_a_key_that_could_not_be_noted_is_not_noted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_store, "LOCK_S", 0.05)
    path = tmp_path / "runs.db"
    with opened(path) as keys:
        keys.begin("other", ONE, "run-0")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(OSError, match="another process has locked it"):
                keys.begin("k", ONE, "run-1")
        assert keys.begin("k", OTHER, "run-2").state == "begun"


def test_keys_take_no_room_of_runs_and_their_answers_are_named_where_there_is_none(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "runs.db", config=CONFIG) as log, closing(RequestKeys(log, "ann")) as keys:
        for number in range(100):
            keys.begin(f"k{number}", ONE, "run-1")
            done(keys, f"k{number}")
        with closing(JournalDatabase(log)) as counted_again:
            counted_again.check_room(2000)
            with pytest.raises(OSError, match="answers to idempotency keys, and there may be 4000"):
                counted_again.check_room(4000)


def test_parts_of_a_request_are_told_apart() -> None:
    assert digest_of("ab", "c") != digest_of("a", "bc")
    assert digest_of("ab", b"c") == digest_of(b"ab", "c")
