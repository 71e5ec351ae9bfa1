"""A backend's own life: opening, closing, and that nothing is left of it."""

from __future__ import annotations

import anyio

from toolcell.errors import SandboxUnavailable
from toolcell.results import ExecutionResult, Outcome
from toolcell.run.connection import GuestConnection
from toolcell.sandbox.backend import Backend
from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import (
    LIMITS,
    SOON_S,
    BackendHarness,
    Broken,
    adopting,
    children,
    descriptors,
    eventually,
    expect,
    expect_equal,
    expect_outcome,
    run_on,
)
from toolcell_bridge.wire.messages import CallTool, RunScript, ToolReturn

promises = Promises("life")

SPARE_DESCRIPTORS = 2
"""An event loop or a library may open one or two once, when it first needs them."""


@promises
async def named(stand: BackendHarness) -> None:
    """A backend has a name, and says whether it isolates."""
    name, isolates = type(stand.backend).name, type(stand.backend).isolates
    expect(type(name) is str and name.isprintable() and name, f"the name is {name!r}")
    expect_equal(type(isolates), bool, "the type of isolates")


@promises
async def starting_when_not_open(stand: BackendHarness) -> None:
    """Starting a sandbox before `open` or after `close` is SandboxUnavailable; closing unopened or twice is fine."""
    backend = stand.make_backend()
    await _refuses(backend, "before open")
    await backend.close()
    opened = stand.make_backend()
    await opened.open()
    await opened.close()
    await opened.close()
    await _refuses(opened, "after close")


async def _refuses(backend: Backend, when: str) -> None:
    try:
        sandbox = await backend.start(LIMITS)
    except SandboxUnavailable:
        return
    except Exception as exc:
        raise Broken(f"starting {when} raised {type(exc).__name__}: {exc}") from exc
    await sandbox.destroy()
    raise Broken(f"a sandbox was started {when}")


@promises
async def two_at_once(stand: BackendHarness) -> None:
    """Two backends at once do not disturb each other, nor does closing one."""
    async with BackendHarness(stand.make_backend, warm=0) as other:
        expect_equal(await other.value("set_result(1)"), 1, "on the other backend")
        async with stand.connection() as connection:
            await other.__aexit__(None, None, None)
            expect(connection.is_usable, "a sandbox ended with another backend")
    expect_equal(await stand.value("set_result(1)"), 1, "after the other was closed")


@promises
async def closed_with_runs_under_way(stand: BackendHarness) -> None:
    """Closing ends what still runs; nobody waits for ever."""
    backend = stand.make_backend()
    outcomes: list[Outcome] = []
    try:
        # `open` and `close` happen in one task, and what is entered between them is left between them.
        with anyio.fail_after(2 * SOON_S):
            async with anyio.create_task_group() as tasks:
                await backend.open()
                try:
                    connection = GuestConnection(await backend.start(LIMITS))
                    await connection.hello()
                    called = anyio.Event()
                    tasks.start_soon(_forever, connection, called, outcomes)
                    await called.wait()
                finally:
                    await backend.close()
    except TimeoutError:
        raise Broken("a run goes on after its backend was closed") from None
    expect(outcomes[0] in (Outcome.KILLED, Outcome.PROTOCOL_ERROR), f"the run ended as {outcomes[0]}")
    expect(not connection.sandbox.is_alive(), "a sandbox outlives its backend")
    await connection.sandbox.destroy()


async def _forever(connection: GuestConnection, called: anyio.Event, outcomes: list[Outcome]) -> None:
    async def dispatch(call: CallTool) -> ToolReturn:
        called.set()
        return ToolReturn(call.id, None)

    source = "call_tool('x')\nimport time\ntime.sleep(60)"
    run = RunScript(1, source, {}, ["x"], "off", 1 << 20, 8, 1 << 20, None, None)
    outcomes.append((await run_on(connection, run, dispatch)).outcome)


@promises
async def cancelled_while_open(stand: BackendHarness) -> None:
    """Cancelling whatever uses a backend closes it all the same, with its runs."""
    await stand.settle()
    before = set(children())
    results: list[ExecutionResult] = []

    async def use() -> None:
        async with BackendHarness(stand.make_backend) as own, anyio.create_task_group() as tasks:

            async def forever() -> None:
                results.append(await own.run("print('started')\nwhile True: pass", on_log=lambda *_: started.set()))

            tasks.start_soon(forever)

    started = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(use)
        with anyio.fail_after(2 * SOON_S):
            await started.wait()
        tasks.cancel_scope.cancel()
    await eventually(lambda: not set(children()) - before, "processes are left")
    expect_equal(results, [], "results of what was cancelled")


@promises
async def leaks_nothing(stand: BackendHarness) -> None:
    """After runs of every kind and `close`, no process below this one and no descriptor is left."""
    await stand.settle()
    processes = set(children())

    async def use() -> None:
        async with BackendHarness(stand.make_backend) as own:
            for source in ("set_result(1)", "raise ValueError", "import os\nos._exit(1)", "import os\nos.fork()"):
                await own.run(source)
            short = LIMITS.model_copy(update={"wall_s": 0.2})
            expect_outcome(await own.run("while True: pass", limits=short), Outcome.TIMEOUT)

    await use()
    before = descriptors()
    await use()
    await eventually(lambda: not set(children()) - processes, f"processes are left: {set(children()) - processes}")
    await eventually(
        lambda: descriptors() <= before + SPARE_DESCRIPTORS, f"{descriptors()} descriptors, {before} before", 3.0
    )


@promises
async def sandboxes_leak_nothing(stand: BackendHarness) -> None:
    """Sandboxes started and destroyed, used or not, give back every descriptor at once."""
    for _ in range(2):
        async with stand.connection():
            pass
    await stand.settle()
    before = descriptors()
    for _ in range(5):
        async with stand.connection():
            pass
        async with stand.sandbox():
            pass
    await eventually(
        lambda: descriptors() <= before + SPARE_DESCRIPTORS, f"{descriptors()} descriptors, {before} before", 3.0
    )


@promises
async def early_ends_leave_nothing(stand: BackendHarness) -> None:
    """A sandbox that is killed, or whose start is cancelled, at any moment of its coming up leaves no process."""
    await stand.settle()
    before = set(children())
    with adopting():
        for delay_s in (0.0, 0.001, 0.003, 0.01, 0.03):
            async with stand.sandbox() as sandbox:
                await anyio.sleep(delay_s)
                sandbox.kill()
            with anyio.move_on_after(delay_s):
                async with stand.connection():
                    pass
        await stand.settle()
        await eventually(lambda: not set(children()) - before, "processes are left", 5.0)
