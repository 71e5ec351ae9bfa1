"""What the calls of one run share and change: budget, secrets, cancellation, workers, background jobs.

Knows no single call. One `RunState` belongs to one event loop.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self

import anyio
from anyio.abc import TaskGroup

from toolcell.calls.concurrency import Workers, passes_on
from toolcell.calls.events import JOB_END
from toolcell.calls.options import Origin
from toolcell.calls.result import NO_USAGE, ErrorCode, Status, TokenUsage, ToolResult
from toolcell.errors import ToolAbort, UsageError
from toolcell.flows import Labels, labels_of
from toolcell.support.checks import check_count, text_of
from toolcell.support.event_loop import ChangeEvent
from toolcell.support.log import logger_of
from toolcell.support.secrets import SecretSearch, SecretWalk, check_secret, search_for
from toolcell_bridge.wire.frozen import frozen

PLAN_ORCHESTRATORS = 2
"""Steps of plans that run code or sub-agents at once: each may start an interpreter or many model calls."""


def new_id() -> str:
    """Return a fresh id for a run."""
    return os.urandom(16).hex()


class Secrets(Mapping[str, str]):
    """Values that tools may use but nobody may read: they are removed from results, events and records of calls.

    What a tool itself writes elsewhere, to `ctx.logger` too, is not searched for them.

    Raises:
        UsageError: a value is not text, or has fewer than four characters: it would be found in nearly every text.
    """

    __unsendable__ = "secrets: return what the model may know"

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        given = dict(values or {})
        self._values = {name: check_secret(f"the secret {name!r}", value) for name, value in given.items()}

    @cached_property
    def _search(self) -> SecretSearch:
        return search_for(frozenset(self._values.values()))

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self._values)})"

    def redact(self, text: str) -> str:
        """Return `text` with every secret replaced, in whatever form it is there."""
        return self._search.hide(text)[0]

    def redact_bytes(self, data: bytes) -> bytes:
        """Do the same in bytes."""
        return self._search.hide_in_bytes(data)[0]

    def redact_value(self, value: Any) -> Any:
        """Do the same in plain data: text, bytes, keys, numbers, arrays and tables."""
        walk = SecretWalk(self._search)
        cleaned = walk.value(value)
        return cleaned if walk.count else value

    def shown(self, value: Any) -> Any:
        """Do the same for anything that is shown to people; what cannot be looked through is not shown."""
        try:
            return self.redact_value(value)
        except (Exception, SystemExit):  # it is nested without end, or its own code fails
            return f"(a {type(value).__name__} that cannot be shown)"


NO_SECRETS = Secrets()


@dataclass(slots=True)
class Budget:
    """What a run and all its sub-agents may use together. None means no limit."""

    tool_calls: int | None = None
    tokens: int | None = None
    used_calls: int = 0
    used: TokenUsage = NO_USAGE

    def __post_init__(self) -> None:
        check_count("Budget(tool_calls)", self.tool_calls, 0, optional=True)
        check_count("Budget(tokens)", self.tokens, 0, optional=True)

    def unused(self) -> Budget:
        """Return the budget of another run with the same bounds."""
        return Budget(self.tool_calls, self.tokens)

    def take_call(self) -> bool:
        """Count one tool call; return false when none is left."""
        if self.tool_calls is not None and self.used_calls >= self.tool_calls:
            return False
        self.used_calls += 1
        return True

    @property
    def is_out_of_tokens(self) -> bool:
        """True when the next model call may not be made."""
        return self.tokens is not None and self.used.total >= self.tokens


# Background work of tools: started now, finished later, completed exactly once. A tool that goes on after its call has
# returned either calls a completion handle that it was given with the call, or hands its work to the run's JobTable,
# which owns the tasks: when the table is closed nothing is left running


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
        if self._idle is not None:
            with anyio.CancelScope(shield=True):
                await self._idle.wait()
        if (own := self._own) is not None:
            self._tasks = self._own = None
            await own.__aexit__(*exc_info)
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


class RunState:
    """What changes during a run. One per run, shared by its sub-agents, plans and guests; used in one event loop."""

    def __init__(
        self,
        max_workers: int | None = None,
        budget: Budget | None = None,
        jobs: JobTable | None = None,
        labels: Iterable[str] = (),
    ) -> None:
        """`labels`: of what those who begin the run have read already."""
        if max_workers is not None and max_workers < 1:
            raise UsageError(f"max_workers must be at least 1, not {max_workers}")
        self.max_workers = max_workers
        """None: what the registry of the first call says."""
        self.budget = budget
        self.labels = Labels(labels_of(labels, "labels") if labels else ())
        """Labels of everything that the run has read."""
        self.cancel_reason: str | None = None
        self.abort: ToolAbort | None = None
        """Set when a tool ended the run, for those between the tool and the run who do not see its exception."""
        self.pending: list[str] = []
        """Ids of calls that have started and not ended."""
        self.scopes: dict[anyio.CancelScope, None] = {}
        """What `cancel` cancels: the calls being executed and other waits of the run."""
        self.scope_type: type[anyio.CancelScope] = anyio.CancelScope
        """The event loop's own class once it is known: anyio looks for the event loop each time it makes a scope."""
        self.failures: dict[str, tuple[int, Any]] = {}
        """By digest: how often the same call failed in a row, and the response that asked for it last."""
        self.found_tools: dict[str, None] = {}
        """Names that `search_tools` has found, the latest last: the model is shown these tools from then on."""
        self.jobs = jobs
        """Where tools may leave background work; None: nowhere."""
        self.workers: Workers | None = None
        """Workers of tools that do the work themselves; made at the first call."""
        self._orchestrators: dict[tuple[int, bool], Workers] = {}

    def fresh(self) -> RunState:
        """Return the state of another run with the same settings and jobs, and as much to use."""
        budget = self.budget.unused() if self.budget is not None else None
        return RunState(self.max_workers, budget, self.jobs, self.labels.names)

    def note_found(self, names: Iterable[str]) -> None:
        """Take note of tools that a search has found, the best first: the best of the last search come last."""
        for name in reversed([*names]):
            self.found_tools.pop(name, None)
            self.found_tools[name] = None

    def open_workers(self, default: int) -> Workers:
        """Return the workers of tools that do the work themselves, over all batches, plans and guests of the run."""
        if self.workers is None:
            self.workers = Workers(default if self.max_workers is None else self.max_workers)
        return self.workers

    def orchestrators(self, level: int, in_plan: bool, default: int) -> Workers:
        """Return the workers of tools that wait for other tools: one set per level, so that no level waits for itself.

        The event loop may not exist when the state is made, so locks and workers are made at first use.
        """
        key = (level, in_plan)
        if key not in self._orchestrators:
            count = default if self.max_workers is None else self.max_workers
            self._orchestrators[key] = Workers(min(PLAN_ORCHESTRATORS, count) if in_plan else count)
        return self._orchestrators[key]

    @cached_property
    def hook_lock(self) -> anyio.Lock:
        """Held while hooks run: they never overlap within a run."""
        return anyio.Lock()

    @contextmanager
    def cancellable(self, deadline: float = math.inf) -> Iterator[anyio.CancelScope]:
        """Wait for something inside the block until the run is cancelled or the deadline passes."""
        with anyio.CancelScope(deadline=deadline) as scope:
            self.scopes[scope] = None
            if self.cancel_reason is not None:
                scope.cancel()
            try:
                yield scope
            finally:
                del self.scopes[scope]

    def cancel(self, reason: str) -> None:
        """Cancel every call in flight and refuse further ones; each still gets its result."""
        if self.cancel_reason is None:
            self.cancel_reason = reason
        for scope in list(self.scopes):
            scope.cancel()


