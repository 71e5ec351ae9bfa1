"""`AuditLog`: the one place through which anything gets on disk, and the thread that signs it.

Every record of a run passes the redactor here, whatever it holds and whoever made it. Knows no run and no tool; those
are the recorder's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from toolcell.audit import chain as chains
from toolcell.audit import content, layout, records, retention
from toolcell.audit.chain import Chain
from toolcell.audit.config import AuditConfig
from toolcell.audit.keys import (
    Signer,
    SigningFailed,
    WrappedSigner,
    default_key_path,
    load_signer,
    own_signer,
)
from toolcell.audit.redact import Redactor
from toolcell.audit.signatures import Head, default_heads_dir, save_head
from toolcell.errors import AuditError, UsageError

logger = logging.getLogger("toolcell.audit")

COMMON = frozenset({records.TOOLS, records.TERMS})
"""Kinds that describe things and hold nothing of a run: an argument called `token` is no token."""


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One record as a sink gets it, after it was written."""

    kind: str
    chain: str
    seq: int
    run: int
    at_ns: int
    fields: Mapping[str, Any]
    """Redacted and cut, as on disk."""


_open_logs: weakref.WeakSet[AuditLog] = weakref.WeakSet()


def _disown_all() -> None:
    for log in tuple(_open_logs):
        log._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)

Sink = Callable[[AuditEvent], None]
"""Told of every record of a run, in order, in the task that made it. One that fails is noted and ignored."""


