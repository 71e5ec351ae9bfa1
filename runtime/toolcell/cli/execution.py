"""Run a command's work with a progress line on a terminal. The first Ctrl-C ends the run and keeps its result."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import anyio

from toolcell.support.text import one_line

if TYPE_CHECKING:
    from anyio.abc import TaskGroup
    from rich.console import Console
    from rich.text import Text

QUIET_S = 1.0
"""Shorter work shows no progress line."""

REFRESH_S = 0.2

T = TypeVar("T")


class Watch:
    """The state of running work: the text of the progress line, and whether the user asked to cancel."""

    def __init__(self) -> None:
        self.cancel = anyio.Event()
        """Set by the first Ctrl-C: end the run and keep what it did."""
        self.doing = "starting"
        self._message = ""

    def say(self, text: str) -> None:
        """Show the last line of what the script printed or reported."""
        lines = text.strip().splitlines()
        self._message = lines[-1] if lines else self._message

    def line(self, elapsed_s: float) -> Text:
        """Return the progress line as a Text: rich would read markup in a str."""
        from rich.text import Text

        return Text(one_line(f"{self.doing} {elapsed_s:.0f} s  {self._message}".rstrip(), 100))


class _Warnings(logging.Handler):
    """Writes warnings to stderr: what a program that uses toolcell would find in its log."""

    def emit(self, record: logging.LogRecord) -> None:
        from toolcell.cli.terminal import stderr, write_text

        with contextlib.suppress(Exception):  # a closed stderr must not end what is under way
            write_text(stderr(), f"warning: {record.getMessage()}")


@contextlib.contextmanager
def showing_warnings() -> Iterator[None]:
    """Show warnings: of a weaker profile than `full`, of an audit log that cannot be signed, of the scheduler, of tools
    that an MCP server lost."""
    handler = _Warnings(logging.WARNING)
    loggers = [
        logging.getLogger(f"toolcell.{name}") for name in ("audit", "mcp", "schedule", "sandbox.process.auto_backend")
    ]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextlib.contextmanager
def showing_installation(watch: Watch) -> Iterator[None]:
    """Show what an installer of packages does on the progress line."""

    def show_line(record: logging.LogRecord) -> bool:
        watch.doing = "installing"
        watch.say(record.getMessage())
        return True

    installer = logging.getLogger("toolcell.sandbox.process.package_sources")
    level = installer.level
    installer.addFilter(show_line)
    installer.setLevel(logging.INFO)
    try:
        yield
    finally:
        installer.removeFilter(show_line)
        installer.setLevel(level)


def run_watched(work: Callable[[Watch], Awaitable[T]], console: Console | None = None) -> T:
    """Run `work` to its end with a progress line on a terminal. `console` is where it is shown; by default stderr.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed twice, or while no script was running.
    """
    outcome: list[T] = []

    async def watched() -> None:
        watch = Watch()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_handle_interrupts, watch, tasks)
            if sys.stderr.isatty() if console is None else console.is_terminal:
                tasks.start_soon(_show_progress, watch, console)
            outcome.append(await work(watch))
            tasks.cancel_scope.cancel()

    with showing_warnings():
        anyio.run(watched)
    if not outcome:
        raise KeyboardInterrupt
    return outcome[0]


async def _handle_interrupts(watch: Watch, tasks: TaskGroup) -> None:
    if sys.platform == "win32":
        return  # event loops cannot wait for signals there; Ctrl-C ends the command at once
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if watch.doing != "running" or watch.cancel.is_set():
                tasks.cancel_scope.cancel()
                return
            watch.cancel.set()


async def _show_progress(watch: Watch, console: Console | None) -> None:
    started = time.monotonic()
    await anyio.sleep(QUIET_S)
    if console is None:
        from toolcell.cli.terminal import stderr  # not for what is over sooner

        console = stderr()
    with console.status(watch.line(QUIET_S)) as status:
        while True:
            await anyio.sleep(REFRESH_S)
            status.update(watch.line(time.monotonic() - started))
