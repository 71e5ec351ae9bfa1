"""One SQLite file that only its owner may read, for several threads and processes at once."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from toolcell.errors import StoreError
from toolcell.support import connect, make_private_folder, transaction

LOCK_S: Final = 10.0
"""How long a transaction waits for that of another process."""


class PrivateDatabase:
    """A file of ours with the tables of `schema`. It is opened when it is first used."""

    def __init__(self, path: str | os.PathLike[str], schema: str, *, application_id: int, version: int) -> None:
        self.path = Path(path).absolute()
        self._schema = schema
        self._marks = (application_id, version)
        self._locks = {"read": threading.Lock(), "write": threading.Lock()}
        self._open: dict[str, sqlite3.Connection] = {}

    def close(self) -> None:
        """Let go of the file. A later use opens it again."""
        for use, lock in self._locks.items():
            with lock:
                if (connection := self._open.pop(use, None)) is not None:
                    connection.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for queries. What others have committed is seen, and no writer is waited for.

        Raises:
            StoreError: the file cannot be used; says why.
        """
        with self._locks["read"], self._translated():
            yield self._opened("read")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for changes that are made as a whole or not at all. No other process writes meanwhile.

        Raises:
            StoreError: the file cannot be used; says why. Nothing was changed.
        """
        with self._locks["write"], self._translated():
            connection = self._opened("write")
            with transaction(connection):
                yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise StoreError(f"{self.path} cannot be used: {exc}", retryable="locked" in f"{exc}") from exc
        except OSError as exc:
            raise StoreError(f"{self.path} cannot be opened: {exc.strerror or exc}") from exc

    def _opened(self, use: str) -> sqlite3.Connection:
        if use not in self._open:
            make_private_file(self.path)
            self._open[use] = connect(self.path, LOCK_S, self._prepare)
        return self._open[use]

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Check that the file is ours, and make its tables if it is new.

        Invariant: a file that is not ours is not written to.
        """
        if self._read_pragmas(connection) != self._marks:
            with transaction(connection):
                found = self._read_pragmas(connection)
                tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
                if found != self._marks:
                    if found != (0, 0) or tables[0]:
                        raise StoreError(
                            f"{self.path} is another database: its application and version are {found}, "
                            f"and not {self._marks}. Nothing was changed; give another path"
                        )
                    for statement in self._schema.split(";"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id = {self._marks[0]}")
                    connection.execute(f"PRAGMA user_version = {self._marks[1]}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # what was answered must survive a loss of power

    def _read_pragmas(self, connection: sqlite3.Connection) -> tuple[int, int]:
        ours, version = (connection.execute(f"PRAGMA {name}") for name in ("application_id", "user_version"))
        return ours.fetchone()[0], version.fetchone()[0]


def make_private_file(path: Path) -> None:
    """Make a file that only its owner may read; leave one that is there as it is.

    Raises:
        StoreError: it or a log beside it is a link or no regular file, another user's, or others may read it; or its
            folder is open to everybody.
        OSError: it cannot be made or opened.
    """
    make_private_folder(path.parent)
    # A file that is there is not opened: closing it would end the locks of this process's connections to it (POSIX).
    # Another process would then remove the log that they read, and nothing it writes would be seen here any more.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if path.parent.stat().st_mode & 0o002:
        raise StoreError(
            f"everybody may put files beside {path}, also a log that SQLite believes; chmod o-w {path.parent}"
        )
    _check_private(path)
    for suffix in ("-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            _check_private(path.with_name(path.name + suffix))


def _check_private(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path} is not a regular file; give the path of a file")
    if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o077):
        mode = stat.S_IMODE(status.st_mode)
        raise StoreError(
            f"{path} belongs to user {status.st_uid} and has mode {mode:04o}: it must be yours and have mode 0600; "
            f"chown it, and chmod 600 {path}"
        )
