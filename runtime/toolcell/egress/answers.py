"""The body of an answer, piece by piece: counted, and without secrets, also where it is compressed."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import anyio

from toolcell.egress.echoes import Echoes
from toolcell.egress.failures import PROTOCOL
from toolcell.errors import ToolError
from toolcell.support.event_loop import TimeSlice

PIECE_BYTES: Final = 64 * 1024

SLACK_BYTES: Final = 64 * 1024
"""By which a compressed body may be longer than what it becomes: data that becomes nothing has no end."""

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_CODINGS: Final = frozenset({"gzip", "x-gzip", "deflate"})


class Inflater:
    """Decompresses gzip and deflate, and never makes more than a piece at a time."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._is_new = True
        self._is_over = False
        """Something else than another member of gzip stands behind the data: it means nothing."""
        self._left = b""

    def feed(self, data: bytes) -> None:
        """Take what was received."""
        self._left += data

    def next_piece(self) -> bytes:
        """Return the next piece; b"" when more data is needed.

        Raises:
            ToolError: the data is damaged.
        """
        while self._left and not self._is_over:
            if self._is_new or self._zlib.eof:
                if len(self._left) < 2:
                    return b""
                if not self._choose():
                    continue
            try:
                made = self._zlib.decompress(self._left, PIECE_BYTES)
            except zlib.error as exc:
                raise ToolError(f"the body cannot be decompressed: {exc}", code=PROTOCOL) from None
            self._left = self._zlib.unconsumed_tail or self._zlib.unused_data
            if made:
                return made
        return b""

    def _choose(self) -> bool:
        """Begin the data, or another member of gzip; False when none follows.

        By the name deflate, servers mean two formats; the first two bytes tell.
        """
        is_gzip = self._left[:2] == b"\x1f\x8b"
        is_zlib = self._left[0] & 0x0F == 8 and int.from_bytes(self._left[:2], "big") % 31 == 0
        self._is_over = not (self._is_new or is_gzip)
        if not self._is_over:
            self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB if is_gzip or is_zlib else -zlib.MAX_WBITS)
            self._is_new = False
        return not self._is_over

    @property
    def is_whole(self) -> bool:
        """True when the data has ended where a body may end."""
        return self._zlib.eof or (self._is_new and not self._left)


def inflater_for(encoding: str) -> Inflater | None:
    """Return what decompresses a body of this Content-Encoding; None when it is not compressed.

    Raises:
        ToolError: it cannot be looked through for secrets.
    """
    names = [each.strip().lower() for each in encoding.split(",")]
    coded = [each for each in names if each not in ("", "identity", "none", "utf-8", "aws-chunked")]
    if not coded:
        return None
    if len(coded) > 1 or coded[0] not in _CODINGS:
        text = f"the answer has the content-encoding {encoding!r:.80}, and is looked through for secrets; ask for gzip"
        raise ToolError(text, code=PROTOCOL)
    return Inflater()


class AnswerBody:
    """One body that is being received."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        *,
        count: Callable[[int], None],
        echoes: Echoes,
        inflater: Inflater | None,
    ) -> None:
        """`count`: is told how many bytes a script gets; raises when they are too many. `echoes`: what is taken out."""
        self._pieces, self.aclose, self._count = pieces, close, count
        self._echoes, self._inflater = echoes, inflater
        self._buffer = bytearray()
        self._turn = TimeSlice()
        self._lock = anyio.Lock()
        """Held by the reader: a script may read in several calls at once."""
        self._excess = -SLACK_BYTES
        """Bytes that came, less those that they were decompressed to."""
        self._held = b""
        """May be the beginning of a secret."""
        self.is_at_end = False
        self.failure: Exception | None = None
        """What ended the connection, after the bytes that are there."""

    async def read(self, size: int, *, fill: bool = False) -> bytes:
        """Return the next bytes, at most `size`; b"" at the end. `fill`: as many, unless it ends or fails before.

        So it is for a compressed body: in which pieces it comes would tell how well a secret in it is compressed with
        what the script had the server write beside it.

        Raises:
            Exception: the connection failed before anything came.
            ToolError: the body is damaged, or there is too much of it.
        """
        async with self._lock:
            return await self._read(size, fill or self._inflater is not None)

    async def _read(self, size: int, fill: bool) -> bytes:
        while not self.is_at_end and len(self._buffer) < (size if fill else 1):
            if self.failure is not None:
                if fill or self._buffer:
                    break
                raise self.failure
            try:
                await self._receive()
            except ToolError:
                raise
            except Exception as exc:
                self.failure = exc
        made = bytes(self._buffer[:size])
        del self._buffer[:size]
        return made

    async def _receive(self) -> None:
        if self._inflater is not None and (made := self._inflater.next_piece()):
            self._excess -= len(made)
            self._add(made)
            return
        try:
            await self._turn.give_way()  # a server may send single bytes
            piece = await anext(self._pieces)
        except StopAsyncIteration:
            if self._inflater is not None and not self._inflater.is_whole:
                raise ToolError("the body ended in the middle of its compression", code=PROTOCOL) from None
            self._hand_over(self._echoes.clean(self._held))
            self._held, self.is_at_end = b"", True
            await self.aclose()
            return
        if self._inflater is None:
            self._add(piece)
            return
        self._inflater.feed(piece)
        self._excess += len(piece)
        if self._excess > 0:
            self._count(self._excess)
            self._excess = 0

    def _add(self, data: bytes) -> None:
        if not self._echoes:
            self._hand_over(data)
            return
        data = self._echoes.clean(self._held + data)
        held = self._echoes.held_back(data)
        self._hand_over(data[: len(data) - held])
        self._held = data[len(data) - held :]

    def _hand_over(self, data: bytes) -> None:
        """Count what the script gets. What was received would tell it how long a secret is."""
        self._count(len(data))
        self._buffer += data

    @property
    def is_empty(self) -> bool:
        return self.is_at_end and not self._buffer