class AuditLog:
    """An append-only, hash-chained, signed log in a directory. Opened by the `Runtime` it is given to, or by `with`.

    Safe in several threads. Several processes may share a directory: each writes a chain of its own.
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
    ) -> None:
        if not os.fspath(directory):
            raise UsageError(
                "an audit log's directory needs a name, such as 'runs/'; '' would be the current directory"
            )
        self.directory = Path(directory)
        self.config = config or AuditConfig()
        self.heads = Path(heads) if heads is not None else default_heads_dir()
        """Where the newest head of each chain is kept, away from the log."""
        values = secrets.values() if isinstance(secrets, Mapping) else secrets
        self.redactor = Redactor(values, self.config.redact_names, self.config.redact_patterns)
        self._value_bytes = self.config.value_bytes
        self._unsigned_most = self.config.checkpoint_records
        self._size_most = self.config.segment_bytes
        self._is_always_synced = self.config.fsync == "always"
        self._key = key
        self._sinks = tuple(sinks)
        self._lock = threading.Lock()
        self._signer: Signer | None = None
        self._chain: Chain | None = None
        self._why_closed = "it is not open"
        self._sealer: threading.Thread | None = None
        self._needs_seal = threading.Event()
        self._is_sealer_awake = True
        """It looks for new records by itself once in `checkpoint_s`. To wake it takes the interpreter from a run."""
        self._is_closing = threading.Event()
        self._to_sync: list[int] = []
        self._failure: AuditError | None = None
        self.noted: set[str] = set()
        """Digests of what runs have in common that the segment being written holds already."""

    # Opening and closing

    def open(self) -> Self:
        """Take a chain and begin to write.

        Raises:
            AuditError: the key or the directory cannot be used.
            UsageError: it is open already, or the key lies in the log.
        """
        if self._chain is not None:
            raise UsageError(f"the audit log {self.directory} is already open")
        self._signer = self._load_key()
        log = layout.make_log(self.directory)
        self._chain = Chain.take(self.directory, log, self._signer)
        self._is_closing.clear()
        self._failure = None
        self.noted.clear()
        _open_logs.add(self)
        self._is_sealer_awake = True
        self._sealer = threading.Thread(target=self._seal_now_and_then, name="toolcell-audit", daemon=True)
        self._sealer.start()
        return self

    def _load_key(self) -> Signer:
        key = self._key
        if key is not None and not isinstance(key, str | os.PathLike):
            if not all(hasattr(key, name) for name in ("key_id", "algorithm", "sign")):
                raise UsageError(f"key must be a file's path or sign by itself (a Signer), not {type(key).__name__}")
            return WrappedSigner(key)
        path = Path(key) if key is not None else default_key_path()
        if path.resolve().is_relative_to(self.directory.resolve()):
            raise UsageError(f"the key {path} lies in the log it signs: who can change one could use the other")
        return own_signer() if key is None else load_signer(path)

    def _disown(self) -> None:
        """In a forked child: the chain is the parent's, and its lock may be held by a thread that is not here."""
        if self._chain is not None:
            self._lock = threading.Lock()
            self._chain, self._why_closed = None, "it was opened by the parent of this process"

    def close(self) -> None:
        """Sign what is left and let go. Safe to call twice.

        Raises:
            AuditError: the last words could not be written.
        """
        chain = self._chain
        if chain is None or self._sealer is None:
            return
        self._is_closing.set()
        self._needs_seal.set()
        self._sealer.join()
        try:
            with self._lock:
                self._chain, self._why_closed = None, "it is closed"
                chain.checkpoint("closed")
                if self.config.fsync != "never":
                    chain.sync()
            self._save_head(chain)
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
        """Write one record and return its seq. When this returns the record survives the end of this process.

        `at_ns`: when it happened, if not now.

        Raises:
            AuditError: it could not be written.
        """
        redactor = redactor or self.redactor
        at_ns = at_ns or time.time_ns()
        try:
            packed: bytes = records.mine.pack(fields)
            is_ready = len(packed) <= self._value_bytes and redactor.scan(packed) is None
        except (TypeError, ValueError, OverflowError, RecursionError):
            is_ready = False
        if not is_ready:
            packed = self._presentable(kind, fields, redactor)
        with self._lock:
            chain = self._chain
            if chain is None or self._failure is not None:
                chain = self._writable()
            seq = chain.append_packed(kind, run, packed, at_ns)
            is_large = chain.unsigned >= self._unsigned_most or chain.size > self._size_most
            if is_large or self._is_always_synced or not self._is_sealer_awake:
                self._follow_up(chain)
        if self._sinks:
            self._tell(kind, run or seq, seq, at_ns, packed)
        return seq

    def _follow_up(self, chain: Chain) -> None:
        """What only some records ask for."""
        if self._is_always_synced:
            chain.sync()
        if chain.unsigned >= self._unsigned_most or not self._is_sealer_awake:
            self._is_sealer_awake = True
            self._needs_seal.set()
        if chain.size > self._size_most:
            self._go_on(chain)

    def _go_on(self, chain: Chain) -> None:
        """Begin the next segment; with no key at hand, somewhat later: a segment ends with a signature."""
        try:
            self._to_sync.append(chain.rotate())
        except SigningFailed as exc:
            self._size_most = chain.size + self.config.segment_bytes // 4
            logger.warning("a segment of the audit log was not ended when it was full: %s", exc)
            return
        self._size_most = self.config.segment_bytes
        self.noted.clear()
        self._needs_seal.set()

    def _presentable(self, kind: str, fields: tuple[Any, ...], redactor: Redactor) -> bytes:
        """A content without secrets and no larger than it may be. Cutting comes last: no half of a secret stays."""
        packed = records.pack_fields(fields)
        rules = redactor.scan(packed)
        plain: list[Any] = records.unpack(packed)
        if rules is not None:
            plain, count = redactor.clean(plain, rules, with_names=kind not in COMMON)
            if count:
                plain = content.with_digests(kind, plain)
                plain[-1] = plain[-1] | {"redacted": count}
        return records.pack_fields(tuple(content.fitted(kind, plain, self.config)))

    def _writable(self) -> Chain:
        if self._chain is None:
            raise AuditError(f"the audit log {self.directory} cannot be written: {self._why_closed}")
        if self._failure is not None:
            raise self._failure
        return self._chain

    def _tell(self, kind: str, run: int, seq: int, at_ns: int, packed: bytes) -> None:
        fields = dict(zip(records.FIELDS[kind], records.unpack(packed), strict=False))
        event = AuditEvent(kind, self._chain.name if self._chain is not None else "", seq, run, at_ns, fields)
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:
                logger.exception("an audit sink failed")

    # Signing

    def checkpoint(self) -> Head:
        """Sign everything written so far, now, and return the head to keep elsewhere.

        Raises:
            AuditError: it could not be written.
        """
        with self._lock:
            chain = self._writable()
            chain.checkpoint("asked")
            head = self._head(chain)
            if self.config.fsync != "never":
                chain.sync()
        with suppress(OSError):
            save_head(self.heads, head)
        return head

    def _head(self, chain: Chain) -> Head:
        assert self._signer is not None
        return Head.sign(chain.log, chain.name, chain.seq, chain.link, time.time_ns(), self._signer)

    def _save_head(self, chain: Chain) -> None:
        try:
            save_head(self.heads, self._head(chain))
        except (OSError, SigningFailed) as exc:
            logger.warning("the head of the audit log could not be kept in %s: %s", self.heads, exc)

    def _seal_now_and_then(self) -> None:
        """Sign soon after something was written; the thread's whole life."""
        while not self._is_closing.is_set() and (chain := self._chain) is not None:
            self._wait_a_while(chain)
            if self._is_signed(chain):
                if not self._is_closing.is_set():
                    self._needs_seal.wait()
                continue
            try:
                self._seal(chain)
            except AuditError as exc:  # what the disk has is not known, and never will be
                self._failure = exc

    def _is_signed(self, chain: Chain) -> bool:
        """True when nothing came for a while; then the next record wakes the sealer."""
        with self._lock:
            self._is_sealer_awake = chain.unsigned > 0
            return not self._is_sealer_awake

    def _wait_a_while(self, chain: Chain) -> None:
        deadline = time.monotonic() + self.config.checkpoint_s
        while not self._is_closing.is_set() and chain.unsigned < self._unsigned_most:
            left = deadline - time.monotonic()
            if left <= 0 or not self._needs_seal.wait(left):
                return
            self._needs_seal.clear()

    def _seal(self, chain: Chain) -> None:
        try:
            with self._lock:
                if not chain.unsigned:
                    return
                chain.checkpoint("time" if chain.unsigned < self._unsigned_most else "records")
                head = self._head(chain)
                newest = chain.duplicate()
        except Exception as exc:  # a full disk, a key that is kept elsewhere: for a while, perhaps
            logger.warning("the audit log could not be signed: %s", exc)
            with self._lock:
                chain.unsigned = max(1, chain.unsigned)  # also where only what follows a signature failed
            self._is_closing.wait(self.config.checkpoint_s)
            return
        was_rotated = bool(self._to_sync)
        try:
            self._sync_old()
            if self.config.fsync != "never":
                chains.sync(newest)
        finally:
            os.close(newest)
        with suppress(OSError):
            save_head(self.heads, head)
        if was_rotated:
            self.prune()

    def _sync_old(self) -> None:
        while self._to_sync:
            descriptor = self._to_sync.pop()
            try:
                if self.config.fsync != "never":
                    chains.sync(descriptor)
            finally:
                os.close(descriptor)

    def prune(self) -> int:
        """Remove segments that the configuration no longer keeps; returns how many. Done at every rotation anyway."""
        chain = self._writable()
        assert self._signer is not None
        try:
            count = retention.prune(chain, self.config, self._signer, self._lock)
        except Exception as exc:  # what is on the disk may be damaged, and a key kept elsewhere may be away
            logger.warning("old segments of the audit log %s could not be removed: %s", self.directory, exc)
            return 0
        if count:
            with self._lock:
                self._follow_up(chain)
        return count
