"""Answers that a script makes as large as it can: they are bounded, say what was cut, and keep nobody waiting."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from service.client_serving import serving
from toolcell import ToolRegistry
from toolcell.config import MIB
from toolcell.service import answering
from toolcell.support.exact_json import exact_json_pieces, exact_json_text, is_small, json_start

CONTROL = r"for i in range(6): call_tool('note', text='\x01' * 900000)"
"""32 MB of JSON."""


def registry() -> ToolRegistry:
    made = ToolRegistry()

    @made.tool
    def note(text: str) -> int:
        """Note a text, for the tests of large answers."""
        return len(text)

    return made


@asynccontextmanager
async def client_of(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of a service whose answers have at most a megabyte."""
    async with (
        serving(folder / "state", registry(), answer_bytes=MIB) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["$bytes", "$dict", "$float"]), inner),
)


@pytest.mark.slow
@given(PLAIN, st.integers(1, 40_000))
def test_a_document_in_pieces_is_the_document(data: Any, times: int) -> None:
    for whole in (data, [data] * (times % 700), {"a": [str(data) * (times % 300)], "b": b"x" * times}):
        assert "".join(exact_json_pieces(whole)) == exact_json_text(whole)


def test_only_the_beginning_of_a_document_is_written() -> None:
    assert json_start(["\x01" * 10_000_000], 10) == '["\\u0001\\u (cut: it has more than 10 characters)'
    assert not is_small([[0] * 20_000])
    assert not is_small({"a": "x" * 20_000})


@pytest.mark.isolation
@pytest.mark.anyio
@each_row(("accept", "more"), [("application/json", {"dry_run": True}), ("text/event-stream", {})])
async def test_an_answer_is_bounded_and_others_are_answered_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], accept: str
) -> None:
    write, is_writing, answered = answering.exact_json_bytes, threading.Event(), threading.Event()

    def slow(data: object, most: int) -> bytes:
        is_writing.set()
        assert answered.wait(60), "nobody was answered while a large answer was written"
        return write(data, most)

    monkeypatch.setattr(answering, "exact_json_bytes", slow)
    async with client_of(tmp_path) as client:
        sent = client.build_request("POST", "/v1/execute", json={"code": CONTROL, **more}, headers={"accept": accept})
        answer = await client.send(sent, stream=True) if "event" in accept else None
        asking = asyncio.create_task(answer.aread() if answer is not None else client.send(sent))
        while not is_writing.is_set():
            await asyncio.sleep(0.01)
        assert (await client.get("/readyz")).status_code == 200
        answered.set()
        done = await asking
    body = done if isinstance(done, bytes) else done.content
    for part in body.split(b"\n\n") if answer is not None else [body]:
        assert len(part) <= MIB + 100
    last = body if answer is None else body.split(b"event: end\ndata: ")[1]
    result = json.loads(last)
    assert result["outcome"] == "ok"
    assert len(result["calls"]) == 6
    assert "(cut: " in result["calls"][0]["args"]["text"]
    assert len(result["effects"]) == (6 if more else 0)


@pytest.mark.isolation
@pytest.mark.anyio
async def test_files_that_do_not_fit_can_be_fetched(tmp_path: Path) -> None:
    code = "open('a.bin', 'wb').write(bytes(range(256)) * 8192); set_result(1, files=['a.bin', 'missing'])"
    async with client_of(tmp_path) as client:
        await client.post("/v1/sessions", json={"name": "s"})
        result = (await client.post("/v1/sessions/s/execute", json={"code": code})).json()
        file, missing = result["files"]
        assert missing["problem"] == "missing"
        assert (file["data"], file["size"]) == (None, 2 * MIB)
        assert "fetch it from /v1/sessions/{name}/files/{path}" in file["problem"]
        fetched = await client.get("/v1/sessions/s/files/a.bin")
        assert fetched.content == bytes(range(256)) * 8192
        assert fetched.headers["Content-Disposition"] == "attachment; filename*=UTF-8''a.bin"
        assert fetched.headers["X-Content-Type-Options"] == "nosniff"
        assert fetched.headers["Content-Security-Policy"] == "default-src 'none'; sandbox"
