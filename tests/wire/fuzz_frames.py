"""Invariant tested: whatever frames a peer sends, an end delivers messages or raises RemoteProtocolError and is dead.

    python tests/wire/fuzz_frames.py --frames 10000000 --seed 1

Valid bodies of every message are bent at the level of fields (wrong types, extreme values, foreign tags, bombs), then
at the level of bytes (flips, splices, cuts, inserted markers, lying lengths), and fed to hosts and guests in every
state. Ends with status 1 and the bytes that did it if anything else happens.
"""

from __future__ import annotations

import argparse
import copy
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Any

import msgpack

from toolcell_bridge.wire import messages as msg
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.connection import Connection, State
from toolcell_bridge.wire.errors import RemoteProtocolError
from wire.wire_strategies import HELLO, RUN

MAX_FRAME_BYTES = 64 * 1024
CORPUS = 2048
FRAMES_PER_CORPUS = 100_000
LIVES = 32
"""Frames one connection is fed at most: most die at the first, and one that waits for a long body never would."""

VALID: list[msg.Message] = [
    msg.Hello(1, "1.0", "3.12.1", {}),
    msg.RunScript(1, "set_result(1)", {"q": [1, 2.5, None]}, "search fetch", "off", 4096, 4, 4096, 7, 0.5),
    msg.PutFile("data/a.csv", b"a,b\n1,2\n" * 8, True),
    msg.PutFile("data/a.csv", b"a,b\n", False),
    msg.Stay(100),
    msg.ToolReturn(1, [{"title": "é", "score": 0.5, "ok": True}] * 3),
    msg.ToolFail(1, "denied", "not today", False, {"why": [None]}),
    msg.Hello(1, "0.1.0", "3.11.7", {"landlock": "ABI 7", "seccomp": "on"}),
    msg.CallTool(2, "search", {"query": "x" * 40, "limit": 10, "deep": {"a": [[[1]]]}}, 3),
    msg.CallTool(3, "f", {}, None),
    msg.CancelCall(1),
    msg.Log(1, "hello\n"),
    msg.Log(2, "x" * 700),
    msg.Progress({"done": 0.5}),
    msg.Result({"rows": [[1, 2, 3]] * 100}, ["a.png"]),
    msg.Result(None, []),
    msg.FilePart("a.png", "image/png", bytes(range(256)), True),
    msg.FilePart("a.png", "image/png", b"\x89PNG", False),
    msg.FileProblem("a.png", 0, "missing"),
    msg.Leftover(["thread 'a'"], [], True),
    msg.ReadPipes(1),
    msg.Done(True, None),
    msg.Done(False, {"type": "ValueError", "message": "x", "line": 3, "findings": []}),
]

POOL: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, float("nan"), float("inf")),
    *("", "x", "é\u2028\U0001f600", "a" * 600, b"", b"\xff" * 10, [], {}, [[]], {"": {}}, ["a"], {"a": "b"}, {1: 2}),
    *({b"a": 1}, {None: 1}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2), ["a", 1], [None] * 300),
]

MARKERS = [
    *(b"\x90", b"\x91", b"\x9f", b"\xdc\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\x80", b"\x81", b"\xdf\xff\xff\xff\xff"),
    *(b"\xde\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xda\x00\x10", b"\xa1\xff", b"\xc6\xff\xff\xff\xff", b"\xc4\x04"),
    *(b"\xc1", b"\xc7\x01\x05", b"\xd6\xff", b"\xd7\xff", b"\xc0", b"\xc3", b"\xca", b"\xcb", b"\xcf", b"\xd3"),
    *(b"\x91" * 70, b"\x81\xa0" * 70, b"\x91" * 1100, b"\x93\xa0" * 40, b"\xed\xa0\x80", b"\xf4\x90\x80\x80"),
]


@dataclass
class Tally:
    """What a fuzzing run has seen."""

    frames: int = 0
    refused: int = 0
    delivered: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        delivered, reasons = (
            ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
            for counts in (self.delivered, self.reasons)
        )
        return (
            f"{self.frames} frames in {self.seconds:.1f} s, {self.frames / self.seconds:.0f}/s; "
            f"{self.refused} connections refused; "
            f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB\n"
            f"refused for: {reasons}\ndelivered: {delivered}"
        )


