"""`AuditLog`: the one place that writes events, and the thread that signs them, brings them to the disk and prunes.

Every event of a run passes the redactor here, whatever it holds and whoever made it. This module knows neither runs
nor tools; those belong to the recorder.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from toolcell.audit import cutting, records, retention, signatures, store
from toolcell.audit.config import RecordConfig
from toolcell.audit.databases import Place, database_of
from toolcell.audit.keys import Signer, Verifier, load_verifiers, signer_of
from toolcell.audit.records import GENESIS, SALT_BYTES, event_digest, hash_digest
from toolcell.audit.redact import Redactor
from toolcell.audit.signatures import Head, default_heads_dir, save_head
from toolcell.audit.sinks import Sink, call_sinks
from toolcell.errors import AuditError, UsageError
from toolcell.support import daemon_threads, packing
from toolcell.support.host_work import LONG_BYTES
from toolcell.support.log import logger_of
from toolcell_bridge import __version__

logger = logger_of("toolcell.audit")

PRUNE_S: Final = 60.0
"""How often the thread that signs looks for what retention no longer keeps; sooner where `keep_s` is shorter."""
PRUNE_EVENTS: Final = 1000
"""Retention removes about as many events at once: while it does, others wait."""
BLOB_USED_NS: Final = 3600 * 10**9
"""A blob that is used is marked again after this long, so that retention keeps it."""

EFFECTS: Final = frozenset({records.RUN_STARTED, records.CALL_STARTED})
"""Kinds that are written before an effect."""
QUEUE_S: Final = 0.05
"""An end that waits for the next event is written after this long at most."""
OWN_LOCK_S: Final = 0.005
"""How long the event loop waits for another thread of this process, which writes for microseconds; then a thread waits
in its place, because that other one may be waiting for another process."""

_open_logs: weakref.WeakSet[AuditLog] = weakref.WeakSet()


def _detach_all() -> None:
    for log in tuple(_open_logs):
        log._detach_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)


@dataclass(slots=True, eq=False)  # not frozen: making one would take several times as long
class _Event:
    """One event to be written, as it is to be stored."""

    kind: str
    run: int
    """0 where it belongs to no run, or begins one."""
    body: bytes
    at_ns: int
    fields: tuple[Any, ...]
    """What the body holds."""
    seq: int = 0
    """Its number, once it is written."""


class _Rows:
    """Rows of what runs need to go on: written beside events, and no part of the chain."""

    __slots__ = ("last", "lock", "rows", "size", "statement", "then")

    def __init__(
        self,
        statement: str,
        rows: Sequence[tuple[Any, ...]],
        then: Callable[[], object] | None,
        removes_bytes: int,
        lock: store.Lock | None,
        last: tuple[int, int],
    ) -> None:
        self.statement, self.rows, self.then, self.lock, self.last = statement, rows, then, lock, last
        self.size = removes_bytes + sum(len(each) for row in rows for each in row if type(each) is bytes)


def _lost_rows(queued: Iterable[object]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of journals that somebody else has: they are not written."""
    for each in queued:
        if type(each) is _Rows and each.lock is not None and each.lock.is_lost:
            yield from each.rows


@dataclass(slots=True, eq=False)  # not frozen: one is made for each write
class _Attempt:
    """One transaction: what it was to write, and where the chain is after it."""

    seq: int
    last_hash: bytes
    events: Sequence[_Event]
    queued: Sequence[_Event | _Rows]


