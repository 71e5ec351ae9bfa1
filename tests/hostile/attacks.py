"""The attacks on a host's liveness: what a guest does, and the limits it does it under.

Each is measured by `harness.measure` beside a heartbeat and an innocent run. Guest sources, as in `escape.prologues`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from escape.prologues import BRIDGE

EVERYWHERE = ("process", "docker")
PROCESS = ("process",)
MIB = 1 << 20
WALL_S = 1.0


@dataclass(frozen=True)
class Attack:
    """Guests that run beside an innocent run, and what is done to the host."""

    sources: Mapping[str, str]
    """What to call each guest, and its source. They run one after the other, each in `guests` sandboxes at once."""
    guests: int = 1
    limits: Mapping[str, Any] = field(default_factory=lambda: {"wall_s": WALL_S})
    backends: tuple[str, ...] = PROCESS
    open_files: int | None = None
    """Descriptors that the host may have, as by `ulimit -n`."""
    umask: int | None = None
    worked_s: float = 0.1
    """Processor time for which it may keep the host's event loop, as PROMISES.md says."""
    patience: float = 1.0
    """How much longer than usual a neighbour may wait: many runs share the processors."""
    starves: float = 1.0
    """The same for everything, the host too: the kernel runs these processes first, and a quota over the sandboxes leaves
    the host a share only of what the rest of the machine leaves. Without any bound it was 80 s."""
    plan: bool = False
    """`sources` are plans in JSON instead of scripts."""
    as_tool: bool = False
    """The guest is the code of a model's call of `execute_code`, which has the host's own limits."""
    audit: bool = False
    """The host writes an audit log."""


def attack(source: str, **options: Any) -> Attack:
    """One guest."""
    return Attack({"": source}, **options)


def raw(statements: str) -> str:
    """A guest that writes to the bridge itself. It has made one call, so that its run is under way."""
    return BRIDGE + statements


def calling(tool: str, arguments: str) -> str:
    """A guest that calls a tool once, whatever comes of it."""
    return f"try:\n    call_tool({tool!r}, {arguments})\nexcept Exception:\n    pass\n"


# One message of 8 MiB, in every shape that msgpack has. `body` is the packed value of `size` bytes.

SHAPES = {
    "empty lists": "b'\\xdd' + struct.pack('>I', size - 5) + b'\\x90' * (size - 5)",
    "empty maps": "b'\\xdd' + struct.pack('>I', size - 5) + b'\\x80' * (size - 5)",
    "a million empty lists": "b'\\xdd' + struct.pack('>I', 500_000) + b'\\x90' * 500_000",
    "a million nils": "b'\\xdd' + struct.pack('>I', 1_000_000) + b'\\xc0' * 1_000_000",
    "a million floats": "b'\\xdd' + struct.pack('>I', 900_000) + (b'\\xcb' + struct.pack('>d', 1.5)) * 900_000",
    "lists of one": "b'\\xdd' + struct.pack('>I', 300_000) + b'\\x91\\x90' * 300_000",
    "64 levels": "b'\\xdd' + struct.pack('>I', 8000) + (b'\\x91' * 61 + b'\\xc0') * 8000",
    "a million levels": "b'\\x91' * (size - 1) + b'\\xc0'",
    "maps of one": "b'\\xdd' + struct.pack('>I', 250_000) + b'\\x81\\xa1a\\xc0' * 250_000",
    "one map": "msgpack.packb({str(number): 0 for number in range(500_000)})",
    "short texts": "b'\\xdd' + struct.pack('>I', 1_000_000) + b'\\xa7\\xc3\\xa9abcde' * 1_000_000",
    "one text": "msgpack.packb('x' * (size - 5))",
    "one text of wide characters": "msgpack.packb('\\u20ac' * ((size - 5) // 3))",
    "one text that is not UTF-8": "b'\\xdb' + struct.pack('>I', size - 5) + b'\\xff' * (size - 5)",
    "bytes": "msgpack.packb(bytes(size - 5))",
    "many bytes": "b'\\xdd' + struct.pack('>I', 1_000_000) + b'\\xc4\\x06abcdef' * 1_000_000",
    "large numbers": "b'\\xdd' + struct.pack('>I', 900_000) + (b'\\xcf' + b'\\xff' * 8) * 900_000",
    "extension types": "b'\\xdd' + struct.pack('>I', size // 3) + b'\\xd4\\x01x' * (size // 3)",
    "as many empty lists as allowed": "b'\\xdd' + struct.pack('>I', 130_000) + b'\\x90' * 130_000",
    "as many maps as allowed": "b'\\xdd' + struct.pack('>I', 60_000) + b'\\x81\\xa1a\\xc0' * 60_000",
    "64 levels, as many as allowed": "b'\\xdd' + struct.pack('>I', 2000) + (b'\\x91' * 61 + b'\\xc0') * 2000",
    "as many floats as allowed": "b'\\xdd' + struct.pack('>I', 260_000) + (b'\\xcb' + struct.pack('>d', 1.5)) * 260_000",
    "as many names as allowed": "msgpack.packb({str(number): 0 for number in range(130_000)})",
    "8 MiB in as many texts as allowed": "b'\\xdd' + struct.pack('>I', 250_000) + (b'\\xbe' + b'\\xc3\\xa9' * 15) * 250_000",
    "a list that announces more": "b'\\xdd\\xff\\xff\\xff\\xff' + b'\\xc0' * (size - 5)",
}

