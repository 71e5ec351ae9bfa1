"""Choose who says who sent a request: the settings name a store of tokens, an issuer of JWTs, both or neither."""

from __future__ import annotations

from collections.abc import Mapping

from toolcell.errors import UsageError
from toolcell.service.attempts import Attempts
from toolcell.service.authentication import Authenticator, LoopbackAuthenticator
from toolcell.service.bearer import BearerAuthenticator, bearer_of
from toolcell.service.config import ServiceConfig
from toolcell.service.principal import Principal
from toolcell.service.tokens import PREFIX, TokenDatabase


class EitherAuthenticator:
    """Takes tokens of a store and JWTs of an issuer: they look different."""

    def __init__(self, tokens: BearerAuthenticator, jwts: BearerAuthenticator) -> None:
        self._tokens, self._jwts = tokens, jwts

    async def principal(self, headers: Mapping[str, str], client: str) -> Principal:
        """Return who sent a request."""
        chosen = self._tokens if bearer_of(headers).startswith(f"{PREFIX}_") else self._jwts
        return await chosen.principal(headers, client)

    def close(self) -> None:
        """Let go of what both have open."""
        self._tokens.close()
        self._jwts.close()


def make_authenticator(config: ServiceConfig) -> Authenticator:
    """Return what the settings ask for. Without a store and an issuer, only programs of this machine are let in.

    Raises:
        UsageError: the store does not exist, or a setting of the issuer cannot be.
    """
    attempts, found = Attempts(), list[BearerAuthenticator]()
    if config.tokens is not None:
        from toolcell.service.token_authenticator import TokenAuthenticator

        if not config.tokens.exists():
            raise UsageError(f"there is no store of tokens {config.tokens}; make one with `toolcell tokens create`")
        found.append(TokenAuthenticator(TokenDatabase(config.tokens), attempts))
    if config.oidc is not None:
        found.append(_jwts(config, attempts))
    match found:
        case [tokens, jwts]:
            return EitherAuthenticator(tokens, jwts)
        case [one]:
            return one
    return LoopbackAuthenticator()


def _jwts(config: ServiceConfig, attempts: Attempts) -> BearerAuthenticator:
    from toolcell.service.jwks import KeySet
    from toolcell.service.jwt_authenticator import JwtAuthenticator

    given = config.oidc
    assert given is not None
    return JwtAuthenticator(
        given.issuer,
        given.audience,
        KeySet(given.issuer, given.jwks),
        algorithms=given.algorithms,
        tenant_claim=given.tenant_claim,
        scope_claim=given.scope_claim,
        scopes=given.scopes,
        tenants=None if given.unlisted_tenants else frozenset(config.tenants),
        attempts=attempts,
    )
