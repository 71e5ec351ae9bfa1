"""A session's scripts share names, imports and files, one script at a time, and each is a run of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anyio
import psutil
import pytest

from toolcell import (
    ExecutionResult,
    Limits,
    Outcome,
    PoolConfig,
    Runtime,
    SandboxUnavailable,
    SyncRuntime,
    ToolRegistry,
    UsageError,
)
from toolcell.errors import SessionError
from toolcell.sandbox.process.backend import ProcessSandbox
from toolcell.sessions.blocking import SyncSession
from toolcell.sessions.session import Session
from toolcell.testing import FakeBackend
from toolcell_bridge.guest.interrupts import INTERRUPT_SIGNAL

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

HELPER = """
import statistics

class Table:
    def __init__(self, rows): self.rows = rows
    def mean(self, name): return statistics.mean(row[name] for row in self.rows)
"""


class Effects:
    """A registry whose tools note each call."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.registry = ToolRegistry()

        @self.registry.tool
        async def write(text: str) -> int:
            """Append a line to a file."""
            self.made.append(text)
            return len(self.made)

        @self.registry.tool
        async def wait_for_ever() -> None:
            """Wait until the call is cancelled."""
            self.made.append("waits")
            await anyio.sleep_forever()


@pytest.fixture
def effects() -> Effects:
    return Effects()


@pytest.fixture(scope="module")
def runtime() -> Iterator[SyncRuntime]:
    with SyncRuntime(pool=PoolConfig(warm=1)) as opened:
        yield opened


@pytest.fixture
def session(runtime: SyncRuntime, effects: Effects) -> Iterator[SyncSession]:
    with runtime.session(tools=effects.registry) as opened:
        yield opened


def value(session: SyncSession, source: str, **options: Any) -> Any:
    result = session.execute_code(source, **options)
    assert result.ok, result
    return result.value


def began(result: ExecutionResult) -> str:
    assert result.session is not None
    return result.session.began


def lost(result: ExecutionResult) -> str:
    assert result.session is not None
    return result.session.lost


@pytest.mark.conforms("Q34")
def test_a_script_finds_what_the_scripts_before_it_imported_defined_and_wrote(session: SyncSession) -> None:
    value(session, f"{HELPER}\nopen('rows.txt', 'w').write('kept')")
    value(session, "table = Table([{'a': 1}, {'a': 4}]); log = 'my own'")

    assert value(session, "[table.mean('a'), open('rows.txt').read(), log, statistics.median([1, 2])]") == [
        2.5,
        "kept",
        "my own",
        1.5,
    ]


def test_a_script_that_fails_leaves_what_python_would_and_its_traceback_names_each_script(session: SyncSession) -> None:
    value(session, "def half(x):\n    return x / zero")
    failed = session.execute_code("zero = 0\nbefore = 1\nhalf(1)\nafter = 2")

    assert failed.outcome is Outcome.ERROR and failed.error is not None and failed.error.line == 3
    assert 'File "<code 2>", line 3' in failed.error.traceback and 'File "<code>", line 2' in failed.error.traceback
    assert "return x / zero" in failed.error.traceback and not lost(failed)
    assert value(session, "[before, 'after' in globals()]") == [1, False]


def test_files_can_be_put_listed_and_read_and_a_second_put_replaces(session: SyncSession) -> None:
    session.put_files({"a.txt": "a long first text", "sub/b.bin": b"\0\1"})
    session.put_files({"a.txt": "short"})

    assert [(file.name, file.size) for file in session.files()] == [("a.txt", 5), ("sub/b.bin", 2)]
    assert session.read_file("a.txt") == b"short"
    assert value(session, "sorted(input_files)") == ["a.txt", "sub/b.bin"]
    with pytest.raises(UsageError, match=r"'none\.txt' cannot be read: missing"):
        session.read_file("none.txt")


