"""`TokenAuthenticator`: lets in who has a token of the store."""

from __future__ import annotations

from toolcell.errors import StoreError
from toolcell.service.attempts import Attempts
from toolcell.service.bearer import BearerAuthenticator, unauthorized
from toolcell.service.principal import Principal
from toolcell.service.tokens import TokenDatabase
from toolcell.support import daemon_threads, logger_of

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
