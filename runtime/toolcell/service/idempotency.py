"""Idempotency keys: a request that is sent again is answered again, and never carried out again.

Before a run begins, its key is written to one SQLite file; when it has ended, the answer is. A key that another
process began is under way as long as that process lives, which it shows by a lock that the kernel frees with it. A key
whose process died has no answer: such a run is never started again, and the answer says which run it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from toolcell.support.file_lock import is_locked, lock
from toolcell.support.private_files import make_private_folder
from toolcell.support.sqlite import SqliteDatabase

KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
"""Printable ASCII, so that a key can be a header."""

_TABLES: Final = """
CREATE TABLE requests (
    tenant TEXT, key TEXT, sha256 BLOB NOT NULL, run TEXT NOT NULL, owner TEXT NOT NULL, began_at REAL NOT NULL,
    status INTEGER, type TEXT, body BLOB, PRIMARY KEY (tenant, key)
);
CREATE INDEX requests_by_time ON requests (tenant, began_at);
CREATE INDEX answers_by_time ON requests (tenant, began_at) WHERE body IS NOT NULL;
CREATE TABLE totals (tenant TEXT PRIMARY KEY, keys INTEGER NOT NULL, bytes INTEGER NOT NULL)
"""


@dataclass(frozen=True, slots=True)
class Begun:
    """The key is new: carry the request out."""


@dataclass(frozen=True, slots=True)
class StillRunning:
    """The request is being carried out."""

    run_id: str
    is_here: bool
    """By this process."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The request was carried out, and this was the answer. `body` None: it was too large, or too old, to be kept."""

    run_id: str
    status: int
    media_type: str
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The process that carried the request out died before it had an answer."""

    run_id: str


@dataclass(frozen=True, slots=True)
class OtherRequest:
    """The key was used for another request."""


@dataclass(frozen=True, slots=True)
class Full:
    """The tenant has as many keys as are kept; says when the oldest of them is forgotten."""

    retry_after_s: float


Entry = Begun | StillRunning | Answered | Interrupted | OtherRequest | Full


class IdempotencyStore:
    """The keys of all tenants, in `folder`. Several processes may use it at once.

    A key is never forgotten before `keep_s`: forgetting it early would run its request twice. Answers are: the oldest
    go first when a tenant has more than `answer_bytes` of them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_s: float = 86_400.0,
        rows: int = 100_000,
        answer_bytes: int = 256 << 20,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`rows`, `answer_bytes`: of each tenant. `clock` is `time.time` where none is given."""
        self._database = SqliteDatabase(folder / "requests.sqlite", [_TABLES.split(";")], application_id=0x746C6972)
        self._keep_s, self._rows, self._answer_bytes, self._clock = keep_s, rows, answer_bytes, clock or time.time
        self._lives = folder / "lives"
        self._owner = ""
        self._life: int | None = None

    def open(self) -> None:
        """Show that this process lives. Forget the processes that do not, and what is older than `keep_s`."""
        make_private_folder(self._lives)
        self._owner = secrets.token_hex(16)
        with self._alone():  # between making its file and locking it, a process looks dead
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._life = os.open(self._lives / self._owner, flags, 0o600)
            lock(self._life, wait=True)
            others = [path for path in self._lives.glob("[0-9a-f]*") if path.name != self._owner]
            alive = [self._owner, *(path.name for path in others if self._is_alive(path.name))]
            for path in others:
                if path.name not in alive:
                    path.unlink(missing_ok=True)
        with self._database.writing() as connection:
            marks = ", ".join("?" * len(alive))
            connection.execute(
                f"DELETE FROM requests WHERE began_at < ? AND (status IS NOT NULL OR owner NOT IN ({marks}))",
                (self._clock() - self._keep_s, *alive),
            )
            connection.execute("DELETE FROM totals")
            connection.execute(
                "INSERT INTO totals SELECT tenant, count(*), coalesce(sum(length(body)), 0) "
                "FROM requests GROUP BY tenant"
            )

    def close(self) -> None:
        """Let go of the file. What this process began and did not finish is interrupted from now on."""
        self._database.close()
        if self._life is not None:
            (self._lives / self._owner).unlink(missing_ok=True)
            os.close(self._life)
            self._life = None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        descriptor = os.open(self._lives / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            lock(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)

    def begin(self, tenant: str, key: str, digest: bytes, run_id: str) -> Entry:
        """Take a key for a request, or return what became of the request that has it. `digest`: of the request."""
        now = self._clock()
        with self._database.writing() as connection:
            row = connection.execute(f"{_SELECT} WHERE tenant = ? AND key = ?", (tenant, key)).fetchone()
            if row is not None:
                entry = self._entry(row, digest)
                if row[3] >= now - self._keep_s or isinstance(entry, StillRunning):
                    return entry
                self._forget(connection, tenant, now, key)
            if (full := self._make_room(connection, tenant, now)) is not None:
                return full
            connection.execute(
                "INSERT INTO requests (tenant, key, sha256, run, owner, began_at) VALUES (?, ?, ?, ?, ?, ?)",
                (tenant, key, digest, run_id, self._owner, now),
            )
            self._count(connection, tenant, keys=1)
        return Begun()

    def _entry(self, row: tuple[bytes, str, str, float, int | None, str, bytes | None], digest: bytes) -> Entry:
        sha256, run_id, owner, _, status, media_type, body = row
        if sha256 != digest:
            return OtherRequest()
        if status is not None:
            return Answered(run_id, status, media_type, body)
        return StillRunning(run_id, owner == self._owner) if self._is_alive(owner) else Interrupted(run_id)

    def _make_room(self, connection: sqlite3.Connection, tenant: str, now: float) -> Full | None:
        """Forget what is old of a tenant that has too many keys. Return Full if that is not enough."""
        if self._totals(connection, tenant)[0] < self._rows:
            return None
        self._forget(connection, tenant, now)
        if self._totals(connection, tenant)[0] < self._rows:
            return None
        (oldest,) = connection.execute("SELECT min(began_at) FROM requests WHERE tenant = ?", (tenant,)).fetchone()
        return Full(max(1.0, oldest + self._keep_s - now))

    def _forget(self, connection: sqlite3.Connection, tenant: str, now: float, key: str | None = None) -> None:
        """Delete what is older than `keep_s` and not under way."""
        of = (
            "tenant = :tenant AND began_at < :before AND (:key IS NULL OR key = :key) "
            "AND (status IS NOT NULL OR NOT is_alive(owner))"
        )
        connection.create_function("is_alive", 1, self._is_alive)
        rows = connection.execute(
            f"SELECT key, coalesce(length(body), 0) FROM requests WHERE {of}",
            {"tenant": tenant, "before": now - self._keep_s, "key": key},
        ).fetchall()
        connection.executemany(
            "DELETE FROM requests WHERE tenant = ? AND key = ?", [(tenant, each) for each, _ in rows]
        )
        self._count(connection, tenant, keys=-len(rows), size=-sum(size for _, size in rows))

    def finish(self, tenant: str, key: str, status: int, media_type: str, body: bytes) -> None:
        """Keep the answer of a request that this process carried out."""
        kept = body if len(body) <= self._answer_bytes else None
        with self._database.writing() as connection:
            changed = connection.execute(
                "UPDATE requests SET status = ?, type = ?, body = ? "
                "WHERE tenant = ? AND key = ? AND owner = ? AND status IS NULL",
                (status, media_type, kept, tenant, key, self._owner),
            ).rowcount
            if changed and kept:
                self._count(connection, tenant, size=len(kept))
                self._drop_answers(connection, tenant)

    def _drop_answers(self, connection: sqlite3.Connection, tenant: str) -> None:
        """Drop the oldest answers of a tenant that has too many bytes of them. Their keys stay."""
        while self._totals(connection, tenant)[1] > self._answer_bytes:
            key, size = connection.execute(
                "SELECT key, length(body) FROM requests WHERE tenant = ? AND body IS NOT NULL "
                "ORDER BY began_at LIMIT 1",
                (tenant,),
            ).fetchone()
            connection.execute("UPDATE requests SET body = NULL WHERE tenant = ? AND key = ?", (tenant, key))
            self._count(connection, tenant, size=-size)

    def release(self, tenant: str, key: str) -> None:
        """Free a key whose request did not begin, so that it can be sent again."""
        with self._database.writing() as connection:
            freed = connection.execute(
                "DELETE FROM requests WHERE tenant = ? AND key = ? AND owner = ? AND status IS NULL",
                (tenant, key, self._owner),
            ).rowcount
            self._count(connection, tenant, keys=-freed)

    @staticmethod
    def _totals(connection: sqlite3.Connection, tenant: str) -> tuple[int, int]:
        row = connection.execute("SELECT keys, bytes FROM totals WHERE tenant = ?", (tenant,)).fetchone()
        return row or (0, 0)

    @staticmethod
    def _count(connection: sqlite3.Connection, tenant: str, *, keys: int = 0, size: int = 0) -> None:
        connection.execute(
            "INSERT INTO totals VALUES (:tenant, :keys, :size) "
            "ON CONFLICT (tenant) DO UPDATE SET keys = keys + :keys, bytes = bytes + :size",
            {"tenant": tenant, "keys": keys, "size": size},
        )

    def _is_alive(self, owner: str) -> bool:
        """Return True while the process holds its lock."""
        return owner == self._owner or is_locked(self._lives / owner)


_SELECT: Final = "SELECT sha256, run, owner, began_at, status, type, body FROM requests"


def digest_of(*parts: bytes | str) -> bytes:
    """Return the digest of a request. Parts are told apart: ("ab", "c") and ("a", "bc") differ."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "big") + data)
    return hashed.digest()
