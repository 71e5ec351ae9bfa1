"""A record in an SQLite file: how it is opened, locked, brought to the disk and copied."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

from toolcell.audit.store import LOCK_S, TABLES, VERSION, Lock, RecordDatabase, lock_number, text
from toolcell.errors import AuditError, BadInput, StoreError
from toolcell.support.sqlite import check_files_beside, check_folder, connect, transaction

APPLICATION_ID: Final = 0x746F6F6C
PAGE_BYTES: Final = 2048
"""An event changes some pages a little, and each is written as a whole: small ones take less time."""
WAL_BYTES: Final = 4 << 20
"""When the write-ahead log is larger, the thread that signs moves its pages into the database."""
LOCKS: Final = "-lock"
"""Ends the name of the file beside the record whose bytes are locked, one for each open journal."""


class SqliteRecord(RecordDatabase):
    """A record in a file, with its write-ahead log beside it."""

    errors = (sqlite3.Error, UnicodeDecodeError)

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        try:
            self.file = self._path = path.absolute()  # also when the working directory is another one later
        except FileNotFoundError as exc:
            raise BadInput(f"there is no record {path}: the working directory is gone") from exc
        self._inode = (0, 0)

    # Opening

    def open_writable(self, *, is_synced: bool = False) -> sqlite3.Connection:
        """Open the file to write, and make it if there is none. A write does not wait for another process."""
        db = self._open_writable(is_synced)
        status = self._path.stat()
        self._inode = (status.st_dev, status.st_ino)
        return db

    def _open_writable(self, is_synced: bool = False) -> sqlite3.Connection:
        path = self._path

        def prepare(db: sqlite3.Connection) -> None:
            db.execute(f"PRAGMA busy_timeout = {LOCK_S * 1000:.0f}")
            if not _is_ours(db):
                db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                with transaction(db):
                    if not _is_ours(db):
                        self._make_tables(db)
            self._check_schema(db)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA secure_delete = ON")  # what a run needed to go on is not in the file when it is over
            db.execute("PRAGMA wal_autocheckpoint = 0")  # the thread that signs moves pages: it may wait for the disk
            # A commit is in the kernel's hands, so it survives a kill; the thread that signs brings it to the disk.
            db.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'OFF'}")
            db.execute("PRAGMA busy_timeout = 0")

        if path.is_dir():
            one = Path(self.place) / "runs.db"
            raise BadInput(f"{self.place} is a folder, and a record is a file: name one, such as {one}")
        try:
            return connect(path, prepare)
        except (StoreError, OSError, sqlite3.Error, UnicodeDecodeError) as exc:
            raise BadInput(f"cannot write the record {self.place}: {self._why_unwritable(exc)}") from exc

    def _why_unwritable(self, exc: Exception) -> str:
        folder = self._path.parent
        with suppress(OSError):
            if os.statvfs(folder).f_flag & os.ST_RDONLY:
                return "its file system is read-only"
            if folder.is_dir() and not os.access(folder, os.W_OK):
                return f"no file can be made in {folder}, and SQLite needs two beside it"
        return self.why(exc)

    def open_read_only(self) -> sqlite3.Connection:
        """Open the file to read. Nothing is written, also not beside it."""
        path = self._path
        try:
            if not path.is_file():
                raise BadInput(f"there is no record {self.place}{_is_a_folder(path)}")
            check_folder(path)
            check_files_beside(path)
            quoted = str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
            # Where no file can be made beside it, none is written either: SQLite need not look for changes.
            is_fixed = not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()
            mode = "mode=ro&immutable=1" if is_fixed else "mode=ro"
            db = sqlite3.connect(f"file:{quoted}?{mode}", uri=True, isolation_level=None, check_same_thread=False)
            db.text_factory = text
            try:
                db.execute("PRAGMA trusted_schema = OFF")
                db.execute("PRAGMA case_sensitive_like = ON")  # as in PostgreSQL
                db.execute(f"PRAGMA busy_timeout = {LOCK_S * 1000:.0f}")
                if not _is_ours(db):
                    raise BadInput(f"{self.place} is not a record of toolcell's")
                self._check_schema(db)
                for statement in PLAIN_ROWS:
                    db.execute(statement)
            except BaseException:
                db.close()
                raise
            return db
        except (StoreError, OSError, sqlite3.Error, UnicodeDecodeError) as exc:
            raise BadInput(f"cannot read the record {self.place}: {self.why(exc)}") from exc

    def _make_tables(self, db: sqlite3.Connection) -> None:
        if db.execute("SELECT 1 FROM sqlite_master").fetchone() or 0 < self._path.stat().st_size < 512:
            raise BadInput(f"{self.place} is another database, or none; nothing was changed, give another path")
        make_tables(db)
        db.execute(
            "INSERT INTO about VALUES ('record', ?), ('tokens', ?)", (os.urandom(16).hex(), os.urandom(32).hex())
        )

    def _check_schema(self, db: sqlite3.Connection) -> None:
        """Check that the tables are those that are made here: a view or a trigger would answer or write another row."""
        self.check_version(db.execute("PRAGMA user_version").fetchone()[0])
        found = {
            text
            for (text,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT GLOB 'x_*'")
        }
        if found != set(TABLES):
            extra = next(iter(found ^ set(TABLES)))
            raise AuditError(f"the tables of the record {self.place} are not those that toolcell makes: {extra!r:.100}")

    # Writing

    def begin_write(self, db: Any, wait_s: float) -> bool:
        """Lock the file. Only here another process is waited for."""
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as exc:
            if not exc.sqlite_errorname.startswith("SQLITE_BUSY"):
                raise
            if not wait_s:
                return False
            self.is_waiting = True
            db.execute(f"PRAGMA busy_timeout = {wait_s * 1000:.0f}")
            try:
                db.execute("BEGIN IMMEDIATE")
            finally:
                self.is_waiting = False
                db.execute("PRAGMA busy_timeout = 0")
        return True

    def check_present(self) -> None:
        """Check that the file is still there: SQLite goes on writing into one that was removed."""
        try:
            status = os.stat(self._path)
        except OSError as exc:
            raise AuditError(f"cannot write the record {self.place}: it was removed ({exc.strerror})") from exc
        if (status.st_dev, status.st_ino) != self._inode:
            raise AuditError(f"cannot write the record {self.place}: another file was put in its place")

    def sync(self) -> None:
        """Bring the write-ahead log to the disk. It is opened beside SQLite, which has no lock on it that closing it
        here would end."""
        try:
            descriptor = os.open(f"{self.file}-wal", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def compact(self) -> None:
        """Move the pages of a large write-ahead log into the database."""
        with suppress(FileNotFoundError):
            if os.stat(f"{self.file}-wal").st_size > WAL_BYTES:
                with closing(self._open_writable()) as db:
                    db.execute("PRAGMA synchronous = NORMAL")
                    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self, db: Any) -> None:
        """Close the file. The last connection moves what is in the write-ahead log into the database, and syncs it."""
        with suppress(sqlite3.Error):
            db.execute("PRAGMA synchronous = NORMAL")
        db.close()

    # Reading

    def damage(self, db: Any) -> Iterator[str]:
        """Yield what SQLite finds wrong with the file's pages and indices."""
        try:
            found = [text for (text,) in db.execute("PRAGMA integrity_check(20)")]
        except sqlite3.DatabaseError as exc:
            found = [str(exc)]
        yield from (f"the file is damaged: {text:.200}" for text in found if text != "ok")

    def most_bytes(self, db: Any) -> float:
        """Return the bytes of all pages."""
        pages, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        return float(pages * size)

    def state(self, db: Any) -> object:
        """Return what differs once somebody has written."""
        return db.execute("PRAGMA data_version").fetchone()[0]

    def copy_to(self, db: Any, copy: sqlite3.Connection) -> None:
        """Copy every page, also while others write."""
        db.backup(copy)

    def why(self, exc: Exception) -> str:
        """Say in words why SQLite or the system refused."""
        if isinstance(exc, UnicodeDecodeError):  # a message of SQLite's names what it found in the file
            return "the file is damaged"
        name = getattr(exc, "sqlite_errorname", "") or ""
        reason = next((text for prefix, text in _REASONS.items() if name.startswith(prefix)), "")
        return reason or (exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc))

    # Locks

    def lock(self, kind: str, name: str, *, is_unknown: bool = False) -> Lock:
        """Lock the byte of a name, which the kernel frees when this process ends."""
        descriptor = self._open_locks()
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _byte(kind, name))
        except BaseException:
            os.close(descriptor)
            raise
        return _ByteLock(descriptor)

    def is_locked(self, kind: str, name: str, db: Any) -> bool:
        """Return whether somebody has locked the byte of a name."""
        descriptor = self._open_locks()
        try:
            found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _byte(kind, name))
        finally:
            os.close(descriptor)
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)

    def _open_locks(self) -> int:
        return os.open(f"{self._path}{LOCKS}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class _ByteLock(Lock):
    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def release(self) -> None:
        os.close(self._descriptor)


_FLOCK: Final = "hhqqi4x"
"""A `struct flock` of the kernel."""


def _byte(kind: str, name: str) -> bytes:
    """Return what is to be locked for a name."""
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, lock_number(f"{kind} {name}"), 1, 0)


