"""Cancellation and death: a run or a sandbox that ends at any moment, by its own action or by the host's."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, Final

import anyio

from toolcell.errors import SandboxUnavailable
from toolcell.results import Outcome
from toolcell.run import SandboxRunner
from toolcell.sandbox import Sandbox
from toolcell.testing.contract.case import CaseGroup
from toolcell.testing.harness import (
    CALL_AND_STAY,
    LIMITS,
    SOON_S,
    BackendHarness,
    ContractViolation,
    eventually,
    expect,
    expect_equal,
    expect_outcome,
    tool_that_sets,
)

cancelling_cases = CaseGroup("cancelling")

REUSED: Final = 16
"""Pairs of sockets that take the numbers of a destroyed sandbox's descriptors."""

SLEEP = "set_result('early')\nprint('started')\nimport time\ntime.sleep(60)"


@cancelling_cases
async def by_event(harness: BackendHarness) -> None:
    """Setting the event ends the run soon; its value, output and calls so far are kept."""
    cancel = anyio.Event()
    source = f"call_tool('echo', q=1)\n{SLEEP}"
    with _EndsSoon():
        result = await harness.run(source, cancel=cancel, on_log=lambda *_: cancel.set())
    expect_outcome(result, Outcome.CANCELLED)
    expect_equal(
        (result.value, result.logs.text, len(result.calls)),
        ("early", "started\n", 1),
        "value, output and calls before the end",
    )
    expect_equal(await harness.value("set_result(2)"), 2, "the next run")


@cancelling_cases
async def by_event_during_a_call(harness: BackendHarness) -> None:
    """A run that waits for a tool is cancelled together with the call."""
    cancel = anyio.Event()
    harness.entered = anyio.Event()
    async with anyio.create_task_group() as tasks:

        async def set_when_called() -> None:
            await harness.entered.wait()
            cancel.set()

        tasks.start_soon(set_when_called)
        with _EndsSoon():
            await harness.run("call_tool('stay')", Outcome.CANCELLED, cancel=cancel)


@cancelling_cases
async def of_the_task(harness: BackendHarness) -> None:
    """Cancelling the task that runs a script ends the script soon; the next run succeeds."""
    for source in (SLEEP, "print('started')\nwhile True: pass", "print('started')\ncall_tool('stay')"):
        started = anyio.Event()
        with _EndsSoon():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_run_until_cancelled, harness, source, lambda *_, event=started: event.set())
                await started.wait()
                tasks.cancel_scope.cancel()
    expect_equal(await harness.value("set_result(2)"), 2, "the next run")


@cancelling_cases
async def of_a_start(harness: BackendHarness) -> None:
    """After a start was cancelled, the backend starts sandboxes as before."""
    for delay_s in (0.0, 0.001, 0.01, 0.05):
        with anyio.move_on_after(delay_s):
            async with harness.connection():
                pass
    with _EndsSoon():
        async with harness.connection() as connection:
            expect(connection.is_usable, "the next sandbox cannot be used")


async def _run_until_cancelled(harness: BackendHarness, source: str, on_log: Callable[..., Any]) -> None:
    await harness.run(source, on_log=on_log)
    raise ContractViolation("the run ended before it was cancelled")


class _EndsSoon:
    """Raise `ContractViolation` when the block takes too long."""

    def __enter__(self) -> None:
        self._began = anyio.current_time()

    def __exit__(self, *exc_info: object) -> None:
        took_s = anyio.current_time() - self._began
        if exc_info[0] is None and took_s > SOON_S:
            raise ContractViolation(f"it took {took_s:.1f} s to end")


deaths_cases = CaseGroup("deaths")


@deaths_cases
async def by_exit(harness: BackendHarness) -> None:
    """A guest that exits without Done has the outcome `killed`; the error has the exit code where it is known."""
    result = await harness.run("set_result('early')\nprint('printed')\nimport os\nos._exit(3)", Outcome.KILLED)
    expect_equal((result.value, result.logs.text), ("early", "printed\n"), "value and output before the end")
    assert result.error is not None
    expect(result.error.exit_code in (3, None), f"the exit code is {result.error.exit_code}")


deaths_cases.ends(
    "by_a_crash",
    "A guest whose interpreter crashes has the outcome `killed`; the next run succeeds.",
    ["import ctypes\nctypes.string_at(0)"],
    Outcome.KILLED,
    wall_s=10.0,
)


