"""`AuditLog`: the one place that writes records, and the thread that signs them.

Every record of a run passes the redactor here, whatever it holds and whoever made it. This module knows neither runs
nor tools; those belong to the recorder.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from toolcell.audit import cutting, records, retention
from toolcell.audit.config import AuditConfig
from toolcell.audit.format import create_log
from toolcell.audit.keys import Signer, SigningFailed, signer_of
from toolcell.audit.pruning import Pruner
from toolcell.audit.redact import Redactor
from toolcell.audit.signatures import Head, default_heads_dir, known_heads, save_head
from toolcell.audit.sinks import Sink, call_sinks
from toolcell.audit.writer import ChainWriter, sync
from toolcell.errors import AuditError, UsageError
from toolcell.support import daemon_threads, packing
from toolcell.support.log import logger_of

logger = logger_of("toolcell.audit")

SHARED = frozenset({records.TOOLS, records.SETTINGS})
"""Kinds that describe tools and settings and hold no values of a run: an argument called `token` is not a token."""


_open_logs: weakref.WeakSet[AuditLog] = weakref.WeakSet()


def _detach_all() -> None:
    for log in tuple(_open_logs):
        log._detach_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)


class AuditLog:
    """An append-only, hash-chained, signed log in a directory. A `Runtime` opens its log; elsewhere use `with`.

    Safe in several threads. Several processes may share a directory: each writes its own chain.

    `on_checkpoint` gets each signed head, in the thread that signs, soon after the records that it covers are on disk:
    give it to a place that whoever can write here cannot change. An exception of it is logged.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        config: AuditConfig | None = None,
        key: Signer | str | os.PathLike[str] | None = None,
        secrets: Mapping[str, str] | Iterable[str] = (),
        sinks: Iterable[Sink] = (),
        heads: str | os.PathLike[str] | None = None,
        on_checkpoint: Callable[[Head], object] | None = None,
    ) -> None:
        if not os.fspath(directory):
            raise UsageError(
                "an audit log's directory needs a name, such as 'runs/'; '' would be the current directory"
            )
        self.directory = Path(directory)
        self.config = config or AuditConfig()
        self.heads = Path(heads) if heads is not None else default_heads_dir()
        """Where the newest head of each chain is saved, outside the log."""
        values = secrets.values() if isinstance(secrets, Mapping) else secrets
        self.redactor = Redactor(values, self.config.redact_names, self.config.redact_patterns)
        self._value_bytes = self.config.value_bytes
        self._max_unsigned = self.config.checkpoint_records
        self._max_segment_bytes = self.config.segment_bytes
        self._is_always_synced = self.config.fsync == "always"
        self._key = key
        self._on_checkpoint = on_checkpoint
        self._sinks = tuple(sinks)
        self._lock = threading.Lock()
        self._signer: Signer | None = None
        self._chain: ChainWriter | None = None
        self._pruner: Pruner | None = None
        self._pruning = threading.Lock()
        self._idle_pruned_s = -math.inf
        self._why_closed = "it is not open"
        self._signing_thread: threading.Thread | None = None
        self._wake_signing = threading.Event()
        self._is_signing_awake = True
        """The signing thread looks for new records every `checkpoint_s` while it is awake. To set `_wake_signing` costs
        the run that does it more, because the interpreter switches threads."""
        self._is_closing = threading.Event()
        self._to_sync: list[int] = []
        self._failure: AuditError | None = None
        self.shared_digests: set[str] = set()
        """Digests of tools and settings that the open segment holds already."""

    # Opening and closing

    def open(self) -> Self:
        """Open a chain for writing and start the signing thread.

        Raises:
            AuditError: the key or the directory cannot be used.
            UsageError: the log is open already, or the key is in the log's directory.
        """
        if self._chain is not None:
            raise UsageError(f"the audit log {self.directory} is already open")
        self._signer = signer_of(self._key, self.directory)
        log = create_log(self.directory)
        self._chain = ChainWriter.open(self.directory, log, self._signer, known_heads(log, self.heads))
        self._pruner = Pruner(self._chain, self.config, self._signer)
        self._is_closing.clear()
        self._failure = None
        self.shared_digests.clear()
        _open_logs.add(self)
        self._is_signing_awake = True
        self._signing_thread = daemon_threads.start(self._sign_until_closed, name="toolcell-audit")
        return self

    def _detach_after_fork(self) -> None:
        """Stop writing, in a forked child: the chain is the parent's, and another thread may have held our lock."""
        if self._chain is not None:
            self._lock = threading.Lock()
            self._chain, self._why_closed = None, "it was opened by the parent of this process"

    def close(self) -> None:
        """Sign the last records and close the chain. Safe to call twice.

        Raises:
            AuditError: the last checkpoint could not be written.
        """
        chain = self._chain
        if chain is None or self._signing_thread is None:
            return
        self._is_closing.set()
        self._wake_signing.set()
        self._signing_thread.join()
        try:
            with self._lock:
                self._chain, self._why_closed = None, "it is closed"
                chain.checkpoint("closed")
                if self.config.fsync != "never":
                    chain.sync()
            self._publish_last(chain)
        finally:
            chain.release()
            self._sync_old()

    @property
    def is_open(self) -> bool:
        """True between `open` and `close`."""
        return self._chain is not None

    @property
    def chain(self) -> str:
        """Name of the chain being written."""
        return self._writable().name

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
        """Write one record and return its seq. When this returns, the record survives a kill of this process.

        `at_ns`: when it happened, if not now.

        Raises:
            AuditError: the record could not be written.
        """
        redactor = redactor or self.redactor
        at_ns = at_ns or time.time_ns()
        try:
            packed: bytes = packing.thread_packer.pack(fields)
            is_ready = len(packed) <= self._value_bytes and redactor.scan(packed) is None
        except (TypeError, ValueError, OverflowError, RecursionError):
            is_ready = False
        if not is_ready:
            packed = cutting.encode(kind, fields, self.config, redactor, with_names=kind not in SHARED)
        with self._lock:
            chain = self._chain
            if chain is None or self._failure is not None:
                chain = self._writable()
            seq = chain.append_packed(kind, run, packed, at_ns)
            is_large = chain.unsigned_records >= self._max_unsigned or chain.segment_bytes > self._max_segment_bytes
            if is_large or self._is_always_synced or not self._is_signing_awake:
                self._follow_up(chain)
        if self._sinks:
            call_sinks(self._sinks, kind, chain.name, seq, run or seq, at_ns, packed)
        return seq

    def _follow_up(self, chain: ChainWriter) -> None:
        """Sync, wake the signing thread or rotate, after a record that requires it."""
        if self._is_always_synced:
            chain.sync()
        if chain.unsigned_records >= self._max_unsigned or not self._is_signing_awake:
            self._is_signing_awake = True
            self._wake_signing.set()
        if chain.segment_bytes > self._max_segment_bytes:
            self._rotate(chain)

    def _rotate(self, chain: ChainWriter) -> None:
        """Begin the next segment. A segment ends with a signature, so while the key cannot be reached, try later."""
        try:
            self._to_sync.append(chain.rotate())
        except SigningFailed as exc:
            self._max_segment_bytes = chain.segment_bytes + self.config.segment_bytes // 4
            logger.warning("a segment of the audit log was not ended when it was full: %s", exc)
            return
        self._max_segment_bytes = self.config.segment_bytes
        self.shared_digests.clear()
        self._wake_signing.set()

    def _writable(self) -> ChainWriter:
        if self._chain is None:
            raise AuditError(f"the audit log {self.directory} cannot be written: {self._why_closed}")
        if self._failure is not None:
            raise self._failure
        return self._chain

    # Signing

    def checkpoint(self) -> Head:
        """Sign everything written so far and return the head; keep it outside the log.

        Raises:
            AuditError: the checkpoint could not be written.
        """
        with self._lock:
            chain = self._writable()
            chain.checkpoint("asked")
            head = self._head(chain)
            if self.config.fsync != "never":
                chain.sync()
        self._publish(head)
        return head

    def _publish(self, head: Head) -> None:
        """Save a head on this machine, and give it to the caller."""
        with suppress(OSError):
            save_head(self.heads, head)
        if self._on_checkpoint is not None:
            try:
                self._on_checkpoint(head)
            except Exception:
                logger.exception("a head of the audit log did not reach on_checkpoint")

    def _head(self, chain: ChainWriter) -> Head:
        assert self._signer is not None
        return Head.sign(chain.log, chain.name, chain.seq, chain.last_hash, time.time_ns(), self._signer)

    def _publish_last(self, chain: ChainWriter) -> None:
        try:
            self._publish(self._head(chain))
        except SigningFailed as exc:
            logger.warning("the last head of the audit log %s was not signed: %s", self.directory, exc)

    def _sign_until_closed(self) -> None:
        """Sign new records soon after they were written. The signing thread runs this."""
        while not self._is_closing.is_set() and (chain := self._chain) is not None:
            self._wait_until_due(chain)
            if self._can_sleep(chain):
                if not self._is_closing.is_set():
                    self._wake_signing.wait()
                continue
            try:
                self._sign(chain)
            except AuditError as exc:  # nobody knows what the disk holds now
                self._failure = exc

    def _can_sleep(self, chain: ChainWriter) -> bool:
        """True when no record came for a while. Then the next record wakes the signing thread."""
        with self._lock:
            self._is_signing_awake = chain.unsigned_records > 0
            return not self._is_signing_awake

    def _wait_until_due(self, chain: ChainWriter) -> None:
        deadline = time.monotonic() + self.config.checkpoint_s
        while not self._is_closing.is_set() and chain.unsigned_records < self._max_unsigned:
            left = deadline - time.monotonic()
            if left <= 0 or not self._wake_signing.wait(left):
                return
            self._wake_signing.clear()

    def _sign(self, chain: ChainWriter) -> None:
        """Write a checkpoint and bring it to the disk; then save the head."""
        try:
            with self._lock:
                is_new = chain.unsigned_records > 0
                if is_new:
                    chain.checkpoint("time" if chain.unsigned_records < self._max_unsigned else "records")
                    head, newest = self._head(chain), chain.duplicate()
        except Exception as exc:  # a full disk or an unreachable key; both may be temporary
            logger.warning("the audit log could not be signed: %s", exc)
            with self._lock:
                chain.unsigned_records = max(1, chain.unsigned_records)  # sign again, also if only a later step failed
            self._is_closing.wait(self.config.checkpoint_s)
            return
        if not is_new:
            return
        was_rotated = bool(self._to_sync)
        try:
            self._sync_old()
            if self.config.fsync != "never":
                sync(newest)
        finally:
            os.close(newest)
        self._publish(head)
        is_due = time.monotonic() - self._idle_pruned_s > retention.IDLE_PRUNE_S
        if was_rotated or is_due:
            self._prune(own=was_rotated, idle=is_due)

    def _sync_old(self) -> None:
        while self._to_sync:
            descriptor = self._to_sync.pop()
            try:
                if self.config.fsync != "never":
                    sync(descriptor)
            finally:
                os.close(descriptor)

    def prune(self) -> int:
        """Remove segments that the configuration no longer keeps; return how many.

        Every rotation does this for the chain being written, and its first signature and every hour for the others.
        """
        return self._prune(own=True, idle=True)

    def _prune(self, own: bool, idle: bool) -> int:
        chain, signer = self._writable(), self._signer
        assert self._pruner is not None
        assert signer is not None
        try:
            with self._pruning:
                count = self._pruner.prune(self._lock) if own else 0
                if idle:
                    self._idle_pruned_s = time.monotonic()
                    of_log = (self.directory, chain.log, chain.name, self.config, signer)
                    count += retention.prune_idle(*of_log, chain.append, self._lock)
        except Exception as exc:  # the files may be damaged, or the key unreachable
            logger.warning("old segments of the audit log %s could not be removed: %s", self.directory, exc)
            return 0
        if count:
            with self._lock:
                self._follow_up(chain)
        return count
