"""Bodies that a script uploads in parts, for the requests that its libraries send. Dropped with the run."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import IO, Any, Final

import anyio

from toolcell.errors import ToolError
from toolcell_bridge.wire.messages import PART_BYTES

INLINE_BYTES: Final = 4 * 1024 * 1024
"""A shorter body is among the arguments of its request, where it is shown, approved and recorded whole, from the moment
on at which it is made. Of a longer one the arguments have digest and size."""

MAX_UPLOADS: Final = 64
"""Most uploads of one run, at once."""

LIMIT: Final = "EgressLimit"


class Upload:
    """One body. The first part is in memory, more of them are in a file without a name."""

    def __init__(self) -> None:
        import tempfile  # with all that it imports, three milliseconds

        self.file: IO[bytes] = tempfile.SpooledTemporaryFile(PART_BYTES)  # noqa: SIM115 (closed by `Uploads`)
        self.size = 0
        self.calls = 0
        """That are to send it."""
        self._digest = hashlib.sha256()

    def add(self, data: bytes) -> None:
        """Append a part."""
        self.file.write(data)
        self._digest.update(data)
        self.size += len(data)

    @property
    def name(self) -> str:
        """What stands for it in the arguments of its request."""
        return f"sha256:{self._digest.hexdigest()}, {self.size} bytes"

    def read(self) -> bytes:
        """Return all of it."""
        self.file.seek(0)
        return self.file.read()


class Uploads:
    """The uploads of one run."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of all of them together."""
        self._most, self._used, self._count = most, 0, 0
        self._open: dict[str, Upload] = {}
        self._named: dict[str, Upload] = {}
        """Those that a request has taken, by what stands for them in its arguments."""

    def add(self, upload: object, data: object) -> str:
        """Append a part to an upload, or begin one; return its name.

        Raises:
            ToolError: there is none of that name, the part is too large, the run's bytes are used up, or there is no
                room for it.
        """
        if not isinstance(data, bytes) or len(data) > PART_BYTES:
            raise ToolError(f"a part of an upload is bytes, at most {PART_BYTES}", code="invalid_arguments")
        if self._used + len(data) > self._most:
            text = f"the requests of a run may send and receive {self._most} bytes together (egress_bytes)"
            raise ToolError(text, code=LIMIT)
        if upload is None:
            if len(self._open) + len(self._named) >= MAX_UPLOADS:
                raise ToolError(f"a run may have {MAX_UPLOADS} uploads at once; send those that it has", code=LIMIT)
            self._count += 1
            upload = f"upload-{self._count}"
            self._open[upload] = Upload()
        if not isinstance(upload, str) or upload not in self._open:
            raise ToolError(f"there is no upload {upload!r:.40} to add to", code="invalid_arguments")
        self._used += len(data)
        try:
            self._open[upload].add(data)
        except OSError as exc:
            raise ToolError(f"the host cannot keep an upload: {exc.strerror}", code=LIMIT, retryable=True) from None
        return upload

    def taken(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a request with what stands for its body."""
        name = args.get("upload")
        upload = self._open.pop(name, None) if isinstance(name, str) else None
        if upload is None:
            if (upload := self.get(name)) is not None:
                upload.calls += 1
            return dict(args)
        if (found := self._named.setdefault(upload.name, upload)) is not upload:  # the same body again
            upload.file.close()
        found.calls += 1
        return {**args, "upload": found.name}

    def whole(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a request with its body, unless it is a long one."""
        upload = self.get(args.get("upload"))
        if upload is None or upload.size > INLINE_BYTES:
            return args
        return {**args, "body": upload.read(), "upload": None}

    def get(self, name: object) -> Upload | None:
        """Return a body that has all its parts by what stands for it."""
        return self._named.get(name) if isinstance(name, str) else None

    def drop(self, args: Mapping[str, Any]) -> None:
        """Drop the long upload of a request that has its answer, unless another one is to send it."""
        upload = self.get(args.get("upload"))
        if upload is None:
            return
        upload.calls -= 1
        if not upload.calls:
            del self._named[upload.name]
            upload.file.close()

    def close(self) -> None:
        """Drop them."""
        for each in (*self._open.values(), *self._named.values()):
            each.file.close()
        self._open, self._named = {}, {}


class OpenRequests:
    """What the libraries of one script, and of the saved scripts in it, keep open from one call to the next."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of uploads together."""
        self.uploads = Uploads(most)
        self.at_end: list[Callable[[], Awaitable[None]]] = []
        """Called when the script has ended."""
        self._is_entered = False

    @asynccontextmanager
    async def until_end(self) -> AsyncIterator[None]:
        """Close all of it after the block; inside another such block, that one does."""
        is_outer, self._is_entered = not self._is_entered, True
        try:
            yield
        finally:
            if is_outer:
                self.uploads.close()
                with anyio.CancelScope(shield=True):
                    for close in self.at_end:
                        await close()
