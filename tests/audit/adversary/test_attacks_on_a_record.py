"""What somebody who can write the file tries, with SQL, with another SQLite program, by copying pages. They have no key.

The rows of `ATTACKS` are those of the table "Findings" in docs/audit-evidence.md.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from audit.ledger import Ledger
from toolcell.audit import HmacKey, Index, Trust, records
from toolcell.audit.chain_check import (
    BAD_PRUNE,
    BAD_SIGNATURE,
    BROKEN_LINK,
    CUT_OFF,
    EDITED,
    MAX_FINDINGS,
    MISSING,
    NOT_AN_EVENT,
    UNKNOWN_KEY,
)
from toolcell.audit.records import event_digest, event_of, hash_digest
from toolcell.audit.signatures import Head, default_heads_dir
from toolcell.audit.sqlite_record import PAGE_BYTES
from toolcell.audit.store import EVENT_COLUMNS
from toolcell.audit.verification import BAD_BLOB, BAD_HEAD, CHAIN_MISSING, NOT_CLOSED, VIEW_DIFFERS, WRONG_LOG
from toolcell.errors import AuditError
from toolcell.support.packing import pack_fields
from toolcell.tools import RunContext

pytestmark = pytest.mark.quick


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    """Two chains of three runs, closed."""
    for _ in range(2):
        ledger.fill(3)
    return ledger


def kinds(ledger: Ledger, **options: Any) -> set[str]:
    return {finding.kind for finding in ledger.verify(**options).findings}


def chains(ledger: Ledger) -> list[str]:
    return [str(chain) for (chain,) in ledger.rows("SELECT writer FROM event GROUP BY writer ORDER BY min(id)")]


def rehash(ledger: Ledger, chain: str) -> None:
    """Compute every hash of a chain again, so that only the signatures tell."""
    rows = ledger.rows(f"SELECT {EVENT_COLUMNS} FROM event WHERE writer = ? ORDER BY n", chain)
    last = rows[0][7]
    for writer, n, run, kind, at, salt, body, _, _ in rows:
        digest = event_digest(writer, n, run, kind, at, salt + body)
        own = hash_digest(last, run, digest)
        ledger.rows("UPDATE event SET prev = ?, hash = ? WHERE writer = ? AND n = ?", last, own, writer, n)
        last = own


def edit(column: str, value: Any) -> Callable[[Ledger], None]:
    return lambda ledger: ledger.rows(f"UPDATE event SET {column} = {value} WHERE n = 4") and None


def other_program(ledger: Ledger) -> None:
    """Not this process: it changes a byte of a body in place."""
    import subprocess

    code = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); "
        "db.execute(\"UPDATE event SET body = CAST(replace(CAST(body AS TEXT), 'set_result(1)', 'set_result(7)') "
        "AS BLOB) WHERE kind = 'run_started'\"); db.commit()"
    )
    subprocess.run([sys.executable, "-c", code, str(ledger.path)], check=True)


def swap(ledger: Ledger) -> None:
    chain = chains(ledger)[0]
    for old, new in ((4, 1000), (5, 4), (1000, 5)):
        ledger.rows("UPDATE event SET n = ? WHERE writer = ? AND n = ?", new, chain, old)


def copy_from_elsewhere(ledger: Ledger) -> None:
    one, two = chains(ledger)
    ledger.rows("DELETE FROM event WHERE writer = ? AND n = 4", one)
    ledger.rows(
        "INSERT INTO event (writer, n, run, kind, at, salt, body, prev, hash) "
        "SELECT ?, n, run, kind, at, salt, body, prev, hash FROM event WHERE writer = ? AND n = 4", one, two
    )  # fmt: skip


def change_and_rehash(ledger: Ledger) -> None:
    chain = chains(ledger)[1]
    ledger.rows(
        "UPDATE event SET body = CAST(replace(CAST(body AS TEXT), 'set_result(1)', 'set_result(7)') AS BLOB) "
        "WHERE writer = ? AND kind = 'run_started'", chain
    )  # fmt: skip
    rehash(ledger, chain)


def sign_with_another_key(ledger: Ledger) -> None:
    change_and_rehash(ledger)
    chain, key = chains(ledger)[1], HmacKey.generate()
    log = ledger.verify().log
    ((n, record_hash),) = ledger.rows("SELECT n, hash FROM event WHERE writer = ? ORDER BY n DESC LIMIT 1", chain)
    head = Head.sign(log, chain, n, record_hash, 1, "closed", key)
    ledger.rows("UPDATE checkpoint SET signature = ?, key_id = ?, hash = ?, at = 1 WHERE writer = ?",
                head.signature, key.key_id, record_hash, chain)  # fmt: skip


def forge_prune(ledger: Ledger) -> None:
    chain = chains(ledger)[1]
    ((record_hash,),) = ledger.rows("SELECT hash FROM event WHERE writer = ? AND n = 5", chain)
    ledger.rows("INSERT INTO checkpoint VALUES (?, 5, ?, 1, 'pruned', ?, ?)",
                chain, record_hash, ledger.key.key_id, bytes(32))  # fmt: skip
    ledger.rows("DELETE FROM event WHERE writer = ? AND n <= 5", chain)


def delete(where: str) -> Callable[[Ledger], None]:
    return lambda ledger: ledger.rows(f"DELETE FROM event WHERE writer = ? AND {where}", chains(ledger)[0]) and None


def drop_checkpoints_and_end(ledger: Ledger) -> None:
    chain = chains(ledger)[1]
    ledger.rows("DELETE FROM checkpoint WHERE writer = ?", chain)
    ledger.rows("DELETE FROM event WHERE writer = ? AND n > 8", chain)


def drop_chain(number: int) -> Callable[[Ledger], None]:
    def attack(ledger: Ledger) -> None:
        chain = chains(ledger)[number]
        for table in ("event", "checkpoint", "run", "call"):
            ledger.rows(f"DELETE FROM {table} WHERE writer = ?", chain)

    return attack


def begin_a_call_again(ledger: Ledger) -> None:
    """Its row then says what the second event says, which nobody signed."""
    chain = chains(ledger)[1]
    ((n, last),) = ledger.rows("SELECT n, hash FROM event WHERE writer = ? ORDER BY n DESC LIMIT 1", chain)
    body, salt = pack_fields((1, "call_1", None, "other", "code", 1, {}, {})), bytes(16)
    own = hash_digest(last, 2, event_digest(chain, n + 1, 2, "call_started", 1, salt + body))
    ledger.rows("INSERT INTO event (writer, n, run, kind, at, salt, body, prev, hash) VALUES "
                "(?, ?, 2, 'call_started', 1, ?, ?, ?, ?)", chain, n + 1, salt, body, last, own)  # fmt: skip
    ledger.rows("UPDATE call SET tool = 'other', status = 'unfinished', code = NULL, duration_us = NULL "
                "WHERE writer = ? AND run = 2 AND number = 1", chain)  # fmt: skip


ATTACKS: dict[str, tuple[Callable[[Ledger], object], set[str]]] = {
    "a column of an event is changed: body": (edit("body", "x'90'"), {EDITED}),
    "time": (edit("at", "at + 1"), {EDITED}),
    "run": (edit("run", "0"), {NOT_AN_EVENT}),
    "run, below zero": (edit("run", "-1"), {NOT_AN_EVENT}),
    "kind": (edit("kind", "'run_started'"), {NOT_AN_EVENT}),
    "salt": (edit("salt", "zeroblob(16)"), {EDITED}),
    "hash": (edit("hash", "zeroblob(32)"), {EDITED, BROKEN_LINK}),
    "hash before": (edit("prev", "zeroblob(32)"), {EDITED, BROKEN_LINK}),
    "type of a column": (edit("body", "'text'"), {NOT_AN_EVENT}),
    "type of a column, with the same bytes": (edit("kind", "CAST(kind AS BLOB)"), {NOT_AN_EVENT}),
    "another program changes a byte": (other_program, {EDITED}),
    "an event is removed": (delete("n = 4"), {MISSING}),
    "the first events are removed": (delete("n < 5"), {MISSING}),
    "events change places": (swap, {EDITED, BROKEN_LINK}),
    "an event is copied from another chain": (copy_from_elsewhere, {EDITED, BROKEN_LINK}),
    "events are changed and all later hashes computed again": (change_and_rehash, {BAD_SIGNATURE}),
    "the same, signed with another key": (sign_with_another_key, {UNKNOWN_KEY}),
    "a prune is forged": (forge_prune, {BAD_PRUNE}),
    "the end is cut off": (delete("n > 8"), {CUT_OFF}),
    "the end is cut off with its checkpoints": (drop_checkpoints_and_end, {CUT_OFF}),
    "checkpoints are removed": (lambda ledger: ledger.rows("DELETE FROM checkpoint"), {MISSING}),
    "a chain is removed": (drop_chain(0), {CHAIN_MISSING}),
    "the newest chain is removed": (drop_chain(1), {CHAIN_MISSING}),
    "a blob is changed": (lambda ledger: ledger.rows("UPDATE blob SET bytes = x'00'"), {BAD_BLOB}),
    "a run is hidden": (lambda ledger: ledger.rows("DELETE FROM run WHERE n = 2"), {VIEW_DIFFERS}),
    "a run is shown with another outcome": (lambda ledger: ledger.rows("UPDATE run SET outcome = 'error'"), {VIEW_DIFFERS}),
    "a call is counted that was not made": (
        lambda ledger: ledger.rows("INSERT INTO call (writer, run, number) VALUES ('x', 1, 1)"), {VIEW_DIFFERS},
    ),
    "a call is counted that a run did not make": (
        lambda ledger: ledger.rows("INSERT INTO call (writer, run, number) SELECT writer, n, 99 FROM run"), {VIEW_DIFFERS},
    ),
    "a call is hidden": (lambda ledger: ledger.rows("DELETE FROM call WHERE run = 2 AND number = 1"), {VIEW_DIFFERS}),
    "a call is not counted, its tool is bytes": (
        lambda ledger: ledger.rows("UPDATE call SET tool = CAST(tool AS BLOB)"), {VIEW_DIFFERS},
    ),
    "a call has a tool that is no text": (
        lambda ledger: ledger.rows("UPDATE call SET tool = CAST(x'66ff' AS TEXT)"), {VIEW_DIFFERS},
    ),
    "a call has the row of another that claims its number": (begin_a_call_again, {VIEW_DIFFERS}),
    "a run is shown that did not begin": (
        lambda ledger: ledger.rows("INSERT INTO run (writer, n) SELECT writer, 1 FROM run LIMIT 1"), {VIEW_DIFFERS},
    ),
    "a run is shown as decided by somebody else": (
        lambda ledger: ledger.rows("UPDATE run SET decided_by = 'eve'"), {VIEW_DIFFERS},
    ),
    "a request is counted that was not sent": (
        lambda ledger: ledger.rows("INSERT INTO request VALUES ('x', 1, 1, 'host', '')"), {VIEW_DIFFERS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_each_attack_on_the_file_is_found_and_nothing_it_touched_is_shown_as_verified(
    filled: Ledger, name: str
) -> None:
    assert filled.verify(strict=True).ok
    before = set(filled.trusts())
    attack, expected = ATTACKS[name]
    attack(filled)
    found = kinds(filled)

    assert expected <= found
    assert not filled.verify().ok
    shown = filled.trusts()
    no_event = {"a blob is changed", "a run is hidden", "a request is counted that was not sent"}
    if before == set(shown) and name not in no_event and not name.startswith(("the end", "a call")):
        assert set(shown.values()) - {Trust.VERIFIED} or CHAIN_MISSING in found


def test_every_event_removed_and_every_two_neighbours_swapped_are_found(filled: Ledger, tmp_path: Path) -> None:
    whole = filled.path.read_bytes()
    heads = Head.saved(filled.verify().log)
    for chain, last in filled.rows("SELECT writer, max(n) FROM event GROUP BY writer"):
        for n in range(1, last + 1):
            filled.rows("DELETE FROM event WHERE writer = ? AND n = ?", chain, n)
            assert {MISSING, CUT_OFF} & kinds(filled, heads=heads), n
            filled.path.write_bytes(whole)
        for n in range(1, last):
            for old, new in ((n, 1000), (n + 1, n), (1000, n + 1)):
                filled.rows("UPDATE event SET n = ? WHERE writer = ? AND n = ?", new, chain, old)
            assert not filled.verify(heads=[]).ok, n
            filled.path.write_bytes(whole)
    assert filled.verify().ok


def everything(ledger: Ledger) -> object:
    """All rows but when a blob was last used, which no signature covers: it only makes retention keep the blob."""
    tables = ("event", "run", "call", "checkpoint", "about")
    return [ledger.rows(f"SELECT * FROM {table}") for table in tables], ledger.rows("SELECT sha256, bytes FROM blob")


def test_pages_copied_from_an_older_copy_and_bytes_flipped_in_the_file_are_found(filled: Ledger) -> None:
    """Where the pages no longer fit each other, SQLite tells; where they do, the hashes."""
    older = filled.path.read_bytes()
    filled.fill(3)
    newer, content = filled.path.read_bytes(), everything(filled)
    size = PAGE_BYTES
    for page in range(1, len(older) // size):
        if older[page * size : (page + 1) * size] == newer[page * size : (page + 1) * size]:
            continue
        mixed = bytearray(newer)
        mixed[page * size : (page + 1) * size] = older[page * size : (page + 1) * size]
        filled.path.write_bytes(mixed)
        try:
            assert kinds(filled) or everything(filled) == content, page
        except AuditError:
            continue
    for at in range(newer.index(b"set_result"), len(newer), 4999):
        flipped = bytearray(newer)
        flipped[at] ^= 0xFF
        filled.path.write_bytes(flipped)
        try:
            assert kinds(filled) or everything(filled) == content, at
        except AuditError:
            continue


def test_tables_that_answer_something_else_are_refused(filled: Ledger) -> None:
    filled.rows("CREATE TRIGGER hide AFTER INSERT ON run BEGIN DELETE FROM run WHERE n = new.n; END")
    for use in (filled.trusts, filled.verify, lambda: filled.fill(1)):
        with pytest.raises(AuditError, match="not those that toolcell makes"):
            use()
    filled.rows("DROP TRIGGER hide")
    filled.rows("ALTER TABLE run RENAME TO hidden")
    filled.rows("CREATE VIEW run AS SELECT * FROM hidden WHERE n > 2")
    with pytest.raises(AuditError, match="not those that toolcell makes"):
        filled.trusts()


def test_a_run_that_somebody_adds_is_never_signed_or_shown_as_verified(filled: Ledger) -> None:
    """It continues a chain, with right hashes, and stands in every table."""
    chain = chains(filled)[1]
    rows = filled.rows(f"SELECT {EVENT_COLUMNS} FROM event WHERE writer = ? ORDER BY n DESC LIMIT 1", chain)
    last = event_of(rows[0])
    fields = filled.fields(records.RUN_STARTED)[0] | {"id": "forged", "who": {"run": "forged"}}
    body, salt, n = pack_fields(tuple(fields.values())), bytes(16), last.seq + 1
    own = hash_digest(last.record_hash, n, event_digest(chain, n, n, "run_started", 1, salt + body))
    filled.rows(f"INSERT INTO event ({EVENT_COLUMNS}) VALUES (?, ?, ?, 'run_started', 1, ?, ?, ?, ?)",
                chain, n, n, salt, body, last.record_hash, own)  # fmt: skip
    filled.rows("INSERT INTO run SELECT writer, ?, 'forged', kind, 1, NULL, 'unfinished', sha256, user, session, title, "
                "0, 0, NULL, NULL, NULL, NULL, NULL, NULL FROM run WHERE writer = ? LIMIT 1", n, chain)  # fmt: skip
    assert filled.trusts()["forged"] == Trust.UNSIGNED
    assert NOT_CLOSED in kinds(filled, strict=True)
    filled.fill(1)  # the next writer signs its own chain alone
    assert filled.trusts()["forged"] == Trust.UNSIGNED


def test_another_key_or_none_verifies_nothing_and_is_named(filled: Ledger) -> None:
    other = HmacKey.generate()
    report = filled.verify(keys=[other], heads=[])
    assert report.is_unchecked and {finding.kind for finding in report.findings} == {UNKNOWN_KEY}
    assert filled.key.key_id in report.findings[0].message
    with Index(filled.path, [other]) as index:
        assert {run.trust for run in index.runs()} == {Trust.UNVERIFIED}


def test_heads_that_were_handed_elsewhere_contradict_a_record_that_was_put_back_replaced_or_written_anew(
    ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has the file, this machine's heads and the key. A place that fails is logged, and recording goes on."""
    heads: list[Head] = []

    def keep(head: Head) -> None:
        heads.append(head)
        raise OSError("no room there")

    ledger.fill(1, on_checkpoint=keep)
    older = tmp_path / "older"
    shutil.copy(ledger.path, older)
    ledger.fill(1, on_checkpoint=keep)
    assert "did not reach on_checkpoint" in caplog.text
    assert ledger.verify(heads=heads, strict=True).ok

    def found(options: Any = None) -> set[str]:
        shutil.rmtree(default_heads_dir(), ignore_errors=True)
        return kinds(ledger, heads=heads)

    log = ledger.verify(heads=[]).log
    for chain in chains(ledger):  # written anew and signed with the genuine key
        ledger.rows("UPDATE event SET body = CAST(replace(CAST(body AS TEXT), 'set_result(0)', 'set_result(9)') AS BLOB) "
                    "WHERE writer = ? AND kind = 'run_started'", chain)  # fmt: skip
        rehash(ledger, chain)
        ((n, record_hash),) = ledger.rows("SELECT n, hash FROM event WHERE writer = ? ORDER BY n DESC LIMIT 1", chain)
        head = Head.sign(log, chain, n, record_hash, 1, "closed", ledger.key)
        ledger.rows("UPDATE checkpoint SET signature = ?, hash = ?, at = 1 WHERE writer = ?",
                    head.signature, record_hash, chain)  # fmt: skip
    assert BROKEN_LINK in found()
    shutil.copy(older, ledger.path)
    assert ledger.verify(heads=[], strict=True).ok  # by itself it is perfect
    assert found() == {CHAIN_MISSING}
    ledger.path.unlink()
    ledger.fill(2)
    assert found() == {WRONG_LOG}
    forged = [Head(*(getattr(heads[0], name) for name in Head.__slots__[:-1]), bytes(32))]
    shutil.copy(older, ledger.path)
    assert kinds(ledger, heads=forged) == {BAD_HEAD}
    far = Head.sign(heads[0].log, heads[0].chain, 2**63, bytes(32), 1, "time", ledger.key)
    assert kinds(ledger, heads=[far]) == {CUT_OFF}