MESSAGES = {
    "a call": "send(raw(b'\\x95\\x11\\x01\\xa4echo\\x81\\xa1q' + body + b'\\xc0'))",
    "progress": "send(raw(b'\\x92\\x14' + body))",
    "a result": "send(raw(b'\\x93\\x15' + body + b'\\x90'))",
}


def one_message(shape: str, kind: str) -> str:
    statements = f"""
size = {8 * MIB} - 64
body = {SHAPES[shape]}
{MESSAGES[kind]}
time.sleep(0.02)
send(message(DONE, True, None))
stay()
"""
    return raw(statements)


def flood(wave: str) -> str:
    return raw(f"wave = {wave}\nwave *= max(1, 200_000 // len(wave))\nwhile True:\n    send(wave)\n")


# What children of a script do.

PING_PONG = """
import os
for _ in range(4):
    there, back = os.pipe(), os.pipe()
    for mine, theirs, first in ((there, back, True), (back, there, False)):
        if os.fork() == 0:
            if first:
                os.write(theirs[1], b"x")
            while True:
                os.read(mine[0], 1)
                os.write(theirs[1], b"x")
import signal
while True:
    signal.pause()
"""

SESSIONS = """
import os
for _ in range(60):
    if os.fork() == 0:
        os.setsid()
        while True:
            pass
while True:
    pass
"""

BRIEF_CHILDREN = """
import mmap, os, signal, struct, time
{before}
spent = mmap.mmap(-1, 8)
said = 0.0
while True:
    child = os.fork()
    if child == 0:
        end = time.process_time() + 0.004
        while time.process_time() < end:
            pass
        spent[:] = struct.pack("d", struct.unpack("d", spent[:])[0] + time.process_time())
        os._exit(0)
    {wait}
    now = struct.unpack("d", spent[:])[0]
    if now > said + 0.05:
        said = now
        print(now, flush=True)
"""

IGNORE_CHILDREN = """
try:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
except OSError:
    pass
"""

IN_FLIGHT = """
import array, os, socket
pairs = []
try:
    while True:
        ours, theirs = socket.socketpair()
        pairs.append((ours, theirs))
        for _ in range(200):
            ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 250))], socket.MSG_DONTWAIT)
except OSError:
    pass
import time
time.sleep(3)
"""

WATCHES = """
import os, select, time
held = []
try:
    ends = [os.pipe()[0] for _ in range(100)]
    while True:
        watch = select.epoll()
        held.append(watch)
        for end in ends:
            watch.register(end)
except OSError:
    pass
for _ in range(60):
    try:
        if os.fork() == 0:
            for watch in held:
                watch.close()
            held = []
            try:
                while True:
                    watch = select.epoll()
                    held.append(watch)
                    for end in ends:
                        watch.register(end)
            except OSError:
                time.sleep(60)
    except OSError:
        break
time.sleep(3)
"""

GIVEN_UP = """
import asyncio
async def main():
    for _ in range(59):
        try:
            await asyncio.wait_for(call_tool_async("doze", seconds=1.0), 0.01)
        except (asyncio.TimeoutError, ToolError):
            pass
asyncio.run(main())
"""

MISSING = """
import os
for number in range(120_000):
    try:
        os.stat(f"/usr/lib/missing-{number}")
    except OSError:
        pass
"""

