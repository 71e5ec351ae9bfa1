"""Connections to SQLite files. Transactions are begun and ended by us, and by nobody else."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def connect(
    path: str | os.PathLike[str], lock_timeout_s: float, prepare: Callable[[sqlite3.Connection], object]
) -> sqlite3.Connection:
    """Open a file and prepare the connection, which is closed if that fails. One thread at a time may use it.

    `lock_timeout_s`: how long a transaction waits for that of another process.
    """
    connection = sqlite3.connect(path, timeout=lock_timeout_s, isolation_level=None, check_same_thread=False)
    try:
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Commit what is done inside, all or nothing."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
