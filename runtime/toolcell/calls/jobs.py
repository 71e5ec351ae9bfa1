"""Background work of tools: started now, finished later, completed exactly once.

A tool that goes on after its call has returned either calls a completion handle it was given with the call, or hands
its work to the run's `JobTable`, which owns the tasks: when the table is closed nothing is left running.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, Self

import anyio
from anyio.abc import TaskGroup

from toolcell.calls.concurrency import passes_on
from toolcell.calls.events import JOB_END
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.errors import ToolAbort, UsageError
from toolcell.support.checks import text_of
from toolcell.support.event_loop import ChangeEvent
from toolcell.support.log import logger_of

logger = logger_of("toolcell.tools")

JOB_TIMEOUT_S = 3600.0
"""Unless the tool says otherwise."""

Work = Callable[[], Awaitable[ToolResult]]


class JobOwner(Protocol):
    """The call that started a job."""

    @property
    def name(self) -> str:
        """Name of its tool."""

    @property
    def call_id(self) -> str:
        """The model's id of the call."""

    @property
    def agents(self) -> tuple[int, ...]:
        """The agent whose call it is and those above, by identity."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Emit an event of the call."""

    def deliver(self, result: ToolResult) -> Awaitable[None] | None:
        """Pass on the final result."""


class Job:
    """One piece of background work."""

    def __init__(self, job_id: str, owner: JobOwner, timeout_s: float) -> None:
        self.id = job_id
        self.tool = owner.name
        self.call_id = owner.call_id
        self.agents = owner.agents
        self.timeout_s = timeout_s
        self.result: ToolResult | None = None
        self.scope = anyio.CancelScope()
        self.owner = owner
        self._done = anyio.Event()

    @property
    def is_done(self) -> bool:
        """True once there is a final result."""
        return self.result is not None

    def complete(self, result: ToolResult) -> bool:
        """Set the final result; False when there already is one, which then stays."""
        if self.result is not None:
            logger.warning("job %s of %s completed again; ignored", self.id, self.tool)
            return False
        self.result = result
        self._done.set()
        self.owner.emit(JOB_END, result=result, is_error=result.is_error, data={"job_id": self.id})
        return True

    async def wait(self) -> ToolResult:
        """The final result, when it is there."""
        await self._done.wait()
        assert self.result is not None
        return self.result


