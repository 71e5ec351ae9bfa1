"""`BearerAuthenticator`: one header, two makers of principals (tokens and JWTs), and a limit on wrong credentials."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from toolcell.service.attempts import Attempts
from toolcell.service.principal import Principal
from toolcell.service.problems import Problem

MAX_HEADER_CHARS: Final = 16_384
TOKEN_PREFIX: Final = "tcs"
"""Tokens of the service begin with it and `_`; no JWT does."""

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
        principal_of = self._tokens if credential.startswith(f"{TOKEN_PREFIX}_") else self._jwts
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


def unauthorized(why: str) -> Problem:
    """Return the answer to a wrong credential. `why` tells nothing that its sender could not know."""
    return Problem(
        401,
        "unauthorized",
        "The credential is not valid",
        why,
        headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
    )
