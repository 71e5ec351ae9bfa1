"""`HeldRuns`: suspended runs whose sandboxes are kept, paused, so that `resume` need not run their scripts again.

Nothing depends on a held run. One that is let go is carried on by its journal, with the same result.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

from toolcell.errors import SandboxUnavailable
from toolcell.run.connection import GuestConnection


class HeldRun:
    """One suspended run, with its sandbox."""

    __slots__ = ("connection", "cpu_s", "over")

    def __init__(self, connection: GuestConnection, cpu_s: float) -> None:
        self.connection: GuestConnection | None = connection
        """None once somebody else has it."""
        self.cpu_s = cpu_s
        """CPU seconds that its sandbox had used when it was suspended; 0 once that is lost."""
        self.over = anyio.Event()
        """It is not held any more."""

    @property
    def has_place(self) -> bool:
        """True when the pool counts its sandbox."""
        return self.connection is not None and self.connection.place == "pool"


class HeldRuns:
    """The held runs of one runtime, by the names of their journals; the oldest is first."""

    def __init__(self, limit: int, let_go: Callable[[GuestConnection], Awaitable[None]]) -> None:
        """`let_go` destroys a sandbox."""
        self._limit = limit
        self._let_go = let_go
        self._runs: dict[str, HeldRun] = {}
        self._tasks: TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._runs)

    def open(self, tasks: TaskGroup) -> None:
        """Begin to hold runs, with a timer for each in `tasks`."""
        self._tasks = tasks if self._limit else None

    @property
    def can_hold(self) -> bool:
        """True when a run may be held at all."""
        return self._tasks is not None

    def keep(self, ident: str, hold_s: float, run: HeldRun) -> bool:
        """Hold a run for so long. False when it cannot be held: whoever has its sandbox destroys that."""
        if self._tasks is None or run.connection is None or not run.connection.can_go_on:
            return False
        self.drop(ident)
        while len(self._runs) >= self._limit:
            self.drop(next(iter(self._runs)))
        self._runs[ident] = run
        self._tasks.start_soon(self._expire, ident, run, hold_s)
        return True

    def take(self, ident: str) -> HeldRun | None:
        """Take a run whose journal was taken. Whoever takes it ends its sandbox.

        The journal may have gone on elsewhere meanwhile. Then the sandbox gets the answers of that time, as a new one
        would.
        """
        run = self._runs.pop(ident, None)
        if run is not None:
            run.over.set()
        return run

    def make_room(self) -> None:
        """Let the oldest run go whose sandbox has a place of the pool, which somebody waits for."""
        ident = next((ident for ident, run in self._runs.items() if run.has_place), None)
        if ident is not None:
            self.drop(ident)

    async def go_on(self, run: HeldRun) -> GuestConnection | None:
        """Let everything in its sandbox run again, and hand that over. None: it is lost, and was destroyed."""
        connection, is_alive = run.connection, False
        assert connection is not None
        try:
            await connection.sandbox.unpause()
            is_alive = connection.can_go_on and self._tasks is not None
        except (OSError, SandboxUnavailable):
            pass
        finally:
            if not is_alive:
                run.cpu_s = 0.0
                await self.end(run)
        run.connection = None
        return connection.rewound() if is_alive else None

    async def end(self, run: HeldRun) -> None:
        """Destroy the sandbox of a run that is not held any more, unless somebody else has it."""
        connection, run.connection = run.connection, None
        if connection is not None:
            with anyio.CancelScope(shield=True):
                await self._let_go(connection)

    async def close(self) -> None:
        """Let all go, and hold none from here on."""
        self._tasks = None
        while self._runs:
            _, run = self._runs.popitem()
            run.over.set()
            await self.end(run)

    def drop(self, ident: str) -> None:
        """Let a run go, if it is held."""
        if self._tasks is not None and (run := self.take(ident)) is not None:  # else `close` is at it
            self._tasks.start_soon(self.end, run)

    async def _expire(self, ident: str, run: HeldRun, hold_s: float) -> None:
        with anyio.move_on_after(hold_s):
            await run.over.wait()
        if not run.over.is_set():
            self.drop(ident)
