"""Every field of Limits, with a script that exceeds it. The outcome names the limit, its value and the use."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from toolcell import ExecutionResult, Limits, Outcome, SyncRuntime
from toolcell.mcp.content import answer
from toolcell.tools.code import CodeTool

from .conftest import Run

pytestmark = [pytest.mark.quick, pytest.mark.isolation, pytest.mark.conforms("Q30")]

MIB = 1024 * 1024
BUSY_S = 30.0
"""Far more than anything here takes that is not held up, on a machine that is busy with others."""


def assert_limited(result: ExecutionResult, outcome: Outcome, limit: str, value: float) -> None:
    assert result.outcome is outcome, result.error
    assert result.error is not None
    assert (result.error.limit, result.error.limit_value) == (limit, value)
    assert result.error.used is not None


@pytest.mark.conforms("Q23", "EX-43", "Q-b24", "Q-b10")
@pytest.mark.parametrize(
    "script",
    [
        "import time; time.sleep(60)",
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
        "x = 7 ** (7 ** 9)",
    ],
)
def test_wall_time_ends_every_kind_of_script(run: Run, script: str) -> None:
    result = run(f"print('started')\n{script}", limits=Limits(wall_s=1.2))

    assert_limited(result, Outcome.TIMEOUT, "wall_s", 1.2)
    assert result.error is not None
    assert "timed out after 1.2 s" in result.error.message
    assert result.logs.text == "started\n"
    assert 1.2 <= result.usage.wall_s < BUSY_S


@pytest.mark.conforms("EX-43", "Q23")
def test_a_script_that_sleeps_too_long_is_ended_with_all_its_processes(run: Run) -> None:
    name = f"sleeper-{os.getpid()}"

    def named() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["name"]) if process.info["name"] == name]

    source = f"""
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"{name}")
os.fork()
os.fork()
print("asleep")
time.sleep(600)"""

    result = run(source, limits=Limits(wall_s=2))

    assert result.outcome is Outcome.TIMEOUT
    assert result.error is not None
    assert "timed out" in result.error.message
    assert result.logs.text == "asleep\n" * 4
    assert psutil.wait_procs(named(), timeout=BUSY_S)[1] == []


def test_a_script_that_hangs_up_and_lives_on_is_killed(run: Run) -> None:
    result = run("print('said')\nimport os, time\nos.closerange(3, 256)\ntime.sleep(60)")

    assert result.outcome is Outcome.KILLED
    assert result.error is not None
    assert result.error.signal == signal.SIGKILL
    assert result.logs.text == "said\n"


@pytest.mark.conforms("Q-b10")
def test_cpu_time_is_bounded_apart_from_wall_time(run: Run) -> None:
    result = run("while True: pass", limits=Limits(cpu_s=0.3, wall_s=BUSY_S))

    assert_limited(result, Outcome.CPU_LIMIT, "cpu_s", 0.3)


@pytest.mark.parametrize(
    "script",
    [
        "rows = []\nwhile True: rows.append(bytes(1 << 20))",
        "x = bytearray(1 << 40)",
        "import mmap\nmaps = [mmap.mmap(-1, 1 << 20) for _ in range(200)]\nfor m in maps: m.write(bytes(1 << 20))",
        "s = 'x'\nwhile True: s += s",
    ],
)
def test_memory_is_bounded(run: Run, script: str) -> None:
    result = run(script, limits=Limits(memory_bytes=64 * MIB))

    assert_limited(result, Outcome.MEMORY_LIMIT, "memory_bytes", 64 * MIB)


def test_files_count_as_memory_too(run: Run) -> None:
    script = "with open('big', 'wb') as f:\n    for _ in range(200): f.write(bytes(1 << 20))"
    result = run(script, limits=Limits(memory_bytes=48 * MIB, disk_bytes=256 * MIB))

    if "cgroup" in result.isolation.layers:
        assert result.outcome in (Outcome.MEMORY_LIMIT, Outcome.ERROR)
    else:  # nothing but disk_bytes bounds files there, and they fit
        assert result.outcome is Outcome.OK


@pytest.mark.parametrize(
    "script",
    [
        "import os\nwhile True: os.fork()",
        "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(9); os._exit(0)",
    ],
)
def test_processes_and_threads_are_bounded(run: Run, script: str) -> None:
    result = run(script, limits=Limits(processes=20))

    assert result.usage.peak_processes <= 20
    if "cgroup" in result.isolation.layers or result.outcome is not Outcome.ERROR:
        assert_limited(result, Outcome.PROCESS_LIMIT, "processes", 20)
    else:  # a storm that is over before the monitor measures leaves nothing but the script's own claim
        assert result.error is not None
        assert result.error.type in ("BlockingIOError", "RuntimeError")


THREADS = """
import threading
done, wait = [], threading.Event()
def work(): wait.wait(); done.append(1)
threads = []
for _ in range(40):
    try:
        thread = threading.Thread(target=work)
        thread.start()
        threads.append(thread)
    except RuntimeError: pass
