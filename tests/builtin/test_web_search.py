"""`web_search`: what is asked of the engines, how passages are ranked, and what is answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builtin.webkit import call
from rows import each_row
from toolcell import UsageError
from toolcell.builtin import HashEmbeddings, WebPolicy, WebSearch
from toolcell.builtin.search import MIN_PASSAGE_CHARS, PASSAGE_CHARS, passages
from toolcell.builtin.web.engines import BraveSearch, SearchHit, SearxngSearch
from toolcell.errors import EmbeddingError, ToolError
from toolcell.tools import ToolRegistry, ToolResult

pytestmark = pytest.mark.anyio

KEY = "brave-key-0123456789"
QUICK = WebPolicy(robots=False, interval_s=0)


class Web(httpx.AsyncBaseTransport):
    """Brave's API and the pages it finds."""

    def __init__(self, pages: dict[str, str], answer: Callable[[httpx.Request], httpx.Response] | None = None) -> None:
        self.pages = pages
        self.requests: list[httpx.Request] = []
        self._answer = answer

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.url.host == "api.search.brave.com":
            return self._answer(request) if self._answer else self._found(int(request.url.params["count"]))
        page = self.pages.get(str(request.url))
        status = 400 if "refused" in request.url.host else 200
        return httpx.Response(404) if page is None else httpx.Response(status, html=page)

    def _found(self, count: int) -> httpx.Response:
        results = [
            {"title": f"<strong>Page</strong> {n} &amp; more", "url": url, "description": f"About page {n}"}
            for n, url in enumerate(self.pages)
        ]
        return httpx.Response(200, json={"web": {"results": results[:count]}})

    @property
    def counts(self) -> list[str]:
        return [each.url.params["count"] for each in self.requests if "brave" in each.url.host]


def pages(count: int, text: str = "") -> dict[str, str]:
    return {
        f"https://p{n}.test/": f"<p>{text or f'A long enough text about subject number {n} and nothing else.'}</p>"
        for n in range(count)
    }


async def search(web: Web, embeddings: Any = None, **args: Any) -> ToolResult:
    return await call(WebSearch(embeddings or HashEmbeddings(), KEY, policy=QUICK, transport=web), "web_search", **args)


@pytest.mark.conforms("S7", "S-b1", "S-b2")
async def test_passages_are_ranked_by_meaning_with_their_sources() -> None:
    web = Web(pages(5))
    song = "The zebra finch sings a song that its father taught it, zebra finch."
    web.pages |= {"https://p3.test/": f"<p>{song}</p>", "https://refused.test/": f"<p>{song} Here too.</p>"}
    result = await search(web, query="zebra finch song")
    best = result.value[0]
    assert "Here too" not in result.text
    assert (best["url"], best["title"]) == ("https://p3.test/", "Page 3 & more")
    assert [each["score"] for each in result.value] == sorted((each["score"] for each in result.value), reverse=True)
    assert 0.35 < best["score"] <= 1 and set(best) == {"title", "url", "text", "score"}
    lines = result.text.splitlines()
    assert lines[0] == f"[1] (score: {best['score']:.2f}) Page 3 & more" and lines[1] == best["text"]
    assert lines[lines.index("Sources:") + 1] == "- Page 3 & more: https://p3.test/"
    request = web.requests[0]
    assert str(request.url) == "https://api.search.brave.com/res/v1/web/search?q=zebra+finch+song&count=8"
    assert (request.method, request.headers["X-Subscription-Token"]) == ("GET", KEY)
    assert all("X-Subscription-Token" not in each.headers for each in web.requests[1:])


@pytest.mark.conforms("S7")
async def test_a_low_best_score_asks_once_more_for_12_and_merges_by_url() -> None:
    web = Web(pages(12))
    result = await search(web, query="wholly unrelated")
    assert web.counts == ["8", "12"]
    fetched = [str(each.url) for each in web.requests if "brave" not in each.url.host]
    assert sorted(fetched) == sorted(web.pages)  # each once
    assert len(result.value) == 8


@pytest.mark.conforms("V-14", "S7")
async def test_the_limit_is_10_by_default_and_20_at_most() -> None:
    schema = ToolRegistry([WebSearch(HashEmbeddings(), KEY)]).definitions()[0].parameters["properties"]["limit"]
    assert (schema["default"], schema["minimum"], schema["maximum"]) == (10, 1, 20)
    web = Web(pages(30))
    assert len((await search(web, query="subject number text about", limit=3)).value) == 3
    many = await search(web, query="subject number text about", limit=20)
    assert (len(many.value), web.counts[-1]) == (20, "20")
    for wrong in (0, 21):
        assert (await search(web, query="x", limit=wrong)).is_error


class Broken(HashEmbeddings):
    async def embed(self, texts: list[str]) -> list[list[float]]:
        raise EmbeddingError("no answer from http://10.0.0.7")


