"""Read a body up to a bound, also a compressed one: a few kilobytes can decompress to gigabytes."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterable
from dataclasses import dataclass

from toolcell.errors import ToolError

ACCEPT_ENCODING = "gzip, deflate"
"""What `BodyDecoder` decompresses without ever making more than was asked for. Brotli's library cannot do that."""

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_RAW_DEFLATE = -zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class Body:
    """What was read of a body."""

    content: bytes
    truncated: bool
    """There was more, or it ended in the middle."""


class BodyDecoder:
    """Decompresses piece by piece, never past `max_bytes`."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        """Raises: ToolError, when `encoding` is none that was asked for."""
        names = [name.strip().lower() for name in encoding.split(",") if name.strip().lower() not in ("", "identity")]
        if len(names) > 1 or not set(names) <= {"gzip", "x-gzip", "deflate"}:
            raise ToolError(f"the server sent content-encoding {encoding!r:.80}, and was asked for {ACCEPT_ENCODING}")
        self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB) if names else None
        self._may_be_raw = names == ["deflate"]
        self._max_bytes = max_bytes
        self._content = bytearray()
        self._received = 0

    @property
    def room(self) -> int:
        """Bytes that may still come."""
        return self._max_bytes - len(self._content)

    def feed(self, data: bytes) -> bool:
        """Take the next piece; False when there is no room for more.

        Raises:
            ToolError: the data is damaged.
        """
        self._received += len(data)
        if self._zlib is None:
            fits = len(data) <= self.room
            self._content += data[: self.room]
            return fits
        while data:
            out = self._decompress(data)
            self._content += out[: self.room]
            if len(out) > self.room or self._zlib.unconsumed_tail:
                return False
            data = self._zlib.unused_data
            if self._zlib.eof and data:  # gzip files may stand one behind the other
                self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB)
        # Empty gzip members decompress to nothing for ever.
        return self._received <= self._max_bytes + 1024

    def _decompress(self, data: bytes) -> bytes:
        assert self._zlib is not None
        try:
            out = self._zlib.decompress(data, self.room + 1)
        except zlib.error as exc:
            if not self._may_be_raw:
                raise ToolError(f"the body cannot be decompressed: {exc}") from exc
            self._zlib = zlib.decompressobj(_RAW_DEFLATE)
            self._may_be_raw = False
            return self._decompress(data)
        self._may_be_raw = False
        return out

    def finish(self, is_whole: bool) -> Body:
        """Return what came."""
        is_cut = self._zlib is not None and not self._zlib.eof and self._received > 0
        return Body(bytes(self._content), truncated=is_cut or not is_whole)


async def read_body(stream: AsyncIterable[bytes], encoding: str, max_bytes: int) -> Body:
    """Read a body of at most `max_bytes` after decompression; the rest is not read.

    Raises:
        ToolError: its encoding is unknown, or it is damaged.
    """
    decoder = BodyDecoder(encoding, max_bytes)
    async for piece in stream:
        if not decoder.feed(piece):
            return decoder.finish(is_whole=False)
    return decoder.finish(is_whole=True)
