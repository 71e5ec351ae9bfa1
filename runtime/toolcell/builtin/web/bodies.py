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
_GZIP_MARK = b"\x1f\x8b"
_COMPRESSIONS = frozenset({"gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd", "dcb", "dcz"})


@dataclass(frozen=True, slots=True)
class Body:
    """What was read of a body."""

    content: bytes
    truncated: bool
    """There was more, or it ended in the middle."""


class BodyDecoder:
    """Decompresses piece by piece, never past `max_bytes`."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        """A name that no compression has is ignored: servers write `utf-8`, `none` or `aws-chunked` there.

        Raises:
            ToolError: `encoding` is a compression that was not asked for.
        """
        names = [name for each in encoding.split(",") if (name := each.strip().lower()) in _COMPRESSIONS]
        if len(names) > 1 or not set(names) <= {"gzip", "x-gzip", "deflate"}:
            raise ToolError(f"the server sent content-encoding {encoding!r:.80}, and was asked for {ACCEPT_ENCODING}")
        self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB) if names else None
        self._is_unknown = names == ["deflate"]
        """Servers mean two formats by this name; the first two bytes tell."""
        self._head = b""
        self._max_bytes = max_bytes
        self._content = bytearray()
        self._received = 0
        self._after_member = b""
        """The first byte behind a member of gzip: another one may follow, or something that means nothing."""
        self._is_over = False

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
        if self._is_unknown:
            data = self._head = self._head + data
            if len(data) < 2:
                return True
            self._choose_format(data)
        data, self._after_member = self._after_member + data, b""
        while data and not self._is_over:
            if self._zlib.eof:  # gzip files may stand one behind the other; anything else there is ignored
                if len(data) < len(_GZIP_MARK):
                    self._after_member = data
                    break
                if not data.startswith(_GZIP_MARK):
                    self._is_over = True
                    break
                self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB)
            out = self._decompress(data)
            self._content += out[: self.room]
            if len(out) > self.room or self._zlib.unconsumed_tail:
                return False
            data = self._zlib.unused_data
        # Empty gzip members decompress to nothing for ever.
        return self._received <= self._max_bytes + 1024

    def _choose_format(self, head: bytes) -> None:
        is_zlib = head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0
        if not is_zlib and head[:2] != b"\x1f\x8b":
            self._zlib = zlib.decompressobj(_RAW_DEFLATE)
        self._is_unknown = False

    def _decompress(self, data: bytes) -> bytes:
        assert self._zlib is not None
        try:
            return self._zlib.decompress(data, self.room + 1)
        except zlib.error as exc:
            raise ToolError(f"the body cannot be decompressed: {exc}") from exc

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