FOUND: dict[str, Attack] = {
    "1 30,000 wrong items": attack(calling("numbers", '{"numbers": ["x"] * 30_000}')),
    "1 190,000 wrong items": attack(calling("numbers", '{"numbers": ["x"] * 190_000}')),
    "2 recursive unions, 14 and 60 levels": Attack(
        {
            str(depth): f"value = 'bad'\nfor _ in range({depth}):\n    value = {{'a': value}}\n"
            + calling("tree", '{"x": value}')
            for depth in (14, 60)
        }
    ),
    "3 JSON in eight strings": attack(calling("rows", '{"rows": ["[" + "1," * 400_000 + "1]"] * 8}')),
    "3 JSON in 31 strings": attack(calling("rows", '{"rows": ["[" + "1," * 130_000 + "1]"] * 31}')),
    "4 errors of unions": attack(calling("unions", '{"items": [["x"] * 30] * 1500}')),
    "5 frames of empty lists": attack(flood("message(PROGRESS, [[]] * 520_000)"), backends=EVERYWHERE),
    "5 frames of empty lists from eight guests": attack(
        flood("message(PROGRESS, [[]] * 520_000)"), guests=8, patience=3.0
    ),
    "5 frames of as many empty lists as allowed": attack(flood("message(PROGRESS, [[]] * 130_000)")),
    "5 frames of as many empty lists as allowed, from eight guests": attack(
        flood("message(PROGRESS, [[]] * 130_000)"), guests=8, patience=3.0
    ),
    "5 one message of 8 MiB": Attack(
        {
            f"{shape} in {kind}": one_message(shape, kind)
            for kind in MESSAGES
            for shape in SHAPES
            if kind == "a call" or "allowed" in shape or shape.startswith("one ")  # what is refused is refused alike
        },
        limits={"wall_s": 5.0},
    ),
    "5 progress of one byte": attack(flood("message(PROGRESS, 1)")),
    "5 progress of one byte from eight guests": attack(flood("message(PROGRESS, 1)"), guests=8, patience=3.0),
    "6 four pairs of processes that ping each other, wall_s": attack(PING_PONG, backends=EVERYWHERE, starves=10.0),
    "6 four pairs of processes that ping each other, cpu_s": attack(
        PING_PONG, limits={"wall_s": 30.0, "cpu_s": 2.0}, backends=EVERYWHERE, starves=10.0
    ),
    "6 sixty children with a session each": attack(SESSIONS, backends=EVERYWHERE),
    "6 children of 4 ms": attack(
        BRIEF_CHILDREN.format(before="", wait="os.waitpid(child, 0)"), limits={"wall_s": 10.0, "cpu_s": 1.0}
    ),
    "6 children of 4 ms that nobody waits for": attack(
        BRIEF_CHILDREN.format(before=IGNORE_CHILDREN, wait="time.sleep(0.004)"),
        limits={"wall_s": 10.0, "cpu_s": 1.0},
    ),
    "7 a synchronous tool given up 59 times": attack(GIVEN_UP, limits={"wall_s": 10.0}),
    "8 descriptors in flight": attack(
        IN_FLIGHT, guests=2, limits={"wall_s": WALL_S, "open_files": 16_384}, open_files=1024
    ),
    "8 watches of epoll": attack(WATCHES, guests=6),
    "9 a hundred runs with 256 descriptors": attack(
        "import time; time.sleep(1.5)", guests=100, open_files=256, patience=6.0
    ),
    "10 umask 077": attack("set_result(1)", umask=0o077),
    "11 files that do not exist": attack(MISSING, limits={"wall_s": 10.0}),
    "11 logs of one byte": attack(
        raw("for _ in range(1024):\n    send(message(LOG, 1, 'x') * 1024)\nsend(message(DONE, True, None))\nstay()\n"),
        limits={"wall_s": 5.0, "output_bytes": 2 * MIB, "output_flood_bytes": 1024 * MIB},
    ),
}
"""The findings of the review, by their numbers."""

PART = 'message(PART, "a", "", bytes({size}), {last})'

FILES = f"""
part, last = {PART.format(size=8 * MIB - 100, last=False)}, {PART.format(size=7 * MIB, last=True)}
for _ in range(3):
    send(message(RESULT, 1, []) + part * 3 + last)
send(message(DONE, True, None))
stay()
"""

TINY_FILES = """
parts = b"".join(message(PART, str(number), "", b"", True) for number in range(64))
problems = b"".join(message(PROBLEM, "\\u202e" * 1000 + str(number), 0, "\\u202e" * 1000) for number in range(1000))
while True:
    send(message(RESULT, 1, []) + parts + problems)
"""

UNREAD = """
answer = {"q": "x" * 4_000_000}
for number in range(1, 100):
    send(message(CALL, number, "echo", answer, None))
time.sleep(60)
"""

HUGE_ERROR = """
text = "\\u202e" * 300_000
findings = [{"line": 1, "column": 1, "rule": text, "message": text}] * 2 + [{}] * 100_000
send(message(DONE, False, {"type": text, "message": text, "traceback": text, "findings": findings}))
stay()
"""

