"""`EagerRun`: a run whose script is written to it while it runs, as a model streams it.

The run is a task. It begins with the first text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from toolcell.config import Limits, check_types_of
from toolcell.errors import UsageError
from toolcell.options import RunOptions
from toolcell.results import ExecutionResult
from toolcell.run.feed import OnRetract, ScriptFeed
from toolcell.run.runs import Runs
from toolcell.support.background import BackgroundTask

LEAVE_S: Final = 2.0
"""What a run that was left may take to end by itself, before its task is cancelled."""

CLOSED: Final = "the Runtime was closed before the run had a result"

WHOLE_ONLY: Final = {
    "repairs": "a repair compares a whole script with another one",
    "refresh": "a repair compares a whole script with another one",
    "preflight": "the calls of a script can be listed when it is whole",
    "hold_s": "a run that was fed cannot be suspended",
}
"""Options that need the whole script before it runs, and why."""

Execute = Callable[[ScriptFeed, RunOptions], Awaitable[ExecutionResult]]


class EagerRun:
    """One run. `write` its text as it comes, then `finish` it; the result is that of one ordinary run.

    Leaving the block without `finish` ends the run, as `cancel=` does.
    """

    def __init__(self, feed: ScriptFeed, execute: Execute, options: RunOptions, tasks: Callable[[], TaskGroup]) -> None:
        """`execute` runs what `feed` brings, with `options`, in a task of `tasks`."""
        self._feed, self._execute, self._tasks = feed, execute, tasks
        self._cancel = options.cancel or anyio.Event()
        self._options = replace(options, cancel=self._cancel)
        self._task = BackgroundTask(CLOSED)
        self._is_begun = False
        self._result: ExecutionResult | None = None

    @property
    def text(self) -> str:
        """Everything that was written and not retracted."""
        return self._feed.text

    @property
    def is_over(self) -> bool:
        """True when nothing more of the text will run: the script has failed or ended, or was stopped."""
        return self._task.over.is_set()

    async def write(self, text: str) -> None:
        """Append text, of any length. It may end anywhere. Statements run meanwhile; this does not wait for them.

        Raises:
            UsageError: it is not text, the script becomes too large, or it was finished.
        """
        self._check_here()
        self._feed.write(text)
        await self._begin(text)

    async def replace(self, text: str) -> None:
        """Say that the whole text so far is `text`, as when a stream begins anew or brings all of it each time.

        What begins as before is kept. Text that differs and has run cannot be undone: `on_retract` decides, and
        `result.eager.retracted` has it.

        Raises:
            UsageError: as from `write`.
        """
        self._check_here()
        self._feed.replace(text)
        await self._begin(text)

    async def finish(self) -> ExecutionResult:
        """Say that the text is whole, wait until it has run, and return the result. May be called twice.

        Raises:
            UsageError: the block was left already.
            Exception: as from `execute_code`.

        Cancellation: the run is ended.
        """
        self._check_here()
        self._feed.finish()
        await self._begin(".")
        try:
            await self._task.over.wait()
        except anyio.get_cancelled_exc_class():
            await self.aclose()
            raise
        if self._result is None:
            raise self._task.failure or UsageError(CLOSED)
        return self._result

    def _check_here(self) -> None:
        if self._task.is_left:
            raise UsageError("the block of this eager run was left; feed() begins another run")

    async def _begin(self, text: str) -> None:
        """Start the run with the first text, and let it have its turn."""
        if text and not self._is_begun:
            self._is_begun = True
            self._tasks().start_soon(self._task.run, self._run, name="toolcell eager run")
        await anyio.lowlevel.checkpoint()

    async def _run(self) -> None:
        self._result = await self._execute(self._feed, self._options)

    async def aclose(self) -> None:
        """End the run, and wait for its end. Does nothing when it is over."""
        self._task.leave()
        if not self._is_begun:
            self._task.over.set()
            return
        self._cancel.set()
        await self._task.wait_over(LEAVE_S)

    async def __aenter__(self) -> Self:
        self._check_here()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def eager_run(
    runs: Runs,
    execute: Execute,
    options: RunOptions,
    limits: Limits,
    *,
    speculate: bool,
    on_retract: OnRetract,
) -> EagerRun:
    """Return a run that has not begun. `execute`: what runs a script with `options`.

    Raises:
        UsageError: an option is wrong, or needs the whole script.
    """
    if name := next((name for name in WHOLE_ONLY if getattr(options, name)), ""):
        raise UsageError(
            f"feed() runs statements before the script is whole, and {WHOLE_ONLY[name]}: leave out {name}="
        )
    if options.on_approval == "suspend":
        raise UsageError('a run that is fed cannot be suspended: use on_approval="ask" or "deny", or execute_code()')
    if (check_types_of(options.check_types) or runs.policy.check_types or "off") != "off":
        raise UsageError(
            "feed() runs statements before the script is whole, so its types cannot be checked before: pass "
            "check_types=False, or use execute_code()"
        )
    feed = ScriptFeed((options.limits or limits).frame_bytes, on_retract, speculate)
    return EagerRun(feed, execute, options, runs.task_group)


class SyncEagerRun:
    """One run, used with `with`. Its methods are those of `EagerRun`."""

    def __init__(self, run: EagerRun, call: Callable[..., Any]) -> None:
        """`call` runs a coroutine function in the event loop of the runtime and waits for it."""
        self.run = run
        self._call = call

    @property
    def text(self) -> str:
        """Everything that was written and not retracted."""
        return self.run.text

    @property
    def is_over(self) -> bool:
        """True when nothing more of the text will run."""
        return self.run.is_over

    def write(self, text: str) -> None:
        """Append text; see `EagerRun.write`."""
        self._call(partial(self.run.write, text))

    def replace(self, text: str) -> None:
        """Say that the whole text so far is `text`; see `EagerRun.replace`."""
        self._call(partial(self.run.replace, text))

    def finish(self) -> ExecutionResult:
        """Say that the text is whole, and wait for the result; see `EagerRun.finish`. Ctrl-C ends the run."""
        finish: Callable[[], Awaitable[ExecutionResult]] = self.run.finish
        result: ExecutionResult = self._call(finish)
        return result

    def __enter__(self) -> Self:
        self._call(self.run.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self.run.aclose)
