"""Who has logged in: sessions of browsers, kept in memory. A cookie names one, and holds nothing else."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from toolcell.support.lru import Lru

IDLE_S: Final = 3600.0
LONGEST_S: Final = 12 * 3600.0
MOST: Final = 10_000
"""Logins at once. The one that was used longest ago makes room."""


@dataclass(slots=True)
class BrowserLogin:
    """A browser that has logged in."""

    credential: str = field(repr=False)
    """What it logged in with. It is looked at again at each request, so that a revoked one ends at once."""
    began_s: float
    used_s: float


class Logins:
    """The logins by the digest of their cookie."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logins: Lru[bytes, BrowserLogin] = Lru(MOST)

    def __len__(self) -> int:
        return len(self._logins)

    def begin(self, credential: str) -> str:
        """Return the cookie of a new login."""
        cookie, now = secrets.token_urlsafe(32), self._clock()
        self._logins.put(_digest(cookie), BrowserLogin(credential, now, now))
        return cookie

    def find(self, cookie: str) -> BrowserLogin | None:
        """Return the login of a cookie, unless it has expired."""
        name, now = _digest(cookie), self._clock()
        found = self._logins.get(name)
        if found is None:
            return None
        if now - found.used_s > IDLE_S or now - found.began_s > LONGEST_S:
            self._logins.pop(name)
            return None
        found.used_s = now
        self._logins.use(name)
        return found

    def end(self, cookie: str) -> None:
        """Forget a login."""
        self._logins.pop(_digest(cookie))


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).digest()
