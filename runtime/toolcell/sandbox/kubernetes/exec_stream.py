"""Bytes to and from a program that is executed in a pod, over one WebSocket through the API server.

The first byte of a message is its channel: 0 to the program's standard input, 1 its standard output, 2 its standard
error, 3 how it ended (Kubernetes, the subprotocol v4.channel.k8s.io).
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.kubernetes.pod_server import PodAddress

STDIN, STDOUT, STDERR, STATUS = 0, 1, 2, 3

PIECE_BYTES: Final = 1 << 15
"""What a message carries at most: some servers take no more than 32 KiB of it at once."""

HEAD_BYTES: Final = 4
ADDRESS_BYTES: Final = 1 << 16
LAST_WORDS_BYTES: Final = 2000


class ExecutedProgram:
    """A relay in a pod, from the WebSocket's side. It runs in the event loop of the cluster's thread."""

    def __init__(self, websocket: Any, where: str) -> None:
        self._websocket = websocket
        self._where = where
        self._messages = self._output()
        self._received = bytearray()
        self._last_words = b""

    async def _output(self) -> AsyncIterator[bytes]:
        async for message in self._websocket:
            data = message.data
            if not isinstance(data, bytes) or not data:
                continue
            if data[0] == STDOUT:
                yield data[1:]
            elif data[0] == STDERR:
                self._last_words = (self._last_words + data[1:])[-LAST_WORDS_BYTES:]
            elif data[0] == STATUS and not self._last_words:
                with suppress(ValueError, AttributeError):
                    self._last_words = str(json.loads(data[1:]).get("message") or "").encode()

    async def address(self) -> PodAddress:
        """Return what the pod says about itself, before anything else is read.

        Raises:
            SandboxUnavailable: the pod has no toolcell, or is gone.
        """
        head = int.from_bytes(await self._exactly(HEAD_BYTES), "big")
        if not 0 < head <= ADDRESS_BYTES:
            raise SandboxUnavailable(f"{self._where} has another program than toolcell's")
        try:
            return PodAddress.unpack(await self._exactly(head))
        except ValueError as exc:
            raise SandboxUnavailable(f"{self._where}: {exc}") from exc

    async def _exactly(self, count: int) -> bytes:
        while len(self._received) < count:
            piece = await anext(self._messages, b"")
            if not piece:
                why = self._last_words.decode("utf-8", "replace").strip() or "the connection ended"
                raise SandboxUnavailable(f"nothing could be executed in {self._where}: {why}")
            self._received += piece
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    async def carry(self, sock: socket.socket) -> None:
        """Pass bytes between `sock` and the program until one of them ends; closes both."""
        sock.setblocking(False)
        sending = asyncio.ensure_future(self._pass_in(sock))
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, bytes(self._received))
            async for piece in self._messages:
                await loop.sock_sendall(sock, piece)
        except OSError:
            pass  # nobody reads any more
        finally:
            sending.cancel()
            with suppress(BaseException):
                await sending
            sock.close()
            await self.aclose()

    async def _pass_in(self, sock: socket.socket) -> None:
        loop, prefix = asyncio.get_running_loop(), bytes([STDIN])
        while True:
            data = await loop.sock_recv(sock, PIECE_BYTES - HEAD_BYTES - 1)
            await self._websocket.send_bytes(prefix + len(data).to_bytes(HEAD_BYTES, "big") + data)
            if not data:
                return

    async def aclose(self) -> None:
        """Close the connection. The program ends with it."""
        with suppress(Exception):
            await self._websocket.close()
