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
from typing import Any, Final, Literal

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

_TRIGGERS: Final = (
    """CREATE TRIGGER request_added AFTER INSERT ON requests BEGIN
    INSERT INTO totals VALUES (new.tenant, 1, 0) ON CONFLICT (tenant) DO UPDATE SET keys = keys + 1;
    END""",
    """CREATE TRIGGER answer_changed AFTER UPDATE OF body ON requests BEGIN
    UPDATE totals SET bytes = bytes + coalesce(length(new.body), 0) - coalesce(length(old.body), 0)
    WHERE tenant = new.tenant;
    END""",
    """CREATE TRIGGER request_removed AFTER DELETE ON requests BEGIN
    UPDATE totals SET keys = keys - 1, bytes = bytes - coalesce(length(old.body), 0) WHERE tenant = old.tenant;
    END""",
    "DELETE FROM totals",
    "INSERT INTO totals SELECT tenant, count(*), coalesce(sum(length(body)), 0) FROM requests GROUP BY tenant",
)
"""Keep `totals`: nobody counts a hundred thousand rows for each request."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of the request that has a key."""

    state: Literal["begun", "running", "answered", "interrupted", "other request", "full"]
    """`begun`: the key is new, so carry the request out. `interrupted`: its process died before it had an answer.
    `other request`: the key was used for one. `full`: the tenant has as many keys as are kept."""
    run_id: str = ""
    is_here: bool = False
    """A running one is carried out by this process."""
    status: int = 0
    media_type: str = ""
    body: bytes | None = None
    """The answer. None: it was too large, or is too old, to be kept."""
    retry_after_s: float = 0.0
    """When the oldest key of a full tenant is forgotten."""


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
        self._database = SqliteDatabase(
            folder / "requests.sqlite", [_TABLES.split(";"), _TRIGGERS], application_id=0x746C6972
        )
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
            for path in self._lives.glob("[0-9a-f]*"):
                if not self._is_alive(path.name):
                    path.unlink(missing_ok=True)
        with self._database.writing() as connection:
            self._forget(connection, self._clock())

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
                entry = self._entry(digest, *row)
                if row[3] >= now - self._keep_s or entry.state == "running":
                    return entry
                self._forget(connection, now, tenant, key)
            if self._totals(connection, tenant)[0] >= self._rows:
                self._forget(connection, now, tenant)
            if self._totals(connection, tenant)[0] >= self._rows:
                oldest = connection.execute("SELECT min(began_at) FROM requests WHERE tenant = ?", (tenant,)).fetchone()
                return Entry("full", retry_after_s=max(1.0, oldest[0] + self._keep_s - now))
            connection.execute(
                "INSERT INTO requests (tenant, key, sha256, run, owner, began_at) VALUES (?, ?, ?, ?, ?, ?)",
                (tenant, key, digest, run_id, self._owner, now),
            )
        return Entry("begun", run_id)

    def _entry(self, digest: bytes, sha256: bytes, run_id: str, owner: str, _: float, *answer: Any) -> Entry:
        if sha256 != digest:
            return Entry("other request", run_id)
        if answer[0] is not None:
            return Entry("answered", run_id, False, *answer)
        return Entry("running" if self._is_alive(owner) else "interrupted", run_id, owner == self._owner)

    def _forget(
        self, connection: sqlite3.Connection, now: float, tenant: str | None = None, key: str | None = None
    ) -> None:
        """Delete what is older than `keep_s` and not under way, of all or of a tenant or a key."""
        connection.create_function("is_alive", 1, self._is_alive)
        wanted = {name: value for name, value in (("tenant", tenant), ("key", key)) if value is not None}
        connection.execute(
            f"DELETE FROM requests WHERE {''.join(f'{name} = :{name} AND ' for name in wanted)}"
            "began_at < :before AND (status IS NOT NULL OR NOT is_alive(owner))",
            {**wanted, "before": now - self._keep_s},
        )

    def finish(self, tenant: str, key: str, status: int, media_type: str, body: bytes) -> None:
        """Keep the answer of a request that this process carried out. The oldest answers of a tenant that has too many
        bytes of them are dropped; their keys stay."""
        kept = body if len(body) <= self._answer_bytes else None
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE requests SET status = ?, type = ?, body = ? "
                "WHERE tenant = ? AND key = ? AND owner = ? AND status IS NULL",
                (status, media_type, kept, tenant, key, self._owner),
            )
            while self._totals(connection, tenant)[1] > self._answer_bytes:
                connection.execute(
                    "UPDATE requests SET body = NULL WHERE rowid = (SELECT rowid FROM requests "
                    "WHERE tenant = ? AND body IS NOT NULL ORDER BY began_at LIMIT 1)",
                    (tenant,),
                )

    def release(self, tenant: str, key: str) -> None:
        """Free a key whose request did not begin, so that it can be sent again."""
        with self._database.writing() as connection:
            connection.execute(
                "DELETE FROM requests WHERE tenant = ? AND key = ? AND owner = ? AND status IS NULL",
                (tenant, key, self._owner),
            )

    @staticmethod
    def _totals(connection: sqlite3.Connection, tenant: str) -> tuple[int, int]:
        row = connection.execute("SELECT keys, bytes FROM totals WHERE tenant = ?", (tenant,)).fetchone()
        return row or (0, 0)

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
