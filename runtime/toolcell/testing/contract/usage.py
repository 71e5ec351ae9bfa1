"""What a backend says of a sandbox: its name, its layers, what it used."""

from __future__ import annotations

from toolcell.config import MIB
from toolcell.results import Outcome
from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import LIMITS, BackendHarness, expect, expect_equal, expect_outcome

promises = Promises("usage")


@promises
async def measured(stand: BackendHarness) -> None:
    """Usage is plausible: CPU time, memory, processes and bytes are what a known script uses."""
    source = """
import time
x = bytearray(40 << 20)
for i in range(0, len(x), 4096): x[i] = 1
call_tool("echo", q="y" * 10_000)
began = time.process_time()
while time.process_time() - began < 0.3: pass
time.sleep(0.5)  # a backend that measures from time to time has to come round
"""
    result = await stand.run(source)
    expect_outcome(result, Outcome.OK)
    usage = result.usage
    expect(0.25 <= usage.cpu_s < 10, f"cpu_s is {usage.cpu_s}, for 0.3 s and a little")
    expect(30 * MIB < usage.peak_memory_bytes <= LIMITS.memory_bytes, f"peak_memory_bytes is {usage.peak_memory_bytes}")
    expect(1 <= usage.peak_processes <= 8, f"peak_processes is {usage.peak_processes}, for one process")
    expect(0.25 <= usage.wall_s < 15, f"wall_s is {usage.wall_s}")
    expect(
        usage.sent_bytes > 10_000 < usage.received_bytes, f"{usage.sent_bytes} sent, {usage.received_bytes} received"
    )
    expect_equal(usage.calls, 1, "calls")


@promises
async def idle_is_cheap(stand: BackendHarness) -> None:
    """What a sandbox cost before its run is not counted as the run's."""
    result = await stand.run("set_result(1)")
    expect(result.usage.cpu_s < 1, f"an empty script is told to have used {result.usage.cpu_s} s of CPU time")
    expect_equal(result.usage.calls, 0, "calls")


@promises
async def layers_are_known_first(stand: BackendHarness) -> None:
    """The live layers are known once a sandbox has said Hello, before any script; every result names them."""
    async with stand.connection() as connection:
        layers = dict(connection.sandbox.layers)
        expect(connection.sandbox.is_alive(), "a sandbox that said Hello is not alive")
    texts = all(type(each) is str and each for pair in layers.items() for each in pair)
    expect(texts, f"layers are not texts: {layers}")
    expect(layers or not stand.backend.isolates, "the backend says that it isolates, and names no layer")
    result = await stand.run("1")
    expect_equal(sorted(result.isolation.layers), sorted(layers), "the layers of a result")
    expect_equal(result.isolation.backend, stand.backend.name, "the backend of a result")


@promises
async def sandboxes_are_told_apart(stand: BackendHarness) -> None:
    """Every sandbox has an id of its own, the backend's name, and the limits it was started with."""
    async with stand.sandbox() as one, stand.sandbox() as other:
        expect(one.id and one.id != other.id, f"two sandboxes are called {one.id!r} and {other.id!r}")
        expect_equal(one.backend, stand.backend.name, "the backend's name")
        expect(one.limits == LIMITS, "a sandbox does not know its limits")


@promises
async def measuring_never_fails(stand: BackendHarness) -> None:
    """A sandbox can be measured and its output read before, during and after its life."""
    async with stand.connection() as connection:
        sandbox = connection.sandbox
        for options in ({}, {"brief": True}, {"last": True}):
            sample = sandbox.sample(**options)
            expect(sample.cpu_s >= 0 and sample.peak_memory_bytes >= 0, f"measured {sample}")
        expect_equal(sandbox.read_output(), (b"", b""), "the output of a sandbox that ran nothing")
    sandbox.sample(last=True)
    sandbox.read_output()
