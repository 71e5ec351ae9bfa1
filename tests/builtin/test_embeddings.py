"""Providers of vectors: the one without a model, services over HTTP, and the checks of what they give."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rows import each_row
from toolcell.builtin import (
    EmbeddingProvider,
    HashEmbeddings,
    HttpEmbeddings,
    LocalEmbeddings,
    Remember,
    SqliteStore,
)
from toolcell.builtin.embeddings import http as http_module
from toolcell.errors import EmbeddingError, UsageError
from toolcell.support.embeddings import cosine, embed_texts
from toolcell.tools import ToolRegistry

pytestmark = pytest.mark.anyio

Answer = Callable[[httpx.Request], httpx.Response]


@pytest.mark.conforms("S19", "S-b1")
async def test_the_hash_embedding_is_the_same_everywhere_and_knows_spelling() -> None:
    provider = HashEmbeddings(64)
    one, same, near, far, empty = await provider.embed(
        ["The weather forecast", "the WEATHER: forecast", "weather forecasts", "a red apple", "?!"]
    )

    assert isinstance(provider, EmbeddingProvider)
    assert (provider.dimensions(), provider.name()) == (64, "hash-64")
    assert one == same
    assert math.hypot(*one) == pytest.approx(1.0)
    assert (cosine(one, near) or 0) > 0.5 > (cosine(one, far) or 0)
    assert empty == [0.0] * 64
    assert [round(each, 6) for each in (await HashEmbeddings(8).embed(["stable"]))[0]] == STABLE


STABLE = [0.0, -0.309426, 0.0, 0.721995, 0.309426, 0.309426, 0.309426, -0.309426]


class Gives:
    """A provider that gives what it was told to."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []

    async def embed(self, texts: list[str]) -> Any:
        self.asked.append(len(texts))
        return self.answers.pop(0) if self.answers else [[1.0, 0.0]] * len(texts)

    def dimensions(self) -> int:
        return 2

    def name(self) -> str:
        return "gives"


async def test_texts_are_embedded_in_batches_of_64() -> None:
    provider = Gives()
    assert len(await embed_texts(provider, ["x"] * 130)) == 130
    assert provider.asked == [64, 64, 2]
    assert await embed_texts(provider, []) == []


@pytest.mark.conforms("S19")
@each_row(
    ("answer", "said"),
    [
        ([], "0 vectors for 1 texts"),
        ([[1.0, 0.0]] * 2, "2 vectors for 1 texts"),
        (None, "NoneType vectors"),
        ([[1.0]], "a vector of 1 numbers, not 2"),
        ([None], "a vector of NoneType numbers"),
        ([[1.0, math.nan]], "not a number"),
        ([[1.0, "x"]], "not a number"),
    ],
)
async def test_vectors_that_cannot_be_used_are_refused(answer: Any, said: str) -> None:
    with pytest.raises(EmbeddingError, match=said):
        await embed_texts(Gives(answer), ["x"])


async def test_a_tool_says_that_no_embedding_could_be_made_and_not_by_whom() -> None:
    store = SqliteStore(":memory:")
    result = await ToolRegistry([Remember(store, Gives([]))]).dispatch("remember", {"content": "x"})

    assert result.is_error
    assert "no embedding could be made" in result.text
    assert "gives" not in result.text
    assert await store.list_documents() == []


# HTTP


def vectors(*rows: Any) -> httpx.Response:
    return httpx.Response(200, json={"data": [{"index": at, "embedding": row} for at, row in enumerate(rows)]})


def service(
    *answers: httpx.Response | Exception | Answer, **settings: Any
) -> tuple[HttpEmbeddings, list[httpx.Request]]:
    left, requests = list(answers), []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else answer(request)

    client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    return HttpEmbeddings("m", 2, url="http://e/v1/", api_key="sk-secret", client=client, **settings), requests


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(http_module, "anyio", types.SimpleNamespace(sleep=sleep))
    return waited


async def test_a_service_is_asked_as_openai_and_its_order_is_mended() -> None:
    swapped = {"data": [{"index": 1, "embedding": [0, 1]}, {"index": 0, "embedding": [1, 0]}]}
    provider, requests = service(httpx.Response(200, json=swapped), send_dimensions=True)

    assert await provider.embed(["a", " ", "b"]) == [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    (request,) = requests
    assert str(request.url) == "http://e/v1/embeddings"
    assert request.headers["authorization"] == "Bearer sk-secret"
    assert json.loads(request.content) == {
        "model": "m",
        "input": ["a", "b"],
        "encoding_format": "float",
        "dimensions": 2,
    }
    assert "sk-secret" not in repr(provider)
    assert await provider.embed([""]) == [[0.0, 0.0]]


async def test_a_busy_service_is_asked_again_after_the_time_it_names(waits: list[float]) -> None:
    busy = httpx.Response(429, headers={"retry-after": "7"}, text="slow down")
    dated = httpx.Response(503, headers={"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"})
    provider, requests = service(busy, httpx.ConnectError("refused"), dated, vectors([1, 2]))

    assert await provider.embed(["a"]) == [[1.0, 2.0]]
    assert waits == [7.0, 1.0, 2.0]
    assert len(requests) == 4


@each_row(
    ("answer", "said", "requests"),
    [
        (httpx.Response(401, text="bad key"), "answered 401: bad key", 1),
        (httpx.Response(429, headers={"retry-after": "3600"}), "answered 429", 1),
        (httpx.Response(500, text="x\x1b[31m"), "answered 500: x", 4),
        (httpx.Response(200, text="<html>"), "not JSON", 4),
        (httpx.ReadTimeout("slow"), "could not be reached: ReadTimeout", 4),
        (httpx.Response(200, json=[]), "without vectors", 1),
        (httpx.Response(200, json={"data": [{"index": 5, "embedding": [1, 2]}]}), "not sent", 1),
        (httpx.Response(200, json={"data": [{"index": 0, "embedding": [1]}]}), "1 numbers, not 2", 1),
        (httpx.Response(200, json={"data": []}), "0 vectors for 1", 1),
    ],
)
async def test_a_service_that_gives_no_vectors_is_a_clear_error(
    answer: httpx.Response | Exception, said: str, requests: int, waits: list[float]
) -> None:
    def give(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    provider, sent = service(*[give] * 4)
    with pytest.raises(EmbeddingError, match=said) as caught:
        await provider.embed(["a"])
    assert len(sent) == requests
    assert "sk-secret" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None  # which keep the key and the whole answer
    assert "\x1b" not in str(caught.value)


async def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "MAX_ANSWER_BYTES", 1000)
    provider, _ = service(httpx.Response(200, content=b"x" * 1001))
    with pytest.raises(EmbeddingError, match="more than 1000 bytes"):
        await provider.embed(["a"])


@each_row("settings", [{"dimensions": 0}, {"dimensions": 8193}, {"url": "ftp://x"}, {"attempts": 0}, {"timeout_s": -1}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        HttpEmbeddings(**{"model": "m", "dimensions": 2, **settings})


# A model on this machine


async def test_a_local_model_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"config\.json, model\.safetensors, tokenizer\.json missing"):
        LocalEmbeddings(tmp_path)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "model2vec", None)
    with pytest.raises(UsageError, match=r"pip install 'toolcell\[builtin\]'"):
        LocalEmbeddings(tmp_path)
