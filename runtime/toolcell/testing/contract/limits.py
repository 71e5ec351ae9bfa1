"""Limits and usage: a script for every limit that tries to exceed it, limits for one run, and measured usage."""

from __future__ import annotations

from toolcell.config import KIB, MIB
from toolcell.results import ExecutionResult, Outcome
from toolcell.testing.contract.case import CaseGroup
from toolcell.testing.harness import (
    LIMITS,
    BackendHarness,
    expect,
    expect_equal,
)

limits_cases = CaseGroup("limits")

ALLOCATE = "rows = []\nwhile True: rows.append(bytes(1 << 20))"

IGNORE_SIGNALS = """
import signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
while True: pass
"""

FORKS = """
import os, time
for _ in range({count}):
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
time.sleep({wait})
set_result("all alive")
"""
"""Bounded, so that a backend without limits fails the case and does not bring down the machine."""


async def _limited(
    harness: BackendHarness, source: str, outcome: Outcome, limit: str, **fields: float
) -> ExecutionResult:
    """Run `source` with these limits. It must end by `limit`, and the next run must succeed."""
    result = await harness.run(source, outcome, limit=limit, limits=LIMITS.model_copy(update=fields))
    expect_equal(await harness.value("set_result(1)"), 1, "the value of the next run")
    return result


@limits_cases
async def wall(harness: BackendHarness) -> None:
    """`wall_s` ends scripts that sleep, ignore signals, stop themselves or wait for a tool."""
    for source in (
        "import time; time.sleep(60)",
        IGNORE_SIGNALS,
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
        "call_tool('stay')",
    ):
        source = f"set_result('early')\nprint('started')\n{source}"
        result = await _limited(harness, source, Outcome.TIMEOUT, "wall_s", wall_s=1.2)
        expect_equal((result.value, result.logs.text), ("early", "started\n"), "value and output before the end")


@limits_cases
async def cpu(harness: BackendHarness) -> None:
    """`cpu_s` ends a script that computes, well before `wall_s` does."""
    result = await _limited(harness, "while True: pass", Outcome.CPU_LIMIT, "cpu_s", cpu_s=0.3)
    expect(result.usage.cpu_s < 3, f"it used {result.usage.cpu_s:.1f} s of CPU time")


limits_cases.ends(
    "cpu_of_children",
    "The CPU time of children counts towards `cpu_s`.",
    ["import os\nif os.fork() == 0:\n    while True: pass\nimport time\ntime.sleep(30)"],
    Outcome.CPU_LIMIT,
    limit="cpu_s",
    cpu_s=0.3,
)


limits_cases.ends(
    "memory",
    "`memory_bytes` ends a script that allocates without end, and refuses a huge single allocation.",
    [ALLOCATE, "x = bytearray(1 << 40)"],
    Outcome.MEMORY_LIMIT,
    limit="memory_bytes",
    memory_bytes=64 * MIB,
)


limits_cases.ends(
    "memory_of_children",
    "The memory of children counts towards `memory_bytes`.",
    [
        """
import os, time
for _ in range(6):
    if os.fork() == 0:
        kept = bytearray(24 << 20)
        for i in range(0, len(kept), 4096): kept[i] = 1
        time.sleep(20)
        os._exit(0)
time.sleep(20)"""
    ],
    Outcome.MEMORY_LIMIT,
    limit="memory_bytes",
    memory_bytes=64 * MIB,
)


limits_cases.ends(
    "processes",
    "`processes` limits children and threads together.",
    [FORKS.format(count=40, wait=8)],
    Outcome.PROCESS_LIMIT,
    limit="processes",
    processes=12,
)


limits_cases.value(
    "fewer_processes",
    "A script below the limit of `processes` succeeds.",
    """
import threading
threads = [threading.Thread(target=print) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
set_result(1)
""",
    1,
    limits=LIMITS.model_copy(update={"processes": 12}),
)


@limits_cases
async def open_files(harness: BackendHarness) -> None:
    """`open_files` limits the open files of one process."""
    source = """
files = []
try:
    while True: files.append(open("/dev/null"))
except OSError as error: set_result([len(files), error.strerror])
"""
    for most in (40, 100):
        count, problem = await harness.value(source, limits=LIMITS.model_copy(update={"open_files": most}))
        expect(most - 30 < count < most, f"{count} files could be opened of {most}")
        expect_equal(problem, "Too many open files", "the problem")


