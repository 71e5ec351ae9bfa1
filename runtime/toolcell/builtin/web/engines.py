"""Search engines: Brave, SearXNG, and the protocol for others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable
from urllib.parse import urlencode

import httpx

from toolcell.builtin.encodings import text_of
from toolcell.builtin.web.fetch import Fetcher, Outgoing, Response
from toolcell.builtin.web.pages import strip_tags
from toolcell.builtin.web.policy import WebPolicy
from toolcell.egress import Allow, Egress
from toolcell.egress.resolver import Resolver
from toolcell.egress.urls import parse_url
from toolcell.errors import ToolError, UsageError

BRAVE_URL: Final = "https://api.search.brave.com/res/v1/web/search"
SEARCH_TIMEOUT_S: Final = 10.0
MAX_ANSWER_BYTES: Final = 2 * 1024 * 1024

ANYWHERE: Final = ("0.0.0.0/0", "::/0")
"""Addresses of a server that the program names itself."""

_JSON = Outgoing(headers={"Accept": "application/json"})


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One result of a search engine, as plain text."""

    title: str
    url: str
    snippet: str


@runtime_checkable
class SearchEngine(Protocol):
    """Finds pages."""

    async def search(self, query: str, count: int) -> list[SearchHit]:
        """Return up to `count` hits, the best first.

        Raises:
            ToolError: there is no answer, or it cannot be read.
        """
        ...


class BraveSearch:
    """The Brave Search API. Source: api-dashboard.search.brave.com, Web Search."""

    def __init__(self, key: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Raises: UsageError, when there is no key."""
        if not key.strip():
            raise UsageError("BraveSearch needs the key of a subscription: https://brave.com/search/api")
        rule = Allow("api.search.brave.com", secrets={"X-Subscription-Token": "{BRAVE_KEY}"})
        egress = Egress(rule, secrets={"BRAVE_KEY": key.strip()})
        policy = WebPolicy(egress=egress, max_body_bytes=MAX_ANSWER_BYTES, max_redirects=0, interval_s=0)
        self._fetcher = Fetcher(policy, transport=transport)

    async def search(self, query: str, count: int) -> list[SearchHit]:
        """Return up to `count` hits; Brave gives at most 20."""
        url = f"{BRAVE_URL}?{urlencode({'q': query, 'count': count})}"
        answer = _json(await self._fetcher.fetch(url, _JSON, timeout_s=SEARCH_TIMEOUT_S), "brave API")
        web = answer.get("web")
        return _hits(web.get("results") if isinstance(web, Mapping) else None, "description", count)


class SearxngSearch:
    """A SearXNG server with the format `json` enabled. Source: docs.searxng.org/dev/search_api.html."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        resolver: Resolver | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`url`: of the server, which may be in a private network. `headers`: for a server that wants a password.

        Raises:
            UsageError: it is not a URL.
        """
        try:
            base = parse_url(url)
        except ToolError as exc:
            raise UsageError(f"SearxngSearch(url): {exc}") from exc
        self._url = f"{base.origin}{base.path.rstrip('/')}/search"
        given: dict[str, str] = {}
        secrets: dict[str, str] = {}
        for name, value in (headers or {}).items():
            scheme, space, token = value.rpartition(" ")  # the token alone is found in an answer, too
            secrets[key := f"HEADER_{len(secrets)}"] = token
            given[name] = f"{scheme}{space}{{{key}}}"
        host = f"http://{base.host}" if base.scheme == "http" else base.host
        rule = Allow(host, ports=[base.port], private=ANYWHERE, secrets=given)
        egress = Egress(rule, secrets=secrets, resolver=resolver)
        policy = WebPolicy(egress=egress, max_body_bytes=MAX_ANSWER_BYTES, max_redirects=0, interval_s=0)
        self._fetcher = Fetcher(policy, transport=transport)

    async def search(self, query: str, count: int) -> list[SearchHit]:
        """Return up to `count` hits of the first page."""
        url = f"{self._url}?{urlencode({'q': query, 'format': 'json'})}"
        response = await self._fetcher.fetch(url, _JSON, timeout_s=SEARCH_TIMEOUT_S)
        return _hits(_json(response, "SearXNG").get("results"), "content", count)


def _json(response: Response, name: str) -> Mapping[str, Any]:
    text = text_of(response.content, response.content_type)
    if response.status != 200:
        again = response.status == 429 or response.status >= 500
        said = " ".join(strip_tags(text[:2000]).split())[:300]
        raise ToolError(f"{name} {response.status}: {said}", code="unavailable", retryable=again)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ToolError(f"{name}: the answer is not a JSON object", code="unavailable", retryable=True)
    return answer


def _hits(results: object, snippet: str, count: int) -> list[SearchHit]:
    """Read what an engine found; entries of another form are left out."""
    found: list[SearchHit] = []
    for entry in results if isinstance(results, list) else []:
        url = entry.get("url") if isinstance(entry, Mapping) else None
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            continue
        title, text = (_plain_line(entry.get(name)) for name in ("title", snippet))
        found.append(SearchHit(title[:300] or url[:300], url, text[:2000]))
    return found[:count]


def _plain_line(value: object) -> str:
    return " ".join(strip_tags(value[:5000]).split()) if isinstance(value, str) else ""
