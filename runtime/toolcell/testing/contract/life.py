"""A backend's own life: open, close, and nothing is left of it."""

from __future__ import annotations

import anyio

from toolcell.errors import SandboxUnavailable
from toolcell.results import ExecutionResult, Outcome
from toolcell.run import SandboxRunner
from toolcell.sandbox import Backend
from toolcell.testing.contract.case import CaseGroup
from toolcell.testing.harness import (
    CALL_AND_STAY,
    LIMITS,
    SOON_S,
    BackendHarness,
    ContractViolation,
    adopting,
    children,
    descriptors,
    eventually,
    expect,
    expect_equal,
    tool_that_sets,
)

life_cases = CaseGroup("life")

SPARE_DESCRIPTORS = 2
"""Descriptors that an event loop or a library may open once, at first use."""


@life_cases
async def named(harness: BackendHarness) -> None:
    """The class of a backend has a printable name and a bool `isolates`."""
    name, isolates = type(harness.backend).name, type(harness.backend).isolates
    expect(type(name) is str and name.isprintable() and name, f"the name is {name!r}")
    expect_equal(type(isolates), bool, "the type of isolates")


@life_cases
async def starting_when_not_open(harness: BackendHarness) -> None:
    """`start` before `open` or after `close` raises SandboxUnavailable; `close` works before `open` and twice."""
    backend = harness.make_backend()
    await _refuses(backend, "before open")
    await backend.close()
    opened = harness.make_backend()
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
        raise ContractViolation(f"starting {when} raised {type(exc).__name__}: {exc}") from exc
    await sandbox.destroy()
    raise ContractViolation(f"a sandbox was started {when}")


@life_cases
async def two_at_once(harness: BackendHarness) -> None:
    """Two open backends work side by side, and closing one does not disturb the other."""
    async with BackendHarness(harness.make_backend, warm=0) as other:
        expect_equal(await other.value("set_result(1)"), 1, "on the other backend")
        async with harness.connection() as connection:
            await other.__aexit__(None, None, None)
            expect(connection.is_usable, "a sandbox ended with another backend")
    expect_equal(await harness.value("set_result(1)"), 1, "after the other was closed")


@life_cases
async def closed_during_a_run(harness: BackendHarness) -> None:
    """`close` ends a run that is in progress; no caller waits for ever."""
    backend = harness.make_backend()
    outcomes: list[Outcome] = []
    try:
        # `open` and `close` run in one task, and everything entered between them is left between them.
        with anyio.fail_after(2 * SOON_S):
            async with anyio.create_task_group() as tasks:
                await backend.open()
                try:
                    connection = SandboxRunner(await backend.start(LIMITS))
                    await connection.hello()
                    called = anyio.Event()
                    tasks.start_soon(_run_for_ever, connection, called, outcomes)
                    await called.wait()
                finally:
                    await backend.close()
    except TimeoutError:
        raise ContractViolation("a run continues after its backend was closed") from None
    expect(outcomes[0] in (Outcome.KILLED, Outcome.LOST, Outcome.PROTOCOL_ERROR), f"the run ended as {outcomes[0]}")
    expect(not connection.sandbox.is_alive(), "a sandbox outlives its backend")
    await connection.sandbox.destroy()


async def _run_for_ever(connection: SandboxRunner, called: anyio.Event, outcomes: list[Outcome]) -> None:
    outcomes.append((await connection.run(CALL_AND_STAY, tool_that_sets(called), LIMITS)).outcome)


@life_cases
async def cancelled_while_open(harness: BackendHarness) -> None:
    """When the task that uses a backend is cancelled, the backend is closed and its runs end."""
    await harness.wait_idle()
    before = set(children())
    results: list[ExecutionResult] = []

    async def use() -> None:
        async with BackendHarness(harness.make_backend) as own, anyio.create_task_group() as tasks:

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


@life_cases
async def leaks_nothing(harness: BackendHarness) -> None:
    """After runs of every kind and `close`, no child process and no descriptor is left."""
    await harness.wait_idle()
    processes = set(children())

    async def use() -> None:
        async with BackendHarness(harness.make_backend) as own:
            for source in ("set_result(1)", "raise ValueError", "import os\nos._exit(1)", "import os\nos.fork()"):
                await own.run(source)
            short = LIMITS.model_copy(update={"wall_s": 0.2})
            await own.run("while True: pass", Outcome.TIMEOUT, limits=short)

    await use()
    before = descriptors()
    await use()
    await eventually(lambda: not set(children()) - processes, f"processes are left: {set(children()) - processes}")
    await eventually(
        lambda: descriptors() <= before + SPARE_DESCRIPTORS, f"{descriptors()} descriptors, {before} before", 3.0
    )


@life_cases
async def sandboxes_leak_nothing(harness: BackendHarness) -> None:
    """A destroyed sandbox has closed all its descriptors, whether it was used or not."""
    for _ in range(2):
        async with harness.connection():
            pass
    await harness.wait_idle()
    before = descriptors()
    for _ in range(5):
        async with harness.connection():
            pass
        async with harness.sandbox():
            pass
    await eventually(
        lambda: descriptors() <= before + SPARE_DESCRIPTORS, f"{descriptors()} descriptors, {before} before", 3.0
    )


@life_cases
async def early_ends_leave_nothing(harness: BackendHarness) -> None:
    """A sandbox leaves no process when it is killed, or its start is cancelled, at any moment of the start."""
    await harness.wait_idle()
    before = set(children())
    with adopting():
        for delay_s in (0.0, 0.001, 0.003, 0.01, 0.03):
            async with harness.sandbox() as sandbox:
                await anyio.sleep(delay_s)
                sandbox.kill()
            with anyio.move_on_after(delay_s):
                async with harness.connection():
                    pass
        await harness.wait_idle()
        await eventually(lambda: not set(children()) - before, "processes are left", 5.0)
