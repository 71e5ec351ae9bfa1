"""What runs need to go on is damaged, full, open elsewhere or old: no start of a call is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import journals
from toolcell import AuditLog, RecordConfig, ResumeError, SyncRuntime, ToolRegistry, UsageError
from toolcell.control.map_runs import MAP_RECORDS
from toolcell.journal.database import RUN, Damaged, OpenJournal, Table, UnderWay, apply_record
from toolcell.journal.ledger import RUN_RECORDS, Journal
from toolcell.journal.store import JournalStore
from toolcell.sessions.journal import SESSION_RECORDS
from toolcell.support.packing import pack

pytestmark = pytest.mark.quick

TABLES = {"run": RUN_RECORDS, "session": SESSION_RECORDS, "map": MAP_RECORDS}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., JournalStore]]:
    """Opens stores of one record, each as in a process of its own."""
    logs = []

    def make(**options: Any) -> JournalStore:
        logs.append(AuditLog(tmp_path / "runs.db", config=RecordConfig(**options)).open())
        store = JournalStore(logs[-1])
        store.open()
        return store

    yield make
    for log in logs:
        log.close()


def begun(store: JournalStore, name: str = "run") -> Journal:
    journal = Journal(name, {"source_sha256": "", "tools": {}})
    store.write(journal)
    return journal


def put_down(store: JournalStore, journal: Journal) -> None:
    store.put_down(journal)
    store.database.settle()


def call(journal: Journal, number: int, given: Any = None) -> None:
    journal.start(journal.ask(f"call_{number}", "write", {"n": given or number}))


def test_a_call_that_could_not_be_recorded_is_not_made_and_does_not_hide_the_next(
    opened: Callable[..., JournalStore],
) -> None:
    store = opened(continue_bytes=256 << 10)
    journal = begun(store)
    with pytest.raises(OSError, match="there may be 262144"):
        call(journal, 1, "x" * 300_000)
    assert not journal.entries[1].is_started
    call(journal, 2)
    put_down(store, journal)

    entries = opened().take("run", ToolRegistry()).entries.values()
    assert [(entry.number, entry.is_started, entry.answer) for entry in entries] == [(2, True, None)]


def test_a_record_that_was_changed_is_damage_wherever_it_is(
    opened: Callable[..., JournalStore], tmp_path: Path
) -> None:
    store = opened()
    journal = begun(store)
    call(journal, 1)
    journal.answer(1, b"answer")
    put_down(store, journal)
    kept = journals.rows(tmp_path, "SELECT n, body FROM kept")
    assert len(kept) == 3

    for n, body in kept:
        for changed in (None, 7, "text", b"", b"\xc1", body[:-1], b"\x92\xa7strange\x01", b"\x91\xa3run"):
            journals.rows(tmp_path, "UPDATE kept SET body = ? WHERE n = ?", changed, n)
            with pytest.raises(ResumeError, match="is damaged"):
                store.take("run", ToolRegistry())
            assert store.interrupted() == []
        journals.rows(tmp_path, "UPDATE kept SET body = ? WHERE n = ?", body, n)
    journals.rows(tmp_path, "DELETE FROM kept WHERE n = 1")
    with pytest.raises(ResumeError, match="is damaged"):
        store.take("run", ToolRegistry())


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_record_of_an_unknown_kind_or_with_other_fields_is_refused(
    opened: Callable[..., JournalStore], table: Table
) -> None:
    strange: list[list[Any]] = [["strange"], [7], [["run"]], *([name, *[None] * 9] for name in table)]
    for number, record in enumerate(strange):
        with pytest.raises(ValueError, match="a record"):
            apply_record(table, None, record)
        database = opened().database
        database.write("run", f"{number}", 0, [pack(record)])
        database.settle()
        journal = OpenJournal(database, "run", f"{number}")
        with pytest.raises(Damaged, match="a record"):
            database.load("run", f"{number}", table, None)
        journal.close()


TAKE = """
import sys
from toolcell import AuditLog, ToolRegistry
from toolcell.journal import JournalStore

with AuditLog(sys.argv[1]) as log:
    store = JournalStore(log)
    store.open()
    store.take("run", ToolRegistry())
