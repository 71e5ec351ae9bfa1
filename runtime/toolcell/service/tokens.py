"""Tokens of the service: made, found, listed, rotated and revoked in one SQLite file.

    tcs_<id>_<secret>          id: 16 hexadecimal digits, shown in lists; secret: 256 random bits, shown once

The file has the SHA-256 of each token. A slow hash of passwords protects secrets that can be guessed; nobody guesses
256 random bits, and a slow hash would let strangers make the service work with every wrong token.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from toolcell.errors import UsageError
from toolcell.service.config import NAME
from toolcell.service.principal import Scope
from toolcell.support.sqlite import SqliteDatabase
from toolcell_bridge.wire.invisible import is_visible

PREFIX: Final = "tcs"
"""Tokens of the service begin with it and `_`; no JWT does."""
TOKEN: Final = re.compile(rf"{PREFIX}_([0-9a-f]{{16}})_[A-Za-z0-9_-]{{43}}")
SECRET_BYTES: Final = 32
MAX_LIFETIME_S: Final = 3660 * 86_400.0
NOTE_USE_AFTER_S: Final = 60.0
"""A use is noted at most so often: noting it is a write, and a request is none."""
MAX_LABEL_CHARS: Final = 100

_TABLES: Final = """
CREATE TABLE tokens (
    id TEXT PRIMARY KEY, sha256 BLOB NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL, scopes TEXT NOT NULL,
    created_at REAL NOT NULL, expires_at REAL, last_used_at REAL, revoked_at REAL, replaced_by TEXT
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What is known of a token. Times are seconds since the epoch."""

    id: str
    tenant: str
    name: str
    """For people: who or what uses it."""
    scopes: frozenset[Scope]
    created_at: float
    expires_at: float | None
    last_used_at: float | None = None
    revoked_at: float | None = None
    replaced_by: str | None = None
    """The id of the token that was made in its place."""

    def state(self, now: float) -> str:
        if self.revoked_at is not None:
            return "revoked"
        return "active" if self.expires_at is None or now < self.expires_at else "expired"


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A token that was just made. Its text cannot be had again."""

    record: TokenRecord
    text: str


class TokenDatabase:
    """The tokens of a service. A change holds for every process at its next request."""

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self._database = SqliteDatabase(path, [_TABLES.split(";")], application_id=0x746C746B)
        self._clock = clock
        self.path = self._database.path

    def close(self) -> None:
        """Let go of the file. A later use opens it again."""
        self._database.close()

    def create(
        self, tenant: str, scopes: Iterable[Scope], *, name: str = "", lifetime_s: float | None = 90 * 86_400.0
    ) -> IssuedToken:
        """Make a token. `lifetime_s` None: it does not expire.

        Raises:
            UsageError: an argument cannot be; names it.
        """
        check_tenant(tenant)
        granted = frozenset(scopes)
        if not granted:
            raise UsageError(f"a token needs a scope: {', '.join(Scope)}")
        if len(name) > MAX_LABEL_CHARS or not is_visible(name):
            raise UsageError(
                f"the name of a token has at most {MAX_LABEL_CHARS} printable characters, not {name!r:.120}"
            )
        expires_at = self._end_of(lifetime_s)
        with self._database.writing() as connection:
            return self._insert(
                connection,
                TokenRecord("", tenant, name=name, scopes=granted, created_at=self._clock(), expires_at=expires_at),
            )

    def _end_of(self, lifetime_s: float | None) -> float | None:
        if lifetime_s is None:
            return None
        if not (math.isfinite(lifetime_s) and 0 < lifetime_s <= MAX_LIFETIME_S):
            raise UsageError(
                f"a token lives for up to {MAX_LIFETIME_S:.0f} seconds and more than 0, not {lifetime_s:g}"
            )
        return self._clock() + lifetime_s

    def _insert(self, connection: sqlite3.Connection, record: TokenRecord) -> IssuedToken:
        made = replace(record, id=secrets.token_hex(8))
        text = f"{PREFIX}_{made.id}_{secrets.token_urlsafe(SECRET_BYTES)}"
        scopes = " ".join(sorted(made.scopes))
        values = (made.id, _digest(text), made.tenant, made.name, scopes, made.created_at, made.expires_at)
        connection.execute(
            "INSERT INTO tokens (id, sha256, tenant, name, scopes, created_at, expires_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            values,
        )
        return IssuedToken(made, text)

    def list(self, tenant: str | None = None) -> list[TokenRecord]:
        """Return the tokens, of one tenant or of all, the oldest first."""
        with self._database.reading() as connection:
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM tokens WHERE :tenant IS NULL OR tenant = :tenant ORDER BY created_at, id",
                {"tenant": tenant},
            ).fetchall()
        return [_record(row) for row in rows]

    def revoke(self, token_id: str) -> TokenRecord:
        """End a token now. One that was revoked before stays as it is.

        Raises:
            UsageError: there is no such token.
        """
        with self._database.writing() as connection:
            self._get(connection, token_id)
            connection.execute(
                "UPDATE tokens SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?", (self._clock(), token_id)
            )
            return self._get(connection, token_id)

    def rotate(self, token_id: str, *, overlap_s: float = 86_400.0) -> IssuedToken:
        """Make a token in place of another, which goes on for `overlap_s`. It lives as long as the other did.

        Raises:
            UsageError: there is no such token, it has ended, it was rotated before, or an argument cannot be.
        """
        if not (math.isfinite(overlap_s) and 0 <= overlap_s <= MAX_LIFETIME_S):
            raise UsageError(f"the overlap is from 0 to {MAX_LIFETIME_S:.0f} seconds, not {overlap_s:g}")
        now = self._clock()
        with self._database.writing() as connection:
            old = self._get(connection, token_id)
            if (state := old.state(now)) != "active":
                raise UsageError(f"token {token_id} is {state}, so nothing can take its place; create a new one")
            if old.replaced_by is not None:
                raise UsageError(f"token {token_id} was rotated before; rotate {old.replaced_by}, or revoke {token_id}")
            lifetime_s = None if old.expires_at is None else old.expires_at - old.created_at
            new = TokenRecord(
                "", old.tenant, name=old.name, scopes=old.scopes, created_at=now, expires_at=self._end_of(lifetime_s)
            )
            issued = self._insert(connection, new)
            ends_at = min(now + overlap_s, math.inf if old.expires_at is None else old.expires_at)
            connection.execute(
                "UPDATE tokens SET expires_at = ?, replaced_by = ? WHERE id = ?", (ends_at, issued.record.id, token_id)
            )
        return issued

    def _get(self, connection: sqlite3.Connection, token_id: str) -> TokenRecord:
        row = connection.execute(f"SELECT {_COLUMNS} FROM tokens WHERE id = ?", (token_id,)).fetchone()
        if row is None:
            raise UsageError(f"there is no token with the id {token_id!r:.80} in {self.path}; `toolcell tokens list`")
        return _record(row)

    def find(self, text: str) -> TokenRecord | None:
        """Return the record of a token that was shown, whatever its state; None when it is not one of ours.

        A wrong secret and an unknown id take the same time: both compare one digest.
        """
        match = TOKEN.fullmatch(text)
        digest, row = _digest(text[:MAX_TOKEN_CHARS]), None
        if match is not None:
            with self._database.reading() as connection:
                row = connection.execute(f"SELECT {_COLUMNS}, sha256 FROM tokens WHERE id = ?", (match[1],)).fetchone()
        is_right = hmac.compare_digest(digest, row[-1] if row is not None else _NOBODYS)
        return _record(row[:-1]) if row is not None and is_right else None

    def is_use_to_note(self, record: TokenRecord) -> bool:
        """Return whether the last use that is noted is old enough to be noted anew."""
        return record.last_used_at is None or abs(self._clock() - record.last_used_at) >= NOTE_USE_AFTER_S

    def note_use(self, token_id: str) -> None:
        with self._database.writing() as connection:
            connection.execute("UPDATE tokens SET last_used_at = ? WHERE id = ?", (self._clock(), token_id))

    def now(self) -> float:
        return self._clock()


MAX_TOKEN_CHARS: Final = 200
_NOBODYS: Final = secrets.token_bytes(32)
_COLUMNS: Final = "id, tenant, name, scopes, created_at, expires_at, last_used_at, revoked_at, replaced_by"


def check_tenant(name: object) -> None:
    """Refuse what cannot be the name of a tenant.

    Raises:
        UsageError: says which names there may be.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(f"the name of a tenant matches ^{NAME.pattern}$, and {str(name)[:80]!r} does not")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _record(row: tuple[Any, ...]) -> TokenRecord:
    token_id, tenant, name, scopes, *rest = row
    return TokenRecord(token_id, tenant, name, frozenset(map(Scope, scopes.split())), *rest)