wait.set()
for thread in threads: thread.join()
len(done)
"""


def test_a_limit_whose_error_a_script_caught_is_named_in_its_result(run: Run) -> None:
    result = run(THREADS, limits=Limits(processes=20))

    assert result.outcome is Outcome.OK, result.error
    assert result.value < 20
    if "cgroup" in result.isolation.layers:
        (said,) = result.warnings
        assert "reached the limit processes=20" in said
        assert f"warning: {said}" in str(result)
        assert f"warning: {said}" in CodeTool.result(result).text
        assert f"warning: {said}" in result._repr_html_()
        assert answer(result).structured_content["warnings"] == [said]
    assert run(THREADS, limits=Limits(processes=60)).warnings == ()


PRINTED = {
    "lines": ("for n in range(20_000): print('x' * 99)", 2_000_000),
    "empty lines": ("for n in range(20_000): print()", 20_000),
    "one character at a time": ("for n in range(20_000): print('é', end='')", 40_000),
    "the descriptor": "import os\nfor n in range(3000): os.write(1 + n % 2, b'x')",
    "a process of its own": "import os\nif not os.fork(): os.write(1, b'x' * 3000); os._exit(0)\nos.wait()",
    "the C library": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.puts(b'x' * 2999)\nlibc.fflush(None)",
    "threads": "import threading\nall = [threading.Thread(target=print, args=('x' * 99,)) for n in range(30)]\n"
    "for each in all: each.start()\nfor each in all: each.join()",
}  # fmt: skip
"""Scripts by the way they print, with the bytes that they print: 3000 where nothing is said."""


@pytest.mark.slow
def test_output_flood_bytes_counts_the_bytes_that_are_printed_and_no_others(
    run: Run, sync_runtime: SyncRuntime
) -> None:
    for way, given in PRINTED.items():
        source, size = given if isinstance(given, tuple) else (given, 3000)
        with sync_runtime.session() as session:
            for route in (run, session.execute_code):  # what is too much ends the session's last script
                allowed = route(source, limits=Limits(output_flood_bytes=size))
                logs = allowed.logs
                assert (way, allowed.outcome, logs.stdout_bytes + logs.stderr_bytes) == (way, Outcome.OK, size)
                refused = route(source, limits=Limits(output_flood_bytes=size - 1))
                assert_limited(refused, Outcome.OUTPUT_LIMIT, "output_flood_bytes", size - 1)
                assert (way, refused.error and refused.error.used) == (way, size)


def test_an_endless_line_is_held_within_the_limit(run: Run) -> None:
    result = run("print('z' * 5_000_000)\nprint('end')", limits=Limits(output_bytes=2000))

    assert result.outcome is Outcome.OK
    assert result.logs.text.endswith("end\n")
    assert len(result.logs.text) < 2200
