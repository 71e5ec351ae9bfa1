"""A guest that writes arbitrary bytes to the bridge: the host believes nothing of it, and other runs go on.

Scripts find the bridge among the guest's descriptors: a socket, or a pipe that is not its raw output.
"""

from __future__ import annotations

from functools import partial

import anyio

from toolcell.config import MIB
from toolcell.results import ExecutionResult, Outcome
from toolcell.testing.contract.case import CaseGroup
from toolcell.testing.harness import (
    LIMITS,
    BackendHarness,
    expect,
    expect_equal,
    expect_outcome,
)

hostile_cases = CaseGroup("hostile")

RAW = """
import fcntl, os, stat, struct, time
import msgpack

def find_bridge():
    output = [os.fstat(descriptor).st_ino for descriptor in (1, 2)]
    for descriptor in range(3, 1024):
        try: status, flags = os.fstat(descriptor), fcntl.fcntl(descriptor, fcntl.F_GETFL)
        except OSError: continue
        is_pipe = stat.S_ISFIFO(status.st_mode) and flags & os.O_ACCMODE == os.O_WRONLY
        if stat.S_ISSOCK(status.st_mode) or is_pipe and status.st_ino not in output: return descriptor

bridge = find_bridge()

def send(data):
    while data: data = data[os.write(bridge, data):]

def raw(body): return struct.pack(">I", len(body)) + body

def message(*fields): return raw(msgpack.packb(list(fields)))

def stay():
    while True: time.sleep(1)

CALL, LOG, PROGRESS, RESULT, PART, DONE = 17, 19, 20, 21, 22, 24
"""

ILLEGAL = {
    "a length past the limit": "struct.pack('>I', 1 << 31) + b'x' * 1000",
    "a message of the host": "message(3, 1, 'answer')",
    "fields of other types": "message(CALL, 1, 5, [], None)",
    "a list of four billion": "raw(b'\\x93\\x15\\xdd\\xff\\xff\\xff\\xff' + b'\\xc0' * 600)",
    "a second Hello": "message(16, 1, '9', '3', {'moat': 'live'})",
}
"""Kind of illegal bytes, and the expression that makes them: one of each, because a backend only carries the bytes."""


async def _attack(harness: BackendHarness, body: str) -> ExecutionResult:
    """Run an attack."""
    return await harness.run(RAW + body, limits=LIMITS.model_copy(update={"wall_s": 8.0}))


async def _expect_unaffected(harness: BackendHarness) -> None:
    """Check that the next run is unaffected by the attack."""
    expect_equal(await harness.value("set_result(call_tool('echo', q='well'))"), "well", "the next run")


@hostile_cases
async def illegal_bytes(harness: BackendHarness) -> None:
    """A violation of the protocol has the outcome `protocol_error`; the host ignores everything after it."""
    for kind, expression in ILLEGAL.items():
        forged = "message(RESULT, 'forged', []) + message(DONE, True, None)"
        result = await _attack(harness, f"send({expression} + {forged})\nstay()")
        if result.outcome is not Outcome.PROTOCOL_ERROR or result.has_value:
            expect(False, f"{kind}: {result.outcome}, value {result.value!r:.100}, {result.error}")
    await _expect_unaffected(harness)


HALF_A_FRAME = f"{RAW}send(message(RESULT, 'x' * 1000, [])[:100])\n"

hostile_cases.ends(
    "half_a_frame",
    "An unfinished frame does not delay the timeout of the run.",
    [f"{HALF_A_FRAME}stay()"],
    Outcome.TIMEOUT,
    wall_s=0.5,
)


hostile_cases.ends(
    "half_a_frame_at_the_end",
    "An unfinished frame does not delay the guest's death.",
    [f"{HALF_A_FRAME}os._exit(0)"],
    Outcome.KILLED,
    Outcome.PROTOCOL_ERROR,
    wall_s=8.0,
)


@hostile_cases
async def a_trickle(harness: BackendHarness) -> None:
    """Bytes that arrive one at a time make the same messages."""
    body = "for byte in message(RESULT, 'slow', []) + message(DONE, True, None): send(bytes([byte]))\nstay()"
    result = await _attack(harness, body)
    expect_outcome(result, Outcome.OK)
    expect_equal(result.value, "slow", "the value")
    await _expect_unaffected(harness)


hostile_cases.ends(
    "floods_of_work",
    "An endless flood of frames that make work for the host ends by the limit of that.",
    [
        f"{RAW}many = {frame} * 1000\nwhile True: send(many)"
        for frame in ("message(LOG, 1, '')", "message(PROGRESS, None)")
    ],
    Outcome.HOST_WORK_LIMIT,
    host_work=2 * MIB,
    wall_s=8.0,
)

FLOOD = f"{RAW}many = message(RESULT, 1, []) * 1000\nwhile True: send(many)"

hostile_cases.ends(
    "floods_of_results", "An endless flood of results ends by the timeout.", [FLOOD], Outcome.TIMEOUT, wall_s=1.0
)


@hostile_cases
async def a_flood_beside_others(harness: BackendHarness) -> None:
    """While one guest floods the host, other runs succeed."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(harness.run, FLOOD, limits=LIMITS.model_copy(update={"wall_s": 15.0})))
        for index in range(3):
            expect_equal(
                await harness.value("set_result(call_tool('echo', q=me))", inputs={"me": index}), index, "value"
            )
        tasks.cancel_scope.cancel()
    await _expect_unaffected(harness)


@hostile_cases
async def an_early_done(harness: BackendHarness) -> None:
    """A forged Done ends the run; later messages have no effect, and no tool is called."""
    body = """
send(message(RESULT, "first", []) + message(DONE, True, None))
try: call_tool("echo", q="late")
finally: stay()
"""
    result = await _attack(harness, body)
    expect_outcome(result, Outcome.OK, Outcome.PROTOCOL_ERROR)
    expect(result.value in ("first", None), f"the value is {result.value!r}")
    expect_equal(result.calls, (), "calls made")
    await _expect_unaffected(harness)


hostile_cases.ends(
    "never_reading",
    "A guest that makes calls without end and never reads an answer runs into a limit.",
    [
        f"""{RAW}
n = 0
while True:
    n += 1
    send(message(CALL, n, "echo", {{"q": "x" * 100_000}}, None))
"""
    ],
    Outcome.TIMEOUT,
    Outcome.PROTOCOL_ERROR,
    Outcome.CALL_LIMIT,
    wall_s=2.0,
    tool_calls=1000,
    call_args_bytes=64 * MIB,
)


hostile_cases.ends(
    "a_result_too_large",
    "A result or a file beyond its limit, sent around the guest's own check, has the outcome `protocol_error`.",
    [
        f"{RAW}send(message(RESULT, 'x' * 100_000, []))\nstay()",
        f"{RAW}send(message(RESULT, 1, ['f']) + message(PART, 'f', '', b'x' * 100_000, True))\nstay()",
    ],
    Outcome.PROTOCOL_ERROR,
    result_bytes=1000,
    files_bytes=1000,
    wall_s=8.0,
)


hostile_cases.ends(
    "a_bridge_closed",
    "When a guest closes its bridge and continues, the run ends.",
    [f"{RAW}os.closerange(3, 1024)\nstay()"],
    Outcome.KILLED,
    Outcome.TIMEOUT,
    wall_s=3.0,
)
