"""Every limit, by a script that tries to pass it; and limits lowered for one run."""

from __future__ import annotations

from toolcell.config import KIB, MIB
from toolcell.results import ExecutionResult, Outcome
from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import LIMITS, BackendHarness, expect, expect_equal, expect_outcome

promises = Promises("limits")

HOARD = "rows = []\nwhile True: rows.append(bytes(1 << 20))"

DEAF = """
import signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
while True: pass
"""

PEOPLE = """
import os, time
for _ in range({count}):
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
time.sleep({wait})
set_result("all alive")
"""
"""Bounded, so that a backend that holds nothing is only found out, not brought down."""


async def limited(stand: BackendHarness, source: str, outcome: Outcome, limit: str, **fields: float) -> ExecutionResult:
    """Run `source` under these limits; it must end by that one, and the next run must be well."""
    result = await stand.run(source, limits=LIMITS.model_copy(update=fields))
    expect_outcome(result, outcome, limit=limit)
    expect_equal(await stand.value("set_result(1)"), 1, "the value of the next run")
    return result


@promises
async def wall(stand: BackendHarness) -> None:
    """`wall_s` ends what sleeps, what ignores signals, what stops itself and what waits for a tool."""
    for source in (
        "import time; time.sleep(60)",
        DEAF,
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
        "call_tool('stay')",
    ):
        source = f"set_result('early')\nprint('started')\n{source}"
        result = await limited(stand, source, Outcome.TIMEOUT, "wall_s", wall_s=1.2)
        expect_equal((result.value, result.logs.text), ("early", "started\n"), "value and output before the end")


@promises
async def cpu(stand: BackendHarness) -> None:
    """`cpu_s` ends a script that computes, well before its wall time."""
    result = await limited(stand, "while True: pass", Outcome.CPU_LIMIT, "cpu_s", cpu_s=0.3)
    expect(result.usage.cpu_s < 3, f"it used {result.usage.cpu_s:.1f} s of CPU time")


@promises
async def cpu_of_children(stand: BackendHarness) -> None:
    """CPU time of children counts."""
    source = "import os\nif os.fork() == 0:\n    while True: pass\nimport time\ntime.sleep(30)"
    await limited(stand, source, Outcome.CPU_LIMIT, "cpu_s", cpu_s=0.3)


@promises
async def memory(stand: BackendHarness) -> None:
    """`memory_bytes` ends a script that hoards, and refuses an absurd allocation."""
    await limited(stand, HOARD, Outcome.MEMORY_LIMIT, "memory_bytes", memory_bytes=64 * MIB)
    await limited(stand, "x = bytearray(1 << 40)", Outcome.MEMORY_LIMIT, "memory_bytes", memory_bytes=64 * MIB)


@promises
async def memory_of_children(stand: BackendHarness) -> None:
    """Memory of children counts."""
    source = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        kept = bytearray(24 << 20)
        for i in range(0, len(kept), 4096): kept[i] = 1
        time.sleep(20)
        os._exit(0)
time.sleep(20)"""
    await limited(stand, source, Outcome.MEMORY_LIMIT, "memory_bytes", memory_bytes=64 * MIB)


@promises
async def processes(stand: BackendHarness) -> None:
    """`processes` holds children and threads together; a script within it is left alone."""
    await limited(stand, PEOPLE.format(count=40, wait=8), Outcome.PROCESS_LIMIT, "processes", processes=12)
    fine = """