@pytest.mark.parametrize("make", ["os.mkfifo('odd')", "os.mkdir('odd')", "os.symlink('/dev/zero', 'odd')"])
def test_a_file_is_not_put_where_a_script_made_something_else_and_the_session_goes_on(
    session: SyncSession, make: str
) -> None:
    session.execute_code(f"import os\n{make}")
    with pytest.raises(UsageError, match="the files were not written: input file 'odd': "):
        session.put_files({"odd": "x", "after.txt": "y"})
    with pytest.raises(UsageError, match="'odd' cannot be read: "):
        session.read_file("odd")
    assert value(session, "1 + 1") == 2


NO_VALUE = "no_value = (i for i in range(9))"
"""A generator cannot be kept by value: a session with it is rebuilt by running its scripts again."""

NOTICES_NO_SIGNAL = (
    f"import signal, time\nsignals = [{INTERRUPT_SIGNAL}]\nsignal.pthread_sigmask(signal.SIG_BLOCK, signals)\n"
    "progress(1)\ntime.sleep(0.5)\nsignal.pthread_sigmask(signal.SIG_UNBLOCK, signals)"
)
"""As a function written in C that takes half a second."""


@pytest.mark.parametrize(
    ("source", "limits", "outcome"),
    [
        ("while True: k += 1", Limits(wall_s=0.2), Outcome.TIMEOUT),
        ("import time\ntime.sleep(60)", Limits(wall_s=0.2), Outcome.TIMEOUT),
        ("call_tool('wait_for_ever')", Limits(wall_s=0.2), Outcome.TIMEOUT),
        ("await call_tool_async('wait_for_ever')", Limits(wall_s=0.2), Outcome.TIMEOUT),
        (f"{NOTICES_NO_SIGNAL}\nwhile True: pass", Limits(wall_s=0.2), Outcome.TIMEOUT),
        ("k = 1\nwhile True: k += 1", Limits(cpu_s=0.2), Outcome.CPU_LIMIT),
        ("k = 1\nwhile True: print('x' * 999)", Limits(output_flood_bytes=100_000), Outcome.OUTPUT_LIMIT),
        ("k = 1\nfor _ in range(101): print('x' * 999)", Limits(output_flood_bytes=100_000), Outcome.OUTPUT_LIMIT),
    ],
    ids=["a loop", "a sleep", "a call", "an async call", "a function in C", "CPU time", "output", "its last output"],
)
def test_a_script_past_a_limit_is_interrupted_and_the_session_keeps_its_state(
    session: SyncSession, source: str, limits: Limits, outcome: Outcome
) -> None:
    value(session, "before, k = 'kept', 0")
    stopped = session.execute_code(source, limits=limits)

    assert stopped.outcome is outcome and stopped.error is not None and "keeps its state" in stopped.error.message
    assert not lost(stopped)
    after = session.execute_code("[before, k, call_tool('write', text='after')]")
    ran = outcome is not Outcome.TIMEOUT  # in 0.2 s on a busy machine, perhaps nothing
    assert began(after) == "live" and after.value[0] == "kept" and after.value[1] >= ran


@pytest.mark.parametrize("restore", ["journal", "empty"])
def test_a_script_that_does_not_let_itself_be_interrupted_costs_the_session_its_state(
    runtime: SyncRuntime, effects: Effects, restore: str
) -> None:
    with runtime.session(tools=effects.registry, restore=restore) as session:
        value(session, "import random\nx = [call_tool('write', text='once'), random.random()]\nx[0]")
        stopped = session.execute_code(
            "y = 1\nwhile True:\n  try:\n    sum(range(10**10))\n  except: pass", limits=Limits(wall_s=0.1)
        )
        with pytest.raises(SessionError, match=r"cannot be forked: it was lost|keeps no journal"):
            session.fork()
        after = session.execute_code("['x' in globals(), 'y' in globals()]")

    assert stopped.outcome is Outcome.TIMEOUT and "did not end" in lost(stopped)
    assert began(after) == restore
    assert after.value == [restore == "journal", False]
    assert effects.made == ["once"]