@limits_cases
async def disk(harness: BackendHarness) -> None:
    """`disk_bytes` limits all writable places together, including deleted files that are open."""
    source = """
import os
total, places = 0, {}
for place in (".", "/tmp", "/dev/shm"):
    places[place] = 0
    try:
        for i in range(400):
            with open(f"{place}/{i}", "wb", buffering=0) as file: places[place] += file.write(bytes(65536))
    except OSError as error: places[place + " ended by"] = error.strerror
kept = []
try:
    for i in range(400):
        kept.append(open(f"gone{i}", "wb", buffering=0)); os.unlink(f"gone{i}"); total += kept[-1].write(bytes(65536))
except OSError: pass
set_result([total + sum(each for each in places.values() if isinstance(each, int)), places])
"""
    limits = LIMITS.model_copy(update={"disk_bytes": 2 * MIB, "open_files": 1024})
    total, places = await harness.value(source, limits=limits)
    expect(total <= 2 * MIB, f"{total} bytes could be written: {places}")
    expect(places["."] >= MIB, f"only {places['.']} bytes could be written into the workspace")


@limits_cases
async def inodes(harness: BackendHarness) -> None:
    """`inodes` limits the number of files and folders."""
    source = """
count = 0
set_result([2000, "none"])
try:
    while count < 2000: open(f"f{count}", "w").close(); count += 1
except OSError as error: set_result([count, error.strerror])
"""
    count, problem = await harness.value(source, limits=LIMITS.model_copy(update={"inodes": 100}))
    expect(50 < count < 100, f"{count} files could be made of 100")
    expect_equal(problem, "No space left on device", "the problem")


limits_cases.ends(
    "output_flood",
    "`output_flood_bytes` ends a script that prints without end, with print() or raw.",
    ["while True: print('x' * 1000)", "import os\nwhile True: os.write(2, b'x' * 65536)"],
    Outcome.OUTPUT_LIMIT,
    limit="output_flood_bytes",
    output_flood_bytes=3 * MIB,
)


@limits_cases
async def frame(harness: BackendHarness) -> None:
    """`frame_bytes` limits a message; the guest itself refuses a larger one."""
    limits = LIMITS.model_copy(update={"frame_bytes": 64 * KIB})
    await harness.run("call_tool('echo', q='x' * 100_000)", Outcome.ERROR, limits=limits)
    answer = await harness.run(
        "try: call_tool('fail', text='x')\nexcept ToolError: set_result('y' * 60_000)", limits=limits
    )
    expect_equal(answer.value, "y" * 60_000, "a result within the limit")


@limits_cases
async def result(harness: BackendHarness) -> None:
    """`result_bytes` is checked in set_result(), and the script can catch the error."""
    source = "try: set_result('x' * 10_000)\nexcept Exception as e: set_result(str(e))"
    message = await harness.value(source, limits=LIMITS.model_copy(update={"result_bytes": 1000}))
    expect("1000" in message, f"the refusal does not name the limit: {message!r}")


@limits_cases
async def tool_calls(harness: BackendHarness) -> None:
    """`tool_calls` limits the number of calls; one more ends the run."""
    source = "print([call_tool('echo', q=i) for i in range(3)])\ncall_tool('echo', q=9)"
    outcome = await _limited(harness, source, Outcome.CALL_LIMIT, "tool_calls", tool_calls=3)
    expect_equal([len(outcome.calls), outcome.logs.text], [3, "[0, 1, 2]\n"], "calls made, and their answers")


@limits_cases
async def call_arguments(harness: BackendHarness) -> None:
    """`call_args_bytes` limits the size of the arguments of all calls together."""
    source = """
made = 0
try:
    for _ in range(50): call_tool("echo", q="x" * 10_000); made += 1
except ToolError as error: set_result([made, error.code])
"""
    limits = LIMITS.model_copy(update={"call_args_bytes": 100_000})
    made, code = await harness.value(source, limits=limits)
    expect(made < 10, f"{made} calls of 10,000 bytes were made with 100,000 allowed")
    expect_equal(code, "too_large", "the code")


@limits_cases
async def host_work(harness: BackendHarness) -> None:
    """`host_work` ends a run that makes too much work for the host, however it does that."""
    sources = {
        "text": "while True: print('x' * 60_000)",
        "elements": "while True: progress([[]] * 1000)",
        "messages": "while True: progress(None)",
        "arguments": "while True: call_tool('echo', q=[[]] * 1000)",
        "refused arguments": "while True:\n    try: call_tool('echo', q=1, r=['x'] * 1000)\n    except ToolError: pass",
        "a call that is caught": "try:\n    while True: call_tool('echo', q=[[]] * 1000)\nexcept ToolError: pass",
    }
    for what, source in sources.items():
        outcome = await _limited(
            harness, source, Outcome.HOST_WORK_LIMIT, "host_work", host_work=MIB, tool_calls=100_000
        )
        expect(outcome.usage.host_work > MIB, f"{what}: usage shows {outcome.usage.host_work} of {MIB}")
        expect("raise host_work" in (outcome.error.message if outcome.error else ""), f"{what}: the error helps nobody")
    honest = await harness.run("set_result([call_tool('echo', q='x' * 100) for _ in range(10)])", limits=LIMITS)
    expect(0 < honest.usage.host_work < 10 * KIB, f"ten calls took {honest.usage.host_work} units of work")


