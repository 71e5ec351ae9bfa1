"""A guest that writes what it likes to the bridge: nothing it says is believed, and everything else goes on.

Scripts find the bridge through the guest's own objects, so this holds for every backend that runs our guest.
"""

from __future__ import annotations

import anyio

from toolcell.config import MIB
from toolcell.results import ExecutionResult, Outcome
from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import LIMITS, BackendHarness, expect, expect_equal, expect_outcome

promises = Promises("hostile")

RAW = """
import os, struct, sys, time
import msgpack

send = sys.stdout._channel._sock.sendall

def raw(body): return struct.pack(">I", len(body)) + body

def message(*fields): return raw(msgpack.packb(list(fields)))

def stay():
    while True: time.sleep(1)

CALL, CANCEL, LOG, PROGRESS, RESULT, PART, DONE = 17, 18, 19, 20, 21, 22, 24
"""

ILLEGAL = {
    "text": "b'HTTP/1.1 200 OK\\r\\n\\r\\n' * 100",
    "noise": "os.urandom(100_000)",
    "an empty frame": "raw(b'')",
    "a length past the limit": "struct.pack('>I', 1 << 31) + b'x' * 1000",
    "an unknown tag": "message(99, None)",
    "a message of the host": "message(3, 1, 'answer')",
    "a second Hello": "message(16, 1, '9', '3', {'moat': 'live'})",
    "too few fields": "message(RESULT, None)",
    "fields of other types": "message(CALL, 1, 5, [], None)",
    "a call id twice": "message(CALL, 7, 'echo', {'q': 1}, None) * 2",
    "a call id that goes back": "message(CALL, 7, 'echo', {'q': 1}, None) + message(CALL, 6, 'echo', {'q': 1}, None)",
    "a cancel of no call": "message(CANCEL, 5)",
    "a log to a third stream": "message(LOG, 3, 'x')",
    "an extension type": "raw(msgpack.packb([RESULT, msgpack.ExtType(5, b'x'), []]))",
    "a deep value": "raw(b'\\x93\\x15' + b'\\x91' * 100_000 + b'\\xc0\\x90')",
    "a list of four billion": "raw(b'\\x93\\x15\\xdd\\xff\\xff\\xff\\xff' + b'\\xc0' * 600)",
    "a file inside a file": "message(PART, 'a', '', b'1', False) + message(PART, 'b', '', b'2', True)",
    "a Done of other types": "message(DONE, 1, None)",
}
"""What kind of bytes, and the expression that makes them."""


async def attack(stand: BackendHarness, body: str, **fields: float) -> ExecutionResult:
    """Run an attack."""
    return await stand.run(RAW + body, limits=LIMITS.model_copy(update={"wall_s": 8.0, **fields}))


async def is_well(stand: BackendHarness) -> None:
    """The next run must not have been touched by an attack."""
    expect_equal(await stand.value("set_result(call_tool('echo', q='well'))"), "well", "the next run")


@promises
async def illegal_bytes(stand: BackendHarness) -> None:
    """Whatever breaks the protocol ends the run as a protocol error; nothing after it is believed."""
    for kind, expression in ILLEGAL.items():
        forged = "message(RESULT, 'forged', []) + message(DONE, True, None)"
        result = await attack(stand, f"send({expression} + {forged})\nstay()")
        if result.outcome is not Outcome.PROTOCOL_ERROR or result.has_value:
            expect(False, f"{kind}: {result.outcome}, value {result.value!r:.100}, {result.error}")
    await is_well(stand)


@promises
async def half_a_frame(stand: BackendHarness) -> None:
    """A frame that is never finished does not hold the run past its time, nor past the guest's death."""
    half = "send(message(RESULT, 'x' * 1000, [])[:100])\n"
    expect_outcome(await attack(stand, half + "stay()", wall_s=0.5), Outcome.TIMEOUT)
    expect_outcome(await attack(stand, half + "os._exit(0)"), Outcome.KILLED, Outcome.PROTOCOL_ERROR)
    await is_well(stand)