class JobTable:
    """The background work of one run: `async with JobTable() as jobs`. Closing it cancels what still runs."""

    def __init__(self, tasks: TaskGroup | None = None) -> None:
        """`tasks`: runs the jobs, and is open for longer than this table, which then costs nothing without a job.
        Without it the table opens a group of its own."""
        self._tasks = tasks
        self._own: TaskGroup | None = None
        self._is_open = False
        self._scopes: set[anyio.CancelScope] = set()
        """Cancel scopes of what runs in `tasks`."""
        self._idle: anyio.Event | None = None
        """Set when none of them runs any more."""
        self._failure: BaseException | None = None
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count(1)
        self._finished: deque[Job] = deque()
        self._changed = ChangeEvent()

    async def __aenter__(self) -> Self:
        if self._tasks is None:
            self._tasks = self._own = await anyio.create_task_group().__aenter__()
        self._is_open = True
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._is_open = False
        for job in self.list():
            if not job.is_done:
                self.cancel(job.id)
        for scope in self._scopes:
            scope.cancel()
        if self._scopes and self._idle is not None:
            with anyio.CancelScope(shield=True):
                await self._idle.wait()
        if self._own is not None:
            await self._own.__aexit__(*exc_info)
        if self._failure is not None:
            raise self._failure

    def _start_soon(self, work: Callable[..., Coroutine[Any, Any, object]], *args: Any, name: str) -> None:
        assert self._tasks is not None
        scope = anyio.CancelScope()
        if not self._scopes:
            self._idle = anyio.Event()
        self._scopes.add(scope)
        self._tasks.start_soon(self._scoped, scope, work, args, name=name)

    async def _scoped(
        self, scope: anyio.CancelScope, work: Callable[..., Coroutine[Any, Any, object]], args: tuple[Any, ...]
    ) -> None:
        """Do something in the group of others, which its failure must not end."""
        try:
            with scope:
                await work(*args)
        except Exception as exc:
            self._failure = exc
        finally:
            self._scopes.discard(scope)
            if not self._scopes and self._idle is not None:
                self._idle.set()

    def list(self) -> tuple[Job, ...]:
        """Every job, oldest first."""
        return tuple(self._jobs.values())

    def get(self, job_id: str) -> Job | None:
        """One job, or None."""
        return self._jobs.get(job_id)

    async def await_(self, job_id: str, timeout_s: float | None = None) -> ToolResult:
        """Wait for a job's final result.

        Raises:
            UsageError: there is no such job.
            TimeoutError: it is not done after `timeout_s`; it goes on.
        """
        if (job := self.get(job_id)) is None:
            raise UsageError(f"there is no job {job_id!r}")
        with anyio.fail_after(timeout_s):
            return await job.wait()

    def cancel(self, job_id: str, reason: str = "job cancelled") -> bool:
        """Stop a job; its final result says it was cancelled. False if it was done, or is unknown."""
        job = self.get(job_id)
        if job is None or job.is_done:
            return False
        self.finish(job, ToolResult.fail(reason, code=ErrorCode.CANCELLED, status=Status.CANCELLED))
        job.scope.cancel()
        return True

    def start(self, owner: JobOwner, work: Work | None, timeout_s: float | None = None) -> Job:
        """Run `work` in the background; what it returns is the job's final result. None: the work runs elsewhere, and
        ends by calling a completion handle, or by its timeout."""
        if not self._is_open:
            raise UsageError("the job table is not open; use `async with JobTable()`")
        job = Job(f"job_{next(self._numbers)}", owner, JOB_TIMEOUT_S if timeout_s is None else timeout_s)
        self._jobs[job.id] = job
        self._start_soon(self._run, job, work, name=f"toolcell job {job.id}")
        return job

    async def _run(self, job: Job, work: Work | None) -> None:
        result = ToolResult.fail("job cancelled", code=ErrorCode.CANCELLED, status=Status.CANCELLED)
        try:
            with job.scope:
                result = await run_alone(job.tool, job.wait if work is None else work, job.timeout_s)
        finally:  # also when the work lets out a cancellation that nobody sent
            if job.id in self._jobs and not job.is_done:
                self.finish(job, result)

    def discard(self, job: Job) -> None:
        """Forget a job whose call had its answer without it."""
        if self._jobs.pop(job.id, None) is not None:
            job.scope.cancel()
            self._changed.notify()

    def conclude(self, job: Job, last: Work) -> None:
        """Complete a job with what `last` returns, from its handle. Does nothing once the table is closed."""
        if self._is_open:
            self._start_soon(self._conclude, job, last, name=f"toolcell job {job.id} ends")

    async def _conclude(self, job: Job, last: Work) -> None:
        self.finish(job, await contained(last))

    def finish(self, job: Job, result: ToolResult) -> bool:
        """Complete a job; False when it already was."""
        if not job.complete(result):
            return False
        self._finished.append(job)
        self._changed.notify()
        self._deliver(job, result)
        return True

    def _deliver(self, job: Job, result: ToolResult) -> None:
        try:
            delivery = job.owner.deliver(result)
        except Exception:
            logger.exception("completion callback for job %s failed", job.id)
            return
        if inspect.isawaitable(delivery) and self._is_open:
            self._start_soon(_await_logged, delivery, job.id, name=f"toolcell job {job.id} tells")

    def take_finished(self, agents: tuple[int, ...]) -> tuple[Job, ...]:
        """Return the jobs of an agent that finished since the last time, for a follow-up message to its model."""
        finished = tuple(job for job in self._finished if job.agents == agents)
        self._finished = deque(job for job in self._finished if job.agents != agents)
        return finished

    async def wait_finished(self, agents: tuple[int, ...]) -> None:
        """Wait until `take_finished` has something to give. Returns at once when nothing of the agent is running."""
        while not any(job.agents == agents for job in self._finished):
            if not any(job.agents == agents and not job.is_done for job in self._jobs.values()):
                return
            await self._changed.wait()


async def _await_logged(delivery: Awaitable[Any], job_id: str) -> None:
    try:
        await delivery
    except Exception:
        logger.exception("completion callback for job %s failed", job_id)


async def run_alone(tool: str, work: Work, timeout_s: float | None) -> ToolResult:
    """Run background work, for so many seconds at most."""
    timeout_s = JOB_TIMEOUT_S if timeout_s is None else timeout_s
    with anyio.move_on_after(timeout_s):
        return await contained(work)
    message = f"job of {tool} timed out after {timeout_s:g} s"
    return ToolResult.fail(message, code=ErrorCode.TIMEOUT, status=Status.TIMEOUT)


async def contained(work: Work) -> ToolResult:
    """Run background work; whatever it raises or forgets becomes its result."""
    try:
        result: object = await work()
    except BaseException as exc:
        if passes_on(exc) and not isinstance(exc, ToolAbort):
            raise
        message = f"background work failed: {type(exc).__name__}: {text_of(exc)}"
        return ToolResult.fail(message, code=ErrorCode.EXCEPTION, exc=exc)
    if isinstance(result, ToolResult):
        return result
    return ToolResult.fail("background work ended without a result", code=ErrorCode.NO_RESULT)