@limits_cases
async def lowered_for_one_run(harness: BackendHarness) -> None:
    """A run's lower limits hold in a sandbox that was started with higher ones; later runs have the higher ones."""
    lower = LIMITS.model_copy(update={"memory_bytes": 64 * MIB, "processes": 10, "open_files": 32, "cpu_s": 0.5})
    await harness.run(ALLOCATE, Outcome.MEMORY_LIMIT, limit="memory_bytes", limits=lower)
    await harness.run(FORKS.format(count=24, wait=6), Outcome.PROCESS_LIMIT, limit="processes", limits=lower)
    await harness.run("while True: pass", Outcome.CPU_LIMIT, limit="cpu_s", limits=lower)
    large = """
x = bytearray(100 << 20)
for i in range(0, len(x), 4096): x[i] = 1
files = [open("/dev/null") for _ in range(60)]
set_result(1)
"""
    expect_equal(await harness.value(large), 1, "a run with the larger limits")


limits_cases.value(
    "raised_for_one_run",
    "A run may have higher limits than the runtime's.",
    "x = bytearray(240 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nset_result(len(x))",
    240 * MIB,
    limits=LIMITS.model_copy(update={"memory_bytes": 400 * MIB}),
)


usage_cases = CaseGroup("usage")


@usage_cases
async def measured(harness: BackendHarness) -> None:
    """CPU time, memory, processes and bytes are plausible for a known script."""
    source = """
import time
x = bytearray(40 << 20)
for i in range(0, len(x), 4096): x[i] = 1
call_tool("echo", q="y" * 10_000)
began = time.process_time()
while time.process_time() - began < 0.6: pass
time.sleep(0.5)  # gives a backend that samples time to sample
"""
    result = await harness.run(source, Outcome.OK)
    usage = result.usage
    # Far less than the script counted: in gVisor its own clock also counts when it waits for a processor.
    expect(0.1 <= usage.cpu_s < 10, f"cpu_s is {usage.cpu_s}, for 0.6 s and a little")
    expect(30 * MIB < usage.peak_memory_bytes <= LIMITS.memory_bytes, f"peak_memory_bytes is {usage.peak_memory_bytes}")
    expect(1 <= usage.peak_processes <= 8, f"peak_processes is {usage.peak_processes}, for one process")
    expect(0.25 <= usage.wall_s < 15, f"wall_s is {usage.wall_s}")
    expect(
        usage.sent_bytes > 10_000 < usage.received_bytes, f"{usage.sent_bytes} sent, {usage.received_bytes} received"
    )
    expect_equal(usage.calls, 1, "calls")


@usage_cases
async def idle_is_cheap(harness: BackendHarness) -> None:
    """The cost of starting a sandbox does not count as usage of the run."""
    result = await harness.run("set_result(1)")
    expect(result.usage.cpu_s < 1, f"an empty script is reported to have used {result.usage.cpu_s} s of CPU time")
    expect_equal(result.usage.calls, 0, "calls")


@usage_cases
async def layers_are_known_first(harness: BackendHarness) -> None:
    """The live layers are known after Hello, before any script, and every result names them."""
    async with harness.connection() as connection:
        layers = dict(connection.sandbox.layers)
        expect(connection.sandbox.is_alive(), "a sandbox that said Hello is not alive")
    texts = all(type(each) is str and each for pair in layers.items() for each in pair)
    expect(texts, f"layers are not texts: {layers}")
    expect(layers or not harness.backend.isolates, "the backend declares that it isolates, and names no layer")
    result = await harness.run("1")
    expect_equal(sorted(result.isolation.layers), sorted(layers), "the layers of a result")
    expect_equal(result.isolation.backend, harness.backend.name, "the backend of a result")


@usage_cases
async def sandboxes_have_ids(harness: BackendHarness) -> None:
    """Every sandbox has its own id, the backend's name, and the limits it was started with."""
    async with harness.sandbox() as one, harness.sandbox() as other:
        expect(one.id and one.id != other.id, f"two sandboxes are called {one.id!r} and {other.id!r}")
        expect_equal(one.backend, harness.backend.name, "the backend's name")
        expect(one.limits == LIMITS, "a sandbox does not know its limits")


@usage_cases
async def measuring_never_fails(harness: BackendHarness) -> None:
    """`sample` and `read_output` never raise, also not after the sandbox is destroyed."""
    async with harness.connection() as connection:
        sandbox = connection.sandbox
        for options in ({}, {"brief": True}, {"last": True}):
            sample = sandbox.sample(**options)
            expect(sample.cpu_s >= 0 and sample.peak_memory_bytes >= 0, f"measured {sample}")
        expect_equal(sandbox.read_output(), (b"", b""), "the output of a sandbox that ran nothing")
    sandbox.sample(last=True)
    sandbox.read_output()
