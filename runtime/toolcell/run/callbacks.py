"""`Callbacks`: the caller's `on_log` and `on_progress`, either kind of function, called and awaited in order.

They are called where something is printed, which may be where nothing can be awaited. What they return to be awaited
waits here until `hear`. One that raises ends its own run with that exception.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import anyio

from toolcell_bridge.wire.frozen import frozen

OnLog = Callable[[str, str], object]
"""Takes stream and text; may be async."""
OnProgress = Callable[[object], object]
"""Takes the reported value; may be async."""


@frozen
class RunHandlers:
    """Callbacks for a run's events, and the event that cancels it."""

    cancel: anyio.Event | None = None
    """Setting it ends the run with outcome `cancelled`."""
    on_log: OnLog | None = None
    """Called with stream and text for everything the script prints."""
    on_progress: OnProgress | None = None
    """Called with every value the script reports as its progress."""


NO_HANDLERS: Final = RunHandlers()

CALLBACK_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""What ends one run when a callback raises it. Let out in a task of the monitor, it would end every run."""

HEAR_S = 1.0
"""What asynchronous callbacks may take after the end of a run, past `wall_s`."""


class Callbacks:
    """The callbacks of one run. As a context manager: what was not awaited by its end is dropped, and what another
    task awaits then is cancelled."""

    def __init__(self, handlers: RunHandlers) -> None:
        self._on_log = handlers.on_log
        self._on_progress = handlers.on_progress
        self._lock: anyio.Lock | None = None
        self._hearing: anyio.CancelScope | None = None
        """Cancel scope of the task that awaits something now."""
        self.unheard: deque[Any] = deque()
        """What is to be awaited, in the order of the calls."""
        self.failure: BaseException | None = None
        """What an asynchronous callback raised."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
        while self.unheard:
            if hasattr(left := self.unheard.popleft(), "close"):
                left.close()

    @property
    def must_be_heard(self) -> bool:
        """True when something is to be awaited and no task does."""
        return bool(self.unheard) and self._hearing is None

    def log(self, stream: str, text: str) -> None:
        """Tell the caller what the script printed."""
        if self._on_log is not None:
            self._take(self._on_log(stream, text))

    def progress(self, value: object) -> None:
        """Tell the caller what the script reported."""
        if self._on_progress is not None:
            self._take(self._on_progress(value))

    def _take(self, answer: object) -> None:
        if answer is not None and inspect.isawaitable(answer):
            self._lock = self._lock or anyio.Lock()
            self.unheard.append(answer)

    async def hear(self, stop: Callable[[BaseException], None]) -> None:
        """Await everything that is to be awaited, also what another task awaits now. `stop` gets what one raises."""
        if self._lock is None:
            return
        async with self._lock:
            try:
                with anyio.CancelScope() as self._hearing:
                    while self.unheard and self.failure is None:
                        await self.unheard.popleft()
            except BaseException as exc:  # also a class of the caller's own: this may be a task of the monitor
                if _is_cancellation(exc):
                    raise
                self.failure = exc
                stop(exc)
            finally:
                self._hearing = None

    async def finish(self, left_s: float) -> None:
        """Await the rest after the end of the run, which had `left_s` to go on.

        Raises:
            Exception: a callback raised it, now or before.
        """
        if self._lock is None:  # nothing was ever to be awaited
            return
        with anyio.move_on_after(max(left_s, HEAR_S)):
            await self.hear(lambda exc: None)
        if self.failure is not None:
            raise self.failure


def _is_cancellation(exc: BaseException) -> bool:
    if isinstance(exc, BaseExceptionGroup):
        return any(map(_is_cancellation, exc.exceptions))
    return isinstance(exc, (GeneratorExit, anyio.get_cancelled_exc_class()))
