"""An MCP server with an authorization server, in memory: what they answer is a table that a test changes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx2

from toolcell.mcp.address_guard import LoginTransport
from toolcell.mcp.login import Login
from toolcell.mcp.oauth import Auth, OAuth

SERVER = "https://mcp.example.com/mcp"
ISSUER = "https://auth.example.net"
REDIRECT_URI = "http://127.0.0.1:4000/callback"
PRM = "https://mcp.example.com/.well-known/oauth-protected-resource/mcp"
METADATA = f"{ISSUER}/.well-known/oauth-authorization-server"


class World:
    """Every request that is sent, and what is answered."""

    def __init__(self) -> None:
        self.requests: list[httpx2.Request] = []
        self.asked: list[str] = []
        """URLs that the person was sent to."""
        self.answers: dict[str, Any] = {
            PRM: {"resource": SERVER, "authorization_servers": [ISSUER]},
            METADATA: {
                "issuer": ISSUER,
                "authorization_endpoint": f"{ISSUER}/authorize",
                "token_endpoint": f"{ISSUER}/token",
                "registration_endpoint": f"{ISSUER}/register",
            },
            f"{ISSUER}/register": {"client_id": "made", "redirect_uris": [REDIRECT_URI]},
        }
        self.refused = httpx2.Headers({"www-authenticate": "Bearer"})
        self.valid = {"access-1", "access-2"}
        self.tokens = (f"access-{number}" for number in itertools.count(1))
        self.come_back: Callable[[dict[str, str]], str] = self.with_code

    @staticmethod
    def with_code(query: dict[str, str]) -> str:
        return f"{REDIRECT_URI}?code=the-code&state={query['state']}"

    async def person(self, url: str) -> str:
        """Log in, as a person does."""
        self.asked.append(url)
        return self.come_back(dict(parse_qsl(urlsplit(url).query)))

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        host = request.headers["host"].partition(":")[0]
        url = str(request.url.copy_with(host=host))
        self.requests.append(request)
        if url == SERVER:
            token = request.headers.get("authorization", "").removeprefix("Bearer ")
            return httpx2.Response(200, json={}) if token in self.valid else httpx2.Response(401, headers=self.refused)
        found = self.answers.get(url)
        if url == f"{ISSUER}/token" and found is None:
            found = {"access_token": next(self.tokens), "token_type": "Bearer", "refresh_token": "refresh-me"}
        if isinstance(found, httpx2.Response):
            return found
        return httpx2.Response(200 if found is not None else 404, json=found)

    def sent_to(self, part: str) -> list[httpx2.Request]:
        """Return the requests whose URL or host contains `part`."""
        return [each for each in self.requests if part in f"{each.headers['host']}{each.url.path}"]

    def form(self, request: httpx2.Request) -> dict[str, str]:
        return dict(parse_qsl(request.content.decode()))

    def login(self, auth: Auth | None = None, **options: Any) -> Login:
        options = {"store": self.store, **options} if hasattr(self, "store") else options
        return Login("s", SERVER, auth or OAuth(redirect=self.person, redirect_uri=REDIRECT_URI, **options))

    def client(self, login: Login) -> httpx2.AsyncClient:
        """Return what `HttpTransport` makes."""
        transport = LoginTransport(httpx2.MockTransport(lambda request: self.answer(request)), login.guard)
        return httpx2.AsyncClient(transport=transport, auth=login)

    store: Any


class Text:
    """A store that is an object."""

    def __init__(self) -> None:
        self.text: str | None = None

    async def load(self) -> str | None:
        return self.text

    async def save(self, text: str) -> None:
        self.text = text


def problem(response: httpx2.Response) -> str:
    """Return what a failed request says, as the SDK reads it."""
    assert response.status_code == 401
    return str(json.loads(response.content)["error"]["message"])