def test_a_killed_sandbox_is_rebuilt_from_the_journal_without_a_call_made_twice(
    session: SyncSession, effects: Effects
) -> None:
    value(session, "import os, random, time\na = call_tool('write', text='a')")
    session.put_files({"f.txt": "f"})
    value(session, "b = [random.random(), time.time(), call_tool('write', text='b'), open('f.txt').read()]")
    before = value(session, "b")
    killed = session.execute_code("os.kill(os.getpid(), 9)\nos._exit(1)")
    after = session.execute_code("b")

    assert killed.outcome is Outcome.KILLED and lost(killed)
    assert killed.error is not None and "the next script begins with the state before it" in killed.error.message
    assert began(after) == "journal" and after.value == before
    assert effects.made == ["a", "b"]


def test_a_session_that_was_put_down_comes_back_with_its_next_script(session: SyncSession, effects: Effects) -> None:
    value(session, "x = call_tool('write', text='x')")
    session.put_down()

    assert not session.session.is_live
    after = session.execute_code("x")
    assert (after.value, began(after), effects.made) == (1, "value", ["x"])


def test_a_state_that_cannot_be_kept_by_value_is_rebuilt(session: SyncSession, effects: Effects) -> None:
    value(session, f"x = call_tool('write', text='x')\n{NO_VALUE}")
    session.put_down()

    after = session.execute_code("[x, next(no_value)]")
    assert (after.value, began(after), effects.made) == ([1, 0], "journal", ["x"])


def test_a_fork_has_the_state_and_goes_its_own_way(session: SyncSession, effects: Effects) -> None:
    value(session, "x = [call_tool('write', text='x')]")
    with session.fork("copy") as copy:
        value(copy, "x.append('copy')")
        assert value(copy, "x") == [1, "copy"]
    assert value(session, "x") == [1]
    assert effects.made == ["x"]


def test_reset_begins_again_with_nothing(session: SyncSession) -> None:
    value(session, "x = 1; open('f', 'w').write('f')")
    session.reset()

    after = session.execute_code("'x' in globals()")
    assert (after.value, began(after), session.files()) == (False, "new", ())


def test_threads_and_processes_that_a_script_leaves_are_reported_and_ended(session: SyncSession) -> None:
    left = session.execute_code(
        "import os, threading, time, concurrent.futures, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"  # from 3.12 on, that it forks beside threads
        "def work():\n  while True: time.sleep(0.001)\n"
        "threading.Thread(target=work, name='worker').start()\n"
        "pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix='idle')\npool.submit(len, '').result()\n"
        "if os.fork() == 0: time.sleep(60)"
    )

    assert left.session is not None and not left.session.lost
    assert set(left.session.ended) == {"thread 'worker'", "thread 'idle_0'", "1 process"} and not left.logs.text
    assert value(session, "[len(threading.enumerate()), pool._shutdown]") == [1, True]


def test_an_idle_thread_of_a_pool_that_is_slow_to_wake_ends_without_a_word(session: SyncSession) -> None:
    left = session.execute_code(
        "import concurrent.futures, queue, time\n"
        "class Slow(queue.SimpleQueue):\n"
        "    def get(self, *rest, **named):\n"
        "        item = super().get(*rest, **named)\n"
        "        if item is None:  # the pool is closed\n"
        "            until = time.monotonic() + 0.5\n"
        "            while time.monotonic() < until: pass\n"
        "        return item\n"
        "pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='idle')\n"
        "pool._work_queue = Slow()\n"
        "pool.submit(len, '').result()\n"
    )

    assert left.session is not None and left.session.ended == ("thread 'idle_0'",) and not left.logs.text
    assert value(session, "import logging; logging.getLogger('concurrent.futures').disabled") is False


STUCK = {
    "a lock": "lock = threading.Lock(); lock.acquire()\nthreading.Thread(target=lock.acquire, name='stuck').start()",
    "an event": "threading.Thread(target=threading.Event().wait, name='stuck', daemon=True).start()",
    "a sleep": "threading.Thread(target=time.sleep, args=(60,), name='stuck').start()",
    "a pool": "concurrent.futures.ThreadPoolExecutor(thread_name_prefix='stuck').submit(time.sleep, 60)",
    "a timer": "t = threading.Timer(60, print); t.name = 'stuck'; t.start()",
}


