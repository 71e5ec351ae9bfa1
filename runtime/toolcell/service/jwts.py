"""`Jwts`: lets in who has a JWT of one issuer for one audience. Source: RFC 7519, RFC 8725, RFC 9068.

`KeySet` has the issuer's public keys: fetched when they are needed, kept for a while, and bounded in every way. Not
PyJWT's `PyJWKClient`: it blocks, follows redirects, and reads an answer of any size.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Container, Mapping
from contextlib import aclosing
from typing import Any, Final, cast
from urllib.parse import urlsplit

import anyio
import httpx
import jwt

from toolcell.errors import UsageError
from toolcell.service.authentication import unauthorized
from toolcell.service.config import NAME, OidcConfig
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem
from toolcell.support.asgi import is_loopback
from toolcell.support.log import logger_of
from toolcell_bridge.wire.invisible import is_visible

logger = logger_of("toolcell.service.jwts")

DISCOVERY: Final = "/.well-known/openid-configuration"
"""Source: OpenID Connect Discovery 1.0, section 4."""
MAX_BYTES: Final = 256 * 1024
MAX_KEYS: Final = 64
TIMEOUT_S: Final = 5.0
MIN_RSA_BITS: Final = 2_048
"""Shorter moduli can be factored (NIST SP 800-131A)."""
KEPT_S: Final = 600.0
"""Keys are fetched again after so long; those that were there are used as long as the issuer cannot be reached."""
AGAIN_AFTER_S: Final = 30.0
"""For the sake of a key id that is unknown, keys are fetched at most so often: anybody can send unknown ids."""


class KeysUnavailable(Exception):
    """The issuer could not be reached, or what it says is not a set of keys."""


class KeySet:
    """The keys of one issuer, by their ids."""

    def __init__(
        self,
        issuer: str,
        url: str | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`url`: of the keys; without it, the issuer's discovery document names it. `transport`: for tests.

        Raises:
            UsageError: an address is not https, and not of this machine.
        """
        self._issuer, self._url, self._transport, self._clock = issuer, url, transport, clock
        for each in (issuer, url):
            if each is not None:
                check_https(each)
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._lock = anyio.Lock()

    async def key(self, key_id: str) -> jwt.PyJWK | None:
        """Return the key with an id; None if the issuer has no such key.

        Raises:
            KeysUnavailable: there are no keys yet, and they cannot be fetched.
        """
        if self._is_due(key_id):
            async with self._lock:
                if self._is_due(key_id):  # others may have fetched meanwhile
                    await self._refresh()
        return self._keys.get(key_id)

    def _is_due(self, key_id: str) -> bool:
        now = self._clock()
        if self._tried_at is not None and now - self._tried_at < AGAIN_AFTER_S:
            if self._fetched_at is None:
                raise KeysUnavailable("the keys of the issuer could not be fetched")
            return False
        is_old = self._fetched_at is None or now - self._fetched_at >= KEPT_S
        return is_old or key_id not in self._keys

    async def _refresh(self) -> None:
        try:
            with anyio.fail_after(2 * TIMEOUT_S):
                keys = read_keys(await self._fetch())
        except (httpx.HTTPError, ValueError, TimeoutError) as exc:
            self._tried_at = self._clock()
            logger.warning("the keys of %s could not be fetched: %s: %s", self._issuer, type(exc).__name__, exc)
            if self._fetched_at is None:
                raise KeysUnavailable("the keys of the issuer could not be fetched") from exc
            return
        self._keys = keys
        self._tried_at = self._fetched_at = self._clock()

    async def _fetch(self) -> Any:
        limits = httpx.Timeout(TIMEOUT_S)
        async with httpx.AsyncClient(timeout=limits, follow_redirects=False, transport=self._transport) as client:
            url = self._url
            if url is None:
                about = await get_json(client, self._issuer.rstrip("/") + DISCOVERY)
                if not isinstance(about, dict) or about.get("issuer") != self._issuer:
                    raise ValueError(f"its discovery document is not about the issuer {self._issuer}")
                url = str(about.get("jwks_uri"))
                check_https(url)
            return await get_json(client, url)


async def get_json(client: httpx.AsyncClient, url: str) -> Any:
    """Return a document of at most MAX_BYTES.

    Raises:
        httpx.HTTPError: it cannot be had.
        ValueError: it is too large, or no JSON.
    """
    async with client.stream("GET", url) as response:
        if response.status_code != 200:
            raise ValueError(f"{url} answered with the status {response.status_code}")
        body = bytearray()
        async with aclosing(cast("AsyncGenerator[bytes]", response.aiter_bytes())) as parts:
            async for part in parts:
                body += part
                if len(body) > MAX_BYTES:
                    raise ValueError(f"{url} has more than {MAX_BYTES} bytes")
    try:
        return json.loads(body)
    except RecursionError as exc:
        raise ValueError(f"{url} is nested too deeply") from exc


