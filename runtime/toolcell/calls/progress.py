"""What a tool tells while it runs, from any thread, and only until it is done: states and output.

A state is text and details for people watching; the next one may replace it. Output is text in pieces, of which none is
lost: who writes faster than is read waits. Neither can end a run nor mark an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import suppress
from typing import Any

import anyio.from_thread
import anyio.lowlevel

from toolcell.calls.events import TOOL_OUTPUT, TOOL_UPDATE
from toolcell.calls.result import ToolResult
from toolcell.support.checks import check_kind
from toolcell.support.token_bucket import TokenBucket
from toolcell_bridge.wire.frozen import frozen

UPDATES_PER_S = 20.0
BURST = 20
"""Updates let through at once before the rate applies; later ones replace each other until there is room."""
MAX_UPDATE_CHARS = 200_000
MAX_PIECE_CHARS = 8_000


@frozen
class Update:
    """One partial result."""

    text: str | None = None
    details: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without what is None."""
        return {key: value for key, value in {"text": self.text, "details": self.details}.items() if value is not None}


class ProgressReporter:
    """The updates of one call. Call it: `progress("half way")`, `progress(details={"rows": 3})`."""

    __slots__ = ("_bucket", "_closed", "_emit", "_thread", "_token", "_wait_for_room", "_waiting", "ignored")

    def __init__(
        self, emit: Callable[[str, dict[str, Any]], None], wait_for_room: Callable[[], Awaitable[None]]
    ) -> None:
        self._emit, self._wait_for_room = emit, wait_for_room
        self._closed = False
        self._bucket = TokenBucket(1 / UPDATES_PER_S, BURST)
        self._thread = threading.get_ident()
        self._token = anyio.lowlevel.current_token()
        self._waiting: Update | None = None
        self.ignored = 0
        """Updates that came after the tool was done."""

    def __call__(self, partial: object = None, *, details: Any = None) -> None:
        update = _as_update(partial, details)
        if self._closed or threading.get_ident() == self._thread:
            self._accept(update)
            return
        try:
            anyio.from_thread.run_sync(self._accept, update, token=self._token)
        except RuntimeError:  # the event loop is gone, and with it whoever was watching
            self.ignored += 1

    def write(self, text: str) -> Awaitable[None]:
        """Write a piece of the tool's output: `await on_update.write("a line")`. In a thread it waits by itself."""
        check_kind("what a tool writes", text, str)
        if self._closed or threading.get_ident() == self._thread:
            return self._write(text)
        with suppress(RuntimeError):  # the event loop is gone, and with it whoever was watching
            anyio.from_thread.run(self._write_and_wait, text, token=self._token)
        return _Room(None)

    def _write(self, text: str) -> Awaitable[None]:
        if self._closed:
            self.ignored += 1
            return _Room(None)
        for start in range(0, len(text), MAX_PIECE_CHARS):
            self._emit(TOOL_OUTPUT, {"text": text[start : start + MAX_PIECE_CHARS]})
        return _Room(self._wait_for_room)

    async def _write_and_wait(self, text: str) -> None:
        await self._write(text)

    def _accept(self, update: Update) -> None:
        if self._closed:
            self.ignored += 1
        elif self._has_room():
            self._waiting = None
            self._emit(TOOL_UPDATE, update.to_dict())
        else:
            self._waiting = update

    def _has_room(self) -> bool:
        now = time.monotonic()
        if self._bucket.wait_s(now):
            return False
        self._bucket.take(now)
        return True

    def close(self) -> None:
        """Let the last update that waited for room through, and no other after it."""
        if self._waiting is not None:
            self._emit(TOOL_UPDATE, self._waiting.to_dict())
            self._waiting = None
        self._closed = True
        self._emit, self._wait_for_room = _nobody, anyio.lowlevel.checkpoint
        # it leads to the call, and from there to here: only the garbage collector would find that


def _nobody(kind: str, update: dict[str, Any]) -> None:
    """Tell nobody."""


class _Room:
    """Awaits that the listeners have room for more; nothing is lost when nobody does."""

    def __init__(self, wait: Callable[[], Awaitable[None]] | None) -> None:
        self._wait = wait

    def __await__(self) -> Generator[Any, Any, None]:
        if self._wait is not None:
            yield from self._wait().__await__()


def _as_update(partial: object, details: Any) -> Update:
    text: str | None
    match partial:
        case ToolResult():
            text, details = partial.output or None, partial.details if details is None else details
        case None:
            text = None
        case str():
            text = partial
        case Mapping():
            text, details = None, partial if details is None else details
        case _:
            text = str(partial)
    if isinstance(details, str):
        details = details[:MAX_UPDATE_CHARS]
    elif details is not None and not _is_short(details):
        details = f"({type(details).__name__} too large to show)"
    return Update(None if text is None else text[:MAX_UPDATE_CHARS], details)


def _is_short(value: Any) -> bool:
    """True when the text of a value is within bounds. Looks at no more of the value than that."""
    left, unseen = MAX_UPDATE_CHARS, [value]
    while unseen:
        each = unseen.pop()
        is_many = isinstance(each, Mapping | list | tuple | set | frozenset)
        left -= len(each) if is_many or isinstance(each, str | bytes | bytearray) else 1
        if left < 0:
            return False
        if is_many:
            unseen += each
            unseen += each.values() if isinstance(each, Mapping) else ()
    return len(repr(value)) <= MAX_UPDATE_CHARS
