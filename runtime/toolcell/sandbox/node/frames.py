"""What a caller and a node say to each other on the connection of one sandbox: frames, and the proof of the shared key.

One connection carries the bridge and everything about its sandbox, so reports and bytes arrive in the order in which
they were sent. A caller that closes its half kills the sandbox.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator
from typing import Final

HEAD: Final = struct.Struct(">cI")
"""Kind of a frame, and the length of its body."""

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32

SETTINGS, START, ACCEPT, PREPARE, SAMPLE, SIGNAL = b"O", b"S", b"A", b"P", b"Q", b"N"
"""From the caller: how its sandboxes are made, where the node was not told before; limits; layers of the Hello; limits
of the run; a question; the name of a signal."""

STARTED, FAILED, PREPARED, USAGE, END, ACKNOWLEDGED = b"s", b"f", b"p", b"u", b"e", b"a"
"""From the node: what was started, and its layers of which the guest does not tell; why nothing was; an answer; a
measurement with raw output; how it ended, and that nothing is left of it; bytes that the guest has taken."""

BRIDGE: Final = b"B"
"""Both ways: bytes of the bridge."""

WINDOW_BYTES: Final = 1 << 20
"""Bridge bytes that a caller may send before the guest has taken some: a node keeps no more of them."""

ACKNOWLEDGE_BYTES: Final = 1 << 18

FRAME_BYTES: Final = 1 << 24
"""Longest frame. What is longer is not a frame of ours."""


def frame(kind: bytes, body: bytes | memoryview = b"") -> bytes:
    """Return a frame."""
    return HEAD.pack(kind, len(body)) + body


def proof(key: bytes, who: bytes, of_node: bytes, of_caller: bytes) -> bytes:
    """Return what proves that `who` has the key, in this connection only."""
    return hmac.new(key, who + of_node + of_caller, hashlib.sha256).digest()


class FrameBuffer:
    """Cuts received bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def frames(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield each whole frame: kind and body.

        Raises:
            ValueError: a frame is longer than any of ours.
        """
        received = self._data
        received += data
        at = 0
        while len(received) - at >= HEAD.size:
            kind, length = HEAD.unpack_from(received, at)
            if length > FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = at + HEAD.size + length
            if len(received) < end:
                break
            body = bytes(memoryview(received)[at + HEAD.size : end])
            at = end
            yield kind, body
        del received[:at]
