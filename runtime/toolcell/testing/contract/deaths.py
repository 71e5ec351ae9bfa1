"""Death at every moment: before Hello, idle, running, in a call, after Done; by its own hand or by the host's."""

from __future__ import annotations

import anyio

from toolcell.errors import SandboxUnavailable
from toolcell.results import Outcome
from toolcell.run.connection import GuestConnection
from toolcell.sandbox.backend import Sandbox
from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import (
    LIMITS,
    SOON_S,
    BackendHarness,
    Broken,
    eventually,
    expect,
    expect_equal,
    expect_outcome,
    run_on,
)
from toolcell_bridge.wire.messages import CallTool, RunScript, ToolReturn

promises = Promises("deaths")


@promises
async def by_exit(stand: BackendHarness) -> None:
    """A guest that leaves without a word is killed, not ok, and the exit code is told where it can be known."""
    result = await stand.run("set_result('early')\nprint('printed')\nimport os\nos._exit(3)")
    expect_outcome(result, Outcome.KILLED)
    expect_equal((result.value, result.logs.text), ("early", "printed\n"), "what it had said")
    assert result.error is not None
    expect(result.error.exit_code in (3, None), f"the exit code is {result.error.exit_code}")


@promises
async def by_a_crash(stand: BackendHarness) -> None:
    """A guest that crashes the interpreter is killed; the next run is well."""
    result = await stand.run("import ctypes\nctypes.string_at(0)", limits=LIMITS.model_copy(update={"wall_s": 10.0}))
    expect_outcome(result, Outcome.KILLED)
    expect_equal(await stand.value("set_result(1)"), 1, "the next run")


@promises
async def during_a_call(stand: BackendHarness) -> None:
    """A guest that dies while the host works for it: the call is ended with it."""
    source = "import os, threading\nthreading.Timer(1.0, os._exit, (4,)).start()\ncall_tool('stay')"
    result = await stand.run(source)
    expect_outcome(result, Outcome.KILLED)
    expect_equal(len(result.calls), 1, "calls")


@promises
async def before_hello(stand: BackendHarness) -> None:
    """A guest that dies before its Hello makes the sandbox unavailable; no code ran."""
    async with stand.sandbox() as sandbox:
        sandbox.kill()
        try:
            with anyio.fail_after(SOON_S):
                await GuestConnection(sandbox).hello()
                # It may have said Hello before it was killed. Then it is dead now, and that is noticed.
                await eventually(lambda: not sandbox.is_alive(), "a killed sandbox counts as alive")
        except SandboxUnavailable:
            pass
    expect_equal(await stand.value("set_result(1)"), 1, "the next run")


@promises
async def while_idle(stand: BackendHarness) -> None:
    """A sandbox that dies while it waits is noticed: `is_alive` is False and the stream is at its end."""
    async with stand.connection() as connection:
        connection.sandbox.kill()
        await eventually(lambda: not connection.sandbox.is_alive(), "a killed sandbox counts as alive")
        with anyio.fail_after(SOON_S):
            while await connection.sandbox.stream.receive():
                pass
        expect(not connection.is_usable, "a session with a dead sandbox can be used")
        await connection.sandbox.stream.send(b"nobody reads this")


@promises
async def while_running(stand: BackendHarness) -> None:
    """A sandbox that the host kills in the middle of a run ends the run, and says how it ended."""
    async with stand.connection() as connection, anyio.create_task_group() as tasks:
        called = anyio.Event()

        async def dispatch(call: CallTool) -> ToolReturn:
            called.set()
            return ToolReturn(call.id, None)

        async def kill() -> None:
            await called.wait()
            connection.sandbox.kill()
            connection.sandbox.kill()

        tasks.start_soon(kill)
        report = await run_on(connection, _run("call_tool('x')\nimport time\ntime.sleep(60)", "x"), dispatch)
        expect(report.outcome is Outcome.KILLED, f"the outcome is {report.outcome}")
        end = await connection.sandbox.ended()
        expect(end.signal in (9, None), f"it ended by signal {end.signal}")
        expect(not connection.sandbox.is_alive(), "a dead sandbox counts as alive")