OWN_SIGNALS = {
    "os.abort()": 6,
    "os.kill(os.getpid(), 9)": 9,
    "os.kill(0, 9)": 9,
    "os.kill(os.getpid(), signal.SIGTERM)": 15,
    "signal.raise_signal(signal.SIGTERM)": 15,
    "signal.pthread_sigmask(signal.SIG_BLOCK, [10])\nos.kill(os.getpid(), 10)\n"
    "signal.pthread_sigmask(signal.SIG_SETMASK, [])": 10,
    "signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)": 10,
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\nthreading.Event().wait(30)": 14,
}
"""How a script ends itself by a signal, and its number."""
SIGKILL = 9


@deaths_cases
async def by_its_own_signal(harness: BackendHarness) -> None:
    """A guest that sends itself a signal without a handler has the outcome `killed`; the error has the signal, or that
    by which the backend has removed what was left."""
    for source, number in OWN_SIGNALS.items():
        result = await harness.run(f"import os, signal, threading\nprint('printed')\n{source}", Outcome.KILLED)
        assert result.error is not None
        expect(result.error.signal in (number, SIGKILL, None), f"{source}: the signal is {result.error.signal}")
        expect_equal(result.logs.text, "printed\n", "output before the end")
    handled = "import os, signal\nsignal.signal(15, lambda *_: set_result('handled'))\nos.kill(os.getpid(), 15)"
    expect_equal(await harness.value(handled), "handled", "a signal with a handler")


@deaths_cases
async def during_a_call(harness: BackendHarness) -> None:
    """When a guest dies during a tool call, the call ends with it."""
    source = "import os, threading\nthreading.Timer(1.0, os._exit, (4,)).start()\ncall_tool('stay')"
    result = await harness.run(source, Outcome.KILLED)
    expect_equal(len(result.calls), 1, "calls")


@deaths_cases
async def before_hello(harness: BackendHarness) -> None:
    """A guest that dies before its Hello raises SandboxUnavailable; no code ran."""
    async with harness.sandbox() as sandbox:
        sandbox.kill()
        try:
            with anyio.fail_after(SOON_S):
                await SandboxRunner(sandbox).hello()
                # It may have said Hello before it was killed. Then `is_alive` must become False.
                await eventually(lambda: not sandbox.is_alive(), "a killed sandbox counts as alive")
        except SandboxUnavailable:
            pass
    expect_equal(await harness.value("set_result(1)"), 1, "the next run")


@deaths_cases
async def while_idle(harness: BackendHarness) -> None:
    """When a waiting sandbox dies, `is_alive` becomes False and the stream ends."""
    async with harness.connection() as connection:
        connection.sandbox.kill()
        await eventually(lambda: not connection.sandbox.is_alive(), "a killed sandbox counts as alive")
        with anyio.fail_after(SOON_S):
            while await connection.sandbox.stream.receive():
                pass
        expect(not connection.is_usable, "a dead sandbox counts as usable")
        await connection.sandbox.stream.send(b"nobody reads this")


@deaths_cases
async def while_running(harness: BackendHarness) -> None:
    """When the host kills a sandbox during a run, the run ends and `ended` returns the signal."""
    async with harness.connection() as connection, anyio.create_task_group() as tasks:
        called = anyio.Event()

        async def kill() -> None:
            await called.wait()
            connection.sandbox.kill()
            connection.sandbox.kill()

        tasks.start_soon(kill)
        result = await connection.run(CALL_AND_STAY, tool_that_sets(called), LIMITS)
        expect(result.outcome is Outcome.KILLED, f"the outcome is {result.outcome}")
        end = await connection.sandbox.ended()
        expect(end.signal in (9, None), f"it ended by signal {end.signal}")
        expect(not connection.sandbox.is_alive(), "a dead sandbox counts as alive")


@deaths_cases
async def after_done(harness: BackendHarness) -> None:
    """When a sandbox dies after Done, the result of the run does not change."""
    source = """
import os, threading
timer = threading.Timer(1.0, os._exit, (1,))
timer.daemon = True
timer.start()
set_result('done')"""
    async with harness.connection() as connection:
        result = await connection.run(source, harness.registry, LIMITS)
        await eventually(lambda: not connection.sandbox.is_alive(), "a sandbox that ended counts as alive")
    expect_equal((result.outcome, result.value), (Outcome.OK, "done"), "outcome and value")


TICKING = """
import os, signal
def tick(*_): os.write(1, b".")
signal.signal(signal.SIGALRM, tick)
{also}
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
set_result("done")
"""

ALSO = {
    "alone": "",
    "with a child": "while os.fork() == 0:\n    while True: tick()",
    "with a thread": """
def run():
    while True: tick()
import threading
threading.Thread(target=run, daemon=True).start()""",
}