@pytest.mark.parametrize("end", ["", "\nwhile True: pass", "\n1 / 0"], ids=["ends", "is interrupted", "fails"])
@pytest.mark.parametrize("what", STUCK)
def test_a_thread_that_does_not_end_ends_with_its_sandbox_and_the_names_stay(
    session: SyncSession, what: str, end: str
) -> None:
    value(session, "x = [1]\ny = x")
    source = f"import concurrent.futures, threading, time\nx.append(2)\n{STUCK[what]}{end}"
    left = session.execute_code(source, limits=Limits(wall_s=0.5))
    after = session.execute_code("x.append(3)\n[y, len(threading.enumerate())]")
    later = session.execute_code("y")

    assert left.session is not None and after.session is not None and later.session is not None
    assert not left.session.lost
    assert [each[:13] for each in left.session.ended] == ["thread 'stuck"]
    assert after.value == [[1, 2, 3], 1], after.error
    assert (after.session.began, later.session.began) == ("value", "live")
    assert later.value == [1, 2, 3]


def test_names_stay_without_such_a_thread_in_a_session_that_keeps_nothing_else(runtime: SyncRuntime) -> None:
    with runtime.session(restore="empty") as session:
        left = session.execute_code(f"import threading, time\nx = 1\n{STUCK['an event']}")
        after = session.execute_code("x += 1\nx")
        killed = session.execute_code("bytearray(10**9)")
        empty = session.execute_code("'x' in globals()")

    assert left.session is not None and after.session is not None and empty.session is not None
    assert (left.session.ended, left.session.lost) == (("thread 'stuck'",), "")
    assert (after.session.began, after.value) == ("value", 2)
    assert lost(killed)
    assert (empty.session.began, empty.value) == ("empty", False)


def test_a_state_that_a_thread_keeps_from_being_written_is_the_one_before(session: SyncSession) -> None:
    value(session, "x = 1")
    left = session.execute_code(
        "import threading\nfrom toolcell_bridge.guest import session_values\nsession_values.keep = None\nx = 2\n"
        f"{STUCK['an event']}"
    )

    assert left.ok and "thread 'stuck'" in lost(left)
    assert value(session, "x") == 1


def test_a_session_holds_all_its_scripts_to_its_limits(runtime: SyncRuntime, effects: Effects) -> None:
    with runtime.session(tools=effects.registry, tool_calls=3, cpu_s=0.15) as session:
        value(session, "call_tool('write', text='1'); call_tool('write', text='2')")
        refused = session.execute_code("call_tool('write', text='3'); call_tool('write', text='4')")
        spent = session.execute_code("while True: pass")
        with pytest.raises(SessionError, match=r"has used 0\.\d+ of its 0\.15 CPU seconds"):
            session.execute_code("1")

    assert refused.outcome is Outcome.CALL_LIMIT and effects.made == ["1", "2", "3"]
    assert spent.outcome is Outcome.CPU_LIMIT


def test_a_script_cannot_change_the_limits_of_its_sandbox(session: SyncSession) -> None:
    with pytest.raises(UsageError, match=r"asks for memory_bytes=67108864, and the session's sandbox has 536870912"):
        session.execute_code("1", limits=Limits(memory_bytes=2**26))


@pytest.mark.slow
def test_a_script_that_diverges_in_the_rebuilding_is_named(session: SyncSession, effects: Effects) -> None:
    value(
        session,
        "import time\nfor _ in range(1 + (time.monotonic_ns() // 2) % 2 ** 40): break\n"
        f"call_tool('write', text=str(time.monotonic_ns()))\n{NO_VALUE}",
    )
    session.put_down()
    with pytest.raises(SessionError, match=r"script 1 did not repeat what it had done: call 1 of write .* reset\(\)"):
        session.execute_code("1")
    session.reset()

    assert value(session, "2") == 2 and len(effects.made) == 1


def test_a_call_that_a_script_did_not_wait_for_is_not_made_again_in_the_rebuilding(
    session: SyncSession, effects: Effects
) -> None:
    value(
        session,
        "import asyncio\ntask = asyncio.create_task(call_tool_async('wait_for_ever'))\n"
        "x = await call_tool_async('write', text='x')",
    )
    session.put_down()

    assert began(session.execute_code("x")) == "journal" and sorted(effects.made) == ["waits", "x"]