def bent(rng: random.Random) -> bytes:
    """Return the body of a valid message, or of one with wrong fields."""
    message = rng.choice(VALID)
    tag = next(tag for tag, kind in msg.TAGS.items() if kind is type(message))
    values: list[Any] = [tag, *astuple(message)]
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        where = rng.randrange(len(values))
        match rng.randrange(6):
            case 0 | 1 | 2:
                values[where] = rng.choice(POOL)
            case 3:
                values[0] = rng.choice([*msg.TAGS, 0, 5, 25, -1, 2**40])
            case 4:
                values.insert(where, rng.choice(POOL))
            case 5:
                del values[where]
                values = values or [None]
    body: bytes = msgpack.packb(values)
    return body


def cut(rng: random.Random, body: bytes, other: bytes) -> bytes:
    """Bend the bytes of a body in one of a few ways, or not at all. Never empty."""
    kind = int(rng.random() * 8)
    where = int(rng.random() * len(body))
    if kind <= 1:
        return body
    if kind <= 3:
        flipped = bytearray(body)
        flipped[where] ^= 1 << int(rng.random() * 8)
        return bytes(flipped)
    if kind == 4:
        return body[: where + 1]
    if kind == 5:
        return body[:where] + other[int(rng.random() * len(other)) :]
    marker = MARKERS[int(rng.random() * len(MARKERS))]
    if kind == 6:
        return body[:where] + marker + body[where:]
    return body[:where] + marker + body[where + len(marker) :]


def end_after(is_host: bool, past: list[msg.Message]) -> Connection:
    """Return an end that has sent and received the messages of `past`."""
    connection = (Connection.host if is_host else Connection.guest)(max_frame_bytes=MAX_FRAME_BYTES)
    for message in past:
        if isinstance(message, msg.RunScript) == is_host:
            connection.send(message)
        else:
            connection.receive_data(encode(message))
            assert connection.next_message() == message
    return connection


CALLED: list[msg.Message] = [HELLO, RUN, msg.CallTool(1, "f", {}, None)]
PASTS = [CALLED, CALLED, CALLED, [*CALLED, msg.CancelCall(1)], [*CALLED, msg.Done(True, None)], []]
ENDS = [end_after(is_host, past) for is_host in (True, False) for past in PASTS]
"""Ends in every state, where there can be one with a call outstanding."""


def fresh(rng: random.Random) -> Connection:
    """Return a copy of one of the ends."""
    return copy.deepcopy(rng.choice(ENDS))


def feed(connection: Connection, data: bytes, tally: Tally) -> bool:
    """Feed bytes and check the invariant; False when the connection has died of them."""
    try:
        connection.receive_data(data)
        while (message := connection.next_message()) is not None:
            tally.delivered[type(message).__name__] += 1
    except RemoteProtocolError as error:
        tally.refused += 1
        tally.reasons[type(error.__cause__ or error).__name__] += 1
        assert connection.state is State.DEAD
        return False
    assert connection.state is not State.DEAD
    return True


def assert_dead(connection: Connection) -> None:
    """Check that a dead connection says nothing but that it is dead."""
    for use in (connection.next_message, lambda: connection.receive_data(b"\0")):
        try:
            use()
        except RemoteProtocolError:
            continue
        raise AssertionError("a dead connection was used")


def fuzz(frames: int, seed: int) -> Tally:
    """Feed this many frames.

    Raises:
        AssertionError: the invariant does not hold; the message has the bytes.
    """
    rng = random.Random(seed)
    tally = Tally()
    started = time.perf_counter()
    corpus: list[bytes] = []
    connection, lives, fed = fresh(rng), LIVES, b""
    for number in range(frames):
        if number % FRAMES_PER_CORPUS == 0:
            corpus = [bent(rng) for _ in range(CORPUS)]
        body = cut(rng, corpus[int(rng.random() * CORPUS)], corpus[int(rng.random() * CORPUS)])
        dice = rng.random()
        length = len(body) if dice < 0.98 else int(rng.random() ** 8 * 2**32)
        data = length.to_bytes(4, "big") + body
        if dice < 0.05:  # in two pieces
            fed += data[:5]
            data = data[5:]
            connection.receive_data(fed[-5:])
        fed += data
        try:
            alive = feed(connection, data, tally)
            if not alive and dice > 0.9:
                assert_dead(connection)
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__} from {fed.hex()}") from error
        lives -= 1
        if not alive or not lives:
            connection, lives, fed = fresh(rng), LIVES, b""
    tally.frames = frames
    tally.seconds = time.perf_counter() - started
    return tally


def run(fuzzed: Callable[[int, int], object], what: str) -> int:
    """Run a fuzzing program: read its number of cases and its seed, and return its exit status."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(f"--{what}", dest="count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        print(fuzzed(options.count, options.seed))
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(fuzz, "frames"))