@deaths_cases
async def paused(harness: BackendHarness) -> None:
    """When `pause` returned True, no process of the sandbox runs until `unpause` or `destroy`."""
    await _stands_still(harness, lambda sandbox: sandbox.pause(), "paused")


@deaths_cases
async def frozen(harness: BackendHarness) -> None:
    """When `freeze` returned True, no process of the sandbox runs until `destroy`."""

    async def freeze(sandbox: Sandbox) -> bool:
        return sandbox.freeze()

    await _stands_still(harness, freeze, "frozen")


async def _stands_still(harness: BackendHarness, stop: Callable[[Sandbox], Awaitable[bool]], word: str) -> None:
    for kind, also in ALSO.items():
        async with harness.connection() as connection:
            sandbox = connection.sandbox
            result = await connection.run(TICKING.format(also=also), harness.registry, LIMITS)
            expect_equal((result.outcome, result.value), (Outcome.OK, "done"), f"outcome and value, {kind}")
            if await stop(sandbox):
                await _until_silent(sandbox, f"a {word} sandbox continues, {kind}")
                await sandbox.destroy()
                expect(not sandbox.is_alive(), f"a {word} sandbox outlives its end, {kind}")


@deaths_cases
async def destroyed_twice(harness: BackendHarness) -> None:
    """`destroy` works twice, also at the same time, and the sandbox is dead afterwards."""
    async with harness.connection() as connection:
        sandbox = connection.sandbox
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sandbox.destroy)
            tasks.start_soon(sandbox.destroy)
        await sandbox.destroy()
        expect(not sandbox.is_alive(), "a destroyed sandbox counts as alive")
        sandbox.kill()
        expect_equal(await sandbox.stream.receive(), b"", "bytes from a destroyed sandbox")


@deaths_cases
async def touches_nobody_else(harness: BackendHarness) -> None:
    """A destroyed sandbox reads, signals and stops nothing of whoever has its descriptors' numbers now."""
    async with harness.connection() as old:
        sandbox = old.sandbox
    with ExitStack() as open_now:
        ends = [each for _ in range(REUSED) for each in socket.socketpair()]
        for each in ends:
            open_now.enter_context(each)
            each.setblocking(False)
            each.send(b"of somebody else")
        async with harness.connection() as connection:
            expect_equal(sandbox.read_output(), (b"", b""), "raw output of a destroyed sandbox")
            sandbox.kill()
            sandbox.kill_now()
            expect(not await sandbox.pause(), "a destroyed sandbox was paused")
            expect(not sandbox.freeze(), "a destroyed sandbox was frozen")
            sandbox.ask_line()
            if sandbox.interrupted_s:
                sandbox.interrupt()
            sandbox.sample(last=True)
            sandbox.cpu_now()
            result = await connection.run("set_result(42)", harness.registry, LIMITS)
            expect_equal(result.value, 42, "the value of another sandbox")
            expect_equal(connection.sandbox.read_output(), (b"", b""), "its raw output")
        for each in ends:
            expect_equal(each.recv(64), b"of somebody else", "what is in a socket that has such a number")


@deaths_cases
async def destroyed_under_a_reader(harness: BackendHarness) -> None:
    """`destroy` wakes a task that waits in `receive`."""
    async with harness.connection() as connection:
        received: list[bytes] = []

        async def receive() -> None:
            received.append(await connection.sandbox.stream.receive())

        with anyio.fail_after(SOON_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                await anyio.wait_all_tasks_blocked()
                await connection.sandbox.destroy()
    expect_equal(received, [b""], "what the reader received")


@deaths_cases
async def many_at_once(harness: BackendHarness) -> None:
    """When many sandboxes die at once, all of them are removed and the next run succeeds."""

    async def one(index: int) -> None:
        source = ("import os\nos._exit(1)", "import ctypes\nctypes.string_at(0)", "raise SystemExit(2)")[index % 3]
        result = await harness.run(source, limits=LIMITS.model_copy(update={"wall_s": 5.0}))
        if result.outcome is Outcome.OK:
            raise ContractViolation(f"{source!r} ended well")

    async with anyio.create_task_group() as tasks:
        for index in range(6):
            tasks.start_soon(one, index)
    expect_equal(await harness.value("set_result(1)"), 1, "the next run")


async def _until_silent(sandbox: Sandbox, problem: str) -> None:
    """Wait until the sandbox has written nothing for a tenth of a second."""
    silent = 0
    with anyio.move_on_after(SOON_S):
        while silent < 20:
            silent = 0 if any(sandbox.read_output()) else silent + 1
            await anyio.sleep(0.005)
        return
    raise ContractViolation(f"{problem}, {SOON_S:g} s later")