def test_the_rebuilding_makes_no_call_that_was_not_made_before(session: SyncSession, effects: Effects) -> None:
    @effects.registry.tool
    def host_clock() -> int:
        """Return the clock of the host."""
        return time.monotonic_ns()

    script = "import time\nt = time.monotonic_ns()\nif t > call_tool('host_clock'): call_tool('write', text='hidden')"
    script = f"{NO_VALUE}\n{script}"
    value(session, script)  # its own clock is past the recorded one only when it runs again
    session.put_down()
    with pytest.raises(SessionError, match="call 2 of write was not made before, and no call is made to rebuild"):
        session.execute_code("1")

    assert effects.made == []


EVADES = """
import os, toolcell_bridge.guest.script_end as leftovers
"""


async def test_what_a_script_hides_between_scripts_is_counted_and_ends_with_the_cpu_time_of_the_session(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cannot(_sandbox: ProcessSandbox) -> bool:
        return False

    monkeypatch.setattr(ProcessSandbox, "pause", cannot)  # otherwise it would not use its time up
    hides = "leftovers.end_leftovers = lambda end_s: ([], [])\nif os.fork() == 0:\n    while True: pass"
    async with Runtime(pool=PoolConfig(warm=1)) as runtime, runtime.session(cpu_s=0.3) as session:
        hidden = await session.execute_code(EVADES + hides)
        with anyio.fail_after(60):
            while session.is_live:
                await anyio.sleep(0.02)

        assert hidden.ok and session.used_cpu_s >= 0.3
        with pytest.raises(SessionError, match=r"has used .* of its 0\.3 CPU seconds"):
            await session.execute_code("1")


def test_what_a_guest_claims_to_have_left_running_is_cut(session: SyncSession) -> None:
    many = session.execute_code(f"{EVADES}leftovers.end_leftovers = lambda end_s: (['x' * 500] * 10_000, [])")
    stuck = session.execute_code("leftovers.end_leftovers = lambda end_s: ([], ['x' * 500] * 10_000)")

    assert many.session is not None and len(many.session.ended) == 20
    assert stuck.session is not None and len(stuck.session.ended) == 20
    assert sum(map(len, stuck.session.ended)) < 3000


@pytest.mark.anyio
async def test_calls_of_a_script_whose_caller_gave_up_count_for_the_session(effects: Effects) -> None:
    async with (
        Runtime(effects.registry, pool=PoolConfig(warm=0)) as runtime,
        runtime.session() as session,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(session.execute_code, "call_tool('wait_for_ever')")
        with anyio.fail_after(60):
            while not effects.made:
                await anyio.sleep(0.005)
        tasks.cancel_scope.cancel()

    assert session.used_calls == 1


@pytest.mark.conforms("Q-b17")
def test_names_of_sessions_are_checked_and_unique(runtime: SyncRuntime) -> None:
    for name in ("", "a/b", "..", "x" * 65, "é", 7):
        with pytest.raises(UsageError, match="a session's name has 1 to 64 letters"):
            runtime.session(name)  # type: ignore[arg-type]
    with runtime.session("one") as session, pytest.raises(UsageError, match="a session named 'one' is open already"):
        session.fork("one")
    with runtime.session("one") as again:
        assert value(again, "1") == 1


def test_a_session_that_is_closed_or_not_open_says_so(runtime: SyncRuntime) -> None:
    session = runtime.session("late")
    with pytest.raises(SessionError, match="session 'late' is not open"):
        session.execute_code("1")
    with session:
        pass
    session.close()
    with pytest.raises(SessionError, match="session 'late' is closed"):
        session.execute_code("1")
    with pytest.raises(UsageError, match="was opened already"), session:
        pass


async def test_scripts_from_several_tasks_run_one_after_the_other(anyio_backend: Any) -> None:
    async with Runtime(pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        await session.execute_code("seen = []")

        async def run(number: int) -> None:
            await session.execute_code(f"seen.append({number}); seen.append({number})")

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(run, number)
        seen = (await session.execute_code("seen")).value

    assert sorted(seen[::2]) == list(range(8)) and seen[::2] == seen[1::2]


async def interrupted(session: Session, source: str, limits: Limits | None = None) -> ExecutionResult:
    """Run a script, and interrupt it once it reports its progress."""
    running = anyio.Event()

    async def interrupt() -> None:
        await running.wait()
        assert await session.interrupt()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(interrupt)
        return await session.execute_code(source, on_progress=lambda _: running.set(), limits=limits)


@pytest.mark.parametrize("before", ["progress(1)", NOTICES_NO_SIGNAL], ids=["at once", "something has to end first"])
async def test_interrupt_ends_the_script_under_way_and_no_other(anyio_backend: str, before: str) -> None:
    async with Runtime(pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        assert not await session.interrupt()
        result = await interrupted(session, f"x = 1\n{before}\nwhile True: pass")
        after = await session.execute_code("x")

    assert result.outcome is Outcome.CANCELLED and result.error is not None and after.value == 1
    assert before == NOTICES_NO_SIGNAL or result.error.line in (2, 3)


HANDLES = "try:\n    {waits}\nexcept {error}:\n    set_result(call_tool('write', text='saved'))"
CALLS = "progress(1)\n    call_tool('wait_for_ever')"


@pytest.mark.parametrize(
    ("waits", "error"),
    [
        ("progress(1)\n    while True: pass", "KeyboardInterrupt"),
        (CALLS, "KeyboardInterrupt"),
        (
            "import asyncio\n    asyncio.get_running_loop().call_later(0.01, progress, 1)\n    await asyncio.sleep(60)",
            "asyncio.CancelledError",
        ),
    ],
)
async def test_a_script_that_handles_an_interrupt_goes_on_and_ends_in_its_own_way(
    anyio_backend: str, effects: Effects, waits: str, error: str
) -> None:
    async with Runtime(effects.registry, pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        await session.execute_code("kept = 1")
        result = await interrupted(session, HANDLES.format(waits=waits, error=error))
        await session.put_down()  # nothing can repeat it: the state comes back by value
        after = await session.execute_code("kept")

    assert (result.outcome, result.error, effects.made[-1:]) == (Outcome.OK, None, ["saved"])
    assert after.value == 1 and after.session is not None and after.session.began == "value"


async def test_an_interrupt_is_not_lost_between_the_sending_of_a_call_and_the_wait_for_its_answer(
    anyio_backend: str, effects: Effects
) -> None:
    async with Runtime(effects.registry) as runtime, runtime.session() as session:
        for _ in range(40):  # each comes at another moment
            result = await interrupted(session, HANDLES.format(waits=CALLS, error="KeyboardInterrupt"))
            assert (result.outcome, effects.made[-1]) == (Outcome.OK, "saved")


async def test_an_interrupt_that_is_handled_for_ever_ends_the_script(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolcell.sessions.session.INTERRUPT_S", 0.2)
    async with Runtime(pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        source = (
            "while True:\n    try:\n        progress(1)\n        while True: pass\n    except KeyboardInterrupt: pass"
        )
        result = await interrupted(session, source, limits=Limits(wall_s=10))

    assert result.outcome is Outcome.CANCELLED


def test_a_process_that_a_script_left_is_ended_also_where_nothing_isolates() -> None:
    plain = SyncRuntime(backend=FakeBackend(), pool=PoolConfig(warm=0), allow_unisolated=True)
    with plain as runtime, runtime.session() as session:
        left = session.execute_code("import os, time\npid = os.fork()\nif pid == 0: time.sleep(60)\npid")

        assert left.ok and not psutil.pid_exists(left.value)
        assert value(session, "pid") == left.value


def test_scripts_share_an_event_loop_and_what_they_leave_running_is_ended_by_name(session: SyncSession) -> None:
    value(
        session,
        "import asyncio\nlock, queue, log = asyncio.Lock(), asyncio.Queue(), []\nloop = asyncio.get_running_loop()\n"
        "async def numbers():\n    try:\n        for n in range(9): yield n\n    finally: log.append('closed')\n"
        "async def poll():\n    try: await asyncio.sleep(60)\n    finally: log.append('ended')\n"
        "reader = numbers()\nawait reader.__anext__()\nawait queue.put('item')\nwaiting = asyncio.ensure_future(lock.acquire())\n"
        "await asyncio.sleep(0)",
    )
    again = session.execute_code(
        "lock.release()\nleft = asyncio.create_task(poll())\n"
        "async with lock: x = [await queue.get(), await reader.__anext__(), loop is asyncio.get_running_loop(), list(log)]\nx"
    )
    assert again.value == ["item", 1, True, []]
    assert again.session is not None and again.session.ended == ("task 'poll'",)
    assert value(session, "[log, loop is asyncio.get_event_loop()]") == [["ended"], True]


async def test_a_session_that_is_closed_does_not_wait_for_what_was_interrupted(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolcell.sessions.session.INTERRUPT_S", 10_000.0)
    running = anyio.Event()
    results: list[ExecutionResult] = []
    async with Runtime(pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:

        async def run() -> None:
            source = "progress(1)\nwhile True:\n    try:\n        while True: pass\n    except BaseException: pass"
            results.append(await session.execute_code(source, on_progress=lambda _: running.set()))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                await running.wait()
                assert await session.interrupt()
                await session.close()

    assert results[0].outcome is Outcome.CANCELLED


@pytest.mark.conforms("Q35")
async def test_an_idle_session_is_put_down_and_one_too_many_puts_down_the_longest_idle(anyio_backend: str) -> None:
    async with Runtime(pool=PoolConfig(warm=0, cap=1)) as runtime:
        async with runtime.session(idle_s=0.05) as session:
            await session.execute_code("x = 1")
            with anyio.fail_after(60):
                while session.is_live:
                    await anyio.sleep(0.01)
            assert (await session.execute_code("x")).value == 1
        async with runtime.session() as first, runtime.session() as second:
            await first.execute_code("x = 1")
            assert not second.is_live
            assert (await second.execute_code("'x' in globals()")).value is False
            assert not first.is_live
            async with second._exclusively():  # as while its next script is checked
                with pytest.raises(SandboxUnavailable, match="none of them can be put down now"):
                    await first.execute_code("x")
            assert second.is_live


async def test_a_session_ends_with_its_runtime(anyio_backend: str) -> None:
    runtime = Runtime(pool=PoolConfig(warm=0))
    await runtime.open()
    session = runtime.session()
    await session.open()
    await session.execute_code("x = 1")
    await runtime.close()

    assert not session.is_live
    with pytest.raises(UsageError, match=r"is closed|is not open"):
        await session.execute_code("x")


FIGURES = """
import sys, types

class Figure:
    def __init__(self): self.canvas = types.SimpleNamespace(figure=self)
    def get_children(self): return [1, 2]
    def savefig(self, file, **options): file.write(b"picture")

opened = {}
module = types.ModuleType("matplotlib._pylab_helpers")
module.Gcf = types.SimpleNamespace(get_all_fig_managers=lambda: list(opened.values()), destroy=opened.pop)
sys.modules["matplotlib._pylab_helpers"] = module

def figure():
    number = len(opened) + 1
    opened[number] = types.SimpleNamespace(num=number, canvas=Figure().canvas)
"""


@pytest.mark.parametrize("end", ["set_result(1)", "1/0", "raise KeyboardInterrupt", "while True: pass"])
def test_figures_of_a_script_are_not_returned_with_the_next_one(session: SyncSession, end: str) -> None:
    session.execute_code(FIGURES)
    shown = session.execute_code("figure()")
    assert [file.name for file in shown.files] == ["script-2-figure-1.png"]

    limits = Limits(cpu_s=0.5) if "while" in end else None
    session.execute_code(f"figure()\n{end}", limits=limits)
    after = session.execute_code("len(opened)")

    assert after.value == 0 and after.files == ()
    assert [file.name for file in session.execute_code("figure()").files] == ["script-5-figure-1.png"]


@pytest.mark.slow
def test_a_figure_that_cannot_be_closed_does_not_end_the_session(session: SyncSession) -> None:
    session.execute_code(FIGURES + "module.Gcf.destroy = None")
    assert session.execute_code("figure()\nset_result(1)").value == 1
    assert session.execute_code("len(opened)").value == 1