"""


def test_a_journal_is_open_once_in_one_process_or_many(opened: Callable[..., JournalStore], tmp_path: Path) -> None:
    first, second = opened(), opened()
    journal = begun(first)
    call(journal, 1)
    for store in (first, second):
        with pytest.raises(ResumeError, match="is under way"):
            store.take("run", ToolRegistry())
        assert store.interrupted() == []
    done = subprocess.run(
        [sys.executable, "-c", TAKE, str(tmp_path / "runs.db")], capture_output=True, text=True, check=False
    )
    assert "run run is under way" in done.stderr
    put_down(first, journal)
    assert [store.interrupted() for store in (first, second)] == [["run"]] * 2


def test_what_is_old_is_removed_and_an_item_goes_with_its_map(
    opened: Callable[..., JournalStore], tmp_path: Path
) -> None:
    store = opened()
    for name in ("run", "m-1", "open"):
        journal = begun(store, name)
        call(journal, 1)
        store.put_down(journal)
    for kind, name in (("map", "m"), ("session", "s"), ("state", "s.0"), ("state", "gone.0"), ("used", "t")):
        store.database.write(kind, name, 0, [b""])
    store.database.settle()
    journals.make_old(tmp_path)
    under_way = store.take("open", ToolRegistry())
    store.database.write("map", "m", 1, [b""])
    store.database.write("session", "s", 1, [b""])
    store.database.settle()
    opened().database.settle()

    kept = journals.rows(tmp_path, "SELECT DISTINCT kind, name FROM kept ORDER BY kind, name")
    assert kept == [("map", "m"), ("run", "m-1"), ("run", "open"), ("session", "s"), ("state", "s.0")]
    put_down(store, under_way)
    journals.make_old(tmp_path)
    opened().database.settle()
    assert journals.rows(tmp_path, "SELECT count(*) FROM kept") == [(0,)]


def test_a_used_token_is_remembered_until_it_has_expired(opened: Callable[..., JournalStore], tmp_path: Path) -> None:
    assert opened().database.use_once("t") and not opened().database.use_once("t")
    journals.rows(tmp_path, "UPDATE kept SET at = at - ?", 3600 * 10**9)
    assert not opened(continue_s=60, token_s=86_400).database.use_once("t")
    assert opened(continue_s=60, token_s=60).database.use_once("t")


def test_tokens_are_not_listed_before_their_key_was_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="open the Runtime first"):
        SyncRuntime(record=tmp_path / "runs.db").suspended_runs()


def test_suspended_runs_in_memory_are_dropped_when_their_tokens_have_expired() -> None:
    store = JournalStore(None)
    for name, expires in (("old", 1.0), ("new", 1e12), ("last", 1e12)):
        journal = Journal(name, {"source_sha256": "", "tools": {}}, token=name, expires=expires)
        store.put_down(journal)

    assert [each.run_id for each in store.suspensions()] == ["new", "last"]


def test_runs_that_begin_with_one_id_at_once_have_journals_of_their_own(opened: Callable[..., JournalStore]) -> None:
    memory = JournalStore(None)
    assert memory.make("same").id == "same" and memory.make("same").id != "same"

    stores = [opened() for _ in range(3)]
    made = [store.make("same") for store in stores]  # all of them find the id free
    for store, journal in zip(stores, made, strict=True):
        journal.header = {"source_sha256": "", "tools": {}}
        store.write(journal)
        if store is not stores[0]:  # the second begins while the first is under way, the third after it
            stores[0].suspend(made[0]) if store is stores[1] else stores[1].suspend(made[1])
    stores[2].suspend(made[2])
    for store in stores:
        store.database.settle()

    assert made[0].id == "same" and len({journal.id for journal in made}) == 3
    assert len(stores[0].suspensions()) == 3


def test_a_run_that_was_lost_and_then_suspended_waits_and_has_not_ended() -> None:
    loaded = Journal("")
    for record in (["run", "r", {"origin": "code"}], ["ended", "lost"]):
        apply_record(RUN_RECORDS, loaded, record)
    assert loaded.ended
    apply_record(RUN_RECORDS, loaded, ["suspended", "token", 0.0, []])
    assert not loaded.ended


def test_a_journal_whose_name_nobody_knows_is_open_from_its_first_record_to_its_end(
    opened: Callable[..., JournalStore],
) -> None:
    database = opened().database
    journal = OpenJournal(database, RUN, "new", is_unknown=True)
    assert not database.is_open(RUN, "new")
    journal.write("run", "new", {})
    assert database.is_open(RUN, "new")
    with pytest.raises(UnderWay):
        OpenJournal(database, RUN, "new")
    journal.close()
    assert not database.is_open(RUN, "new")
    with pytest.raises(OSError, match="it is closed"):
        journal.write("run", "new", {})
