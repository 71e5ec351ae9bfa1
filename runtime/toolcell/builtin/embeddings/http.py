"""`HttpEmbeddings`: any service with OpenAI's `POST /embeddings`, such as OpenAI, vLLM or Ollama.

Source: https://platform.openai.com/docs/api-reference/embeddings/create.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import anyio

from toolcell.builtin.stores.records import MAX_DIMENSIONS
from toolcell.calls.run_state import Secrets
from toolcell.errors import EmbeddingError, UsageError
from toolcell.support.checks import check_count, check_kind, check_seconds
from toolcell.support.embeddings import checked_vectors
from toolcell.support.lazy import needed
from toolcell.support.text import one_line

RETRIED: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""
MAX_WAIT_S: Final = 60.0
"""Longer than this nothing is waited for, whatever `Retry-After` says."""
FIRST_WAIT_S: Final = 0.5
"""Doubled with each attempt."""
MAX_ANSWER_BYTES: Final = 64 << 20


class HttpEmbeddings:
    """Vectors from a service. Give a `client` of your own for proxies, certificates or tests."""

    def __init__(
        self,
        model: str,
        dimensions: int,
        *,
        url: str = "https://api.openai.com/v1",
        api_key: str = "",
        client: Any = None,
        attempts: int = 4,
        timeout_s: float = 30.0,
        send_dimensions: bool = False,
    ) -> None:
        """`client` is an `httpx.AsyncClient`. `send_dimensions`: ask the service for shorter vectors than its own."""
        check_kind("HttpEmbeddings(model)", model, str)
        check_kind("HttpEmbeddings(api_key)", api_key, str)
        check_count("HttpEmbeddings(dimensions)", dimensions, 1)
        check_count("HttpEmbeddings(attempts)", attempts, 1)
        check_seconds("HttpEmbeddings(timeout_s)", timeout_s)
        if dimensions > MAX_DIMENSIONS:
            raise UsageError(f"HttpEmbeddings(dimensions) must be at most {MAX_DIMENSIONS}, not {dimensions}")
        if not url.startswith(("https://", "http://")):
            raise UsageError(f"HttpEmbeddings(url) must begin with https:// or http://, not {url!r:.80}")
        self._httpx = needed("httpx", "HttpEmbeddings")
        self._model = model
        self._dimensions = dimensions
        self._url = url.rstrip("/") + "/embeddings"
        self._secrets = Secrets({"api_key": api_key.strip()} if len(api_key.strip()) >= 4 else {})
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = client
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._extra = {"dimensions": dimensions} if send_dimensions else {}

    def __repr__(self) -> str:
        return f"HttpEmbeddings({self._model!r}, {self._dimensions})"  # without the key

    def dimensions(self) -> int:
        return self._dimensions

    def name(self) -> str:
        return self._model

    async def embed(self, texts: list[str]) -> list[list[float]]:
        """Return one vector for each text. An empty text gets a vector of zeros: services refuse it."""
        sent = [text for text in texts if text.strip()]
        if not sent:
            return [[0.0] * self._dimensions for _ in texts]
        answer = await self._answer({"model": self._model, "input": sent, "encoding_format": "float", **self._extra})
        vectors = iter(checked_vectors(self, self._ordered(answer), len(sent)))
        return [next(vectors) if text.strip() else [0.0] * self._dimensions for text in texts]

    def _ordered(self, answer: Any) -> list[Any]:
        """Return the vectors of an answer in the order of the texts."""
        rows = answer.get("data") if isinstance(answer, Mapping) else None
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise EmbeddingError(f"the embedding service of {self._model!r} gave an answer without vectors")
        places = [row.get("index", at) for at, row in enumerate(rows)]
        if sorted(places, key=str) != sorted(range(len(rows)), key=str):
            raise EmbeddingError(f"the embedding service of {self._model!r} gave vectors for texts that were not sent")
        return [row.get("embedding") for _, row in sorted(zip(places, rows, strict=True), key=lambda pair: pair[0])]

    async def _answer(self, body: Mapping[str, Any]) -> Any:
        if self._client is not None:
            return await self._attempted(self._client, body)
        async with self._httpx.AsyncClient(timeout=self._timeout_s) as client:
            return await self._attempted(client, body)

    async def _attempted(self, client: Any, body: Mapping[str, Any]) -> Any:
        """Send a request until it is answered, fails for good, or has failed too often."""
        attempt = 1
        while True:
            try:
                return await self._once(client, body)
            except _Failure as exc:
                is_last = not exc.retryable or attempt == self._attempts or exc.asked_s > MAX_WAIT_S
                error = EmbeddingError(str(exc), retryable=exc.retryable)
                wait_s = max(exc.asked_s, FIRST_WAIT_S * 2 ** (attempt - 1))
            if is_last:
                raise error  # outside of `except`: what led to it has the request's key and the whole answer
            await anyio.sleep(wait_s)
            attempt += 1

    async def _once(self, client: Any, body: Mapping[str, Any]) -> Any:
        what, data = f"the embedding service of {self._model!r}", bytearray()
        try:
            async with client.stream("POST", self._url, json=body, headers=self._headers) as response:
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > MAX_ANSWER_BYTES:
                        raise _Failure(f"{what} gave more than {MAX_ANSWER_BYTES} bytes", retryable=False)
        except self._httpx.HTTPError as exc:
            said = self._secrets.redact(str(exc))  # httpx quotes a header that has a line break
            raise _Failure(f"{what} could not be reached: {type(exc).__name__}: {said}") from exc
        if (status := response.status_code) != 200:
            said = self._secrets.redact(data[:100_000].decode("utf-8", "replace"))  # some say the key again
            again = status in RETRIED
            raise _Failure(f"{what} answered {status}: {one_line(said[:2000])}", again, _wait_s(response.headers))
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise _Failure(f"{what} gave an answer that is not JSON") from exc


class _Failure(Exception):
    """One attempt failed."""

    def __init__(self, message: str, retryable: bool = True, asked_s: float = 0.0) -> None:
        super().__init__(message)
        self.retryable, self.asked_s = retryable, asked_s


def _wait_s(headers: Mapping[str, str]) -> float:
    """Return `Retry-After` in seconds; 0 when there is none, or it is a date. Source: RFC 9110, section 10.2.3."""
    try:
        asked = float(headers.get("retry-after", "0"))
    except ValueError:
        return 0.0
    return max(0.0, asked) if math.isfinite(asked) else 0.0
