"""A test stand: one backend under a Runtime with tools of its own, for the promises of the contract to be tried on.

Knows how to run things on a backend and how to look for what they leave; knows no promise.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeAlias

import anyio
import psutil

from toolcell.config import MIB, Limits, PoolConfig
from toolcell.errors import ToolAbort, ToolError
from toolcell.results import ExecutionResult, Outcome
from toolcell.run.calls import Dispatch
from toolcell.run.connection import GuestConnection
from toolcell.run.request import RunRequest
from toolcell.run.run import Run
from toolcell.runtime import Runtime
from toolcell.sandbox.backend import Backend, Sandbox
from toolcell.tools import ToolRegistry
from toolcell_bridge.wire.messages import RunScript

MakeBackend: TypeAlias = Callable[[], Backend]

LIMITS = Limits(wall_s=20, cpu_s=20, memory_bytes=192 * MIB, processes=32)
"""What runs on a stand may use unless the promise is about limits. Generous in time: slow is not broken."""

PR_SET_CHILD_SUBREAPER = 36

SOON_S = 30.0
"""Within this, what a backend ends must have ended."""


class Broken(AssertionError):
    """The backend did not do what the contract says."""


def expect(holds: object, problem: str) -> None:
    """Raise `Broken` unless `holds`."""
    if not holds:
        raise Broken(problem)


def expect_equal(got: object, wanted: object, what: str) -> None:
    """Raise `Broken` unless both are equal and of one type."""
    if got != wanted or type(got) is not type(wanted):
        raise Broken(f"{what}: expected {wanted!r:.300}, got {got!r:.300}")


def expect_outcome(result: ExecutionResult, *outcomes: Outcome, limit: str | None = None) -> None:
    """Raise `Broken` unless the run ended in one of these ways, on account of this limit."""
    error = result.error
    said = f" ({error.type}: {error.message:.300})" if error is not None else ""
    if result.outcome not in outcomes:
        raise Broken(f"outcome: expected {' or '.join(outcomes)}, got {result.outcome}{said}")
    if limit is not None and (error is None or error.limit != limit):
        raise Broken(f"the error names the limit {error.limit if error else None!r}, not {limit!r}{said}")


class BackendHarness:
    """One open backend. `async with`; everything it started is gone afterwards."""

    def __init__(self, make_backend: MakeBackend, *, warm: int = 1) -> None:
        self.make_backend = make_backend
        self.registry = ToolRegistry()
        self.entered = anyio.Event()
        """Set when a script calls the tool `stay`."""
        self._meetings: dict[str, tuple[int, anyio.Event]] = {}
        self._warm = warm
        self._stack = AsyncExitStack()
        _add_tools(self)

    async def __aenter__(self) -> Self:
        self.backend = self.make_backend()
        pool = PoolConfig(warm=self._warm, cap=16)
        self.runtime = Runtime(
            self.registry, backend=self.backend, limits=LIMITS, pool=pool, allow_unisolated=not self.backend.isolates
        )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.runtime)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def run(self, source: str, **options: Any) -> ExecutionResult:
        """Run a script in a fresh sandbox."""
        return await self.runtime.execute_code(source, **options)

    async def value(self, source: str, **options: Any) -> Any:
        """Run a script that must end well, and return its value."""
        result = await self.run(source, **options)
        expect_outcome(result, Outcome.OK)
        return result.value

    @asynccontextmanager
    async def sandbox(self, limits: Limits = LIMITS) -> AsyncIterator[Sandbox]:
        """A sandbox that has not been greeted."""
        sandbox = await self.backend.start(limits)
        try:
            yield sandbox
        finally:
            await sandbox.destroy()

    @asynccontextmanager
    async def connection(self, limits: Limits = LIMITS) -> AsyncIterator[GuestConnection]:
        """A sandbox that has said Hello."""
        async with self.sandbox(limits) as sandbox:
            connection = GuestConnection(sandbox)
            await connection.hello()
            yield connection

    async def settle(self) -> None:
        """Wait until its runtime has ended what was used and has started what it keeps ready."""
        pool = self.runtime.pool
        assert pool is not None
        await eventually(
            lambda: not pool.busy and not pool.starting and len(pool.idle) >= self._warm, "the pool is not full"
        )

    async def meet(self, name: str, size: int) -> int:
        """Wait until `size` calls are here at once."""
        count, full = self._meetings.pop(name, (0, anyio.Event()))
        if count + 1 < size:
            self._meetings[name] = count + 1, full
            await full.wait()
        full.set()
        return size

    async def stay(self) -> None:
        """Tell that the tool was called, and never come back."""
        self.entered.set()
        await anyio.sleep_forever()


def _add_tools(stand: BackendHarness) -> None:
    registry = stand.registry

    @registry.tool
    async def echo(q: Any) -> Any:
        """Return the argument unchanged."""
        return q

    @registry.tool
    async def fail(text: str) -> str:
        """Fail with words that are meant to be read."""
        raise ToolError(text, code="wanted", retryable=True, details={"text": text})

    @registry.tool
    async def crash(text: str) -> str:
        """Raise an exception that nobody planned."""
        raise LookupError(text)

    @registry.tool
    async def abort(text: str) -> str:
        """End the whole run, not just this call."""
        raise ToolAbort(text)

    @registry.tool
    async def meet(name: str, size: int) -> int:
        """Wait until so many calls of this name are here at once."""
        return await stand.meet(name, size)

    @registry.tool
    async def stay() -> None:
        """Never return, however long the script waits for it."""
        await stand.stay()


async def run_on(connection: GuestConnection, message: RunScript, dispatch: Dispatch) -> ExecutionResult:
    """Run one script in a sandbox that has said Hello."""
    return await Run(connection, RunRequest(message, LIMITS), dispatch).execute()


async def eventually(holds: Callable[[], object], problem: str, within_s: float | None = None) -> None:
    """Wait until `holds`, or raise `Broken`."""
    within_s = within_s or SOON_S
    with anyio.move_on_after(within_s):
        while not holds():  # noqa: ASYNC110 - most of what is waited for sets no event
            await anyio.sleep(0.005)
        return
    raise Broken(f"{problem}, {within_s:g} s later")


def descriptors() -> int:
    """How many this process holds; 0 where that cannot be told."""
    gc.collect()
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        with suppress(psutil.Error, AttributeError):
            return psutil.Process().num_fds()
        return 0


@contextmanager
def adopting() -> Iterator[None]:
    """Have processes below this one that lose their parent become its children, so that `children` finds them.

    Where the kernel cannot (it takes Linux), nothing is adopted and less is found.
    """
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = {process.pid for process in psutil.Process().children()}
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        for process in psutil.Process().children():
            if process.pid not in before:
                with suppress(psutil.NoSuchProcess, ChildProcessError):
                    if process.status() == psutil.STATUS_ZOMBIE:
                        os.waitpid(process.pid, os.WNOHANG)


def children() -> Sequence[psutil.Process]:
    """Living processes below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