@promises
async def after_done(stand: BackendHarness) -> None:
    """A sandbox that dies after its run changes nothing about the run."""
    source = "import os, threading\nthreading.Timer(1.0, os._exit, (1,)).start()\nset_result('done')"
    async with stand.connection() as connection:
        report = await run_on(connection, _run(source), _no_calls)
        await eventually(lambda: not connection.sandbox.is_alive(), "a sandbox that ended counts as alive")
    expect_equal((report.outcome, report.value), (Outcome.OK, "done"), "outcome and value")


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


@promises
async def frozen(stand: BackendHarness) -> None:
    """What a sandbox says that it froze stands still, with all its processes, until it is destroyed."""
    for kind, also in ALSO.items():
        async with stand.connection() as connection:
            sandbox = connection.sandbox
            report = await run_on(connection, _run(TICKING.format(also=also)), _no_calls)
            expect_equal((report.outcome, report.value), (Outcome.OK, "done"), f"outcome and value, {kind}")
            if not sandbox.freeze():
                continue
            await _until_silent(sandbox, f"a frozen sandbox goes on, {kind}")
            await sandbox.destroy()
            expect(not sandbox.is_alive(), f"a frozen sandbox outlives its end, {kind}")


@promises
async def destroyed_twice(stand: BackendHarness) -> None:
    """`destroy` may be called twice, also at once, and leaves a sandbox that is dead."""
    async with stand.connection() as connection:
        sandbox = connection.sandbox
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sandbox.destroy)
            tasks.start_soon(sandbox.destroy)
        await sandbox.destroy()
        expect(not sandbox.is_alive(), "a destroyed sandbox counts as alive")
        sandbox.kill()
        expect_equal(await sandbox.stream.receive(), b"", "what a destroyed sandbox says")


@promises
async def destroyed_under_a_reader(stand: BackendHarness) -> None:
    """`destroy` wakes whoever waits for the sandbox to speak."""
    async with stand.connection() as connection:
        heard: list[bytes] = []

        async def listen() -> None:
            heard.append(await connection.sandbox.stream.receive())

        with anyio.fail_after(SOON_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen)
                await anyio.wait_all_tasks_blocked()
                await connection.sandbox.destroy()
    expect_equal(heard, [b""], "what the reader heard")


@promises
async def a_storm(stand: BackendHarness) -> None:
    """Many sandboxes that die at once are all cleared away, and the next run is well."""

    async def one(index: int) -> None:
        source = ("import os\nos._exit(1)", "import ctypes\nctypes.string_at(0)", "raise SystemExit(2)")[index % 3]
        result = await stand.run(source, limits=LIMITS.model_copy(update={"wall_s": 5.0}))
        if result.outcome is Outcome.OK:
            raise Broken(f"{source!r} ended well")

    async with anyio.create_task_group() as tasks:
        for index in range(6):
            tasks.start_soon(one, index)
    expect_equal(await stand.value("set_result(1)"), 1, "the next run")


async def _until_silent(sandbox: Sandbox, problem: str) -> None:
    """Wait until it has written nothing for a tenth of a second."""
    silent = 0
    with anyio.move_on_after(SOON_S):
        while silent < 20:
            silent = 0 if any(sandbox.read_output()) else silent + 1
            await anyio.sleep(0.005)
        return
    raise Broken(f"{problem}, {SOON_S:g} s later")


def _run(source: str, *tools: str) -> RunScript:
    return RunScript(1, source, {}, list(tools), "off", 1 << 20, 8, 1 << 20, None, None)


async def _no_calls(call: CallTool) -> ToolReturn:
    raise Broken(f"{call.name} was called")
