"""Long and odd texts from models: the event loop never waits for them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import httpx
import pytest

from rows import each_row
from toolcell import Runtime, ToolRegistry
from toolcell.builtin import SqliteStore, chunking, indexing
from toolcell.builtin.embeddings import hashing
from toolcell.builtin.embeddings.hashing import SHORT_CHARS, HashEmbeddings
from toolcell.builtin.embeddings.http import HttpEmbeddings
from toolcell.builtin.ingestion import Ingestion
from toolcell.builtin.remember import Remember
from toolcell.builtin.skill import parse_skill
from toolcell.builtin.stores import sqlite
from toolcell.builtin.web import fetch
from toolcell.errors import EmbeddingError, UsageError

pytestmark = pytest.mark.anyio


async def test_a_long_text_is_split_embedded_and_counted_away_from_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: dict[str, set[int]] = {"chunks_of": set(), "embedded": set(), "counted": set()}

    def chunks_of(*args: object) -> object:
        threads["chunks_of"].add(threading.get_ident())
        return chunking.chunks_of(*args)  # type: ignore[arg-type]

    def words(text: str) -> list[str]:
        threads["embedded"].add(threading.get_ident())
        return text.split()

    def add_words(*args: object) -> None:
        threads["counted"].add(threading.get_ident())

    monkeypatch.setattr(indexing, "chunks_of", chunks_of)
    monkeypatch.setattr(hashing, "words", words)
    monkeypatch.setattr(sqlite.SqliteDialect, "add_words", add_words)
    await Remember(SqliteStore(":memory:"), HashEmbeddings()).remember("word " * (SHORT_CHARS // 4))
    assert all(threads.values()), "each of them was done"
    assert not any(threading.get_ident() in each for each in threads.values())


async def test_a_document_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.pdf")
    ingestion = Ingestion(SqliteStore(":memory:"), HashEmbeddings(), Runtime(ToolRegistry()))
    with pytest.raises(UsageError, match=r"report\.pdf.* cannot be read: not a regular file"):
        await ingestion.ingest(tmp_path / "report.pdf")


def test_very_many_agents_of_one_group_are_read() -> None:
    text = "user-agent: other\n" * 20_000 + "user-agent: toolcell\n" * 20_000 + "disallow: /a\n"
    assert not fetch.parse_robots(text, "toolcell").allows("/a")
    assert fetch.parse_robots(text, "third").allows("/a")


async def test_an_embedding_service_that_says_the_key_again_tells_it_to_nobody() -> None:
    key = "sk-1234567890"
    handle = httpx.MockTransport(lambda request: httpx.Response(401, text=f"wrong: {request.headers['authorization']}"))
    async with httpx.AsyncClient(transport=handle) as client:
        provider = HttpEmbeddings("m", 3, api_key=key, client=client)
        with pytest.raises(EmbeddingError, match=r"answered 401: wrong: Bearer \[redacted\]"):
            await provider.embed(["text"])


async def test_an_api_key_with_a_line_break_is_not_in_the_error() -> None:
    def quote(request: httpx.Request) -> httpx.Response:  # as httpx does once it is connected
        raise httpx.LocalProtocolError(f"Illegal header value {request.headers['authorization'].encode()!r}")

    async with httpx.AsyncClient(transport=httpx.MockTransport(quote)) as client:
        provider = HttpEmbeddings("m", 3, api_key="sk-1234567890\n", client=client, attempts=1)
        with pytest.raises(EmbeddingError, match=r"LocalProtocolError: Illegal header value b'Bearer \[redacted\]"):
            await provider.embed(["text"])


@each_row("number", ["0x" + "f" * 5000, "1" + ":1" * 4000])
@each_row("where", ["model: {}", "allowed-tools: [{}]", "metadata: {{tags: [{}]}}"])
def test_a_number_in_front_matter_that_python_does_not_write_is_refused(where: str, number: str) -> None:
    text = f"---\nname: n\ndescription: d\n{where.format(number)}\n---\nDo it.\n"
    with pytest.raises(UsageError, match="more than 64 bits"):
        parse_skill(text.encode())
