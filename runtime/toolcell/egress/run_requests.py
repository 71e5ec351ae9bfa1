"""`RunRequests`: what the requests of one run have used, and the answers and wheels that are being read."""

from __future__ import annotations

import os
import tempfile
from typing import IO, Final

from toolcell.config import Limits
from toolcell.egress.answers import AnswerBody
from toolcell.egress.failures import LIMIT
from toolcell.egress.streams import httpcore
from toolcell.errors import ToolError

MAX_RESTS: Final = 64
"""Answers of one run that are being read at once."""


class RunRequests:
    """The requests of one run: how many, how many bytes, and the answers that are being read."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._requests = self._bytes = self._count = 0
        self._id = os.urandom(4).hex()
        self.rests: dict[str, AnswerBody] = {}
        self.wheels: dict[str, range] = {}
        """Where each is in the file. One file for all of them: a script may have many found, and read none."""
        self._wheel_file: IO[bytes] | None = None
        self.pool: httpcore.AsyncConnectionPool | None = None
        """Its own: what a server sends too much, or knows of a connection, is not for another run."""

    def count_request(self) -> None:
        """Count a request that is about to be sent.

        Raises:
            ToolError: it is one too many.
        """
        most = self._limits.egress_requests
        if self._requests >= most:
            raise ToolError(f"this run may send {most} requests (egress_requests), and has sent them", code=LIMIT)
        self._requests += 1

    def count_bytes(self, count: int) -> None:
        """Count bytes of a body.

        Raises:
            ToolError: they are too many.
        """
        self._bytes += count
        if self._bytes > (most := self._limits.egress_bytes):
            text = f"the requests of this run may send and receive {most} bytes together (egress_bytes)"
            raise ToolError(text, code=LIMIT)

    @property
    def bytes_left(self) -> int:
        """What may still be sent and received."""
        return max(0, self._limits.egress_bytes - self._bytes)

    async def keep(self, body: AnswerBody) -> str:
        """Keep the rest of an answer; return its name, which no other run gives: a repair gets answers of two runs."""
        if len(self.rests) >= MAX_RESTS:
            oldest = next(iter(self.rests))
            await self.rests.pop(oldest).aclose()
        self._count += 1
        name = f"answer-{self._id}-{self._count}"
        self.rests[name] = body
        return name

    def keep_wheel(self, content: bytes, digest: str) -> str:
        """Keep a wheel until it is read; return its name, by which other runs have the same content.

        Raises:
            ToolError: there is no room for it.
        """
        name = digest
        while name in self.wheels:  # another thread of the script reads it
            name += "+"
        try:
            file = self._wheel_file = self._wheel_file or tempfile.TemporaryFile()  # noqa: SIM115 (closed when all are read)
            start = file.seek(0, os.SEEK_END)
            file.write(content)
            file.flush()
        except OSError as exc:
            raise ToolError(f"the host cannot keep a wheel: {exc.strerror}", code=LIMIT, retryable=True) from None
        self.wheels[name] = range(start, start + len(content))
        return name

    def part_of_wheel(self, name: str, start: int, size: int) -> bytes:
        """Return a part of a wheel. It is dropped with its last."""
        assert self._wheel_file is not None
        part = self.wheels[name][start : start + size]
        self._wheel_file.seek(part.start)
        content = self._wheel_file.read(len(part))
        if part.stop >= self.wheels[name].stop:
            del self.wheels[name]
            if not self.wheels:
                self._drop_wheels()
        return content

    def _drop_wheels(self) -> None:
        if self._wheel_file is not None:
            self._wheel_file.close()
        self._wheel_file, self.wheels = None, {}

    async def aclose(self) -> None:
        rests, self.rests = self.rests, {}
        for body in rests.values():
            await body.aclose()
        self._drop_wheels()
        pool, self.pool = self.pool, None
        if pool is not None:
            await pool.aclose()