class AuditLog:
    """An append-only, hash-chained, signed record. A `Runtime` opens it; elsewhere use `with`.

    `path` is an SQLite file, or the URL of a PostgreSQL database, which several hosts may share. Safe in several
    threads. Several processes may share a record: each writes its own chain.

    `on_checkpoint` gets each signed head, in the thread that signs, soon after the events that it covers are on disk:
    give it to a place that whoever can write here cannot change. An exception of it is logged.
    """

    def __init__(
        self,
        path: Place,
        *,
        config: RecordConfig | None = None,
        key: Signer | str | os.PathLike[str] | None = None,
        secrets: Mapping[str, str] | Iterable[str] = (),
        sinks: Iterable[Sink] = (),
        heads: str | os.PathLike[str] | None = None,
        on_checkpoint: Callable[[Head], object] | None = None,
    ) -> None:
        self.database = database_of(path)
        self.place = self.database.place
        """Names the record in messages."""
        self.path: Path | str = self.database.file or self.place
        self.config = config or RecordConfig()
        self.heads = Path(heads) if heads is not None else default_heads_dir()
        """Where the newest head of each chain is saved, outside the record."""
        values = secrets.values() if isinstance(secrets, Mapping) else secrets
        self.redactor = Redactor(values, self.config.redact_names, self.config.redact_patterns)
        self._value_bytes = self.config.value_bytes
        self._key = key if key is not None else self.config.key
        self._on_checkpoint = on_checkpoint
        self._sinks = tuple(sinks)
        self._lock = threading.RLock()
        """Held while events are written, for microseconds; longer only while another process has locked the file, or a
        sink takes its time."""
        self._queue: deque[_Event | _Rows] = deque()
        """Written with the next event: ends of calls, and what threads want to write that wait for another process."""
        self.database.turn = self._lock
        self._unsure: list[_Attempt] = []
        """The connection was lost while one of these was written, so it may be written or not."""
        self._must_find_out = False
        self._db: store.Connection | None = None
        self._why_closed = "it is not open"
        self._signer: Signer | None = None
        self._chain, self._seq, self._last_hash = "", 0, GENESIS
        self._id = ""
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
            raise UsageError(f"the record {self.place} is already open")
        self._signer = signer = signer_of(self._key, self.database.file)
        self._db = self.database.open_writable(is_synced=self.config.fsync == "always")
        try:
            self._begin(self._db, signer)
        except BaseException:
            self._db.close()
            self._db = None
            raise
        self._is_closing.clear()
        self._failure, self._is_signing_awake = None, True
        _open_logs.add(self)
        self._signing_thread = daemon_threads.start(self._sign_until_closed, name="toolcell-record")
        return self

    def _begin(self, db: store.Connection, signer: Signer) -> None:
        """Write the first event of a new chain: who writes it, and which event was the newest of the record."""
        self._id = store.record_id(db)
        self._chain, self._seq, self._last_hash, self._signed_seq = os.urandom(6).hex(), 0, GENESIS, 0
        self._blobs.clear()
        self._unsure.clear()
        self._must_find_out = False
        self._after = db.execute("SELECT writer, n, hash FROM event ORDER BY id DESC LIMIT 1").fetchone()
        python = ".".join(map(str, sys.version_info[:3]))
        who = (os.uname().nodename, os.getpid(), __version__, python, signer.key_id, signer.algorithm)
        self.append(records.OPENED, 0, (*who, None if self._after is None else [*self._after], {}))

    def _detach_after_fork(self) -> None:
        """Stop writing, in a forked child: the chain is the parent's, and another thread may have held our lock."""
        if self._db is not None:
            self._lock = self.database.turn = threading.RLock()
            self.database.forget_connections()
            self._queue.clear()
            self._abandoned = self._db  # a parent's connection must not be used, nor closed
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
            head = self._checkpoint(signatures.CLOSED)
            with self._lock:
                self._db, self._why_closed = None, "it is closed"
            self._sync()
            self._publish(head)
        finally:
            with self._lock:
                self._db, self._why_closed = None, "it is closed"
            for each in self._queue:  # they could not be written
                if type(each) is _Rows and each.then is not None:
                    each.then()
            self._queue.clear()
            self.database.close(db)

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
        self, kind: str, run: int, fields: tuple[Any, ...], redactor: Redactor | None = None, at_ns: int = 0
    ) -> int:
        """Write one event and return its seq. When this returns, the event survives a kill of this process.

        `at_ns`: when it happened, if not now. Waits while another process has locked the file.

        Raises:
            AuditError: the event could not be written; the record is as it was before.
        """
        event = self._event(kind, run, fields, redactor, at_ns)
        until = time.monotonic() + store.LOCK_S
        self._queue.append(event)
        with self._lock:
            while not event.seq:  # whoever had the lock before may have written it
                self._write_queued(event, until)
        self._stir(event.seq)
        return event.seq

    def _write_queued(self, event: _Event, until: float) -> None:
        """Write what is queued, this event too; return without an error where that is to be tried again."""
        try:
            self._write([], max(0.001, until - time.monotonic()))
        except BaseException as exc:
            is_sent = event.seq or (self.database.is_unsure(exc) and time.monotonic() < until)
            if is_sent and isinstance(exc, AuditError):
                return  # it is known now that an earlier attempt wrote it, or it is to be found out
            if event in self._queue:
                self._queue.remove(event)
            raise

    def try_append(self, kind: str, run: int, fields: tuple[Any, ...], redactor: Redactor | None = None) -> int | None:
        """Do the same, but return None and write nothing where that would have to wait for another process, or would
        write many bytes of what runs need to go on."""
        event = self._event(kind, run, fields, redactor)
        if self.database.is_waiting or self.has_much_to_write() or not self._lock.acquire(timeout=OWN_LOCK_S):
            return None
        try:
            seq = self._write([event], 0.0)
        finally:
            self._lock.release()
        if seq is not None:
            self._stir(seq)
        return seq

    def has_much_to_write(self) -> bool:
        """Return True where a thread should write what is queued."""
        return sum(each.size for each in [*self._queue] if type(each) is _Rows) > LONG_BYTES

    def append_later(self, kind: str, run: int, fields: tuple[Any, ...], redactor: Redactor, at_ns: int) -> None:
        """Write one event with the next one, or in a moment, in the thread that signs.

        Raises:
            AuditError: the record is closed, or no longer written.
        """
        self._writable()
        self._queue.append(self._event(kind, run, fields, redactor, at_ns))
        self._stir(self._seq)

    def keep(
        self,
        statement: str,
        rows: Sequence[tuple[Any, ...]],
        then: Callable[[], object] | None = None,
        removes_bytes: int = 0,
        lock: store.Lock | None = None,
        last: tuple[int, int] = (0, 0),
    ) -> None:
        """Write rows of what runs need to go on, with the next event or in a moment. `then` is called after that.
        `lock`: of their journal; `last`: number and time of its last record then.

        Raises:
            AuditError: the record is closed, or no longer written.
        """
        self._writable()
        self._queue.append(_Rows(statement, rows, then, removes_bytes, lock, last))
        self._stir(self._seq)

    def change(self, change: Callable[[store.Connection], Any]) -> Any:
        """Write what is queued and then change rows, in one transaction; return what `change` returns. Waits.

        Raises:
            AuditError: it could not be written.
        """
        found: list[Any] = []
        until = time.monotonic() + store.LOCK_S
        with self._lock:
            self._write([], self._left_s(until), also=lambda db: found.append(change(db)))
        return found[0]

    def flush(self, *, wait: bool = False) -> bool:
        """Write what `append_later` was given. False: another process must be waited for.

        Raises:
            AuditError: it could not be written; it will be, with a later event.
        """
        until = time.monotonic() + (store.LOCK_S if wait else 0.0)
        while True:
            try:
                return self._flush(wait, until)
            except AuditError as exc:
                if not self.database.is_unsure(exc) or time.monotonic() >= until:
                    raise

    def _flush(self, wait: bool, until: float) -> bool:
        if not self._queue:
            return True
        if (not wait and self.database.is_waiting) or not self._lock.acquire(timeout=-1 if wait else OWN_LOCK_S):
            return False
        try:
            return not self._queue or self._write([], self._left_s(until) if wait else 0.0) is not None
        finally:
            self._lock.release()

    def _left_s(self, until: float) -> float:
        """Return how long who waited for us may still wait: for a server, that is part of it."""
        return max(0.001, until - time.monotonic()) if self.database.file is None else store.LOCK_S

    def _event(self, kind: str, run: int, fields: tuple[Any, ...], redactor: Redactor | None, at_ns: int = 0) -> _Event:
        redactor = redactor or self.redactor
        try:
            body: bytes = packing.thread_packer.pack(fields)
            is_ready = len(body) <= self._value_bytes and redactor.scan(body) is None
        except (TypeError, ValueError, OverflowError, RecursionError):
            is_ready = False
        if not is_ready:
            body = cutting.encode(kind, fields, self.config, redactor)
            fields = tuple(records.fields_of(kind, body).values())
        return _Event(kind, run, body, at_ns or time.time_ns(), fields)

    def _stir(self, seq: int) -> None:
        """Wake the thread that signs where it sleeps, or has much to sign."""
        if not self._is_signing_awake or seq - self._signed_seq >= self.config.checkpoint_records:
            self._is_signing_awake = True
            self._wake_signing.set()

    def _write(
        self, new: Sequence[_Event], wait_s: float, also: Callable[[store.Connection], object] | None = None
    ) -> int | None:
        """Write what is queued, these events and what `also` changes, in one transaction. The caller holds the lock.

        Return the seq of the last event; None: another process must be waited for, and nothing was written.
        """
        self._writable()
        if self._must_find_out:
            self._find_out(wait_s)
        chain, seq, last_hash = self._chain, self._seq, self._last_hash
        queued = [*self._queue]  # at once: a thread may add to it
        events, rows, changes, has_effect = [], [], list[store.Row](), False
        lasts: list[tuple[store.Lock, tuple[int, int]]] = []
        for event in [*queued, *new] if queued else new:
            if type(event) is _Rows:
                changes += [(event.statement, row) for row in event.rows]
                if event.lock is not None:
                    lasts.append((event.lock, event.last))
                continue
            assert type(event) is _Event
            seq += 1
            kind, run, at_ns, body = event.kind, event.run, event.at_ns, event.body
            if kind == records.RUN_STARTED:
                event.run = run = seq
            has_effect = has_effect or kind in EFFECTS
            salt = self._next_salt()
            digest = event_digest(chain, seq, run, kind, at_ns, salt + body)
            previous_hash, last_hash = last_hash, hash_digest(last_hash, run, digest)
            rows.append((chain, seq, run, kind, at_ns, salt, body, previous_hash, last_hash))
            events.append(event)
            changes += store.rows_of(chain, run, kind, at_ns, event.fields)
        if has_effect:
            self.database.check_present()

        def write(db: store.Connection) -> None:
            for lock, last in lasts:
                lock.attempted.add(last)
            lost = {id(row) for row in _lost_rows(queued)} if any(lock.is_lost for lock, _ in lasts) else ()
            with self.database.batch(db):
                db.executemany(store.INSERT_EVENT, rows)
                store.execute(db, [each for each in changes if id(each[1]) not in lost] if lost else changes)
            if also is not None:
                also(db)

        attempt = _Attempt(seq, last_hash, events, queued)
        try:
            if not self._change(write, wait_s):
                return None
        except AuditError as exc:
            if self.database.is_unsure(exc):
                self._unsure.append(attempt)
                self._must_find_out = True
            raise
        self._written(attempt)
        return seq

    def _written(self, attempt: _Attempt) -> None:
        """Take note of what is in the record now."""
        for number, event in enumerate(attempt.events, self._seq + 1):
            event.seq = number
        self._seq, self._last_hash = attempt.seq, attempt.last_hash
        self._unsure.clear()
        for each in attempt.queued:
            if type(each) is _Rows:
                if each.lock is not None:
                    each.lock.written = each.last[0]
                    each.lock.attempted.clear()
                if each.then is not None:
                    each.then()
            if self._queue and self._queue[0] is each:  # only now: who finds nothing in the queue waits for nobody
                self._queue.popleft()
            elif each in self._queue:  # else whoever waited for it gave up
                self._queue.remove(each)
        for event in attempt.events if self._sinks else ():
            call_sinks(self._sinks, event.kind, self._chain, event.seq, event.run, event.at_ns, event.body)

    def _find_out(self, wait_s: float) -> None:
        """Find out whether a transaction was committed. Without an event in it, it can be made again.

        Raises:
            AuditError: the database is not to be reached, or our chain is not what we wrote.
        """
        query, found = "SELECT n, hash FROM event WHERE writer = ? ORDER BY n DESC LIMIT 1", list[Any]()
        if not self._change(lambda db: found.append(db.execute(query, (self._chain,)).fetchone()), wait_s):
            raise AuditError(f"cannot write the record {self.place} now")
        self._must_find_out = False
        for attempt in self._unsure:
            if found[-1] == (attempt.seq, attempt.last_hash) and attempt.seq > self._seq:
                self._written(attempt)
                return
        if found[-1] != (self._seq, self._last_hash) and self._seq:
            self._failure = AuditError(f"the record {self.place} is not what was written to it; open it again")
            raise self._failure

    def _change(self, change: Callable[[store.Connection], object], wait_s: float) -> bool:
        """Commit a change, all or nothing. False: another process would have to be waited for, and nothing was done.

        Raises:
            AuditError: it could not be written.
        """
        db = self._writable()
        try:
            if not self.database.begin_write(db, wait_s):
                return False
            change(db)
            db.execute("COMMIT")
        except BaseException as exc:
            with suppress(*self.database.errors):
                db.execute("ROLLBACK")
            if isinstance(exc, self.database.errors):
                raise AuditError(f"cannot write the record {self.place}: {self.database.why(exc)}") from exc
            raise
        return True

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
        now_ns, until = time.time_ns(), time.monotonic() + store.LOCK_S
        if now_ns - self._blobs.get(digest, 0) < BLOB_USED_NS:
            return True
        statement = "INSERT INTO blob VALUES (?, ?, ?) ON CONFLICT (sha256) DO UPDATE SET used = excluded.used"
        if (not wait and self.database.is_waiting) or not self._lock.acquire(timeout=-1 if wait else OWN_LOCK_S):
            return False
        try:
            row = (digest, content, now_ns)
            if not self._change(lambda db: db.execute(statement, row), self._left_s(until) if wait else 0.0):
                return False
        finally:
            self._lock.release()
        self._blobs[digest] = now_ns
        return True

    def _writable(self) -> store.Connection:
        if self._db is None:
            raise AuditError(f"the record {self.place} cannot be written: {self._why_closed}")
        if self._failure is not None:
            raise self._failure
        return self._db

    # Signing

    def checkpoint(self) -> Head:
        """Sign everything written so far and return the head; keep it outside the record.

        Raises:
            AuditError: the checkpoint could not be written.
        """
        head = self._checkpoint(signatures.ASKED)
        self._sync()
        self._publish(head)
        return head

    def _checkpoint(self, reason: str) -> Head:
        """Sign what was written so far. The key may be slow, so nothing waits for it but the signing thread."""
        self.flush(wait=True)
        with self._lock:
            self._writable()
            seq, record_hash = self._seq, self._last_hash
        assert self._signer is not None
        head = Head.sign(self._id, self._chain, seq, record_hash, time.time_ns(), reason, self._signer)
        row = signatures.checkpoint_row(head)
        with self._lock:
            self._change(lambda db: db.execute(signatures.INSERT_CHECKPOINT, row), store.LOCK_S)
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
            for head in signatures.Head.load(self.heads / self._id / f"{after[0]}.json"):
                if (head.seq, head.record_hash) == after[1:] and head.reason == signatures.CLOSED:
                    signatures.forget_heads(self.heads, self._id, [after[0]])

    def _sync(self) -> None:
        """Wait until what was written is on disk."""
        if self.config.fsync == "never":
            return
        try:
            self.database.sync()
        except OSError as exc:  # what is on the disk now is not known, so no later event may claim to be safe
            self._failure = AuditError(f"the record did not reach the disk: {exc.strerror}; open it again")
            raise self._failure from exc

    def _sign_until_closed(self) -> None:
        """Sign new events soon after they were written. The signing thread runs this."""
        every_s = self.config.checkpoint_s
        due_s = time.monotonic() + every_s
        while not self._is_closing.is_set() and self._db is not None:
            if self._can_sleep():
                self._wake_signing.wait()
                due_s = time.monotonic() + every_s
            self._wake_signing.wait(min(QUEUE_S, every_s))
            self._wake_signing.clear()
            if self._is_closing.is_set():
                return
            try:
                self.flush(wait=True)
                if time.monotonic() >= due_s or self._seq - self._signed_seq >= self.config.checkpoint_records:
                    due_s = time.monotonic() + every_s
                    self._sign()
                self._prune_if_due()
            except Exception as exc:  # a full disk or an unreachable key; both may be temporary
                logger.warning("the record %s could not be signed: %s", self.place, exc)
                self._is_closing.wait(self.config.checkpoint_s)

    def _can_sleep(self) -> bool:
        """True when there is nothing to write, to sign or to prune. Then the next event wakes the signing thread."""
        self._is_signing_awake = False  # before the look, or an event that comes meanwhile would wake nobody
        is_pruning = self.config.keep_s is not None or self.config.keep_bytes is not None
        self._is_signing_awake = is_pruning or self._seq > self._signed_seq or bool(self._queue)
        return not self._is_signing_awake

    def _sign(self) -> None:
        """Make a checkpoint and bring it to the disk; then save the head."""
        if self._seq == self._signed_seq:
            return
        head = self._checkpoint(signatures.TIME)
        self._sync()
        self._publish(head)
        self.database.compact()

    # Retention

    def prune(self, keys: Iterable[Verifier] = ()) -> list[retention.Removal]:
        """Remove what the configuration no longer keeps, and say for each chain what went and what stays, and why.

        `keys`: of chains that another key signed, besides those whose place ours has taken.

        Raises:
            AuditError: the record cannot be read or written.
        """
        signer = self._signer
        self._writable()
        assert signer is not None
        known = [signer, *keys]
        if self._key is None or isinstance(self._key, str | os.PathLike):
            known += load_verifiers(self._key, is_needed=False)
        done: dict[str, retention.Removal] = {}
        is_more = True
        while is_more:
            plan = retention.removals(self.database, self.config, known, PRUNE_EVENTS)
            is_more = any(each.count >= PRUNE_EVENTS for each in plan)
            for removal in plan:
                before = done.get(removal.chain)
                if removal.count:
                    self._remove(removal, signer)
                    done[removal.chain] = removal if before is None else removal.after(before)
                else:
                    done.setdefault(removal.chain, removal)
        if any(each.count for each in done.values()):
            with self._lock, self.database.translated("prune"):
                retention.remove_blobs(self._writable(), time.time_ns())
        return [*done.values()]

    def _remove(self, removal: retention.Removal, signer: Signer) -> None:
        """Remove events, put the checkpoint that stands for them, and say so in an event: all in one transaction."""
        head = Head.sign(
            self._id, removal.chain, removal.seq, removal.record_hash, time.time_ns(), signatures.PRUNED, signer
        )
        said: tuple[Any, ...] = (removal.chain, removal.seq, removal.record_hash, removal.count, removal.reason, {})
        body = packing.pack_fields(said)

        def remove(db: store.Connection) -> None:
            retention.remove(db, removal, head)

        with self._lock:
            self._write([_Event(records.PRUNED, 0, body, time.time_ns(), said)], store.LOCK_S, also=remove)
        if removal.is_whole:
            signatures.forget_heads(self.heads, self._id, [removal.chain])

    def _prune_if_due(self) -> None:
        if self.config.keep_s is None and self.config.keep_bytes is None:
            return
        if time.monotonic() - self._pruned_s >= min(PRUNE_S, self.config.keep_s or PRUNE_S):
            self._pruned_s = time.monotonic()
            self.prune()
