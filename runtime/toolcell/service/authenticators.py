"""Choose who says who sent a request: the settings name a store of tokens, an issuer of JWTs, both or neither.

Wrong credentials are counted by the address that they come from, and an address has to wait after too many.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from toolcell.errors import StoreError, UsageError
from toolcell.service.authentication import Authenticator, LoopbackAuthenticator, unauthorized
from toolcell.service.config import ServiceConfig
from toolcell.service.principal import Principal
from toolcell.service.problems import Problem
from toolcell.service.tokens import PREFIX, TokenDatabase
from toolcell.support import daemon_threads
from toolcell.support.log import logger_of
from toolcell.support.lru import Lru
from toolcell.support.token_bucket import TokenBucket

MAX_ADDRESSES: Final = 20_000
MAX_PROVED: Final = 20_000
PROVED_S: Final = 3600.0


class Attempts:
    """`allowed` wrong credentials at once from an address, and one more every `refill_s`.

    A credential that was right from an address lately is looked at even while that address has to wait: otherwise a
    client behind the same proxy could lock the others out.
    """

    def __init__(
        self, allowed: int = 10, refill_s: float = 6.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._allowed, self._refill_s, self._clock = allowed, refill_s, clock
        self._wrong: Lru[str, TokenBucket] = Lru(MAX_ADDRESSES)
        """The wrong credentials of each address."""
        self._proved: Lru[tuple[str, bytes], float] = Lru(MAX_PROVED)
        """When a credential was right last, by address and digest."""

    def wait_s(self, address: str, digest: bytes) -> int:
        """Return 0 if a credential may be looked at, or how many seconds its sender has to wait."""
        place, now = network_of(address), self._clock()
        bucket = self._wrong.get(place)
        wait_s = bucket.wait_s(now) if bucket is not None else 0.0
        if not wait_s or now - self._proved.get((place, digest), -math.inf) < PROVED_S:
            return 0
        return max(1, math.ceil(wait_s))

    def note_wrong(self, address: str) -> None:
        place, now = network_of(address), self._clock()
        bucket = self._wrong.get(place) or TokenBucket(self._refill_s, self._allowed)
        bucket.take(now)
        self._wrong.put(place, bucket)

    def note_right(self, address: str, digest: bytes) -> None:
        self._proved.put((network_of(address), digest), self._clock())


def network_of(address: str) -> str:
    """Return what counts as one address: of IPv6 the first 64 bits, because one host has all of the rest."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


MAX_HEADER_CHARS: Final = 16_384
PrincipalOf = Callable[[str], Awaitable[Principal]]
"""Returns whose a credential is, or raises `unauthorized(...)`."""


class BearerAuthenticator:
    """Finds a principal by the header `Authorization: Bearer ...`. Source: RFC 6750."""

    def __init__(
        self,
        *,
        tokens: PrincipalOf | None = None,
        jwts: PrincipalOf | None = None,
        attempts: Attempts | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`close`: lets go of what the makers have open."""
        self._tokens, self._jwts, self.close = tokens or jwts, jwts or tokens, close
        self._attempts = Attempts() if attempts is None else attempts

    async def principal(self, headers: Mapping[str, str], client: str) -> Principal:
        """Return who sent a request.

        Raises:
            Problem: 401, the credential is missing or wrong; 429, too many from this address were wrong.
        """
        credential = bearer_of(headers)
        digest = hashlib.sha256(credential.encode("utf-8", "surrogatepass")).digest()
        if wait_s := self._attempts.wait_s(client, digest):
            raise Problem(
                429,
                "too_many_attempts",
                "Too many wrong credentials",
                f"too many wrong credentials came from this address; try again in {wait_s} s",
                headers={"Retry-After": f"{wait_s}"},
            )
        principal_of = self._tokens if credential.startswith(f"{PREFIX}_") else self._jwts
        assert principal_of is not None
        try:
            principal = await principal_of(credential)
        except Problem as problem:
            if problem.status == 401:
                self._attempts.note_wrong(client)
            raise
        self._attempts.note_right(client, digest)
        return principal


def bearer_of(headers: Mapping[str, str]) -> str:
    """Return the credential of a request.

    Raises:
        Problem: 401, there is none, or several.
    """
    kind, _, credential = headers.get("authorization", "").partition(" ")
    getlist = getattr(headers, "getlist", None)
    if getlist is not None and len(getlist("authorization")) > 1:
        raise unauthorized("two Authorization headers")
    if kind.lower() != "bearer" or not credential.strip():
        raise Problem(
            401,
            "unauthorized",
            "A credential is needed",
            "send the header Authorization: Bearer <token>",
            headers={"WWW-Authenticate": "Bearer"},
        )
    if len(credential) > MAX_HEADER_CHARS or not credential.isascii():
        raise unauthorized("it is too long or not ASCII")
    return credential.strip()


logger = logger_of("toolcell.service.tokens")


class Tokens:
    """Looks a token up in the store at each request, so that a revoked one ends at once."""

    def __init__(self, store: TokenDatabase) -> None:
        self._store = store
        self._noting: set[str] = set()

    async def principal_of(self, credential: str) -> Principal:
        """Return whose a token is.

        Raises:
            Problem: it is nobody's (401).
        """
        # One row by its key, from memory. A thread would take longer, and a reader waits for no writer.
        record = self._store.find(credential)
        if record is None:
            raise unauthorized("this is not a token of the service")
        if (state := record.state(self._store.now())) != "active":
            raise unauthorized(f"the token {record.id} is {state}")
        if record.id not in self._noting and self._store.is_use_to_note(record):
            await self._note_use(record.id)
        return Principal(record.tenant, record.name or record.id, record.scopes)

    async def _note_use(self, token_id: str) -> None:
        self._noting.add(token_id)
        try:
            await daemon_threads.run_sync(self._store.note_use, token_id)
        except StoreError as exc:
            logger.warning("the use of token %s could not be noted: %s", token_id, exc)
        finally:
            self._noting.discard(token_id)


def make_authenticator(config: ServiceConfig) -> Authenticator:
    """Return what the settings ask for. Without a store and an issuer, only programs of this machine are let in.

    Raises:
        UsageError: the store does not exist, or a setting of the issuer cannot be.
    """
    tokens: PrincipalOf | None = None
    jwts: PrincipalOf | None = None
    close = lambda: None  # noqa: E731
    if config.tokens is not None:
        if not config.tokens.exists():
            raise UsageError(f"there is no store of tokens {config.tokens}; make one with `toolcell tokens create`")
        store = TokenDatabase(config.tokens)
        if unknown := config.unlisted(each.tenant for each in store.list() if each.state(store.now()) == "active"):
            logger.warning("tokens: %s", unknown)
        tokens, close = Tokens(store).principal_of, store.close
    if config.oidc is not None:
        from toolcell.service.jwts import Jwts

        listed = None if config.oidc.unlisted_tenants else frozenset(config.tenants)
        jwts = Jwts(config.oidc, tenants=listed).principal_of
    if tokens is None and jwts is None:
        return LoopbackAuthenticator()
    return BearerAuthenticator(tokens=tokens, jwts=jwts, close=close)