def test_a_record_that_was_rolled_back_stays_found_whoever_goes_on_with_it(ledger: Ledger, tmp_path: Path) -> None:
    ledger.fill(1)
    shutil.copy(ledger.path, tmp_path / "older")
    ledger.fill(1)
    shutil.copy(tmp_path / "older", ledger.path)
    ledger.fill(1)
    assert kinds(ledger) == {CHAIN_MISSING}


def test_rows_added_by_the_thousand_are_counted_and_not_all_kept(ledger: Ledger) -> None:
    ledger.fill(1)
    with closing(sqlite3.connect(ledger.path)) as db:
        rows = (("0" * 12, n, 0, "x", 0, b"", b"", b"", b"") for n in range(2 * MAX_FINDINGS))
        strays = ((b"stray", n, 0, "x", 0, b"", b"", b"", b"") for n in range(3))
        db.executemany(f"INSERT INTO event ({EVENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", [*rows, *strays])
        db.commit()
    report = ledger.verify()
    assert "3 rows have columns of another type" in [each.message for each in report.findings]
    assert len(report.findings) <= MAX_FINDINGS + 10
    assert f"{MAX_FINDINGS} more findings of kind {NOT_AN_EVENT} are not listed" in " ".join(report.notes)


def test_an_id_of_a_record_chooses_no_other_place_for_heads(filled: Ledger) -> None:
    filled.rows("UPDATE about SET value = '../../elsewhere'")
    for use in (filled.trusts, filled.verify, lambda: filled.fill(1)):
        with pytest.raises(AuditError, match="id is damaged"):
            use()


