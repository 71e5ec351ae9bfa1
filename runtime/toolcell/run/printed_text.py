"""`Capture`: keeps the beginning and the end of what a script prints, in order.

Takes pieces as they arrive, and holds at most `output_bytes` for each stream however much arrives.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Literal

from toolcell.results import LogEntry, Logs

Stream = Literal["stdout", "stderr"]


PIECE_BYTES = 4096
"""Pieces shorter than this are put together with what follows."""


@dataclass(slots=True)
class _Piece:
    """Text of one stream that was printed without a break."""

    order: int
    """Counts the changes from one stream to the other."""
    stream: Stream
    text: str
    size: int


class Capture:
    """The beginning and the end of stdout and stderr."""

    def __init__(self, output_bytes: int) -> None:
        self._head_bytes = output_bytes - output_bytes // 2
        self._tail_bytes = output_bytes // 2
        self._heads: list[_Piece] = []
        self._tails: dict[Stream, deque[_Piece]] = {"stdout": deque(), "stderr": deque()}
        self._head_used: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._tail_used: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._total: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._order = 0
        self._last: Stream | None = None
        """The stream of the piece that was fed last."""

    @property
    def total_bytes(self) -> int:
        """Bytes printed to both streams, kept or not."""
        return self._total["stdout"] + self._total["stderr"]

    def feed(self, stream: Stream, text: str) -> None:
        """Take the next piece of one stream."""
        if not text:
            return
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        self._total[stream] += size
        if stream != self._last:
            self._order += 1
            self._last = stream
        room = self._head_bytes - self._head_used[stream]
        if room > 0:
            head = text if size <= room else _cut(text, room)
            taken = len(head.encode("utf-8", "replace"))
            # A character that did not fit closes the head: what follows it must not slip in before it.
            self._head_used[stream] = self._head_bytes if len(head) < len(text) else self._head_used[stream] + taken
            self._add(self._heads, stream, head, taken)
            text, size = text[len(head) :], size - taken
        if text:
            self._keep_tail(stream, text, size)

    def _keep_tail(self, stream: Stream, text: str, size: int) -> None:
        tail = self._tails[stream]
        self._add(tail, stream, text, size)
        used = self._tail_used[stream] + size
        while tail and used - tail[0].size >= self._tail_bytes:
            used -= tail.popleft().size
        self._tail_used[stream] = used

    def _add(self, pieces: list[_Piece] | deque[_Piece], stream: Stream, text: str, size: int) -> None:
        """Add text that was printed last. Short texts of one stream are put together: each alone would take more."""
        if pieces and pieces[-1].order == self._order and pieces[-1].size < PIECE_BYTES:
            last = pieces[-1]
            last.text += text
            last.size += size
        else:
            pieces.append(_Piece(self._order, stream, text, size))

    def feed_raw(self, stream: Stream, data: bytes) -> None:
        """Take bytes that a script wrote to a descriptor; what is not UTF-8 is replaced."""
        if data:
            self.feed(stream, data.decode("utf-8", "replace"))

    def logs(self) -> Logs:
        """Return what was kept, in order, with a marker where something is missing."""
        if not self._order:
            return Logs()
        entries = [(each.order, each.stream, each.text) for each in self._heads]
        truncated = False
        for stream, tail in self._tails.items():
            if not tail:
                continue
            kept, order = _last("".join(each.text for each in tail), self._tail_bytes), tail[0].order
            kept_bytes = len(kept.encode("utf-8", "replace"))
            head_bytes = sum(each.size for each in self._heads if each.stream == stream)
            missing = self._total[stream] - head_bytes - kept_bytes
            if missing > 0:
                truncated = True
                kept = f"\n... [{missing} bytes of {stream} dropped] ...\n{kept}"
            entries.append((order, stream, kept))
        entries.sort(key=lambda entry: entry[0])
        return Logs(
            entries=tuple(_merged(entries)),
            stdout_bytes=self._total["stdout"],
            stderr_bytes=self._total["stderr"],
            truncated=truncated,
        )


def _cut(text: str, size: int) -> str:
    """Return the longest beginning of `text` within `size` bytes."""
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore")


def _last(text: str, size: int) -> str:
    """Return the longest end of `text` within `size` bytes."""
    if size <= 0:
        return ""
    return text.encode("utf-8", "replace")[-size:].decode("utf-8", "ignore")


def _merged(entries: list[tuple[int, Stream, str]]) -> list[LogEntry]:
    """Put neighbours of the same stream together."""
    runs = itertools.groupby(entries, key=lambda entry: entry[1])
    return [LogEntry(stream, "".join(text for _, _, text in run)) for stream, run in runs]
