"""Choose who says who sent a request: the settings name a store of tokens, an issuer of JWTs, both or neither."""

from __future__ import annotations

from collections.abc import Mapping

from toolcell.errors import StoreError, UsageError
from toolcell.service.attempts import Attempts
from toolcell.service.authentication import Authenticator, LoopbackAuthenticator
from toolcell.service.bearer import BearerAuthenticator, bearer_of, unauthorized
from toolcell.service.config import ServiceConfig
from toolcell.service.principal import Principal
from toolcell.service.tokens import PREFIX, TokenDatabase
from toolcell.support import daemon_threads
from toolcell.support.log import logger_of

logger = logger_of("toolcell.service.tokens")


class TokenAuthenticator(BearerAuthenticator):
    """Looks a token up in the store at each request, so that a revoked one ends at once."""

    def __init__(self, store: TokenDatabase, attempts: Attempts | None = None) -> None:
        super().__init__(attempts)
        self._store = store
        self._noting: set[str] = set()

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    async def _principal_of(self, credential: str) -> Principal:
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
        if not config.tokens.exists():
            raise UsageError(f"there is no store of tokens {config.tokens}; make one with `toolcell tokens create`")
        store = TokenDatabase(config.tokens)
        if unknown := config.unlisted(each.tenant for each in store.list() if each.state(store.now()) == "active"):
            logger.warning("tokens: %s", unknown)
        found.append(TokenAuthenticator(store, attempts))
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
