"""Every kind of illegal bytes that a guest can send while its script runs, as data.

`tests/hostile/test_illegal_frames.py` walks the table without a sandbox. `tests/escape/test_escape_bridge.py` sends one
of each family out of a real sandbox.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import msgpack

CALL, CANCEL, LOG, PROGRESS, RESULT, PART, PROBLEM, DONE = 17, 18, 19, 20, 21, 22, 23, 24


def raw(body: bytes) -> bytes:
    """A frame: the length, then the body."""
    return struct.pack(">I", len(body)) + body


def message(*fields: Any) -> bytes:
    """A frame of a message with these fields, legal or not."""
    return raw(msgpack.packb(list(fields)))


HONEST = message(PROGRESS, "honest")
"""Sent before the illegal bytes, so that they and not their place in the conversation are refused."""

FORGED = message(CALL, 9, "touch", {"tag": "forged"}, None) + message(RESULT, "forged", []) + message(DONE, True, None)
"""Sent after the illegal bytes. Nothing of it may have an effect."""

LENGTHS = {
    "text": b"HTTP/1.1 200 OK\r\n\r\n" * 100,
    "noise": random.Random(1).randbytes(100_000),
    "length 0": raw(b""),
    "length of all ones": b"\xff" * 8,
    "length just over the limit": struct.pack(">I", (8 << 20) + 1),
    "length of 2 GiB": struct.pack(">I", 1 << 31) + b"x" * 1000,
}
SHAPES = {
    "no array": raw(msgpack.packb({"value": 1})),
    "empty array": raw(b"\x90"),
    "unknown tag": message(99, None),
    "tag of the host": message(3, 1, "answer"),
    "tag that is not an int": message("21", None, []),
    "tag that is a bool": message(True, None),
    "too few fields": message(RESULT, None),
    "too many fields": message(RESULT, None, [], None),
    "two messages in a frame": raw(msgpack.packb([RESULT, 1, []]) * 2),
    "half a message in a frame": raw(msgpack.packb([RESULT, "x" * 100, []])[:50]),
}
FIELDS = {
    "files that are not a list": message(RESULT, None, "file"),
    "files that are not names": message(RESULT, None, [1]),
    "call of a number": message(CALL, 1, 5, {}, None),
    "call with a list of arguments": message(CALL, 1, "touch", ["forged"], None),
    "call with number keys": raw(msgpack.packb([CALL, 1, "touch", {1: "forged"}, None])),
    "call with bytes keys": raw(msgpack.packb([CALL, 1, "touch", {b"tag": "forged"}, None])),
    "call id 0": message(CALL, 0, "touch", {"tag": "forged"}, None),
    "call id below 0": message(CALL, -1, "touch", {"tag": "forged"}, None),
    "call id that is a float": message(CALL, 1.0, "touch", {"tag": "forged"}, None),
    "call id beyond 64 bit": raw(b"\x95\x11\xcf" + b"\xff" * 8 + msgpack.packb("touch") + b"\x80\xc0\xc0"),
    "log to a third stream": message(LOG, 3, "x"),
    "log to stream 0": message(LOG, 0, "x"),
    "log that is bytes": message(LOG, 1, b"x"),
    "log that is not UTF-8": raw(b"\x93\x13\x01\xa2\xff\xfe"),
    "log with a surrogate": raw(b"\x93\x13\x01\xa3\xed\xa0\x80"),
    "done with a number": message(DONE, 1, None),
    "done with a list": message(DONE, False, ["x"]),
}
VALUES = {
    "extension type": raw(msgpack.packb([RESULT, msgpack.ExtType(5, b"x"), []])),
    "timestamp": raw(msgpack.packb([RESULT, msgpack.Timestamp(1, 1), []])),
    "long extension type": raw(msgpack.packb([RESULT, ["x" * 1000, msgpack.ExtType(5, b"x" * 1000)], []])),
    "reserved byte": raw(b"\x93\x15\xc1\x90"),
    "depth 65": raw(b"\x93\x15" + b"\x91" * 65 + b"\xc0" + b"\x90"),
    "depth 100000": raw(b"\x93\x15" + b"\x91" * 100_000 + b"\xc0" + b"\x90"),
    "depth of maps": raw(b"\x93\x15" + b"\x81\xa1k" * 3000 + b"\xc0" + b"\x90"),
    "list that announces 4 billion": raw(b"\x93\x15\xdd\xff\xff\xff\xff" + b"\xc0" * 600),
    "map that announces 4 billion": raw(b"\x93\x15\xdf\xff\xff\xff\xff" + b"\xc0" * 600),
    "short list that announces millions": raw(b"\x93\x15\xdd\x00\x7f\xff\xff"),
    "text that announces 4 billion": raw(b"\x93\x15\xdb\xff\xff\xff\xff" + b"x" * 600),
    "two million elements": raw(msgpack.packb([RESULT, [None] * (2 << 20), []])),
    "a million empty lists, twice": raw(msgpack.packb([RESULT, [[]] * (1 << 20), []])),
    "progress with a million maps": raw(msgpack.packb([PROGRESS, [{}] * (1 << 20)])),
}
MOVES = {
    "second hello": message(16, 1, "9", "3", {"moat": "live"}),
    "call id twice": message(CALL, 7, "echo", {"text": "x"}, None) * 2,
    "call id that goes back": message(CALL, 7, "echo", {"text": "x"}, None)
    + message(CALL, 6, "touch", {"tag": "forged"}, None),
    "cancel of a call that never was": message(CANCEL, 5),
    "piece of one file in another": message(PART, "a", "", b"1", False) + message(PART, "b", "", b"2", True),
    "problem of one file in another": message(PART, "a", "", b"1", False) + message(PROBLEM, "b", 1, "x"),
}

ILLEGAL: dict[str, bytes] = {**LENGTHS, **SHAPES, **FIELDS, **VALUES, **MOVES}
"""Kind of illegal bytes, and the bytes."""

ONE_OF_EACH = (
    "noise",
    "length of 2 GiB",
    "tag of the host",
    "call with number keys",
    "progress with a million maps",
    "second hello",
)
"""What is sent out of a real sandbox too: the bytes are the same from there, and so is the code that refuses them."""
