"""Keep checkers of types warm: each is one run of a script that waits for scripts to check, in a sandbox of its own.

A checker reads strangers' texts, one after the other, so it is bounded: it serves one set of tools and a number of
scripts, and is destroyed when one of them takes too long or its caller gives up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import anyio
from anyio.abc import TaskGroup

from toolcell.calls.call import ScriptRuntime
from toolcell.config import MIB, Limits, PoolConfig
from toolcell.control import type_check_guest
from toolcell.errors import SandboxUnavailable, ToolcellError
from toolcell.results import ExecutionResult
from toolcell.support.daemon_threads import run_sync
from toolcell.support.event_loop import ChangeEvent

SCRIPT: Final = f"""{Path(type_check_guest.__file__).read_text(encoding="utf-8")}
serve(lambda answer: call_tool("next_check", {{"answer": answer}}), stubs, names, paths, version)
"""
"""What a checker runs: it gets scripts as answers of its only tool."""

MAX_CHECKERS: Final = 4
"""Alive at once, for all sets of tools together."""

MAX_CHECKS: Final = 500
"""By one checker. ty keeps a little of each script."""

CHECK_S: Final = 20.0
"""For one script. A checker that has just started has read nothing of Python's own types yet."""

IDLE_S: Final = 600.0
"""After so long without a script, a checker ends."""

LIMITS: Final = Limits(wall_s=86_400, cpu_s=600, memory_bytes=768 * MIB, processes=48, tool_calls=MAX_CHECKS + 8)
"""Limits of one checker in its whole life."""

ONLY_PROGRAM: Final = type_check_guest.TY


class NotChecked(Exception):
    """A script could not be checked; says why."""


class CheckerHost(ScriptRuntime, Protocol):
    """As much of a Runtime as a checker needs."""

    async def open(self) -> None:
        """Start it."""

    async def close(self) -> None:
        """End it."""


class Checker:
    """One checker, from its start to its end. It checks one script at a time."""

    def __init__(self, key: str) -> None:
        self.key = key
        """Key of the tools that it knows."""
        self.is_busy = True
        self.checks = 0
        self.problem: str | None = None
        """Why it has ended."""
        self.has_died = False
        """It has ended by itself."""
        self._failure: ToolcellError | None = None
        self._end = anyio.Event()
        self._jobs, self._given = anyio.create_memory_object_stream[dict[str, Any]](1)
        self._answered = anyio.Event()
        self._answer: Any = None

    async def run(self, sandboxes: CheckerHost, inputs: Mapping[str, Any]) -> None:
        """Run until it is ended, or ends by itself. Raises nothing."""

        async def next_check(answer: Any = None) -> dict[str, Any] | None:
            """Give the answer about one script, and get the next one; None when none comes."""
            if answer is not None:
                self._answer = answer
                self._answered.set()
            with anyio.move_on_after(IDLE_S):
                return await self._given.receive()
            return None

        problem = "the checker was ended"
        try:
            result: ExecutionResult = await sandboxes.execute_code(
                SCRIPT, inputs=inputs, tools=[next_check], cancel=self._end
            )
            problem = f"{result.outcome}: {result.error.message if result.error is not None else ''}"
        except ToolcellError as exc:
            problem, self._failure = str(exc), exc
        finally:
            self.has_died = not self._end.is_set()
            self.problem = self.problem or problem
            self._answered.set()
            self._jobs.close()
            self._given.close()

    async def check(self, job: Mapping[str, Any]) -> Any:
        """Return the answer about one script.

        Raises:
            NotChecked: it took too long, or the checker has ended; it is of no use any more.
            SandboxUnavailable: the checker could not be started.

        Cancellation: the checker is ended.
        """
        self._answer, self._answered = None, anyio.Event()
        self.checks += 1
        try:
            self._check_alive()
            self._jobs.send_nowait(dict(job))
            with anyio.move_on_after(CHECK_S):
                await self._answered.wait()
        except BaseException:
            self.end()
            raise
        if self._answer is None:
            self._check_alive()
            self.end()
            raise NotChecked(f"it took more than {CHECK_S:g} s")
        return self._answer

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.problem is not None:
            raise NotChecked(self.problem)

    def end(self) -> None:
        """End its run. May be called twice."""
        self._end.set()
        self.problem = self.problem or "the checker was ended"


class Checkers:
    """The checkers of one Runtime. They are started when they are needed."""

    def __init__(self, runtime: Callable[..., CheckerHost], tasks: Callable[[], TaskGroup]) -> None:
        """`runtime` makes the Runtime of their sandboxes; each runs in a task of `tasks`."""
        self._make, self._tasks = runtime, tasks
        self._runtime: CheckerHost | None = None
        self._alive: list[Checker] = []
        """The one that was used last is the last."""
        self._lock: anyio.Lock | None = None
        self._changed = ChangeEvent()

    async def close(self) -> None:
        """End them, and their sandboxes."""
        runtime, self._runtime, self._lock = self._runtime, None, None
        for each in self._alive:
            each.end()
        self._alive.clear()
        if runtime is not None:
            await runtime.close()

    async def check(self, key: str, inputs: Mapping[str, Any], job: Mapping[str, Any]) -> Any:
        """Return the answer about a script. `inputs` are those of a checker that knows the tools of `key`.

        Raises:
            NotChecked: this script cannot be checked.
            UsageError, SandboxUnavailable: no checker can be started.
        """
        while True:
            checker = await self._take_checker(key, inputs)
            is_new = not checker.checks
            try:
                return await checker.check(job)
            except NotChecked:
                if is_new or not checker.has_died:
                    raise  # else what earlier scripts left may be the cause
            finally:
                self._put_back(checker)

    async def _take_checker(self, key: str, inputs: Mapping[str, Any]) -> Checker:
        """Return a checker that nobody else has, started if there is none."""
        runtime = await self._open()
        while True:
            idle = [each for each in self._alive if not each.is_busy]
            for each in reversed(idle):
                if each.key == key:
                    each.is_busy = True
                    return each
            if len(self._alive) >= MAX_CHECKERS and idle:
                idle[0].end()
                self._alive.remove(idle[0])
            if len(self._alive) < MAX_CHECKERS:
                checker = Checker(key)
                self._tasks().start_soon(checker.run, runtime, inputs)
                self._alive.append(checker)
                return checker
            await self._changed.wait()

    def _put_back(self, checker: Checker) -> None:
        checker.is_busy = False
        if checker in self._alive:
            self._alive.remove(checker)
            if checker.problem is None and checker.checks < MAX_CHECKS:
                self._alive.append(checker)
            else:
                checker.end()
        self._changed.notify()

    async def _open(self) -> CheckerHost:
        self._lock = self._lock or anyio.Lock()
        async with self._lock:
            if self._runtime is None:
                if sys.platform != "linux":
                    raise SandboxUnavailable(f"types are checked in a sandbox of Linux, and this is {sys.platform}")
                from toolcell.sandbox.process import type_checker
                from toolcell.sandbox.process.backend import ProcessBackend

                backend = ProcessBackend(packages=await run_sync(type_checker.build), program=ONLY_PROGRAM)
                pool = PoolConfig(warm=1, cap=MAX_CHECKERS + 1)
                runtime = self._make(backend=backend, limits=LIMITS, pool=pool)
                await runtime.open()
                self._runtime = runtime
            return self._runtime
