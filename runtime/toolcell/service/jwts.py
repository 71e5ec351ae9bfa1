"""`Jwts`: lets in who has a JWT of one issuer for one audience. Source: RFC 7519, RFC 8725, RFC 9068."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

import jwt

from toolcell.service.access_config import OidcConfig
from toolcell.service.bearer import unauthorized
from toolcell.service.config import NAME
from toolcell.service.jwks import KeySet, KeysUnavailable
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem
from toolcell_bridge.wire.invisible import is_visible

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
        claims: dict[str, Any] = jwt.decode(
            credential,
            key,  # which allows only the algorithms of its own type
            algorithms=[*self._config.algorithms],
            audience=self._config.audience,
            issuer=self._config.issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iss", "aud", "sub"], "strict_aud": False},
        )
        return claims

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
