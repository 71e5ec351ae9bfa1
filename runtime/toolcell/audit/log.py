"""`AuditLog`: the one place that writes events, and the thread that signs them, brings them to the disk and prunes.

Every event of a run passes the redactor here, whatever it holds and whoever made it. This module knows neither runs
nor tools; those belong to the recorder.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from toolcell.audit import cutting, records, retention, signatures, store
from toolcell.audit.config import RecordConfig
from toolcell.audit.keys import Signer, signer_of
from toolcell.audit.records import GENESIS, SALT_BYTES, event_digest, hash_digest
from toolcell.audit.redact import Redactor
from toolcell.audit.signatures import Head, default_heads_dir, save_head
from toolcell.audit.sinks import Sink, call_sinks
from toolcell.errors import AuditError, UsageError
from toolcell.support import daemon_threads, packing
from toolcell.support.log import logger_of
from toolcell_bridge import __version__

logger = logger_of("toolcell.audit")

WAL_BYTES: Final = 4 << 20
"""When the write-ahead log is larger, the thread that signs moves its pages into the database."""
PRUNE_S: Final = 60.0
"""How often the thread that signs looks for what retention no longer keeps; sooner where `keep_s` is shorter."""
BLOB_USED_NS: Final = 3600 * 10**9
"""A blob that is used is marked again after this long, so that retention keeps it."""

_open_logs: weakref.WeakSet[AuditLog] = weakref.WeakSet()


def _detach_all() -> None:
    for log in tuple(_open_logs):
        log._detach_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)


class AuditLog:
    """An append-only, hash-chained, signed record in an SQLite file. A `Runtime` opens it; elsewhere use `with`.

    Safe in several threads. Several processes may share a file: each writes its own chain.

    `on_checkpoint` gets each signed head, in the thread that signs, soon after the events that it covers are on disk:
    give it to a place that whoever can write here cannot change. An exception of it is logged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: RecordConfig | None = None,
        key: Signer | str | os.PathLike[str] | None = None,
        secrets: Mapping[str, str] | Iterable[str] = (),
        sinks: Iterable[Sink] = (),
        heads: str | os.PathLike[str] | None = None,
        on_checkpoint: Callable[[Head], object] | None = None,
    ) -> None:
        if not os.fspath(path):
            raise UsageError("a record's file needs a name, such as 'runs.db'")
        self.path = Path(path)
        self.config = config or RecordConfig()
        self.heads = Path(heads) if heads is not None else default_heads_dir()
        """Where the newest head of each chain is saved, outside the record."""
        values = secrets.values() if isinstance(secrets, Mapping) else secrets
        self.redactor = Redactor(values, self.config.redact_names, self.config.redact_patterns)
        self._value_bytes = self.config.value_bytes
        self._key = key if key is not None else self.config.key
        self._on_checkpoint = on_checkpoint
        self._sinks = tuple(sinks)
        self._lock = threading.Lock()
        """Held while an event is written, for microseconds; longer only while another process has locked the file."""
        self._db: sqlite3.Connection | None = None
        self._why_closed = "it is not open"
        self._signer: Signer | None = None
        self._chain, self._seq, self._last_hash = "", 0, GENESIS
        self._id = ""
        self._inode = (0, 0)
        self._after: tuple[str, int, bytes] | None = None
        self._signed_seq = 0
        self._salts, self._salt_at = b"", 0
        self._blobs: dict[str, int] = {}
        """Digests of the blobs that are in the record, and when each was last marked as used."""
        self._signing_thread: threading.Thread | None = None
        self._wake_signing = threading.Event()
        self._is_signing_awake = True
        """The signing thread looks for new events every `checkpoint_s` while it is awake. To set `_wake_signing` costs
        the run that does it more, because the interpreter switches threads."""
        self._is_closing = threading.Event()
        self._failure: AuditError | None = None
        self._pruned_s = time.monotonic()

    # Opening and closing

    def open(self) -> Self:
        """Begin a chain and start the signing thread.

        Raises:
            AuditError: the key or the file cannot be used.
            UsageError: the record is open already, or the key lies beside what it signs.
        """
        if self._db is not None:
            raise UsageError(f"the record {self.path} is already open")
        self._signer = signer = signer_of(self._key, self.path)
        self._db = store.open_writable(self.path, is_synced=self.config.fsync == "always")
        try:
            self._begin(self._db, signer)
        except BaseException as exc:
            self._db.close()
            self._db = None
            if isinstance(exc, sqlite3.Error):
                raise self._failed(exc) from exc
            raise
        self._is_closing.clear()
        self._failure, self._is_signing_awake = None, True
        _open_logs.add(self)
        self._signing_thread = daemon_threads.start(self._sign_until_closed, name="toolcell-record")
        return self

    def _begin(self, db: sqlite3.Connection, signer: Signer) -> None:
        """Write the first event of a new chain: who writes it, and which event was the newest of the record."""
        self._id = store.record_id(db)
        status = self.path.stat()
        self._inode = (status.st_dev, status.st_ino)
        self._chain, self._seq, self._last_hash, self._signed_seq = os.urandom(6).hex(), 0, GENESIS, 0
        self._blobs.clear()
        self._after = db.execute("SELECT writer, n, hash FROM event ORDER BY id DESC LIMIT 1").fetchone()
        python = ".".join(map(str, sys.version_info[:3]))
        who = (os.uname().nodename, os.getpid(), __version__, python, signer.key_id, signer.algorithm)
        self.append(records.OPENED, 0, (*who, None if self._after is None else [*self._after], {}))

    def _detach_after_fork(self) -> None:
        """Stop writing, in a forked child: the chain is the parent's, and another thread may have held our lock."""
        if self._db is not None:
            self._lock = threading.Lock()
            self._abandoned = self._db  # SQLite forbids to use or close a parent's connection
            self._db, self._why_closed = None, "it was opened by the parent of this process"

    def close(self) -> None:
        """Sign the last events and close the file. Safe to call twice.

        Raises:
            AuditError: the last checkpoint could not be written.
        """
        db = self._db
        if db is None or self._signing_thread is None:
            return
        self._is_closing.set()
        self._wake_signing.set()
        self._signing_thread.join()
        try:
            with store.translated(self.path, "write"):
                head = self._checkpoint(signatures.CLOSED)
                with self._lock:
                    self._db, self._why_closed = None, "it is closed"
                self._sync()
            self._publish(head)
        finally:
            with self._lock:
                self._db, self._why_closed = None, "it is closed"
            self._close_database(db)

    def _close_database(self, db: sqlite3.Connection) -> None:
        """Close the file. The last connection moves what is in the write-ahead log into the database, and syncs it."""
        with suppress(sqlite3.Error):
            db.execute("PRAGMA synchronous = NORMAL")
        db.close()

    @property
    def is_open(self) -> bool:
        """True between `open` and `close`."""
        return self._db is not None

    @property
    def chain(self) -> str:
        """Name of the chain being written."""
        self._writable()
        return self._chain

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Writing

    def append(
        self, kind: str, run: int, fields: tuple[Any, ...], redactor: Redactor | None = None, at_ns: int | None = None
    ) -> int:
        """Write one event and return its seq. When this returns, the event survives a kill of this process.

        `at_ns`: when it happened, if not now. Waits while another process has locked the file.

        Raises:
            AuditError: the event could not be written; the record is as it was before.
        """
        seq = self.try_append(kind, run, fields, redactor, at_ns, wait=True)
        assert seq is not None
        return seq

    def try_append(
        self,
        kind: str,
        run: int,
        fields: tuple[Any, ...],
        redactor: Redactor | None = None,
        at_ns: int | None = None,
        *,
        wait: bool = False,
    ) -> int | None:
        """Do the same, but return None and write nothing where that would have to wait for another process."""
        redactor = redactor or self.redactor
        at_ns = at_ns or time.time_ns()
        try:
            body: bytes = packing.thread_packer.pack(fields)
            is_ready = len(body) <= self._value_bytes and redactor.scan(body) is None
        except (TypeError, ValueError, OverflowError, RecursionError):
            is_ready = False
        if not is_ready:
            body = cutting.encode(kind, fields, self.config, redactor)
            fields = tuple(records.fields_of(kind, body).values())
        if not self._lock.acquire(blocking=wait):
            return None
        try:
            seq = self._write(kind, run, body, at_ns, fields, wait)
        finally:
            self._lock.release()
        if seq is None:
            return None
        if self._sinks:
            call_sinks(self._sinks, kind, self._chain, seq, run or seq, at_ns, body)
        if not self._is_signing_awake or seq - self._signed_seq >= self.config.checkpoint_records:
            self._is_signing_awake = True
            self._wake_signing.set()
        return seq

    def _write(
        self,
        kind: str,
        run: int,
        body: bytes,
        at_ns: int,
        fields: tuple[Any, ...],
        wait: bool,
        also: Callable[[sqlite3.Connection], object] | None = None,
    ) -> int | None:
        """Write an event, its rows and what `also` changes, in one transaction. The caller holds the lock."""
        db = self._writable()
        if kind in _EFFECTS:
            self._check_file()
        seq = self._seq + 1
        run = seq if kind == records.RUN_STARTED else run
        salt = self._next_salt()
        digest = event_digest(self._chain, seq, run, kind, at_ns, salt + body)
        record_hash = hash_digest(self._last_hash, run, digest)
        try:
            self._begin_write(db, wait)
        except sqlite3.OperationalError as exc:
            if not wait and exc.sqlite_errorname.startswith("SQLITE_BUSY"):
                return None
            raise self._failed(exc) from exc
        try:
            db.execute(
                store.INSERT_EVENT,
                (self._chain, seq, run, kind, at_ns, salt, body, self._last_hash, record_hash),
            )
            for statement, values in store.rows_of(
                self._chain, seq, run, kind, at_ns, dict(zip(records.FIELDS[kind], fields, strict=True))
            ):
                db.execute(statement, values)
            if also is not None:
                also(db)
            db.execute("COMMIT")
        except BaseException as exc:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            if isinstance(exc, sqlite3.Error):
                raise self._failed(exc) from exc
            raise
        self._seq, self._last_hash = seq, record_hash
        return seq

    def _begin_write(self, db: sqlite3.Connection, wait: bool) -> None:
        """Lock the file. Only here another process is waited for."""
        if not wait:
            db.execute("BEGIN IMMEDIATE")
            return
        db.execute(f"PRAGMA busy_timeout = {store.LOCK_S * 1000:.0f}")
        try:
            db.execute("BEGIN IMMEDIATE")
        finally:
            db.execute("PRAGMA busy_timeout = 0")

    def _failed(self, exc: sqlite3.Error) -> AuditError:
        return AuditError(f"cannot write the record {self.path}: {store.why(exc)}")

    def _check_file(self) -> None:
        """Check that the file is still there: SQLite goes on writing into one that was removed.

        Raises:
            AuditError: it was removed or replaced.
        """
        try:
            status = os.stat(self.path)
        except OSError as exc:
            raise AuditError(f"cannot write the record {self.path}: it was removed ({exc.strerror})") from exc
        if (status.st_dev, status.st_ino) != self._inode:
            raise AuditError(f"cannot write the record {self.path}: another file was put in its place")

    def _next_salt(self) -> bytes:
        """Return random bytes. They are drawn for many events at once, because a system call takes longer."""
        start = self._salt_at
        if start == len(self._salts):
            self._salts, start = os.urandom(SALT_BYTES * 64), 0
        self._salt_at = end = start + SALT_BYTES
        return self._salts[start:end]

    def keep_blob(self, digest: str, content: bytes, *, wait: bool) -> bool:
        """Write what many runs share, once, and mark it as used. False: another process must be waited for.

        Raises:
            AuditError: it could not be written.
        """
        now_ns = time.time_ns()
        if now_ns - self._blobs.get(digest, 0) < BLOB_USED_NS:
            return True
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            db = self._writable()
            try:
                self._begin_write(db, wait)
                try:
                    values = (digest, content, now_ns)
                    db.execute(
                        "INSERT INTO blob VALUES (?, ?, ?) ON CONFLICT (sha256) DO UPDATE SET used = excluded.used",
                        values,
                    )
                    db.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):
                        db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as exc:
                if not wait and (getattr(exc, "sqlite_errorname", "") or "").startswith("SQLITE_BUSY"):
                    return False
                raise self._failed(exc) from exc
        finally:
            self._lock.release()
        self._blobs[digest] = now_ns
        return True

    def _writable(self) -> sqlite3.Connection:
        if self._db is None:
            raise AuditError(f"the record {self.path} cannot be written: {self._why_closed}")
        if self._failure is not None:
            raise self._failure
        return self._db

    # Signing

    def checkpoint(self) -> Head:
        """Sign everything written so far and return the head; keep it outside the record.

        Raises:
            AuditError: the checkpoint could not be written.
        """
        with store.translated(self.path, "write"):
            head = self._checkpoint(signatures.ASKED)
        self._sync()
        self._publish(head)
        return head

    def _checkpoint(self, reason: str) -> Head:
        """Sign what was written so far. The key may be slow, so nothing waits for it but the signing thread."""
        with self._lock:
            self._writable()
            seq, record_hash = self._seq, self._last_hash
        assert self._signer is not None
        head = Head.sign(self._id, self._chain, seq, record_hash, time.time_ns(), reason, self._signer)
        with self._lock:
            db = self._writable()
            self._begin_write(db, wait=True)
            try:
                db.execute(signatures.INSERT_CHECKPOINT, signatures.checkpoint_row(head))
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise
            self._signed_seq = seq
        return head

    def _publish(self, head: Head) -> None:
        """Save a head on this machine, and give it to the caller."""
        with suppress(OSError):
            save_head(self.heads, head)
            self._forget_linked()
        if self._on_checkpoint is not None:
            try:
                self._on_checkpoint(head)
            except Exception:
                logger.exception("a head of the record did not reach on_checkpoint")

    def _forget_linked(self) -> None:
        """Forget the head of the chain that ours names as the newest, once ours is saved: it is found through ours."""
        after, self._after = self._after, None
        if after is None:
            return
        with suppress(AuditError):
            for head in signatures.load_heads(self.heads / self._id / f"{after[0]}.json"):
                if (head.seq, head.record_hash) == after[1:] and head.reason == signatures.CLOSED:
                    signatures.forget_heads(self.heads, self._id, [after[0]])

    def _sync(self) -> None:
        """Wait until what was written is on disk.

        The write-ahead log is opened beside SQLite, which has no lock on it that closing it here would end.
        """
        if self.config.fsync == "never":
            return
        try:
            descriptor = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            os.fsync(descriptor)
        except OSError as exc:  # what is on the disk now is not known, so no later event may claim to be safe
            self._failure = AuditError(f"the record did not reach the disk: {exc.strerror}; open it again")
            raise self._failure from exc
        finally:
            os.close(descriptor)

    def _sign_until_closed(self) -> None:
        """Sign new events soon after they were written. The signing thread runs this."""
        while not self._is_closing.is_set() and self._db is not None:
            self._wake_signing.wait(None if self._can_sleep() else self.config.checkpoint_s)
            self._wake_signing.clear()
            if self._is_closing.is_set():
                return
            try:
                self._sign()
                self._prune_if_due()
            except Exception as exc:  # a full disk or an unreachable key; both may be temporary
                logger.warning("the record %s could not be signed: %s", self.path, exc)
                self._is_closing.wait(self.config.checkpoint_s)

    def _can_sleep(self) -> bool:
        """True when there is nothing to sign, and nothing to prune. Then the next event wakes the signing thread."""
        with self._lock:
            is_pruning = self.config.keep_s is not None or self.config.keep_bytes is not None
            self._is_signing_awake = is_pruning or self._seq > self._signed_seq
            return not self._is_signing_awake

    def _sign(self) -> None:
        """Make a checkpoint and bring it to the disk; then save the head."""
        if self._seq == self._signed_seq:
            return
        head = self._checkpoint(signatures.TIME)
        self._sync()
        self._publish(head)
        with suppress(FileNotFoundError):
            if os.stat(f"{self.path}-wal").st_size > WAL_BYTES:
                with closing(store.open_writable(self.path)) as db:
                    db.execute("PRAGMA synchronous = NORMAL")
                    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    # Retention

    def prune(self) -> list[retention.Removal]:
        """Remove what the configuration no longer keeps, and say for each chain what went and what stays, and why.

        Raises:
            AuditError: the record cannot be read or written.
        """
        signer = self._signer
        self._writable()
        assert signer is not None
        plan = retention.removals(self.path, self.config, [signer])
        for removal in plan:
            if removal.count:
                self._remove(removal, signer)
        if any(each.count for each in plan):
            with self._lock, store.translated(self.path, "prune"):
                retention.remove_blobs(self._writable(), time.time_ns())
        return plan

    def _remove(self, removal: retention.Removal, signer: Signer) -> None:
        """Remove events, put the checkpoint that stands for them, and say so in an event: all in one transaction."""
        head = Head.sign(
            self._id, removal.chain, removal.seq, removal.record_hash, time.time_ns(), signatures.PRUNED, signer
        )
        said: tuple[Any, ...] = (removal.chain, removal.seq, removal.record_hash, removal.count, removal.reason, {})
        body = packing.pack_fields(said)

        def remove(db: sqlite3.Connection) -> None:
            retention.remove(db, removal, head)

        with self._lock:
            self._write(records.PRUNED, 0, body, time.time_ns(), said, wait=True, also=remove)
        if removal.is_whole:
            signatures.forget_heads(self.heads, self._id, [removal.chain])

    def _prune_if_due(self) -> None:
        if self.config.keep_s is None and self.config.keep_bytes is None:
            return
        every_s = min(PRUNE_S, self.config.keep_s or PRUNE_S)
        if time.monotonic() - self._pruned_s >= every_s:
            self._pruned_s = time.monotonic()
            self.prune()


_EFFECTS: Final = frozenset({records.RUN_STARTED, records.CALL_STARTED})
"""Kinds that are written before an effect."""
