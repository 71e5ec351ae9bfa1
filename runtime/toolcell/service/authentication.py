"""Find out who asks. Without a store of tokens, only this machine is let in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem
from toolcell.service.request_log import note
from toolcell.support import daemon_threads
from toolcell.support.asgi import is_loopback

LOOPBACK_TENANT = "default"


class Authenticator(Protocol):
    """Says who sent a request."""

    async def principal(self, headers: Mapping[str, str], client: str) -> Principal:
        """Return who it is; `client` is the address that the request came from.

        Raises:
            Problem: it is nobody that is known (401), or too many attempts failed (429).
        """

    def close(self) -> None:
        """Let go of what it has open."""


def unauthorized(why: str) -> Problem:
    """Return the answer to a wrong credential. `why` tells nothing that its sender could not know."""
    return Problem(
        401,
        "unauthorized",
        "The credential is not valid",
        why,
        headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
    )


class LoopbackAuthenticator:
    """Lets in programs of this machine, as one tenant that may do everything."""

    _anybody = Principal(LOOPBACK_TENANT, "local", frozenset(Scope))

    async def principal(self, headers: Mapping[str, str], client: str) -> Principal:
        if why := _not_local(headers, client):
            detail = f"{why}, and without a store of tokens only programs of this machine are let in"
            raise Problem(401, "unauthorized", "Not let in", detail)
        return self._anybody

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""


HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")
"""A name or an address, with a port or without."""

FORWARDED: Final = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-forwarded-server",
    "x-real-ip",
    "x-client-ip",
    "true-client-ip",
    "cf-connecting-ip",
)
"""Headers of proxies: behind one, everybody has its address."""


def _not_local(headers: Mapping[str, str], client: str) -> str:
    """Say why a request is not one of a program of this machine; empty if it is one.

    A web page in a local browser does not count as one: its name may lead here (Host), and it says so (Origin).
    """
    host = headers.get("host", "")
    if not is_loopback(client):
        return f"{client or 'the client'} is not this machine"
    if (found := HOST.fullmatch(host)) is None or not is_loopback(found[1].strip("[]").lower()):
        return f"the request is for the host {host!r:.80}"
    if (origin := headers.get("origin")) is not None and not is_origin_of(origin, host):
        return f"a web page of {origin!r:.80} sent it"
    if forwarded := [name for name in FORWARDED if name in headers]:
        return f"a proxy forwarded it ({forwarded[0]})"
    return ""


def is_origin_of(origin: str, host: str) -> bool:
    """Return whether a page of this origin was served by this host."""
    try:
        return bool(host) and urlsplit(origin).netloc == host
    except ValueError:
        return False


async def principal_of(connection: HTTPConnection, *scopes: Scope) -> Principal:
    """Return who sent a request, if they may do this.

    Raises:
        Problem: they are not known (401), may not do it (403), or tried too often (429).
    """
    client = connection.client.host if connection.client is not None else ""
    principal = await identified(connection.app.state.service, connection.headers, client)
    check_may(principal, *scopes)
    return principal


async def identified(service: Any, headers: Mapping[str, str], client: str) -> Principal:
    """Return who it is, and note it, or why it is nobody, in the line of the request. The large data of this task is
    charged to the tenant from now on."""
    try:
        principal: Principal = await service.authenticator.principal(headers, client)
    except Problem as problem:
        note(code=problem.code, refused=problem.detail or problem.title)
        raise
    note(tenant=principal.tenant, subject=principal.subject)
    daemon_threads.account.set(service.admission.account(principal.tenant))
    return principal


def check_may(principal: Principal, *scopes: Scope) -> None:
    """Check that somebody has every one of these scopes.

    Raises:
        Problem: one is missing (403).
    """
    for scope in scopes:
        if not principal.may(scope):
            had = ", ".join(sorted(principal.scopes)) or "none"
            raise Problem(403, "forbidden", "Not allowed", f"this needs the scope {scope}, and yours are: {had}")
