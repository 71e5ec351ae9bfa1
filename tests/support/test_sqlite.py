"""SQLite files: opened whole or not at all, changed whole or not at all."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from toolcell.support.sqlite import connect, transaction


def rows(connection: sqlite3.Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT n FROM numbers")]


def test_a_transaction_is_made_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    connection = connect(tmp_path / "a.sqlite", 1.0, lambda db: db.execute("CREATE TABLE numbers (n)"))
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
        connect(tmp_path / "a.sqlite", 1.0, prepare)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[0].execute("SELECT 1")
