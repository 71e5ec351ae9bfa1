"""SQLite files: private, ours, opened whole or not at all, changed whole or not at all."""

from __future__ import annotations

import grp
import os
import pwd
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from toolcell.builtin import SqliteStore
from toolcell.errors import StoreError
from toolcell.service.tokens import TokenDatabase
from toolcell.support.sqlite import SqliteDatabase, connect, transaction

pytestmark = pytest.mark.quick

OURS = 0x1234


def nothing(_: sqlite3.Connection) -> None:
    pass


def database(path: Path) -> SqliteDatabase:
    return SqliteDatabase(path, [["CREATE TABLE numbers (n)"]], application_id=OURS)


def rows(connection: sqlite3.Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT n FROM numbers")]


def test_a_transaction_is_made_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    connection = connect(tmp_path / "a.sqlite", lambda db: db.execute("CREATE TABLE numbers (n)"))
    with transaction(connection):
        connection.execute("INSERT INTO numbers VALUES (1)")
    with pytest.raises(ValueError), transaction(connection):
        connection.execute("INSERT INTO numbers VALUES (2)")
        raise ValueError
    assert rows(connection) == [1] and not connection.in_transaction
    connection.close()


def test_a_connection_that_cannot_be_prepared_is_closed(tmp_path: Path) -> None:
    opened: list[sqlite3.Connection] = []

    def prepare(connection: sqlite3.Connection) -> None:
        opened.append(connection)
        raise ValueError("not ours")

    with pytest.raises(ValueError, match="not ours"):
        connect(tmp_path / "a.sqlite", prepare)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[0].execute("SELECT 1")


# Files that others can read or change


def plant(path: Path, what: str) -> None:
    """Put something in the place of a file, or beside it, that another user might have put there."""
    match what:
        case "others may read it":
            path.touch(0o644)
            path.chmod(0o644)
        case "a pipe":
            os.mkfifo(path, 0o600)
        case "a folder":
            path.mkdir()
        case "a link":
            target = path.with_name("target")
            target.touch(0o600)
            path.symlink_to(target)
        case "a link to nothing":
            path.symlink_to(path.with_name("nothing"))
        case "another user's":
            if os.geteuid():
                pytest.skip("only root can give a file away")
            path.touch(0o600)
            os.chown(path, 12345, 12345)


PLANTED = ["others may read it", "a pipe", "a folder", "a link", "a link to nothing", "another user's"]


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("name", ["a.db", "a.db-wal", "a.db-shm", "a.db-journal"])
def test_a_file_and_the_logs_beside_it_are_regular_files_of_its_owner_alone(
    tmp_path: Path, name: str, what: str
) -> None:
    plant(tmp_path / name, what)

    with pytest.raises(StoreError, match=rf"{name} (belongs to user|is not a regular file)"):
        connect(tmp_path / "a.db", nothing)

    assert not (tmp_path / "nothing").exists()


def open_token_database(path: Path) -> None:
    TokenDatabase(path).list()


def open_store(path: Path) -> None:
    anyio.run(SqliteStore(path).init)


@pytest.mark.parametrize("opened", [open_token_database, open_store])
@pytest.mark.parametrize("what", [*PLANTED, "an open folder", "a log beside it"])
def test_every_store_refuses_a_file_that_others_can_change(
    tmp_path: Path, opened: Callable[[Path], None], what: str
) -> None:
    path = tmp_path / "store.db"
    if what == "an open folder":
        tmp_path.chmod(0o777)
    elif what == "a log beside it":
        plant(tmp_path / "store.db-wal", "others may read it")
    else:
        plant(path, what)

    with pytest.raises(StoreError, match=r"belongs to user|is not a regular file"):
        opened(path)


def test_a_folder_where_others_may_put_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name="staff", gr_mem=[]))
    for mode in (0o777, 0o1777, 0o770, 0o702):
        folder.chmod(mode)
        with pytest.raises(StoreError, match=rf"{mode:04o}; chmod go-w {folder}"):
            connect(folder / "a.db", nothing)
    assert not any(folder.iterdir())

    folder.chmod(0o755)
    connect(folder / "a.db", nothing).close()


@pytest.mark.parametrize(("members", "is_refused"), [([], False), (["me"], False), (["me", "you"], True)])
def test_a_folder_may_be_open_to_a_group_that_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: list[str], is_refused: bool
) -> None:
    tmp_path.chmod(0o775)
    group = tmp_path.stat().st_gid
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me", pw_gid=group))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name="me", gr_mem=members))
    if is_refused:
        with pytest.raises(StoreError, match="chmod go-w"):
            connect(tmp_path / "a.db", nothing)
    else:
        connect(tmp_path / "a.db", nothing).close()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.geteuid():
        os.chown(tmp_path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StoreError, match="its folder belongs to user"):
        connect(tmp_path / "a.db", nothing)


def test_a_missing_folder_is_made_for_the_owner_alone(tmp_path: Path) -> None:
    connect(tmp_path / "a" / "b" / "c.db", nothing).close()

    modes = [each.stat().st_mode & 0o777 for each in (tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/c.db")]
    assert modes == [0o700, 0o700, 0o600]


# Databases


def test_a_database_keeps_its_locks_when_its_second_connection_is_opened(tmp_path: Path) -> None:
    """Without them, another process removes the log under it, and what is written later is not seen here."""
    path = tmp_path / "a.db"
    ours = database(path)
    with ours.reading() as connection:
        assert rows(connection) == []
    with ours.writing() as connection:
        connection.execute("INSERT INTO numbers VALUES (1)")

    inode = f":{path.stat().st_ino} "
    assert any(inode in line and f" {os.getpid()} " in line for line in Path("/proc/locks").read_text().splitlines())
    for number in (2, 3):
        code = f"""import sqlite3
with sqlite3.connect({str(path)!r}) as db:
    db.execute("INSERT INTO numbers VALUES ({number})")
"""
        subprocess.run([sys.executable, "-c", code], check=True)
    with ours.reading() as connection:
        assert rows(connection) == [1, 2, 3]
    ours.close()


def test_a_forked_process_opens_connections_of_its_own(tmp_path: Path) -> None:
    ours = database(tmp_path / "a.db")
    with ours.writing() as connection:
        connection.execute("INSERT INTO numbers VALUES (1)")
    if (child := os.fork()) == 0:
        try:
            with ours.writing() as its_own:
                os._exit(its_own is connection)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    with ours.writing() as again:
        assert again is connection
    ours.close()


def test_a_database_in_memory_is_one_and_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours = database(Path(":memory:"))
    with ours.writing() as connection:
        connection.execute("INSERT INTO numbers VALUES (1)")
    with ours.reading() as connection:
        assert rows(connection) == [1]
    ours.close()
    assert not any(tmp_path.iterdir())
