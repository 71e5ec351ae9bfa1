"""`SyncSession`: a blocking `Session`, for a `SyncRuntime`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from toolcell.results import Suspension
from toolcell.run.options import SessionRunKwargs
from toolcell.run.streaming import RunEvent
from toolcell.sessions.session import Session
from toolcell.support.loop_thread import LoopThread, blocking, each_of


class SyncSession:
    """A blocking `Session` with the same methods. Ctrl-C interrupts its script, and the state is kept."""

    def __init__(self, session: Session, thread: LoopThread) -> None:
        self.session = session
        self._thread = thread

    def __enter__(self) -> Self:
        self._wait("__aenter__")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Destroy the sandbox; see `Session.close`. Does nothing when the runtime is closed already."""
        if not self._thread.has_ended:
            self._wait("close")

    execute_code = blocking(Session.execute_code)
    resume = blocking(Session.resume)
    abandon = blocking(Session.abandon)
    interrupt = blocking(Session.interrupt)
    put_files = blocking(Session.put_files)
    files = blocking(Session.files)
    read_file = blocking(Session.read_file)
    reset = blocking(Session.reset)
    pause = blocking(Session.pause)
    put_down = blocking(Session.put_down)

    def stream(self, source: str, **options: Unpack[SessionRunKwargs]) -> Iterator[RunEvent]:
        """Run a script and return what happens as events; see `Session.stream`."""
        self._thread.check()
        return each_of(self._thread, self._thread.run_sync(partial(self.session.stream, source, **options)))

    @property
    def waiting(self) -> Suspension | str:
        """What the last script waits for; see `Session.waiting`."""
        return self.session.waiting

    def fork(self, name: str | None = None) -> SyncSession:
        """Return another session with the same state; see `Session.fork`."""
        return SyncSession(self._wait("fork", name), self._thread)

    def _wait(self, name: str, *args: Any, **options: Any) -> Any:
        self._thread.check()
        interrupt = self.session.interrupt if name in ("execute_code", "resume") else None
        return self._thread.call(partial(getattr(self.session, name), *args, **options), interrupt)
