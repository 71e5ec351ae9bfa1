"""Journal files that are torn, changed or no files, and disks that are full: no start of a call is lost."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from toolcell import ResumeError, SyncRuntime, ToolRegistry, UsageError
from toolcell.journal.directory import shared_key
from toolcell.journal.file import JournalFile, apply_record
from toolcell.journal.ledger import Journal
from toolcell.journal.marks import marks_directory
from toolcell.journal.records import RESUMED, RUN_RECORDS, LoadedRun, RunRecords, load_run
from toolcell.journal.store import JournalStore

pytestmark = pytest.mark.quick


def begun(path: Path, key: bytes = b"") -> tuple[Journal, JournalFile]:
    file = JournalFile(path, key=key)
    records = RunRecords(file)
    journal = Journal(path.stem, {"tools": {}}, records=records)
    records.write_header(journal)
    return journal, file


def call(journal: Journal, number: int) -> None:
    entry = journal.ask(f"call_{number}", "write", {"n": number})
    journal.start(entry)


def test_a_record_that_was_written_in_part_does_not_hide_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, file = begun(tmp_path / "run.journal")
    whole, left = os.write, [10, 0]

    def full(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        return whole(descriptor, data[: left.pop(0)])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            call(journal, 1)
    assert not journal.entries[0].is_started
    call(journal, 2)
    journal.answer(1, b"refused")
    file.close()

    found = load_run(JournalFile(tmp_path / "run.journal")).journal
    assert [(entry.number, entry.is_started, entry.answer) for entry in found.entries] == [
        (1, False, b"refused"),
        (2, True, None),
    ]


def test_a_journal_that_is_torn_at_its_end_is_read_and_one_that_was_changed_is_not(tmp_path: Path) -> None:
    path, key = tmp_path / "run.journal", shared_key(tmp_path)
    journal, file = begun(path, key)
    ends = [path.stat().st_size]
    for number in range(3):
        call(journal, number)
        ends.append(path.stat().st_size)
    file.close()
    data = path.read_bytes()

    for length in range(ends[0], len(data)):
        path.write_bytes(data[:length])
        file = JournalFile(path, key=key)
        assert len(load_run(file).journal.entries) == sum(end <= length for end in ends[1:])
        file.close()
    path.write_bytes(data[: ends[0] + 12] + b"?" + data[ends[0] + 13 :])
    store = JournalStore(tmp_path)
    store.open()
    with pytest.raises(ResumeError, match="is damaged"):
        store.take("run", ToolRegistry())


def test_a_length_that_was_changed_is_no_torn_end(tmp_path: Path) -> None:
    """What follows it says what was made: nothing of it may be dropped."""
    path = tmp_path / "run.journal"
    journal, file = begun(path)
    start = path.stat().st_size
    for number in range(3):
        call(journal, number)
    file.close()
    data = path.read_bytes()

    for at, bit in itertools.product((*range(8), *range(start, start + 8)), range(8)):
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        path.write_bytes(changed)
        file = JournalFile(path)
        with pytest.raises(ValueError, match="was changed"):
            file.read()
        file.close()
        assert path.read_bytes() == changed


def test_records_that_were_added_or_moved_without_the_key_are_refused(tmp_path: Path) -> None:
    """A decision that somebody added would make a call that nobody approved."""
    store, path = JournalStore(tmp_path), tmp_path / "run.journal"
    store.open()
    journal = Journal("run", {"tools": {}})
    store.write(journal)
    ends = [path.stat().st_size]
    for number in range(2):
        call(journal, number)
        ends.append(path.stat().st_size)
    store.put_down(journal)
    data = path.read_bytes()
    forger = JournalFile(path)  # without the key
    forger.write(RESUMED, "", [[1, "approve", None, "", ""]])
    forger.close()
    added = path.read_bytes()
    first, second = data[ends[0] : ends[1]], data[ends[1] :]

    for changed in (added, data[: ends[0]] + second + first, data + second):
        path.write_bytes(changed)
        with pytest.raises(ResumeError, match="is damaged"):
            opened(tmp_path).take("run", ToolRegistry())
    path.write_bytes(data)
    assert len(opened(tmp_path).take("run", ToolRegistry()).entries) == 2


def test_an_older_copy_of_a_journal_is_not_carried_on(tmp_path: Path) -> None:
    """Whatever is put back: the calls after it would be made a second time."""
    store = JournalStore(tmp_path)
    store.open()
    journal = Journal("run", {"tools": {}})
    store.write(journal)
    path = tmp_path / "run.journal"
    copies = [b"", path.read_bytes()]
    for number in range(3):
        call(journal, number)
        copies.append(path.read_bytes())
        journal.answer(number, b"answer")
        copies.append(path.read_bytes())
    store.put_down(journal)
    *older, newest = copies

    for copy in older:
        path.write_bytes(copy)
        with pytest.raises(ResumeError, match="an older copy was put back"):
            opened(tmp_path).take("run", ToolRegistry())
        assert path.read_bytes() == copy
        assert opened(tmp_path).interrupted() == []
    path.write_bytes(newest + b"torn")
    again = opened(tmp_path).take("run", ToolRegistry())
    assert len(again.entries) == 3 and path.read_bytes() == newest
    store.put_down(again)
    path.unlink()
    fresh = Journal("run", {"tools": {}})
    store.write(fresh)  # another run of this name
    store.put_down(fresh)
    assert opened(tmp_path).interrupted() == ["run"]


def test_a_journal_that_another_machine_went_on_with_is_carried_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path / "runs")
    journal = Journal("run", {"tools": {}})
    store.write(journal)
    call(journal, 1)
    store.put_down(journal)
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
        other = opened(tmp_path / "runs")
        journal = other.take("run", ToolRegistry())
        call(journal, 2)
        other.put_down(journal)

    assert len(opened(tmp_path / "runs").take("run", ToolRegistry()).entries) == 2


def test_a_state_directory_that_cannot_be_written_costs_only_the_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    store = opened(tmp_path / "runs")
    journal = Journal("run", {"tools": {}})
    store.write(journal)
    call(journal, 1)
    store.put_down(journal)

    assert store.interrupted() == ["run"]


def test_marks_are_removed_with_the_journals_that_nobody_used(tmp_path: Path) -> None:
    store = opened(tmp_path)
    journal = Journal("run", {"tools": {}})
    store.write(journal)
    store.put_down(journal)
    (mark,) = marks_directory(store.key).glob("*.mark")
    for path in (mark, tmp_path / "run.journal"):
        os.utime(path, (0, 0))
    opened(tmp_path)

    assert not mark.exists() and not (tmp_path / "run.journal").exists()


def opened(folder: Path) -> JournalStore:
    store = JournalStore(folder)
    store.open()
    return store


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o770, 0o701, 0o1777])
def test_a_directory_or_key_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    opened(tmp_path)
    tmp_path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 700 {tmp_path}"):
        opened(tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / "key").chmod(mode & 0o777)
    with pytest.raises(UsageError, match="chmod 600"):
        opened(tmp_path)
    (tmp_path / "key").chmod(0o600)
    opened(tmp_path)


def test_a_key_that_is_a_link_or_no_file_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(bytes(32))
    elsewhere.chmod(0o600)
    (tmp_path / "key").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="cannot be used"):
        opened(tmp_path)
    (tmp_path / "key").unlink()
    os.mkfifo(tmp_path / "key")
    with pytest.raises(UsageError, match="not a regular file"):
        opened(tmp_path)


def test_what_is_no_file_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "folder.journal").mkdir()
    os.mkfifo(tmp_path / "pipe.journal")
    (tmp_path / "link.journal").symlink_to(tmp_path / "nowhere")
    begun(tmp_path / "target")[1].close()
    (tmp_path / "linked.journal").symlink_to(tmp_path / "target")
    for path in tmp_path.glob("*.journal"):
        os.utime(path, (0, 0), follow_symlinks=False)
    store = JournalStore(tmp_path)
    store.open()

    assert store.interrupted() == [] and store.suspensions() == []
    for name in ("folder", "pipe", "linked"):
        with pytest.raises(ResumeError, match="cannot be opened"):
            store.take(name, {})


def test_a_copy_of_a_journal_is_not_resumed(tmp_path: Path) -> None:
    begun(tmp_path / "run.journal", shared_key(tmp_path))[1].close()
    (tmp_path / "copy.journal").write_bytes((tmp_path / "run.journal").read_bytes())
    store = JournalStore(tmp_path)
    store.open()

    assert store.interrupted() == ["run"]
    with pytest.raises(ResumeError, match="a copy of the journal of run run"):
        store.take("copy", {})


def test_a_directory_with_a_damaged_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").touch(mode=0o600)
    with pytest.raises(UsageError, match="its key has 0 bytes and not 32"):
        JournalStore(tmp_path).open()


def test_tokens_are_not_listed_before_their_key_was_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="open the Runtime first"):
        SyncRuntime(journal=tmp_path).suspended_runs()


def test_suspended_runs_in_memory_are_dropped_when_their_tokens_have_expired() -> None:
    store = JournalStore(None)
    for name, expires in (("old", 1.0), ("new", 1e12), ("last", 1e12)):
        journal = Journal(name, {"source_sha256": "", "tools": {}}, token=name, expires=expires)
        store.put_down(journal)

    assert [each.run_id for each in store.suspensions()] == ["new", "last"]


def test_runs_that_begin_with_one_id_at_once_have_journals_of_their_own(tmp_path: Path) -> None:
    memory = JournalStore(None)
    assert memory.make("same").id == "same" and memory.make("same").id != "same"

    stores = [JournalStore(tmp_path / "runs") for _ in range(3)]
    for store in stores:
        store.open()
    journals = [store.make("same") for store in stores]  # all of them find the id free
    for store, journal in zip(stores, journals, strict=True):
        journal.header = {"source_sha256": "", "tools": {}}
        store.write(journal)
        if store is not stores[0]:  # the second begins while the first is under way, the third after it
            stores[0].suspend(journals[0]) if store is stores[1] else stores[1].suspend(journals[1])
    stores[2].suspend(journals[2])

    assert journals[0].id == "same" and len({journal.id for journal in journals}) == 3
    assert len(stores[0].suspensions()) == 3


def test_a_run_that_was_lost_and_then_suspended_waits_and_has_not_ended() -> None:
    loaded = LoadedRun()
    for record in (["run", "r", {"origin": "code"}], ["ended", "lost"]):
        apply_record(RUN_RECORDS, loaded, record)
    assert loaded.is_ended
    apply_record(RUN_RECORDS, loaded, ["suspended", "token", 0.0, []])
    assert not loaded.is_ended
