"""SQLite files that only their owner can read or change, for several threads and processes at once.

Transactions are begun and ended here, and never by the `sqlite3` module.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from toolcell.errors import StoreError
from toolcell.support.files import make_private_folder, open_to_others

IN_MEMORY: Final = Path(":memory:")
"""A database of this process, gone when it is closed."""
LOCK_S: Final = 10.0
"""How long a transaction waits for that of another process."""


# Files


def connect(
    path: Path, prepare: Callable[[sqlite3.Connection], object], lock_timeout_s: float = LOCK_S
) -> sqlite3.Connection:
    """Open a private file and prepare the connection, which is closed if that fails. One thread at a time may use it.

    The file is made if there is none. `lock_timeout_s`: how long a transaction waits for that of another process.

    Raises:
        StoreError: others can change the file, or what SQLite would read beside it.
        OSError: the file cannot be made.
    """
    if path != IN_MEMORY:
        _make_private_file(path)
    connection = sqlite3.connect(path, timeout=lock_timeout_s, isolation_level=None, check_same_thread=False)
    try:
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_private_file(path: Path) -> None:
    """Make a file that only its owner may read, or check that the one that is there is such a file.

    The folder is checked first: once nobody else can put files there, what the other checks see stays true.
    """
    make_private_folder(path.parent)
    check_folder(path)
    # A file that is there is not opened: closing it would end the locks of this process's connections to it (POSIX).
    # Another process would then remove the log that they read, and nothing it writes would be seen here any more.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    check_file(path)
    check_files_beside(path)


def check_files_beside(path: Path) -> None:
    """Check the files that SQLite reads beside a database: whoever writes them writes the database.

    Raises:
        StoreError: others may change one.
    """
    for suffix in ("-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            check_file(path.with_name(path.name + suffix))


def check_folder(path: Path) -> None:
    """Check that nobody else may put files beside a database.

    Raises:
        StoreError: others may.
    """
    status = path.parent.stat()
    mode = stat.S_IMODE(status.st_mode)
    others = 0o002 if _is_own_group(status.st_gid) else 0o022
    if hasattr(os, "geteuid") and (status.st_uid not in (0, os.geteuid()) or mode & others):
        raise StoreError(
            f"others may put files beside {path}, also a log that SQLite believes: its folder belongs to user "
            f"{status.st_uid} and has mode {mode:04o}; chmod go-w {path.parent}, or give a path in a folder of yours"
        )


def _is_own_group(group: int) -> bool:
    """Return whether this is the group that distributions make for each user: with its name, and nobody else in it."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def check_file(path: Path) -> None:
    """Check that a file is a regular one that only its owner may read or change.

    Raises:
        StoreError: it is not.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path} is not a regular file; give the path of a file")
    if problem := open_to_others(status):
        raise StoreError(f"{path} {problem}; chown it, and chmod 600 {path}")


class Transactional(Protocol):
    """A connection that leaves transactions to us."""

    @property
    def in_transaction(self) -> bool:
        """True between BEGIN and COMMIT."""

    def execute(self, sql: str, /) -> object: ...


@contextmanager
def transaction(connection: Transactional, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Commit what is done inside, all or nothing."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


# Databases


class SqliteDatabase:
    """A file of ours: a connection to read and one to write, each used by one thread at a time.

    It is opened when it is first used. A database in memory has one connection for both.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        migrations: Sequence[Iterable[str]],
        *,
        application_id: int,
        lock_timeout_s: float = LOCK_S,
    ) -> None:
        """`migrations`: the statements that make version 1 of the tables, then those that bring it to version 2, ..."""
        self.path = IN_MEMORY if Path(path) == IN_MEMORY else Path(path).absolute()
        self._migrations = migrations
        self._application_id = application_id
        self._lock_timeout_s = lock_timeout_s
        write = threading.Lock()
        self._locks = {"read": write if self.path == IN_MEMORY else threading.Lock(), "write": write}
        self._open: dict[str, sqlite3.Connection] = {}
        self._process = os.getpid()

    def close(self) -> None:
        """Let go of the file. A later use opens it again."""
        for use, lock in self._locks.items():
            with lock:
                if (connection := self._open.pop(use, None)) is not None:
                    connection.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for queries on one state of the database. No writer is waited for.

        Raises:
            StoreError: the file cannot be used; says why.
        """
        with self._in_transaction("read", "BEGIN") as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for changes that are made as a whole or not at all. No other process writes meanwhile.

        Raises:
            StoreError: the file cannot be used; says why. Nothing was changed.
        """
        with self._in_transaction("write", "BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def _in_transaction(self, use: str, begin: str) -> Iterator[sqlite3.Connection]:
        with self._locks[use], self._translated():
            connection = self._connection(use)
            with transaction(connection, begin):
                yield connection

    def _connection(self, use: str) -> sqlite3.Connection:
        if self.path == IN_MEMORY:
            use = "write"
        elif self._process != os.getpid():  # a forked process must not use its parent's connections, nor close them
            self._abandoned, self._open, self._process = self._open, {}, os.getpid()
        if use not in self._open:
            try:
                self._open[use] = connect(self.path, self._prepare, self._lock_timeout_s)
            except OSError as exc:
                raise StoreError(f"the store {self.path} cannot be opened: {exc.strerror or exc}") from exc
        return self._open[use]

    def _prepare(self, connection: sqlite3.Connection) -> None:
        self._migrate(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # what was answered must survive a loss of power
        connection.execute("PRAGMA foreign_keys = ON")

    def _migrate(self, connection: sqlite3.Connection) -> None:
        """Make the tables, or bring those of an older version up to date, in one transaction.

        Invariant: a file that is not ours is not written to, also when another process makes it meanwhile.
        """
        newest = len(self._migrations)
        if _marks(connection) == (self._application_id, newest):
            return
        with transaction(connection):
            found, version = _marks(connection)
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if found not in (0, self._application_id) or (not found and (tables or self._is_short())):
                raise StoreError(
                    f"{self.path} is another database, or none: its application_id is {found:#x}, and not "
                    f"{self._application_id:#x}. Nothing was changed; give another path"
                )
            if version > newest:
                raise StoreError(
                    f"the store {self.path} has version {version}, and this toolcell knows {newest}; "
                    "use a newer toolcell",
                    reason="the store was written by a newer version",
                )
            for statements in self._migrations[version:]:
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {self._application_id}")
            connection.execute(f"PRAGMA user_version = {newest}")

    def _is_short(self) -> bool:
        """Return whether the file holds less than a page: SQLite takes it for an empty one, and would write over it."""
        return self.path != IN_MEMORY and 0 < self.path.stat().st_size < 512

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            name = getattr(exc, "sqlite_errorname", "")
            said, reason, retryable = next(
                (row for prefix, row in _REASONS.items() if name.startswith(prefix)), ("failed", "", False)
            )
            message = f"the store {self.path} {said.format(timeout=self._lock_timeout_s)}: {exc}"
            raise StoreError(message, reason=reason, retryable=retryable) from exc


def _marks(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the application id and the version of the tables."""
    application_id, version = (connection.execute(f"PRAGMA {name}") for name in ("application_id", "user_version"))
    return application_id.fetchone()[0], version.fetchone()[0]


_REASONS: Final = {
    "SQLITE_BUSY": ("is locked by another process, for more than {timeout:g} s", "the store is in use", True),
    "SQLITE_LOCKED": ("is locked by another process, for more than {timeout:g} s", "the store is in use", True),
    "SQLITE_FULL": ("cannot grow: the disk is full", "the store is full", False),
    "SQLITE_READONLY": ("is read-only", "the store is read-only", False),
    "SQLITE_CANTOPEN": ("cannot be opened", "the store cannot be opened", False),
    "SQLITE_NOTADB": (
        "is damaged, encrypted or a file of another kind; nothing was changed, give another path",
        "the store is damaged",
        False,
    ),
    "SQLITE_CORRUPT": ("is damaged; restore it from a copy", "the store is damaged", False),
    "SQLITE_IOERR": ("cannot be read or written", "the store cannot be read or written", False),
}
"""Shape: what the error says after the path, what a model reads, whether to try again. By the name of SQLite's error
code, where the longer names of its kind begin with it."""
