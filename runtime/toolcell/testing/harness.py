"""Run scripts on a backend under test, and look for processes and descriptors that they leave behind.

`BackendHarness` opens one backend under a Runtime with tools of its own. This module knows no case of the contract.
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
from toolcell.run import SandboxRunner
from toolcell.runtime import Runtime
from toolcell.sandbox import Backend, Sandbox
from toolcell.tools import ToolRegistry

MakeBackend: TypeAlias = Callable[[], Backend]

LIMITS = Limits(wall_s=20, cpu_s=20, memory_bytes=192 * MIB, processes=32)
"""Limits of a run unless its case is about limits. They allow much time: a slow backend is not a broken one."""

PR_SET_CHILD_SUBREAPER = 36

SOON_S = 60.0
"""How long the end of a run, a sandbox or a backend may take."""


class ContractViolation(AssertionError):
    """The backend does not meet a case of the contract."""


def expect(holds: object, problem: str) -> None:
    """Raise `ContractViolation` unless `holds`."""
    if not holds:
        raise ContractViolation(problem)


def expect_equal(got: object, wanted: object, what: str) -> None:
    """Raise `ContractViolation` unless both are equal and of one type."""
    if got != wanted or type(got) is not type(wanted):
        raise ContractViolation(f"{what}: expected {wanted!r:.300}, got {got!r:.300}")


def expect_outcome(result: ExecutionResult, *outcomes: Outcome, limit: str | None = None) -> None:
    """Raise `ContractViolation` unless the run ended with one of `outcomes` and, if given, by this limit."""
    error = result.error
    detail = f" ({error.type}: {error.message:.300})" if error is not None else ""
    if result.outcome not in outcomes:
        raise ContractViolation(f"outcome: expected {' or '.join(outcomes)}, got {result.outcome}{detail}")
    if limit is not None and (error is None or error.limit != limit):
        raise ContractViolation(f"the error names the limit {error.limit if error else None!r}, not {limit!r}{detail}")


class BackendHarness:
    """One open backend under a Runtime. Use it with `async with`, which ends everything that it started."""

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
        pool = PoolConfig(warm=self._warm, cap=16, start_s=SOON_S)
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

    async def run(self, source: str, *outcomes: Outcome, limit: str | None = None, **options: Any) -> ExecutionResult:
        """Run a script in a fresh sandbox. It must end with one of the outcomes, if any are given, and by `limit`."""
        result = await self.runtime.execute_code(source, **options)
        if outcomes:
            expect_outcome(result, *outcomes, limit=limit)
        return result

    async def value(self, source: str, **options: Any) -> Any:
        """Run a script that must succeed, and return its value."""
        result = await self.run(source, Outcome.OK, **options)
        return result.value

    @asynccontextmanager
    async def sandbox(self, limits: Limits = LIMITS) -> AsyncIterator[Sandbox]:
        """Start a sandbox and do not wait for its Hello."""
        sandbox = await self.backend.start(limits)
        try:
            yield sandbox
        finally:
            await sandbox.destroy()

    @asynccontextmanager
    async def connection(self, limits: Limits = LIMITS) -> AsyncIterator[SandboxRunner]:
        """Start a sandbox and wait for its Hello."""
        async with self.sandbox(limits) as sandbox:
            connection = SandboxRunner(sandbox)
            await connection.hello()
            yield connection

    async def wait_idle(self) -> None:
        """Wait until the runtime's pool has ended every used sandbox and started its warm ones."""
        pool = self.runtime.pool
        assert pool is not None
        await eventually(
            lambda: not pool.busy and not pool.starting and len(pool.idle) >= self._warm, "the pool is not full"
        )

    async def meet(self, name: str, size: int) -> int:
        """Wait until `size` calls of this name wait here at the same time."""
        count, full = self._meetings.pop(name, (0, anyio.Event()))
        if count + 1 < size:
            self._meetings[name] = count + 1, full
            await full.wait()
        full.set()
        return size

    async def stay(self) -> None:
        """Set `entered`, and never return."""
        self.entered.set()
        await anyio.sleep_forever()


def _add_tools(harness: BackendHarness) -> None:
    registry = harness.registry

    @registry.tool
    async def echo(q: Any) -> Any:
        """Return the argument unchanged."""
        return q

    @registry.tool
    async def fail(text: str) -> str:
        """Fail with a message for the script."""
        raise ToolError(text, code="wanted", retryable=True, details={"text": text})

    @registry.tool
    async def crash(text: str) -> str:
        """Raise an unexpected exception."""
        raise LookupError(text)

    @registry.tool
    async def abort(text: str) -> str:
        """End the whole run, not just this call."""
        raise ToolAbort(text)

    @registry.tool
    async def meet(name: str, size: int) -> int:
        """Wait until so many calls of this name are here at once."""
        return await harness.meet(name, size)

    @registry.tool
    async def stay() -> None:
        """Never return, however long the script waits for it."""
        await harness.stay()


CALL_AND_STAY = "call_tool('note')\nimport time\ntime.sleep(60)"


def tool_that_sets(called: anyio.Event) -> ToolRegistry:
    """Return the tool that `CALL_AND_STAY` calls."""
    made = ToolRegistry()

    @made.tool
    async def note() -> None:
        """Take note that the script has come so far."""
        called.set()

    return made


async def eventually(holds: Callable[[], object], problem: str, within_s: float | None = None) -> None:
    """Wait until `holds`, or raise `ContractViolation`."""
    within_s = within_s or SOON_S
    with anyio.move_on_after(within_s):
        while not holds():  # noqa: ASYNC110 - most conditions set no event
            await anyio.sleep(0.005)
        return
    raise ContractViolation(f"{problem}, {within_s:g} s later")


def descriptors() -> int:
    """Return how many descriptors this process has open; 0 on Windows, where they are not counted."""
    gc.collect()
    return psutil.Process().num_fds() if psutil.POSIX else 0


@contextmanager
def adopting() -> Iterator[None]:
    """Adopt descendants of this process that lose their parent, so that `children` finds them.

    On other systems than Linux nothing is adopted, and `children` finds fewer processes.
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
    """Return the living descendants of this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
