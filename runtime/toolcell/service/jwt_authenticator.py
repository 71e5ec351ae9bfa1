"""`JwtAuthenticator`: lets in who has a JWT of one issuer for one audience. Source: RFC 7519, RFC 8725, RFC 9068."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

import jwt

from toolcell.errors import UsageError
from toolcell.service.attempts import Attempts
from toolcell.service.bearer import BearerAuthenticator, unauthorized
from toolcell.service.config import NAME
from toolcell.service.jwks import KeySet, KeysUnavailable
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem
from toolcell_bridge import is_visible

SIGNATURES: Final = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
"""With public keys. `none` signs nothing; with HS256 a public key would be the secret."""
TYPES: Final = frozenset({"", "jwt", "at+jwt", "application/at+jwt"})
LEEWAY_S: Final = 30
MAX_SUBJECT_CHARS: Final = 200


class JwtAuthenticator(BearerAuthenticator):
    """Checks signature, issuer, audience and times, and reads tenant and scopes from claims."""

    def __init__(
        self,
        issuer: str,
        audience: str,
        keys: KeySet | None = None,
        *,
        algorithms: Sequence[str] = ("RS256", "ES256", "EdDSA"),
        tenant_claim: str = "tenant",
        scope_claim: str = "scope",
        scopes: Mapping[str, Scope] | None = None,
        tenants: Container[str] | None = None,
        attempts: Attempts | None = None,
    ) -> None:
        """`scopes`: what the words of the scope claim stand for; by default `toolcell:read` and so on. `tenants`: those
        that are let in; None for all that the issuer names.

        Raises:
            UsageError: an algorithm is not one of `SIGNATURES`, or an address is not https.
        """
        super().__init__(attempts)
        if wrong := sorted(set(algorithms) - SIGNATURES):
            known = ", ".join(sorted(SIGNATURES))
            raise UsageError(f"the algorithm {wrong[0]!r} proves nothing with a public key; use one of {known}")
        if not algorithms or not issuer or not audience:
            raise UsageError("a JWT needs an issuer, an audience and at least one algorithm to be checked against")
        self._issuer, self._audience, self._algorithms = issuer, audience, list(algorithms)
        self._keys = KeySet(issuer) if keys is None else keys
        self._tenant_claim, self._scope_claim = tenant_claim, scope_claim
        self._tenants = tenants
        of_tenants = {f"toolcell:{each}": each for each in Scope if each is not Scope.OPERATOR}
        self._scopes = dict(scopes) if scopes is not None else of_tenants

    async def _principal_of(self, credential: str) -> Principal:
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
        if algorithm not in self._algorithms:
            raise jwt.InvalidAlgorithmError(f"it is signed with none of {', '.join(self._algorithms)}")
        if "crit" in header or str(header.get("typ", "")).lower() not in TYPES:
            raise jwt.InvalidTokenError("it is of another type")
        if not isinstance(key_id, str):
            raise jwt.InvalidTokenError("it names no key (kid)")
        if (key := await self._keys.key(key_id)) is None:
            raise jwt.InvalidTokenError("the issuer has no such key (kid)")
        claims: dict[str, Any] = jwt.decode(
            credential,
            key,  # which allows only the algorithms of its own type
            algorithms=self._algorithms,
            audience=self._audience,
            issuer=self._issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iss", "aud", "sub"], "strict_aud": False},
        )
        return claims

    def _principal_in(self, claims: Mapping[str, Any]) -> Principal:
        tenant, subject = claims.get(self._tenant_claim), claims.get("sub")
        if not isinstance(tenant, str) or not NAME.fullmatch(tenant):
            raise Problem(403, "no_tenant", "No tenant", f"the claim {self._tenant_claim!r} names no tenant")
        if self._tenants is not None and tenant not in self._tenants:
            raise Problem(403, "no_tenant", "No tenant", f"the tenant {tenant!r} is not known here")
        if not isinstance(subject, str) or not 0 < len(subject) <= MAX_SUBJECT_CHARS or not is_visible(subject):
            raise unauthorized("its subject is empty, too long or not printable")
        return Principal(tenant, subject, self._scopes_in(claims.get(self._scope_claim)))

    def _scopes_in(self, claim: object) -> frozenset[Scope]:
        """Read a claim of words with spaces between them, or of a list. What is unknown allows nothing."""
        words = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
        known = (self._scopes.get(each) for each in words if isinstance(each, str))
        return frozenset(each for each in known if each is not None)
