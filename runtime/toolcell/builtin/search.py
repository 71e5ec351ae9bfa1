"""`WebSearch`: the tool `web_search`. An engine finds pages, the pages are fetched, and their passages are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

import anyio
from pydantic import Field

from toolcell.builtin.chunking import split
from toolcell.builtin.http import fetcher
from toolcell.builtin.package import ToolPackage, offered, required_text
from toolcell.builtin.web.policy import WebPolicy
from toolcell.calls.concurrency import run_in_thread
from toolcell.errors import EmbeddingError, ToolError, UsageError
from toolcell.support.checks import brief, check_does, check_kind
from toolcell.support.embeddings import PROVIDERS, EmbeddingProvider, embed_texts, nearest
from toolcell.tools import ToolContext, ToolOptions, ToolResult, ToolSpec

if TYPE_CHECKING:
    import httpx

    from toolcell.builtin.web.engines import SearchEngine, SearchHit
    from toolcell.egress.resolver import Resolver

HITS: Final = 8
MORE_HITS: Final = 12
"""Asked for when the best score of the first ones is below `GOOD_SCORE`."""
GOOD_SCORE: Final = 0.35
MAX_LIMIT: Final = 20
PAGE_TIMEOUT_S: Final = 8.0
PAGE_BYTES: Final = 512 * 1024
PAGE_CHARS: Final = 8000
PASSAGE_CHARS: Final = 500
MIN_PASSAGE_CHARS: Final = 50
MAX_QUERY_CHARS: Final = 1000

Pages = dict[str, list[str]]
"""The passages of pages, by URL."""

_VALUE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "url": {"type": "string"},
            "text": {"type": "string"},
            "score": {"type": ["number", "null"], "description": "cosine from 0 to 1; null when it was not ranked"},
        },
        "required": ["title", "url", "text", "score"],
    },
}


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a page, or what the engine says of it."""

    title: str
    url: str
    text: str
    score: float | None = None


class WebSearch(ToolPackage):
    """Searches the web and ranks what it finds by meaning."""

    package = "search"
    needs = ("EmbeddingProvider", "Brave API key, or another search engine")
    extra = "builtin"

    def __init__(
        self,
        embeddings: EmbeddingProvider,
        engine: str | SearchEngine,
        *,
        policy: WebPolicy | None = None,
        resolver: Resolver | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`engine`: the key of a Brave subscription, or an engine. `policy`: for the pages that were found.

        `transport`: sends all requests in place of the network, for tests.

        Raises:
            UsageError: the key is empty, an argument is of another kind, or httpx is not installed.
        """
        check_kind("WebSearch(policy)", policy, WebPolicy, type(None))
        if embeddings is not None:
            check_does("WebSearch(embeddings)", embeddings, EmbeddingProvider, PROVIDERS)
        if not isinstance(engine, str) and not callable(getattr(engine, "search", None)):
            raise UsageError(f"WebSearch(engine) must be a Brave key or a search engine, not {brief(engine)}")
        self._pages = fetcher(policy, resolver=resolver, transport=transport)
        from toolcell.builtin.web.engines import BraveSearch

        self._embeddings = embeddings
        self._engine = BraveSearch(engine, transport=transport) if isinstance(engine, str) else engine

    def _spec(self, name: str, options: ToolOptions) -> ToolSpec:
        return super()._spec(name, self._pages.policy.labelled(options))

    @offered(read_only=True, idempotent=True, sends="public", reads="web", returns=_VALUE)
    async def web_search(
        self, ctx: ToolContext, query: str, limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = 10
    ) -> ToolResult:
        """Search the web for current information. Returns the passages that fit the query best, with their sources.

        Args:
            query: What to look for, as one would type it into a search engine.
            limit: How many results at most.
        """
        query = required_text("query", " ".join(query.split()), MAX_QUERY_CHARS)
        most = HITS if limit <= 10 else limit
        hits = await self._engine.search(query, most)
        if not hits:
            return ToolResult.ok(f'No results found for "{query}".', value=[])
        pages = await self._read(ctx, hits, {})
        found = await self._ranked(query, hits, pages)
        if found is not None and found[0].score is not None and found[0].score < GOOD_SCORE:
            more = await self._engine.search(query, min(MAX_LIMIT, max(MORE_HITS, most + 4)))
            hits = list({hit.url: hit for hit in (*more, *hits)}.values())
            pages = await self._read(ctx, hits, pages)
            found = await self._ranked(query, hits, pages)
        if found is None:
            found = [Passage(hit.title, hit.url, hit.snippet) for hit in hits]
        return _result(found[: min(limit, most)])

    async def _read(self, ctx: ToolContext, hits: Sequence[SearchHit], known: Pages) -> Pages:
        """Fetch all pages at once; one that cannot be had is empty."""
        pages = dict(known)
        async with anyio.create_task_group() as tasks:
            for hit in hits:
                if hit.url not in pages:
                    pages[hit.url] = []
                    tasks.start_soon(self._read_page, ctx, hit.url, pages)
        return pages

    async def _read_page(self, ctx: ToolContext, url: str, pages: Pages) -> None:
        from toolcell.builtin.web.pages import read_page

        try:
            response = await self._pages.fetch(url, timeout_s=PAGE_TIMEOUT_S, max_bytes=PAGE_BYTES)
        except ToolError:
            return
        if response.status < 400:
            pages[url] = await run_in_thread(lambda: passages(read_page(response).text[:PAGE_CHARS]), ctx.call.give_up)

    async def _ranked(self, query: str, hits: Sequence[SearchHit], pages: Pages) -> list[Passage] | None:
        """Return the passages, the best first; None when there are no vectors to compare."""
        found = [
            Passage(hit.title, hit.url, text)
            for hit in hits
            for text in dict.fromkeys([hit.snippet, *pages.get(hit.url, ())])
            if text
        ] or [Passage(hit.title, hit.url, hit.title) for hit in hits]
        try:
            first, *others = await embed_texts(self._embeddings, [query, *(each.text for each in found)])
        except EmbeddingError:
            return None
        return [replace(found[at], score=score) for at, score in nearest(first, others)] or None


def passages(text: str) -> list[str]:
    """Return a text in pieces of 50 to 500 characters."""
    return [piece for piece in split(text, PASSAGE_CHARS) if len(piece) >= MIN_PASSAGE_CHARS]


def _result(found: Sequence[Passage]) -> ToolResult:
    lines: list[str] = []
    for number, each in enumerate(found, 1):
        score = "" if each.score is None else f"(score: {each.score:.2f}) "
        lines.append(f"[{number}] {score}{each.title}\n{each.text}\n")
    sources = dict.fromkeys((each.url, each.title) for each in found)
    lines += ["Sources:", *(f"- {title}: {url}" for url, title in sources)]
    value = [{"title": each.title, "url": each.url, "text": each.text, "score": each.score} for each in found]
    return ToolResult.ok("\n".join(lines), value=value)
