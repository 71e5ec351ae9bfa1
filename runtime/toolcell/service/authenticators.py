"""Choose who says who sent a request: the settings name a store of tokens, an issuer of JWTs, both or neither."""

from __future__ import annotations

from toolcell.errors import StoreError, UsageError
from toolcell.service.authentication import Authenticator, LoopbackAuthenticator
from toolcell.service.bearer import BearerAuthenticator, PrincipalOf, unauthorized
from toolcell.service.config import ServiceConfig
from toolcell.service.principal import Principal
from toolcell.service.tokens import TokenDatabase
from toolcell.support import daemon_threads
from toolcell.support.log import logger_of

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