class open_jobs:
    """Give a run a table of jobs inside the block, unless it has one. What still runs at the end is cancelled.

    `tasks`: as of `JobTable`.
    """

    def __init__(self, run: RunState, tasks: TaskGroup | None = None) -> None:
        self._run, self._tasks = run, tasks
        self._table: JobTable | None = None

    async def __aenter__(self) -> None:
        if self._run.jobs is None:
            self._table = self._run.jobs = await JobTable(self._tasks).__aenter__()

    async def __aexit__(self, *exc_info: object) -> None:
        if self._table is not None:
            self._run.jobs = None
            await self._table.__aexit__(None, None, None)  # what the block raises goes on as it is, in no group


@dataclass(slots=True)
class RunLink:
    """How the record names one run of a script, a plan or a commit, and the run that it goes on from."""

    id: str = ""
    """In the record, which gives one of its own to a run whose id is taken."""
    relation: str = ""
    """resumes, repairs, commits or reverts; empty for a run that goes on from no other."""
    after: str = ""
    """Id of the run that it goes on from."""
    decided_by: str = ""
    """Who had it go on, if anybody was named."""
    decisions: tuple[Mapping[str, Any], ...] = ()
    """What was decided about calls. Shape: {"call", "tool", "decision", "by", "reason", "at_ns", "args"}."""
    waits: tuple[Any, ...] = ()
    """What it waits for when it ends: pending calls."""


@frozen
class Lineage:
    """Where a part of a run stands below the calls that started it. For scheduling and rules; made by `Call` alone."""

    origins: frozenset[Origin] = frozenset()
    """Plans, code and sub-agents this part of the run was reached through: rules about them hold here too."""
    level: int = 0
    """Orchestrating tools above."""
    borrowed_worker: Workers | None = None
    """The one worker of a call above that waits for this part of the run; calls here take turns with it."""
    held_groups: frozenset[str] = frozenset()
    """Exclusive groups the calls above hold."""


OUTERMOST = Lineage()
