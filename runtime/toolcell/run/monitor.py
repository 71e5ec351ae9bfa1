"""`RunMonitor`: has every run under way measured a few times a second, and ends runs whose time is over.

There are two tickers. A task of the event loop calls `Run.check`, which measures everything. A thread calls
`Deadline.enforce`, which kills a sandbox past `wall_s` or `cpu_s` also while something keeps the event loop.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from toolcell.config import Limits
from toolcell.results import Outcome
from toolcell.run.callbacks import Callbacks
from toolcell.run.outcome import Failed
from toolcell.sandbox.backend import LimitExceeded, Sandbox
from toolcell.support import daemon_threads
from toolcell.support.change_event import ChangeEvent

TICK_S = 0.02
"""How often running sandboxes are measured. A run shorter than this is only measured at its end."""

ABORT_S = 5.0
"""An aborted run ends within milliseconds, unless a tool does not let itself be cancelled."""

LINGER_TICKS = 50
"""Ticks without a run after which a ticker sleeps: waking it costs a short run more than a tick does."""


PROCESSORS = os.cpu_count() or 1


class Deadline:
    """The limits in time of one run, and the sandbox that they end."""

    def __init__(self, limits: Limits, sandbox: Sandbox, started: float) -> None:
        """`started`: by `time.perf_counter`."""
        self._limits = limits
        self._sandbox = sandbox
        self._started = started
        self._is_over = self._is_killed = False
        self._enforcing = threading.Lock()
        """Invariant: `enforce` touches the sandbox only while it holds this lock and the run is not over."""
        self._exceeded_at = 0.0
        self._answer_s = sandbox.answer_s
        self.exceeded: LimitExceeded | Failed | None = None
        """Why `enforce` killed the sandbox."""

    def enforce(self) -> None:
        """Kill the sandbox if its time is over. Never raises: what fails here ends this run only.

        Called a few times a second. The event loop has one turn of it to ask the script where it is.
        """
        with self._enforcing:
            if self._is_over or self._is_killed:
                return
            try:
                if self.exceeded is None:
                    self.exceeded, self._exceeded_at = self._find_exceeded(), time.perf_counter()
                elif time.perf_counter() - self._exceeded_at >= self._answer_s:
                    self._is_killed = True
                    self._sandbox.kill_now()
            except Exception as exc:
                self.exceeded = Failed(exc)

    def left_s(self) -> float:
        """Return how much of `wall_s` is left."""
        return self._limits.wall_s - (time.perf_counter() - self._started)

    def end(self) -> None:
        """The run is over: when this returns, `enforce` does not touch the sandbox any more."""
        with self._enforcing:
            self._is_over = True

    def timeout(self) -> LimitExceeded:
        """Return `wall_s` as the limit that was exceeded, now."""
        return LimitExceeded(Outcome.TIMEOUT, "wall_s", self._limits.wall_s, time.perf_counter() - self._started)

    def _find_exceeded(self) -> LimitExceeded | None:
        limits, elapsed_s = self._limits, time.perf_counter() - self._started
        if self.left_s() < 0:
            return self.timeout()
        if elapsed_s * PROCESSORS > limits.cpu_s:  # it cannot have used more
            cpu_s = self._sandbox.cpu_now()
            if cpu_s is not None and cpu_s > limits.cpu_s:
                return LimitExceeded(Outcome.CPU_LIMIT, "cpu_s", limits.cpu_s, cpu_s)
        return None


class MonitoredRun(Protocol):
    """As much of a `Run` as the monitor needs."""

    callbacks: Callbacks
    deadline: Deadline

    def check(self) -> None:
        """Measure the sandbox and stop the run if it exceeds a limit. Never raises."""

    def fail(self, exc: BaseException) -> None:
        """Stop the run with an exception."""

    def abort(self, why: str) -> None:
        """Stop the run with outcome `cancelled`."""


class RunMonitor:
    """Checks every run that was added, until it is discarded."""

    def __init__(self) -> None:
        self._runs: set[MonitoredRun] = set()
        self._added = ChangeEvent()
        self._enforcer = Enforcer(self._runs)
        self.discard = self._runs.discard

    def add(self, run: MonitoredRun) -> None:
        """Begin to check a run."""
        self._runs.add(run)
        self._added.notify()
        if self._enforcer.is_asleep:
            self._enforcer.wake()

    async def abort_all(self, why: str) -> None:
        """Abort every run, and wait until they have ended, at most a few seconds."""
        with anyio.move_on_after(ABORT_S):
            while self._runs:
                for run in tuple(self._runs):
                    run.abort(why)
                await anyio.sleep(TICK_S)

    async def tick(self) -> None:
        """Check the runs for ever. A Runtime that is opened again begins anew, with a thread of its own."""
        idle = 0
        self._enforcer = enforcer = Enforcer(self._runs)
        enforcer.start()
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    await anyio.sleep(TICK_S)
                    self._check_all(tasks)
                    idle = 0 if self._runs else idle + 1
                    if idle > LINGER_TICKS:
                        await self._added.wait()
                        idle = 0
        finally:
            enforcer.stop()

    def _check_all(self, tasks: TaskGroup) -> None:
        for run in tuple(self._runs):
            run.check()
            if run.callbacks.must_be_heard:
                tasks.start_soon(run.callbacks.hear, run.fail)


class Enforcer:
    """The thread that ends runs whose time is over."""

    def __init__(self, runs: set[MonitoredRun]) -> None:
        self._runs = runs
        self._is_stopped = threading.Event()
        self._awake = threading.Event()
        self.is_asleep = False
        """It waits for `wake`. Set before it looks for runs a last time, so that no run is missed."""

    def start(self) -> None:
        """Begin. The thread ends with `stop`, or with the process."""
        daemon_threads.start(self._tick, name="toolcell-limits")

    def stop(self) -> None:
        """End the thread, at once or after what it is doing."""
        self._is_stopped.set()
        self._awake.set()

    def wake(self) -> None:
        """There is a run again."""
        self.is_asleep = False
        self._awake.set()

    def _tick(self) -> None:
        idle = 0
        while not self._is_stopped.wait(TICK_S):
            self._enforce()
            idle = 0 if self._runs else idle + 1
            if idle > LINGER_TICKS:
                self._sleep()
                idle = 0

    def _enforce(self) -> None:
        for run in tuple(self._runs):
            run.deadline.enforce()

    def _sleep(self) -> None:
        self._awake.clear()
        self.is_asleep = True
        if not (self._runs or self._is_stopped.is_set()):
            self._awake.wait()
        self.is_asleep = False
