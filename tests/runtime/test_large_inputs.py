"""Inputs with many elements are checked and packed in a thread; the event loop turns meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rows import each_row
from toolcell import Outcome, Runtime, UsageError
from toolcell.calls.values import is_large
from toolcell.run.connection import GuestConnection
from toolcell.run.run import LARGE, Script
from toolcell_bridge.wire.messages import RunScript

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

MANY = 2 * LARGE


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The thread that makes the message of a script, and the one that packs it."""
    seen: dict[str, int] = {}
    make, post = Script.message, GuestConnection.post

    def make_noted(*args: Any, **options: Any) -> RunScript:
        seen["check"] = threading.get_ident()
        return make(*args, **options)

    def post_noted(self: GuestConnection, message: Any) -> bytes:
        if isinstance(message, RunScript):
            seen["pack"] = threading.get_ident()
        return post(self, message)

    monkeypatch.setattr(Script, "message", make_noted)
    monkeypatch.setattr(GuestConnection, "post", post_noted)
    return seen


@each_row(
    "value",
    [[[]] * MANY, {str(number): number for number in range(MANY)}, {"a": [{"b": ([0] * MANY,)}]}, [[0] * 9] * LARGE],
    ids=["lists", "a dict", "deep", "many small"],
)
@each_row("route", ["execute_code", "session"])
async def test_large_inputs_keep_no_event_loop(threads: dict[str, int], value: Any, route: str) -> None:
    threads.clear()  # one for all rows
    async with Runtime() as runtime:
        if route == "session":
            async with runtime.session() as session:
                result = await session.execute_code("len(x)", inputs={"x": value})
        else:
            result = await runtime.execute_code("len(x)", inputs={"x": value})

    assert result.value == len(value)
    assert threading.get_ident() not in threads.values() and threads.keys() == {"check", "pack"}


async def test_small_inputs_need_no_thread(threads: dict[str, int]) -> None:
    async with Runtime() as runtime:
        result = await runtime.execute_code("x", inputs={"x": [{"a": [1, 2]}], "text": "y" * 30_000})

    assert result.value == [{"a": [1, 2]}]
    assert set(threads.values()) == {threading.get_ident()}


async def test_wrong_large_inputs_are_refused_as_small_ones_are() -> None:
    async with Runtime() as runtime:
        with pytest.raises(UsageError, match="inputs"):
            await runtime.execute_code("1", inputs={"x": [[0] * MANY, object()]})
        with pytest.raises(UsageError, match="inputs too large"):
            await runtime.execute_code("1", inputs={"x": [[]] * 1_100_000})
        assert (await runtime.execute_code("1")).outcome is Outcome.OK


def test_looking_for_large_inputs_ends_early() -> None:
    itself: list[Any] = []
    itself.append(itself)
    assert is_large({"x": itself}, LARGE)
    assert is_large({"x": [[itself]]}, LARGE)
    assert not is_large(None) and not is_large({}) and not is_large({"x": [[1], {"a": (2,)}]})
