"""Run a command's work with a progress line on a terminal. The first Ctrl-C ends the run and keeps its result."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import anyio

from toolcell.cli import exits
from toolcell.support import daemon_threads
from toolcell.support.event_loop import end_signals
from toolcell.support.text import for_terminal, one_line

if TYPE_CHECKING:
    from anyio.abc import TaskGroup
    from rich.console import Console
    from rich.status import Status
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
        self.status: Status | None = None
        """The progress line, while there is one."""
        self.printed: Printed | None = None
        """What writes the output of the script, if it is shown as it comes."""
        self._message = ""

    def say(self, text: str) -> None:
        lines = text.strip().splitlines()
        self._message = lines[-1] if lines else self._message

    def line(self, elapsed_s: float) -> Text:
        """Return the progress line as a Text: rich would read markup in a str."""
        from rich.text import Text

        return Text(one_line(f"{self.doing} {elapsed_s:.0f} s  {self._message}".rstrip(), 100))

    def show(self, stream: str, text: str) -> None:
        """Write what the script printed, in place of the progress line. Ends the run when nobody can read it."""
        if self.status is not None:
            self.status.stop()
        if self.printed is None:
            self.printed = Printed()
        self.printed.add(stream, text)
        if self.printed.is_lost:
            self.cancel.set()


class Printed:
    """Writes what a script prints as it comes, in a thread: a reader that takes its time keeps no tool waiting."""

    def __init__(self) -> None:
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._texts: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._last = ("stdout", "\n")
        self._thread = daemon_threads.start(self._write, name="toolcell-output")
        self.is_lost = False
        """True when a stream was closed, or its disk is full. The exit status says so in the end."""

    def add(self, stream: str, text: str) -> None:
        if text:
            self._last = stream, text
            self._texts.put(self._last)

    @property
    def is_at_rest(self) -> bool:
        """True when everything is written, and the line is ended."""
        return self._texts.empty() and self._last[1].endswith("\n")

    def end(self) -> None:
        """End the last line, and wait until everything is written."""
        stream, text = self._last
        self.add(stream, "" if text.endswith("\n") else "\n")
        self._texts.put(None)
        self._thread.join()

    def _write(self) -> None:
        while (each := self._texts.get()) is not None:
            stream = self._streams[each[0]]
            try:
                stream.write(for_terminal(each[1]))
                stream.flush()
            except (OSError, ValueError):
                self.is_lost = True


class _Warnings(logging.Handler):
    """Writes warnings to stderr: what a program that uses toolcell would find in its log."""

    def emit(self, record: logging.LogRecord) -> None:
        from toolcell.cli.terminal import stderr, write_text

        with contextlib.suppress(Exception):  # a closed stderr must not end what is under way
            write_text(stderr(), f"warning: {record.getMessage()}")


@contextlib.contextmanager
def showing_warnings() -> Iterator[None]:
    """Show warnings: of a weaker profile than `full`, of an audit log that cannot be signed, of the scheduler, of the
    service, of tools that an MCP server lost."""
    handler = _Warnings(logging.WARNING)
    loggers = [
        logging.getLogger(f"toolcell.{name}")
        for name in ("audit", "mcp", "schedule", "service", "sandbox.process.auto_backend")
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

    watch = Watch()

    async def watched() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_handle_interrupts, watch, tasks)
            if sys.stderr.isatty() if console is None else console.is_terminal:
                tasks.start_soon(_show_progress, watch, console)
            outcome.append(await work(watch))
            tasks.cancel_scope.cancel()

    with showing_warnings():
        try:
            anyio.run(watched)
        finally:
            if watch.printed is not None:
                watch.printed.end()
    if watch.printed is not None and watch.printed.is_lost and watch.cancel.is_set():
        raise SystemExit(exits.READER_GONE)  # nobody reads what there would be to say
    if not outcome:
        raise KeyboardInterrupt
    return outcome[0]


async def _handle_interrupts(watch: Watch, tasks: TaskGroup) -> None:
    async for _ in end_signals():
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
    with console.status(watch.line(QUIET_S)) as watch.status:
        while True:
            await anyio.sleep(REFRESH_S)
            watch.status.update(watch.line(time.monotonic() - started))
            if watch.printed is None or watch.printed.is_at_rest:
                watch.status.start()