def make_tables(db: sqlite3.Connection) -> None:
    """Make the tables of a record in an empty file."""
    for statement in TABLES:
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _is_a_folder(path: Path) -> str:
    if not path.is_dir():
        return ""
    found = next(iter(sorted(path.glob("*.db"))), None)
    return "; it is a folder" if found is None else f"; a service keeps one for each tenant: take {found}"


def _is_ours(db: sqlite3.Connection) -> bool:
    return bool(db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID)


PLAIN_ROWS: Final = (
    "CREATE TEMP VIEW plain_run AS SELECT * FROM run WHERE typeof(started) = 'integer' "
    "AND typeof(outcome) = 'text' AND typeof(wall_s) IN ('real', 'null')",
    "CREATE TEMP VIEW plain_call AS SELECT call.*, started FROM call JOIN plain_run ON plain_run.writer = call.writer "
    "AND plain_run.n = call.run WHERE typeof(tool) = 'text' AND typeof(status) = 'text' "
    "AND typeof(code) IN ('text', 'null') AND typeof(duration_us) IN ('integer', 'null')",
    "CREATE TEMP VIEW plain_request AS SELECT * FROM request WHERE typeof(host) = 'text' AND typeof(secret) = 'text'",
)
"""What is counted: a row that another program made may hold values of any type."""

_REASONS: Final = {
    "SQLITE_BUSY": f"another process has locked it for more than {LOCK_S:g} s",
    "SQLITE_LOCKED": f"another process has locked it for more than {LOCK_S:g} s",
    "SQLITE_FULL": "the disk is full",
    "SQLITE_READONLY": "it is read-only",
    "SQLITE_CANTOPEN": "it cannot be opened",
    "SQLITE_NOTADB": "it is not a database",
    "SQLITE_CORRUPT": "the file is damaged",
    "SQLITE_IOERR": "the disk cannot be read or written",
}
