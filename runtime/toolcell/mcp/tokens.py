"""Tokens of one MCP server, from one login to the next: a file that only its owner may read, or an object's text."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import platformdirs
from mcp.shared.auth import OAuthClientInformationFull, OAuthMetadata, OAuthToken, ProtectedResourceMetadata
from pydantic import BaseModel, ValidationError

from toolcell.errors import McpServerError
from toolcell.mcp.oauth import LoginStore, Store
from toolcell.mcp.requests import called
from toolcell.support.files import make_private_folder, read_regular_file, take_lock, write_file

MAX_STORED_BYTES = 256 * 1024
LOCK_S = 30.0
LOCK_PAUSE_S = 0.02


class TokenFile:
    """Keeps the text in a file of mode 0600."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> str | None:
        """Return the file's text; None when there is no file.

        Raises:
            OSError: others can use it, or it cannot be read.
        """
        try:
            return read_regular_file(self.path, MAX_STORED_BYTES, is_private=True).decode("utf-8", "replace")
        except FileNotFoundError:
            return None

    def save(self, text: str) -> None:
        make_private_folder(self.path.parent)
        write_file(self.path, text.encode())

    def try_lock(self) -> int | None:
        """Take the lock of the file: a descriptor, which holds it until it is closed; None while another has it.

        Raises:
            OSError: there cannot be one.
        """
        make_private_folder(self.path.parent)
        return take_lock(self.path.with_name(f"{self.path.name}.lock"))


class TokenMemory:
    """Keeps the text as long as the program runs."""

    def __init__(self) -> None:
        self._text: str | None = None

    def load(self) -> str | None:
        return self._text

    def save(self, text: str) -> None:
        self._text = text


def default_path(url: str) -> Path:
    host = re.sub(r"[^A-Za-z0-9.-]", "_", url.partition("://")[2].partition("/")[0])[:80]
    name = f"{host}-{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    return platformdirs.user_data_path("toolcell", appauthor=False) / "mcp-tokens" / name


def store_of(given: Store, url: str, is_of_person: bool) -> LoginStore:
    """Return the store that `store=` means: without one, a file for a person's tokens, memory for a program's."""
    if isinstance(given, str | Path):
        return TokenFile(Path(given).expanduser())
    if given is not None:
        return given
    return TokenFile(default_path(url)) if is_of_person else TokenMemory()


class LoginRecord(BaseModel):
    """What is kept of a login."""

    server: str
    tokens: OAuthToken | None = None
    expires_at: float | None = None
    client: OAuthClientInformationFull | None = None
    metadata: OAuthMetadata | None = None
    """Metadata of the authorization server: where a token is refreshed after a restart."""
    resource: ProtectedResourceMetadata | None = None


class KeptLogin:
    """What is kept of the login at one server. A `TokenStorage` of the SDK."""

    def __init__(self, url: str, store: LoginStore) -> None:
        self._url, self._store = url, store
        self.kept = LoginRecord(server=url)

    async def load(self) -> LoginRecord:
        """Read again: another process may have refreshed the tokens. What is of another server is not used.

        Raises:
            McpServerError: the store fails.
        """
        text = await self._ask_store("load")
        try:
            found = LoginRecord.model_validate_json(text) if isinstance(text, str) else None
        except ValidationError:
            found = None
        self.kept = found if found is not None and found.server == self._url else LoginRecord(server=self._url)
        return self.kept

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Let one process at a time refresh the tokens of a file: a server takes a rotating one once.

        Goes on without the lock where there is none, and after `LOCK_S`: a person may be logging in there.
        """
        descriptor = None
        if isinstance(store := self._store, TokenFile):
            with suppress(OSError), anyio.move_on_after(LOCK_S):
                while (descriptor := store.try_lock()) is None:  # noqa: ASYNC110  # of another process
                    await anyio.sleep(LOCK_PAUSE_S)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    async def save(self) -> None:
        """Write everything.

        Raises:
            McpServerError: the store fails.
        """
        await self._ask_store("save", self.kept.model_dump_json(exclude_none=True))

    async def _ask_store(self, method: str, *args: str) -> Any:
        try:
            return await called(getattr(self._store, method), *args, purpose="stores of tokens")
        except Exception as exc:  # its text may hold what was to be saved
            number = f" ({exc.strerror}: {exc.filename})" if isinstance(exc, OSError) and exc.strerror else ""
            raise McpServerError(f"the store of its tokens failed to {method}: {type(exc).__name__}{number}") from None

    async def get_tokens(self) -> OAuthToken | None:
        return self.kept.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.kept.tokens = tokens
        self.kept.expires_at = time.time() + tokens.expires_in if tokens.expires_in is not None else None
        await self.save()

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.kept.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.kept.client = client_info
        await self.save()