def read_keys(document: Any) -> dict[str, jwt.PyJWK]:
    """Return the public keys for signatures in a set of keys. What is no such key is passed over.

    Raises:
        ValueError: it is not a set of keys, or has too many.
    """
    rows = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(rows, list) or len(rows) > MAX_KEYS:
        raise ValueError(f"it is not a set of at most {MAX_KEYS} keys")
    keys = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("kid"), str) or row.get("use", "sig") != "sig":
            continue
        if row.get("kty") not in ("RSA", "EC", "OKP"):  # a secret that everybody can read proves nothing
            continue
        try:
            key = jwt.PyJWK(row)
            if row["kty"] == "RSA" and key.key.key_size < MIN_RSA_BITS:
                logger.warning("an RSA key of %s bits is not used; at least %s", key.key.key_size, MIN_RSA_BITS)
                continue
            keys[row["kid"]] = key
        except (jwt.PyJWTError, ValueError, TypeError):
            continue
    return keys


def check_https(url: str) -> None:
    """Refuse an address from which keys would arrive unprotected.

    Raises:
        UsageError: it is neither https nor of this machine.
    """
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and is_loopback(parts.hostname or ""):
        return
    raise UsageError(f"{url[:200]!r} must begin with https:// (http:// only for this machine)")


TYPES: Final = frozenset({"", "jwt", "at+jwt", "application/at+jwt"})
LEEWAY_S: Final = 30
MAX_SUBJECT_CHARS: Final = 200


class Jwts:
    """Checks signature, issuer, audience and times, and reads tenant and scopes from claims."""

    def __init__(
        self, config: OidcConfig, keys: KeySet | None = None, *, tenants: Container[str] | None = None
    ) -> None:
        """`tenants`: those that are let in; None for all that the issuer names.

        Raises:
            UsageError: an address of the issuer is not https.
        """
        self._config, self._tenants = config, tenants
        self.keys = keys or KeySet(config.issuer, config.jwks)
        of_tenants = {f"toolcell:{each}": each for each in Scope if each is not Scope.OPERATOR}
        self._scopes = of_tenants if config.scopes is None else config.scopes

    async def principal_of(self, credential: str) -> Principal:
        """Return whose a JWT is.

        Raises:
            Problem: it is nobody's (401), names no tenant (403), or the issuer cannot be asked (503).
        """
        try:
            claims = await self._claims_of(credential)
        except jwt.PyJWTError as exc:
            raise unauthorized(f"the JWT is refused: {exc}"[:300]) from exc
        except (ValueError, TypeError, RecursionError) as exc:
            raise unauthorized("this is not a JWT") from exc
        except KeysUnavailable as exc:
            headers = {"Retry-After": "30"}
            raise Problem(503, "issuer_unavailable", "The issuer cannot be asked", str(exc), headers=headers) from exc
        return self._principal_in(claims)

    async def _claims_of(self, credential: str) -> dict[str, Any]:
        header = jwt.get_unverified_header(credential)
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in self._config.algorithms:
            raise jwt.InvalidAlgorithmError(f"it is signed with none of {', '.join(self._config.algorithms)}")
        if "crit" in header or str(header.get("typ", "")).lower() not in TYPES:
            raise jwt.InvalidTokenError("it is of another type")
        if not isinstance(key_id, str):
            raise jwt.InvalidTokenError("it names no key (kid)")
        if (key := await self.keys.key(key_id)) is None:
            raise jwt.InvalidTokenError("the issuer has no such key (kid)")
        return jwt.decode(
            credential,
            key,  # which allows only the algorithms of its own type
            algorithms=[*self._config.algorithms],
            audience=self._config.audience,
            issuer=self._config.issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iss", "aud", "sub"], "strict_aud": False},
        )

    def _principal_in(self, claims: Mapping[str, Any]) -> Principal:
        tenant, subject = claims.get(self._config.tenant_claim), claims.get("sub")
        if not isinstance(tenant, str) or not NAME.fullmatch(tenant):
            raise Problem(403, "no_tenant", "No tenant", f"the claim {self._config.tenant_claim!r} names no tenant")
        if self._tenants is not None and tenant not in self._tenants:
            raise Problem(403, "no_tenant", "No tenant", f"the tenant {tenant!r} is not known here")
        if not isinstance(subject, str) or not 0 < len(subject) <= MAX_SUBJECT_CHARS or not is_visible(subject):
            raise unauthorized("its subject is empty, too long or not printable")
        return Principal(tenant, subject, self._scopes_in(claims.get(self._config.scope_claim)))

    def _scopes_in(self, claim: object) -> frozenset[Scope]:
        """Read a claim of words with spaces between them, or of a list. What is unknown allows nothing."""
        words = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
        known = (self._scopes.get(each) for each in words if isinstance(each, str))
        return frozenset(each for each in known if each is not None)
