"""What a run leaves in the memory of the host: nothing of a plain run, and a bounded number of bytes for later ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from toolcell import Runtime, ToolRegistry
from toolcell.calls import reverts
from toolcell.calls.call import Call
from toolcell.control import draft as drafts
from toolcell.errors import UsageError
from toolcell.run.conversation import Conversation
from toolcell.support.host_work import about_bytes
from toolcell.tools import ToolContext

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

NOTES = "for i in range(20): call_tool('note', text='x' * 100_000)"
"""Two megabytes."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the garbage collector: a host that reads much of guests sees it seldom."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def registry(left: list[weakref.ref[Any]]) -> ToolRegistry:
    made = ToolRegistry()

    @made.tool(revert=lambda args, result: None)
    def note(text: str, ctx: ToolContext) -> int:
        """Note a text, for the tests of memory."""
        ctx.update("noted")
        left.append(weakref.ref(ctx.call))
        return len(text)

    @made.tool
    def say(text: str, ctx: ToolContext) -> int:
        """Say a text, for the tests of memory."""
        ctx.update("said")
        left.append(weakref.ref(ctx.call))
        return len(text)

    return made


@pytest.mark.usefixtures("no_collector")
async def test_nothing_of_a_plain_run_waits_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    left, begin = list[weakref.ref[Any]](), Conversation.__init__

    def noted(self: Conversation, *args: Any, **options: Any) -> None:
        left.append(weakref.ref(self))
        begin(self, *args, **options)

    monkeypatch.setattr(Conversation, "__init__", noted)
    async with Runtime(registry(left)) as runtime:
        for cancel in (None, anyio.Event()):
            result = await runtime.execute_code("call_tool('say', text='x' * 100_000)", cancel=cancel)
            assert result.ok
        del result
        await anyio.lowlevel.checkpoint()
        kept = [each() for each in left if each() is not None]
        assert {type(each) for each in kept} <= {Call}  # those that can be mended are kept, and bounded
        assert not [each for each in kept if isinstance(each, Conversation)]
    assert len(left) == 4


@pytest.mark.parametrize("dry_run", [False, True], ids=["reverts", "dry runs"])
async def test_what_is_kept_is_bounded_in_bytes(dry_run: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts if dry_run else reverts, "KEPT_BYTES", 5_000_000)
    async with Runtime(registry([])) as runtime:
        done = [await runtime.execute_code(NOTES, dry_run=dry_run) for _ in range(4)]

        async def use(result: Any) -> Any:
            return await (runtime.commit(result, approve=result.draft_digest) if dry_run else runtime.revert(result))

        with pytest.raises(UsageError, match="at most 5000000 bytes together"):
            await use(done[0])
        assert (await use(done[-1])).ok


async def test_drafts_that_made_room_can_be_committed_from_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drafts, "KEPT_BYTES", 5_000_000)
    async with Runtime(registry([]), record=tmp_path / "journals") as runtime:
        done = [await runtime.execute_code(NOTES, dry_run=True) for _ in range(4)]
        assert (await runtime.commit(done[0].draft_id, approve=done[0].draft_digest)).ok


def test_what_stands_twice_in_data_counts_once() -> None:
    text = "x" * 1000
    assert 1000 <= about_bytes([text, text, {"a": text}]) < 2000
    assert about_bytes([text, "y" * 1000]) >= 2000
    assert about_bytes([[]] * 10) >= 640