class Zeros(HashEmbeddings):
    async def embed(self, texts: list[str]) -> list[list[float]]:
        return [[0.0] * self.dimensions() for _ in texts]


@pytest.mark.conforms("S7")
@each_row("embeddings", [Broken(), Zeros()])
async def test_without_embeddings_the_first_8_come_unranked(embeddings: HashEmbeddings) -> None:
    result = await search(Web(pages(12)), embeddings, query="x")
    assert [each["url"] for each in result.value] == [f"https://p{n}.test/" for n in range(8)]
    assert {each["score"] for each in result.value} == {None}
    assert result.text.startswith("[1] Page 0 & more\nAbout page 0\n")


@pytest.mark.conforms("S7")
async def test_nothing_found_is_no_error_and_an_empty_query_is_one() -> None:
    result = await search(Web({}), query="  no\nsuch  thing ")
    assert (result.text, result.value) == ('No results found for "no such thing".', [])
    assert (await search(Web({}), query=" ")).message == "query is required"
    assert "2000 characters" in (await search(Web({}), query="x" * 2000)).message


@pytest.mark.conforms("S7")
@each_row(
    ("response", "message"),
    [
        (httpx.Response(429, text=f"<b>Slow</b> down, {KEY}"), "brave API 429: Slow down, {BRAVE_KEY}"),
        (httpx.Response(401, json={"error": "x" * 900}), "brave API 401: "),
        (httpx.Response(200, text="<html>"), "brave API: the answer is not a JSON object"),
        (httpx.Response(200, text="[" * 90_000), "brave API: the answer is not a JSON object"),
        (httpx.Response(302, headers={"location": "https://evil.test/"}), "more than 0 redirects"),
    ],
)
async def test_what_the_engine_refuses_is_an_error(response: httpx.Response, message: str) -> None:
    result = await search(Web({}, lambda _: response), query="x")
    assert result.message.startswith(message) and len(result.message) < 500
    assert KEY not in repr(result)


@each_row(
    "answer",
    [{}, {"web": None}, {"web": {"results": {}}}, {"web": {"results": [1, {"url": 5}, {"url": "file:///x"}, None]}}],
)
async def test_an_answer_of_another_form_has_no_hits(answer: Any) -> None:
    result = await search(Web({}, lambda _: httpx.Response(200, json=answer)), query="x")
    assert result.value == []


@pytest.mark.conforms("S-b5")
async def test_pages_of_the_own_network_are_not_fetched() -> None:
    web = Web({"http://169.254.169.254/": "secret", "http://localhost/": "secret"})
    result = await search(web, query="About page")
    assert [each.url.host for each in web.requests] == ["api.search.brave.com"]
    assert {each["text"] for each in result.value} == {"About page 0", "About page 1"}


async def test_searxng_is_asked_at_its_own_address_also_a_private_one() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(
            200,
            text=json.dumps(
                {"results": [{"title": "T", "url": "https://t.test/", "content": "<b>found</b>"}, {"title": "no url"}]}
            ),
        )

    headers = {"Authorization": "Basic dXNlcjpwYXNzd29yZA=="}
    engine = SearxngSearch("http://10.0.0.7:8888/searx/", headers=headers, transport=httpx.MockTransport(answer))
    assert await engine.search("a b", 5) == [SearchHit("T", "https://t.test/", "found")]
    assert str(asked[0].url) == "http://10.0.0.7:8888/searx/search?q=a+b&format=json"
    assert asked[0].headers["authorization"].startswith("Basic")
    for wrong in ("ftp://x", "searx"):
        with pytest.raises(UsageError):
            SearxngSearch(wrong)


class Own:
    """An engine of somebody's own."""

    async def search(self, query: str, count: int) -> list[SearchHit]:
        if query == "fail":
            raise ToolError("the index is being rebuilt", retryable=True)
        return [SearchHit("Doc", "https://docs.test/", f"Everything about {query}")]


@pytest.mark.conforms("S1", "EX-12")
async def test_any_engine_will_do_and_a_key_is_brave() -> None:
    tool = WebSearch(HashEmbeddings(), Own(), policy=QUICK, transport=Web({}))
    found = await call(tool, "web_search", query="zebras")
    assert found.value[0]["text"] == "Everything about zebras"
    assert (await call(tool, "web_search", query="fail")).message == "the index is being rebuilt"
    with pytest.raises(UsageError, match="key of a subscription"):
        WebSearch(HashEmbeddings(), " ")
    with pytest.raises(UsageError, match="key of a subscription"):
        BraveSearch("")


@given(st.text(st.sampled_from("ab .\n!?"), max_size=3000))
def test_passages_are_bounded_and_lose_no_words_in_between(text: str) -> None:
    found = passages(text)
    assert all(MIN_PASSAGE_CHARS <= len(each) <= PASSAGE_CHARS for each in found)
    assert "".join("".join(found).split()) in "".join(text.split()) or len(found) > 1
