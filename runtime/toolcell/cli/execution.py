"""Run one script from the command line: Ctrl-C ends it gently, and what takes long says so on a terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup
from rich.console import Console
from rich.text import Text

from toolcell.text import one_line

QUIET_S = 1.0
"""Nothing is said about what ends sooner."""

REFRESH_S = 0.2

T = TypeVar("T")


class Watch:
    """What the work under way tells the progress line, and what the person in front of it asked."""

    def __init__(self) -> None:
        self.cancel = anyio.Event()
        """Set by the first Ctrl-C: end the run, keep what it did."""
        self.doing = "starting"
        self._said = ""

    def say(self, text: str) -> None:
        """Note the newest thing the script printed or reported."""
        lines = text.strip().splitlines()
        self._said = lines[-1] if lines else self._said

    def line(self, elapsed_s: float) -> Text:
        """The progress line; never a str, which rich would read as markup."""
        return Text(one_line(f"{self.doing} {elapsed_s:.0f} s  {self._said}".rstrip(), 100))


def run_watched(work: Callable[[Watch], Awaitable[T]], console: Console) -> T:
    """Run `work` to its end with a progress line on a terminal.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed while there was nothing to end gently, or twice.
    """
    outcome: list[T] = []

    async def everything() -> None:
        watch = Watch()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_heed_interrupts, watch, tasks)
            if console.is_terminal:
                tasks.start_soon(_show_progress, watch, console)
            outcome.append(await work(watch))
            tasks.cancel_scope.cancel()

    anyio.run(everything)
    if not outcome:
        raise KeyboardInterrupt
    return outcome[0]


async def _heed_interrupts(watch: Watch, tasks: TaskGroup) -> None:
    if sys.platform == "win32":
        return  # no loop there can wait for a signal; Ctrl-C ends the command at once
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if watch.doing != "running" or watch.cancel.is_set():
                tasks.cancel_scope.cancel()
                return
            watch.cancel.set()


async def _show_progress(watch: Watch, console: Console) -> None:
    started = time.monotonic()
    await anyio.sleep(QUIET_S)
    with console.status(watch.line(QUIET_S)) as status:
        while True:
            await anyio.sleep(REFRESH_S)
            status.update(watch.line(time.monotonic() - started))