@promises
async def a_trickle(stand: BackendHarness) -> None:
    """Bytes that come one at a time make the same messages."""
    body = "for byte in message(RESULT, 'slow', []) + message(DONE, True, None): send(bytes([byte]))\nstay()"
    result = await attack(stand, body)
    expect_outcome(result, Outcome.OK)
    expect_equal(result.value, "slow", "the value")
    await is_well(stand)


@promises
async def floods(stand: BackendHarness) -> None:
    """Frames without end are bounded as output, or by time, and hold nobody else up."""
    for frame in ("message(LOG, 1, '')", "message(PROGRESS, None)"):
        result = await attack(stand, f"many = {frame} * 1000\nwhile True: send(many)", output_flood_bytes=2 * MIB)
        expect_outcome(result, Outcome.OUTPUT_LIMIT)
    forever = "many = message(RESULT, 1, []) * 1000\nwhile True: send(many)"
    expect_outcome(await attack(stand, forever, wall_s=1.0), Outcome.TIMEOUT, Outcome.OUTPUT_LIMIT)
    await is_well(stand)


@promises
async def a_flood_beside_others(stand: BackendHarness) -> None:
    """While one guest floods, another is served."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attack_quietly, stand)
        for index in range(3):
            expect_equal(await stand.value("set_result(call_tool('echo', q=me))", inputs={"me": index}), index, "value")
        tasks.cancel_scope.cancel()
    await is_well(stand)


async def attack_quietly(stand: BackendHarness) -> None:
    """Flood until cancelled."""
    limits = LIMITS.model_copy(update={"wall_s": 15.0})
    await stand.run(RAW + "many = message(RESULT, 1, []) * 1000\nwhile True: send(many)", limits=limits)


@promises
async def an_early_done(stand: BackendHarness) -> None:
    """A forged Done ends the run; what the script says afterwards has no effect, and no tool is called."""
    body = """
send(message(RESULT, "first", []) + message(DONE, True, None))
try: call_tool("echo", q="late")
finally: stay()
"""
    result = await attack(stand, body)
    expect_outcome(result, Outcome.OK, Outcome.PROTOCOL_ERROR)
    expect(result.value in ("first", None), f"the value is {result.value!r}")
    expect_equal(result.calls, (), "calls made")
    await is_well(stand)


@promises
async def never_reading(stand: BackendHarness) -> None:
    """A guest that calls and calls and never reads an answer is bounded."""
    body = """
n = 0
while True:
    n += 1
    send(message(CALL, n, "echo", {"q": "x" * 100_000}, None))
"""
    result = await attack(stand, body, wall_s=2.0, tool_calls=1000, call_args_bytes=64 * MIB)
    expect_outcome(result, Outcome.TIMEOUT, Outcome.PROTOCOL_ERROR, Outcome.CALL_LIMIT)
    await is_well(stand)


@promises
async def a_result_too_large(stand: BackendHarness) -> None:
    """A result or a file past its limit is a protocol error when the guest's own end does not refuse it."""
    result = await attack(stand, "send(message(RESULT, 'x' * 100_000, []))\nstay()", result_bytes=1000)
    expect_outcome(result, Outcome.PROTOCOL_ERROR)
    part = "send(message(RESULT, 1, ['f']) + message(PART, 'f', '', b'x' * 100_000, True))\nstay()"
    expect_outcome(await attack(stand, part, files_bytes=1000), Outcome.PROTOCOL_ERROR)
    await is_well(stand)


@promises
async def a_bridge_closed(stand: BackendHarness) -> None:
    """A guest that closes its bridge and stays has nothing more to say: the run ends."""
    result = await attack(stand, "sys.stdout._channel._sock.close()\nos.closerange(3, 200)\nstay()", wall_s=3.0)
    expect_outcome(result, Outcome.KILLED, Outcome.TIMEOUT)
    await is_well(stand)
