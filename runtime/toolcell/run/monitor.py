"""`RunMonitor`: has every run under way measured a few times a second, and ends runs whose time is over.

There are two ways to that. The event loop calls `Run.check`, which measures everything. A thread calls
`Deadline.enforce`, which kills a sandbox past `wall_s` or `cpu_s` also while something keeps the event loop.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from toolcell.config import Limits
from toolcell.results import Outcome
from toolcell.run.options import Callbacks
from toolcell.run.outcome import Failed
from toolcell.sandbox.backend import LimitExceeded, Sandbox
from toolcell.support import daemon_threads, event_loop

TICK_S = 0.02
"""How often running sandboxes are measured. A run shorter than this is only measured at its end."""

ABORT_S = 5.0
"""An aborted run ends within milliseconds, unless a tool does not let itself be cancelled."""

REST_S = 1.0
"""How long the thread rests when there is no run. Meanwhile it need not be woken for a run whose limits are later."""

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

    def due(self) -> float:
        """Return when `enforce` may have something to do, by `time.perf_counter`.

        A tick late: the event loop comes first, if it runs.
        """
        if self._is_over or self._is_killed:
            return math.inf
        within_s = 0.0 if self.exceeded is not None else min(self._limits.wall_s, self._limits.cpu_s / PROCESSORS)
        return max(self._started + within_s, time.perf_counter()) + TICK_S

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
        self._enforcer = Enforcer(self._runs)
        self._added = event_loop.ChangeEvent()
        self.on_tick: Callable[[], object] = _nothing
        """Called with each tick: a run takes long."""
        self.discard = self._runs.discard

    def add(self, run: MonitoredRun) -> None:
        """Begin to check a run."""
        self._runs.add(run)
        self._enforcer.expect(run.deadline)
        self._added.notify()

    async def abort_all(self, why: str) -> None:
        """Abort every run, and wait until they have ended, at most a few seconds."""
        with anyio.move_on_after(ABORT_S):
            while self._runs:
                for run in tuple(self._runs):
                    run.abort(why)
                await anyio.sleep(TICK_S)

    async def watch(self) -> None:
        """Check the runs for ever. A Runtime that is opened again begins anew, with a thread of its own."""
        self._enforcer = enforcer = Enforcer(self._runs)
        enforcer.start()
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    if not self._runs:
                        await self._added.wait()
                    await anyio.sleep(TICK_S)
                    self._tick(tasks)  # in a task: a backend may begin another one in order to measure
        finally:
            enforcer.stop()

    def _tick(self, tasks: TaskGroup) -> None:
        for run in tuple(self._runs):
            run.check()
            if run.callbacks.must_be_heard:
                tasks.start_soon(run.callbacks.hear, run.fail)
        if self._runs:
            self.on_tick()


class Enforcer:
    """The thread that ends runs whose time is over. It sleeps until one may be."""

    def __init__(self, runs: set[MonitoredRun]) -> None:
        self._runs = runs
        self._is_stopped = False
        self._awake = threading.Event()
        self._wakes_at = math.inf
        """When it looks again, by `time.perf_counter`."""

    def start(self) -> None:
        """Begin. The thread ends with `stop`, or with the process."""
        daemon_threads.start(self._enforce, name="toolcell-limits")

    def stop(self) -> None:
        """End the thread, at once or after what it is doing."""
        self._is_stopped = True
        self._awake.set()

    def expect(self, deadline: Deadline) -> None:
        """Wake the thread if it would sleep past a deadline of a run that was added."""
        if deadline.due() < self._wakes_at:
            self._awake.set()

    def _enforce(self) -> None:
        has_rested = False
        while not self._is_stopped:
            self._awake.clear()
            self._wakes_at = math.inf  # whatever is added from here on wakes it
            for run in tuple(self._runs):
                run.deadline.enforce()
            due = [run.deadline.due() for run in tuple(self._runs)]
            now = time.perf_counter()
            self._wakes_at = min(due, default=math.inf if has_rested else now + REST_S)
            has_rested = not due
            self._awake.wait(None if self._wakes_at == math.inf else self._wakes_at - now)


def _nothing() -> None:
    pass