TURNS = """
import os
for _ in range(200_000):
    os.write(1, b"x")
    os.write(2, b"\\xe2\\x82")
"""

PARALLEL = """
try:
    call_tools_parallel([("echo", {"q": number}) for number in range(10_000)], return_exceptions=True)
except Exception:
    pass
"""

NAMES = """
for number in range(1, 1100):
    send(message(CALL, number, "ech" * (80 if number % 2 else 300_000), {}, None))
send(message(DONE, True, None))
stay()
"""

SECRETS = (
    "sk-" * 1_000_000,
    "eyJaaaaaaaa." * 300_000,
    "token=1" * 500_000,
    "password = '" * 300_000,
    "-----BEGIN PRIVATE KEY-----" * 100_000,
    "bearer " * 500_000,
    "://a:" * 500_000,
    "secret" + " " * 3_000_000,
    "\u017fecret\u0130" * 200_000,
)

OWN: dict[str, Attack] = {
    "files of 31 MiB, three times": attack(raw(FILES), limits={"wall_s": 10.0}),
    "tiny files and problems": attack(raw(TINY_FILES)),
    "answers that nobody reads": attack(raw(UNREAD), limits={"wall_s": 3.0, "tool_calls": 100}),
    "a huge error": attack(raw(HUGE_ERROR), limits={"wall_s": 5.0}),
    "both streams in turn, broken characters": attack(TURNS, limits={"wall_s": 5.0, "output_bytes": 2 * MIB}),
    "10,000 calls in parallel": attack(PARALLEL, limits={"wall_s": 5.0}),
    "names of a megabyte": attack(raw(NAMES), limits={"wall_s": 10.0}),
    "100,000 unknown arguments": attack(calling("numbers", "{f'numbres{number}': 1 for number in range(100_000)}")),
    "an argument with a name of 6 MB": attack(calling("numbers", "{'numbres' * 900_000: 1}")),
    "a pattern that backtracks": attack(calling("patterns", "{'items': ['a' * 40 + '!'] * 2000}")),
    "results of 4 MB again and again": attack(flood("message(RESULT, ['x' * 1000] * 4000, [])")),
    "cancels of a call long answered": attack(flood("message(CANCEL, 1)")),
    "texts full of near secrets": Attack(
        {text[:12]: calling("echo", f"{{'q': {text[:60]!r} * {len(text) // 60}}}") for text in SECRETS},
        limits={"wall_s": 10.0},
        audit=True,
        worked_s=1.0,
    ),
    "values of every kind for the audit log": Attack(
        {
            "lists": calling("echo", "{'q': [[]] * 190_000}"),
            "names": calling("echo", "{'q': {f'tokem{number}': 1 for number in range(90_000)}}"),
            "names of secrets": calling("echo", "{'q': {f'token{number}': '1' for number in range(90_000)}}"),
            "bytes": calling("echo", "{'q': bytes(6_000_000)}"),
            "a result": "set_result(['token=1'] * 400_000)",
            "logs": "print('token=1' * 1_000_000)",
        },
        limits={"wall_s": 10.0, "output_bytes": 8 * MIB},
        audit=True,
        worked_s=1.0,
    ),
    "what a model's code leaves behind": Attack(
        {
            "a result of empty lists": "set_result([[]] * 500_000)",
            "a result with names": "set_result({str(n): n for n in range(200_000)})",
            "arguments": "for _ in range(5):\n    call_tool('echo', {'q': [0] * 90_000})",
            "progress of empty lists": "for _ in range(20):\n    progress([[]] * 500_000)",
            "progress": "for n in range(100_000):\n    progress(n)",
            "printed": "for n in range(100_000):\n    print(n)",
            "escapes": "print('\\x1b[1m\\u202e' * 400_000)",
        },
        as_tool=True,
    ),
    "raw output of 16 guests": attack(
        "import os\nwhile True:\n    os.write(1, b'\\xff' * 65_536)", guests=16, patience=3.0
    ),
    "a plan of 50 large steps": Attack(
        {"": json.dumps([{"tool": "echo", "args": {"q": [0] * 3800}, "id": f"s{n}"} for n in range(50)])}, plan=True
    ),
    "a plan whose results grow": Attack(
        {
            "": json.dumps(
                [{"tool": "echo", "args": {"q": [0] * 10}, "id": "s0"}]
                + [{"tool": "echo", "args": {"q": [{"$ref": f"s{n}"}] * 10}, "id": f"s{n + 1}"} for n in range(49)]
            )
        },
        plan=True,
    ),
}
"""What the authors tried besides, with the code before them."""

ATTACKS = FOUND | OWN
