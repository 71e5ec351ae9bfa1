"""Who looks at the pages, who has logged in, and what the pages are about: the border between the viewer and whoever
runs it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import anyio
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from toolcell.audit import RecordedRun, Trust
from toolcell.config import Limits, PoolConfig
from toolcell.control import Replay, replay
from toolcell.runtime import Runtime
from toolcell.service.log_reader import LogReader
from toolcell.service.replays import bounded
from toolcell.service.viewer.protection import form_token
from toolcell.service.viewer.verification import Verifications
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
        self._logins.pop(_digest(cookie))


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).digest()


READ: Final = "read"
EXECUTE: Final = "execute"
APPROVE: Final = "approve"


@dataclass(frozen=True, slots=True)
class Visitor:
    """A person with a browser."""

    tenant: str
    name: str
    scopes: frozenset[str]
    form_token: str = field(repr=False)
    """What the person's forms carry."""
    subject: str = ""
    """Who it is within the tenant."""

    def can(self, scope: str) -> bool:
        return scope in self.scopes


class ViewerHost(Protocol):
    """What the pages need of the program that serves them."""

    links: Mapping[str, str]
    """Path to name of the pages for the head of each page."""
    verifications: Verifications

    async def visitor(self, request: Request) -> Visitor | Response:
        """Return who asks, or the answer for somebody unknown."""
        ...

    async def log_of(self, visitor: Visitor) -> LogReader:
        """Return the record that a visitor may read."""
        ...

    async def replay(self, request: Request, visitor: Visitor, run: RecordedRun, trust: str) -> Replay:
        """Run a recorded script again, for this visitor; `trust`: how far its record can be trusted."""
        ...

    async def stub_of(self, visitor: Visitor, tool: str) -> str:
        """Return what scripts see of a tool; empty where no tools are at hand."""
        ...


LINKS: Final = {"/": "Overview", "/runs": "Runs", "/tools": "Tools", "/verify": "Verification"}


class OneLog:
    """Shows one log to one person: whoever has the address with the token that the command printed."""

    def __init__(self, log: LogReader, port: int, backend: str = "process") -> None:
        self.links: Mapping[str, str] = LINKS
        self.verifications = Verifications()
        self._replays = anyio.CapacityLimiter(1)
        self.token = secrets.token_urlsafe(32)
        self._log, self._backend = log, backend
        self._cookie = f"toolcell-viewer-{port}"  # cookies do not tell ports apart
        self._visitor = Visitor("", "", frozenset({READ, EXECUTE}), form_token(secrets.token_bytes(32), self.token))

    async def visitor(self, request: Request) -> Visitor | Response:
        """Return the person if the cookie has the token; set it for who came with the token in the address."""
        given = request.query_params.get("token")
        if given is not None and request.method == "GET" and self._is_token(given):
            answer = RedirectResponse("/" + request.url.path.lstrip("/"), 303)
            answer.set_cookie(self._cookie, self.token, httponly=True, samesite="strict", path="/")
            return answer
        if self._is_token(request.cookies.get(self._cookie, "")):
            return self._visitor
        text = "Open the address that `toolcell ui` printed: it holds the token that this page asks for.\n"
        return Response(text, 403, media_type="text/plain")

    async def log_of(self, visitor: Visitor) -> LogReader:
        return self._log

    async def replay(self, request: Request, visitor: Visitor, run: RecordedRun, trust: str) -> Replay:
        """Run it again as its record says, if that is verified, with the backend of this viewer."""
        run = run if trust == Trust.VERIFIED else bounded(run, trust, Limits())
        options = run.runtime_options()
        async with self._replays, Runtime(None, backend=self._backend, pool=PoolConfig(warm=1), **options) as runtime:
            return await replay(runtime, run)

    async def stub_of(self, visitor: Visitor, tool: str) -> str:
        """Return nothing: a log alone has no tools."""
        return ""

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())