def test_a_run_with_an_id_that_is_taken_does_not_hide_the_genuine_one(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder, context=RunContext(run_id="mine"))
    with ledger.opened(key=HmacKey.generate()) as recorder:
        ledger.run(recorder, "forged = 1", context=RunContext(run_id="mine"))
    with Index(ledger.path, [ledger.key]) as index:
        assert index.find("mine").trust == Trust.VERIFIED
        assert {run.trust for run in index.runs()} == {Trust.VERIFIED, Trust.UNVERIFIED}


def test_a_run_whose_events_changed_is_broken_and_is_not_shown(filled: Ledger) -> None:
    other_program(filled)
    with Index(filled.path, [filled.key]) as index:
        (broken, _) = [run for run in index.runs() if run.title == "set_result(7)"]
        assert broken.trust == Trust.BROKEN
        with pytest.raises(AuditError, match="was changed"):
            index.load(broken)


def test_what_is_no_database_or_another_one_is_refused_and_left_alone(ledger: Ledger, tmp_path: Path) -> None:
    ledger.path.parent.mkdir(mode=0o700)
    ledger.path.touch(mode=0o600)
    ledger.path.write_bytes(b"{}" * 4000)
    for use in (ledger.trusts, ledger.verify, lambda: ledger.fill(1)):
        with pytest.raises(AuditError, match=r"not a database|not a record"):
            use()
    assert ledger.path.read_bytes() == b"{}" * 4000
    ledger.path.unlink()
    ledger.path.touch(mode=0o600)
    ledger.rows("CREATE TABLE mine (x)")
    with pytest.raises(AuditError, match="another database"):
        ledger.fill(1)
    assert ledger.rows("SELECT count(*) FROM sqlite_master") == [(1,)]