import threading
threads = [threading.Thread(target=print) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
set_result(1)
"""
    expect_equal(await stand.value(fine, limits=LIMITS.model_copy(update={"processes": 12})), 1, "eight threads")


@promises
async def open_files(stand: BackendHarness) -> None:
    """`open_files` is what one process may hold."""
    source = """
files = []
try:
    while True: files.append(open("/dev/null"))
except OSError as error: set_result([len(files), error.strerror])
"""
    for most in (40, 100):
        count, problem = await stand.value(source, limits=LIMITS.model_copy(update={"open_files": most}))
        expect(most - 30 < count < most, f"{count} files could be opened of {most}")
        expect_equal(problem, "Too many open files", "the problem")


@promises
async def disk(stand: BackendHarness) -> None:
    """`disk_bytes` is one budget for every place that can be written, deleted files included."""
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
    total, places = await stand.value(source, limits=limits)
    expect(total <= 2 * MIB, f"{total} bytes could be written: {places}")
    expect(places["."] >= MIB, f"only {places['.']} bytes could be written into the workspace")


@promises
async def inodes(stand: BackendHarness) -> None:
    """`inodes` is how many files and folders there can be."""
    source = """
count = 0
set_result([2000, "none"])
try:
    while count < 2000: open(f"f{count}", "w").close(); count += 1
except OSError as error: set_result([count, error.strerror])
"""
    count, problem = await stand.value(source, limits=LIMITS.model_copy(update={"inodes": 100}))
    expect(50 < count < 100, f"{count} files could be made of 100")
    expect_equal(problem, "No space left on device", "the problem")


@promises
async def output_flood(stand: BackendHarness) -> None:
    """`output_flood_bytes` ends a script that prints without end, through Python or around it."""
    for source in ("while True: print('x' * 1000)", "import os\nwhile True: os.write(2, b'x' * 65536)"):
        await limited(stand, source, Outcome.OUTPUT_LIMIT, "output_flood_bytes", output_flood_bytes=3 * MIB)


@promises
async def frame(stand: BackendHarness) -> None:
    """`frame_bytes` bounds a message: the guest's own end refuses a larger one, either way."""
    limits = LIMITS.model_copy(update={"frame_bytes": 64 * KIB})
    large = await stand.run("call_tool('echo', q='x' * 100_000)", limits=limits)
    expect_outcome(large, Outcome.ERROR)
    answer = await stand.run(
        "try: call_tool('fail', text='x')\nexcept ToolError: set_result('y' * 60_000)", limits=limits
    )
    expect_equal(answer.value, "y" * 60_000, "a result within the limit")


@promises
async def result(stand: BackendHarness) -> None:
    """`result_bytes` is checked where the result is set: the script can catch it."""
    source = "try: set_result('x' * 10_000)\nexcept Exception as e: set_result(str(e))"
    said = await stand.value(source, limits=LIMITS.model_copy(update={"result_bytes": 1000}))
    expect("1000" in said, f"the refusal does not name the limit: {said!r}")


@promises
async def tool_calls(stand: BackendHarness) -> None:
    """`tool_calls` is how many calls are made; one more fails."""
    source = "print([call_tool('echo', q=i) for i in range(3)])\ncall_tool('echo', q=9)"
    outcome = await limited(stand, source, Outcome.CALL_LIMIT, "tool_calls", tool_calls=3)
    expect_equal([len(outcome.calls), outcome.logs.text], [3, "[0, 1, 2]\n"], "calls made, and their answers")


@promises
async def call_arguments(stand: BackendHarness) -> None:
    """`call_args_bytes` is what the arguments of all calls take together."""
    source = """
made = 0
try:
    for _ in range(50): call_tool("echo", q="x" * 10_000); made += 1
except ToolError as error: set_result([made, error.code])
"""
    limits = LIMITS.model_copy(update={"call_args_bytes": 100_000})
    made, code = await stand.value(source, limits=limits)
    expect(made < 10, f"{made} calls of 10,000 bytes were made with 100,000 allowed")
    expect_equal(code, "too_large", "the code")


@promises
async def lowered_for_one_run(stand: BackendHarness) -> None:
    """A sandbox started with larger limits keeps to smaller ones it is handed a run with; later runs are not held."""
    lower = LIMITS.model_copy(update={"memory_bytes": 64 * MIB, "processes": 10, "open_files": 32, "cpu_s": 0.5})
    expect_outcome(await stand.run(HOARD, limits=lower), Outcome.MEMORY_LIMIT, limit="memory_bytes")
    people = await stand.run(PEOPLE.format(count=24, wait=6), limits=lower)
    expect_outcome(people, Outcome.PROCESS_LIMIT, limit="processes")
    expect_outcome(await stand.run("while True: pass", limits=lower), Outcome.CPU_LIMIT, limit="cpu_s")
    large = """
x = bytearray(100 << 20)
for i in range(0, len(x), 4096): x[i] = 1
files = [open("/dev/null") for _ in range(60)]
set_result(1)
"""
    expect_equal(await stand.value(large), 1, "a run with the larger limits")


@promises
async def raised_for_one_run(stand: BackendHarness) -> None:
    """A run may be given more than others have."""
    source = "x = bytearray(240 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nset_result(len(x))"
    value = await stand.value(source, limits=LIMITS.model_copy(update={"memory_bytes": 400 * MIB}))
    expect_equal(value, 240 * MIB, "bytes held")
