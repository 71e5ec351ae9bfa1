"""Long and odd texts from models: the event loop never waits for them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from toolcell import Runtime, ToolRegistry
from toolcell.errors import UsageError
from toolcell.tools.builtin import chunking, indexing
from toolcell.tools.builtin.embeddings import hashing
from toolcell.tools.builtin.embeddings.hashing import SHORT_CHARS, HashEmbeddings
from toolcell.tools.builtin.ingestion import Ingestion
from toolcell.tools.builtin.remember import Remember
from toolcell.tools.builtin.stores import memory
from toolcell.tools.builtin.stores.memory import MemoryStore
from toolcell.tools.builtin.web import robots

pytestmark = pytest.mark.anyio


async def test_a_long_text_is_split_embedded_and_counted_away_from_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: dict[str, set[int]] = {"chunks_of": set(), "embedded": set(), "counted": set()}

    def chunks_of(*args: object) -> list[chunking.Chunk]:
        threads["chunks_of"].add(threading.get_ident())
        return chunking.chunks_of(*args)  # type: ignore[arg-type]

    def words_of(name: str) -> object:
        def words(text: str) -> list[str]:
            threads[name].add(threading.get_ident())
            return text.split()

        return words

    monkeypatch.setattr(indexing, "chunks_of", chunks_of)
    monkeypatch.setattr(hashing, "words", words_of("embedded"))
    monkeypatch.setattr(memory, "words", words_of("counted"))
    await Remember(MemoryStore(), HashEmbeddings()).remember("word " * (SHORT_CHARS // 4))
    assert all(threads.values()), "each of them was done"
    assert not any(threading.get_ident() in each for each in threads.values())


async def test_a_document_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.pdf")
    ingestion = Ingestion(MemoryStore(), HashEmbeddings(), Runtime(ToolRegistry()))
    with pytest.raises(UsageError, match=r"report\.pdf.* cannot be read: not a regular file"):
        await ingestion.ingest(tmp_path / "report.pdf")


def test_very_many_agents_of_one_group_are_read() -> None:
    text = "user-agent: other\n" * 20_000 + "user-agent: OasisBot\n" * 20_000 + "disallow: /a\n"
    assert not robots.parse_robots(text, "OasisBot").allows("/a")
    assert robots.parse_robots(text, "third").allows("/a")
