"""`SyncEagerRun`: a blocking `EagerRun`, of a `SyncRuntime` or a `SyncSession`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from toolcell.results import ExecutionResult
from toolcell.sessions.eager_run import EagerRun


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
