"""Ending a run from outside: by event, by cancelling its task, at any moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from toolcell.results import Outcome
from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import SOON_S, BackendHarness, Broken, expect, expect_equal, expect_outcome

promises = Promises("cancelling")

SLEEP = "set_result('early')\nprint('started')\nimport time\ntime.sleep(60)"


@promises
async def by_event(stand: BackendHarness) -> None:
    """Setting the event ends the run soon, and what it had done is kept."""
    cancel = anyio.Event()
    source = f"call_tool('echo', q=1)\n{SLEEP}"
    with _soon():
        result = await stand.run(source, cancel=cancel, on_log=lambda *_: cancel.set())
    expect_outcome(result, Outcome.CANCELLED)
    expect_equal((result.value, result.logs.text, len(result.calls)), ("early", "started\n", 1), "what it had done")
    expect_equal(await stand.value("set_result(2)"), 2, "the next run")


@promises
async def by_event_during_a_call(stand: BackendHarness) -> None:
    """A run that waits for a tool is cancelled with the call."""
    cancel = anyio.Event()
    stand.entered = anyio.Event()
    async with anyio.create_task_group() as tasks:

        async def set_when_called() -> None:
            await stand.entered.wait()
            cancel.set()

        tasks.start_soon(set_when_called)
        with _soon():
            expect_outcome(await stand.run("call_tool('stay')", cancel=cancel), Outcome.CANCELLED)


@promises
async def of_the_task(stand: BackendHarness) -> None:
    """Cancelling the task that runs a script ends the script, at once and silently; the next run is well."""
    for source in (SLEEP, "print('started')\nwhile True: pass", "print('started')\ncall_tool('stay')"):
        started = anyio.Event()
        with _soon():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_run, stand, source, lambda *_, event=started: event.set())
                await started.wait()
                tasks.cancel_scope.cancel()
    expect_equal(await stand.value("set_result(2)"), 2, "the next run")


@promises
async def of_a_start(stand: BackendHarness) -> None:
    """Cancelling a start leaves the backend well."""
    for delay_s in (0.0, 0.001, 0.01, 0.05):
        with anyio.move_on_after(delay_s):
            async with stand.connection():
                pass
    with _soon():
        async with stand.connection() as connection:
            expect(connection.is_usable, "the next sandbox cannot be used")


async def _run(stand: BackendHarness, source: str, on_log: Callable[..., Any]) -> None:
    await stand.run(source, on_log=on_log)
    raise Broken("the run ended before it was cancelled")


class _soon:
    """Raise `Broken` when what is inside takes too long, however it ends."""

    def __enter__(self) -> None:
        self._began = anyio.current_time()

    def __exit__(self, *exc_info: object) -> None:
        took_s = anyio.current_time() - self._began
        if exc_info[0] is None and took_s > SOON_S:
            raise Broken(f"it took {took_s:.1f} s to end")
