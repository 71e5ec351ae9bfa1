"""`Runs`: the one path of every script of a runtime, from its tools and limits to its result.

Whoever runs a script prepares it, which makes a `Run`, adds a journal to its parts, and executes it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol, runtime_checkable

import anyio
from anyio.abc import TaskGroup

from toolcell.calls.call import CallableTools, Feature, Features, RunContext, RunScope
from toolcell.calls.concurrency import OF_THIS_PROCESS, AbandonedThreads
from toolcell.calls.context import share_labels
from toolcell.calls.options import CallPolicy, Origin, ToolOptions
from toolcell.calls.run_state import RunLink, Secrets, open_jobs
from toolcell.calls.uploads import OpenRequests
from toolcell.calls.values import is_large
from toolcell.config import Limits, Policy
from toolcell.results import ExecutionResult, Outcome
from toolcell.run.connection import GuestConnection
from toolcell.run.options import NO_OPTIONS, RunOptions
from toolcell.run.run import LARGE, Run, RunPart, Script
from toolcell.run.sandboxes import Sandboxes
from toolcell.sandbox.environment import Environment
from toolcell.support import daemon_threads
from toolcell.support.host_work import LONG_BYTES, HostWork
from toolcell.support.lifetime import Lifetime
from toolcell.support.log import logger_of
from toolcell.tools import ToolRegistry
from toolcell.tools.spec import RegisteredTool
from toolcell_bridge.wire.frozen import replaced

logger = logger_of("toolcell.runtime")


class RunRecorder(Protocol):
    """Begins the records of runs: `Recorder` of the audit log does."""

    async def recording(
        self, run: Run, *, policy: Policy, environment: Mapping[str, Any], egress: Sequence[Mapping[str, Any]]
    ) -> RunPart:
        """Return what records a script's run."""

    def observe(self, context: RunContext, kind: str, link: RunLink | None) -> AbstractAsyncContextManager[RunContext]:
        """Record the calls that are made with the yielded context."""


class UnlistedTools(Protocol):
    """Tools that every script of one runtime has, and nobody is told of: its libraries send requests with them."""

    @property
    def tools(self) -> Sequence[RegisteredTool]:
        """The tools."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where requests may go, as a model is told."""

    @property
    def installable(self) -> tuple[str, ...]:
        """Which packages scripts may install, as a model is told."""

    @property
    def rules(self) -> Sequence[Mapping[str, Any]]:
        """Which requests they may send, for the record; with names of secrets, never with their values."""

    @property
    def options(self) -> Sequence[ToolOptions]:
        """Options of their calls. A tool whose options depend on its arguments has several."""

    async def open(self) -> None:
        """Prepare what would take long in a script."""

    async def aclose(self) -> None:
        """Close their connections."""


@runtime_checkable
class EgressRules(Protocol):
    """Where scripts may send requests; an `Egress`."""

    def tools_for(self, limits: Limits) -> UnlistedTools:
        """Return the tools of one runtime. `limits`: of runs that have none of their own."""


class Runs:
    """Runs scripts of one runtime in its sandboxes."""

    def __init__(
        self,
        *,
        registry: ToolRegistry,
        limits: Limits,
        policy: Policy,
        features: tuple[Feature, ...] = (),
        environment: Environment,
        sandboxes: Sandboxes,
        lifetime: Lifetime,
        runtime: object,
        requests: UnlistedTools | None = None,
    ) -> None:
        """`runtime`: what saved scripts and agents that are called run their scripts with.
        `features`: of every run."""
        self.registry, self.limits, self.policy, self._features = registry, limits, policy, Features(features)
        self.environment, self.sandboxes = environment, sandboxes
        self.runtime = runtime
        self.recorder: RunRecorder | None = None
        """Writes to the audit log, if there is one."""
        self.on_end: Callable[[Any], object] | None = None
        """Called with what each script and each plan left behind. What it raises is logged."""
        self.abandoned = AbandonedThreads(OF_THIS_PROCESS)
        self._lifetime, self.requests = lifetime, requests
        self.numbers = itertools.count(1)
        self._tasks: TaskGroup | None = None

    # What every run begins with

    def open(self, tasks: TaskGroup) -> None:
        """Begin to start runs. What is started in `tasks` ends with the runtime."""
        self._tasks = tasks

    def check_open(self) -> None:
        """Check that runs can be started here and now.

        Raises:
            Misconfigured: the runtime is not open, or belongs to another event loop or to the parent process.
        """
        self._lifetime.check()

    def task_group(self) -> TaskGroup:
        """Return where something is started that ends with the runtime.

        Raises:
            Misconfigured: as `check_open`.
        """
        self._lifetime.check()
        assert self._tasks is not None
        return self._tasks

    def tools(self, given: CallableTools | Iterable[Any] | None) -> CallableTools:
        """Return the tools of a run, unchanging. None: those of the runtime.

        Raises:
            Misconfigured: as `check_open`.
            UsageError: they are something else.
        """
        self._lifetime.check()
        return self.snapshot(given)

    def snapshot(self, given: CallableTools | Iterable[Any] | None) -> CallableTools:
        """Do the same while the runtime closes."""
        found: CallableTools = self.registry if given is None else ToolRegistry.of(given, "tools=")
        found = found.snapshot()
        if self.requests is None or not isinstance(found, ToolRegistry):  # else a record answers
            return found
        return found.with_tools(self.requests.tools)

    def seed_and_clock(
        self, seed: int | None, clock: float | None, is_repeatable: bool
    ) -> tuple[int | None, float | None]:
        """Return what a run is given of these; of one that may be repeated, both are known."""
        seed, clock = self.policy.seed if seed is None else seed, self.policy.clock if clock is None else clock
        return replay_seed(seed, clock) if is_repeatable else (seed, clock)

    def begin(self, context: RunContext) -> RunContext:
        """Begin a run under the rules of this runtime, with the labels of the tool call that it begins in.

        Raises:
            QuotaExceeded: whoever it is for has used up the quota.
        """
        context = self.under_rules(context)
        share_labels(context)
        for begin_run in context.features.begin_run:
            begin_run(context)
        return context

    def under_rules(self, context: RunContext) -> RunContext:
        """Return a run under the flows, and with the features, of this runtime."""
        made_for = context.scope.link, context.user_id
        features = [own for each in self._features if (own := each.of_run(*made_for)) not in context.features]
        if self.policy.flows:
            flows = CallPolicy()
            flows.add_flow(*self.policy.flows)
            context = context.within(policies=(*context.scope.policies, flows))
        return context.having(*features) if features else context

    def observed(self, context: RunContext, kind: str, link: RunLink) -> AbstractAsyncContextManager[RunContext]:
        """Record the calls that are made with the yielded context, if there is an audit log."""
        link.id = context.run_id
        context = context.within(link=link)
        return self.recorder.observe(context, kind, link) if self.recorder is not None else nullcontext(context)

    # One run

    async def prepare(
        self,
        script: Script,
        tools: CallableTools,
        context: RunContext | None,
        link: RunLink | None = None,
        options: RunOptions = NO_OPTIONS,
    ) -> Run:
        """Make a run, with its message, and count it. `link`: names the run that it goes on from.

        Raises:
            UsageError: the source or an input cannot be sent; names it.
            QuotaExceeded: whoever it is for has used up the quota.
        """
        limits = script.limits
        source, inputs = script.source, script.inputs
        may_be = bool(inputs) or type(source) is not str or len(source) > LARGE  # hardly any is
        large = may_be and is_large([source, inputs], LARGE, counts_bytes=False)
        make_message = partial(
            script.message,
            script.number or next(self.numbers),
            tools=tools.names_text(Origin.CODE),
            egress=tools.makes_requests,
        )
        message = await daemon_threads.run_large(make_message) if large else make_message()
        above = context.scope.work if context is not None and context.scope.scripts else None
        work, abandoned = HostWork(limits.host_work, above=above), AbandonedThreads(self.abandoned)
        requests = context.scope.requests if above is not None and context is not None else None
        if requests is None and tools.makes_requests:
            requests = OpenRequests(limits.egress_bytes)
        link = link or RunLink()
        own_limits = None if limits is self.limits else limits  # of saved scripts that it calls, too
        scope: dict[str, Any] = {
            "work": work, "abandoned": abandoned, "runtime": self.runtime, "requests": requests, "link": link,
        }  # fmt: skip
        if context is None and not self.policy.flows:
            features = Features([each.of_run(link, "") for each in self._features])
            ident = os.urandom(16).hex()
            context = RunContext(run_id=ident, limits=own_limits, features=features, scope=RunScope(**scope))
            share_labels(context)
            for begin_run in features.begin_run:
                begin_run(context)
        else:
            context = context or RunContext()
            own_limits = own_limits or context.limits
            context = self.begin(context.child(limits=own_limits, scope=replaced(context.scope, **scope)))
        link.id = context.run_id
        return Run(script, tools, context, message, work=work, is_large=large, options=options)

    async def execute(self, run: Run, own: GuestConnection | None = None) -> ExecutionResult:
        """Run a script once, in `own`, the sandbox of a session, or in one that is destroyed afterwards.

        Raises:
            SandboxUnavailable: no sandbox could be started, so nothing ran.
            AuditError: the run could not be recorded.
            Exception: a handler raised this; the run was killed.

        Cancellation: the sandbox is killed with everything in it.
        """
        script, work, context, started = run.script, run.work, run.context, time.perf_counter()
        try:
            if self.recorder is not None:
                await self._join_record(run, self.recorder)
            requests = context.scope.requests
            async with open_jobs(context.state, self._tasks), _NOTHING if requests is None else requests.until_end():
                ran = await self.sandboxes.run(run, own)
                ran = await _without_secrets(ran, context, work)
                is_kept = ran.outcome is Outcome.SUSPENDED or bool(context.features.collects)
                is_long = is_kept and work.calls > LONG_BYTES
                result = await daemon_threads.run_large(_finished, run, ran) if is_long else _finished(run, ran)
        except BaseException as exc:
            count_cpu(context, min(script.limits.cpu_s, time.perf_counter() - started))  # nobody measured it
            with anyio.CancelScope(shield=True):
                for part in run.parts:
                    await part.failed(exc)
            raise
        for finished in context.features.finished:
            finished(context, result.journal_id)
        return await self._ended(run, result)

    async def refuse(
        self,
        script: Script,
        tools: CallableTools,
        context: RunContext | None,
        result: ExecutionResult,
        link: RunLink | None = None,
    ) -> ExecutionResult:
        """Return the result of a script that must not run, recorded and counted as one that did. `link`: as for
        `prepare`.

        Raises:
            Exception: as from `prepare`.
            AuditError: it could not be recorded.
        """
        run = await self.prepare(script, tools, context, link)
        if self.recorder is not None:
            await self._join_record(run, self.recorder)
        for part in run.parts:
            if (begun := part.script_sent()) is not None:
                await begun
        return await self._ended(run, dataclasses.replace(result, run_id=run.context.run_id))

    async def _join_record(self, run: Run, recorder: RunRecorder) -> None:
        egress = self.requests.rules if self.requests is not None and run.message.egress else ()
        run.join(await recorder.recording(run, policy=self.policy, environment=self.environment.facts, egress=egress))

    async def _ended(self, run: Run, result: ExecutionResult) -> ExecutionResult:
        count_cpu(run.context, result.usage.cpu_s)
        for part in run.parts:
            if (noted := part.ended(result)) is not None:
                await noted
        self.tell_end(result)
        return result

    def tell_end(self, result: Any) -> None:
        """Tell `on_end` of a script or a plan that has ended."""
        if self.on_end is None:
            return
        try:
            self.on_end(result)
        except Exception:
            logger.exception("Runtime.on_end failed")


_NOTHING: AbstractAsyncContextManager[None] = nullcontext()


def count_cpu(context: RunContext, cpu_s: float) -> None:
    for end_run in context.features.end_run:
        end_run(context, cpu_s)


def replay_seed(seed: int | None, clock: float | None) -> tuple[int, float]:
    """Return the seed and clock of a run that can be repeated: those given, or new ones."""
    if seed is None:
        seed = int.from_bytes(os.urandom(6), "big")
    return seed, round(time.time(), 6) if clock is None else clock


def _finished(run: Run, result: ExecutionResult) -> ExecutionResult:
    for part in run.parts:
        result = part.finish(result)
    return result


async def _without_secrets(result: ExecutionResult, context: RunContext, work: HostWork) -> ExecutionResult:
    """Return the result without the secrets of the run in the calls and the local variables of its error.

    `work`: of the run. The event loop stays free while long calls are looked through.
    """
    if not context.secrets:
        return result
    if work.calls + work.uploaded > LONG_BYTES:
        with suppress(MemoryError):  # there is none for a thread
            return await daemon_threads.run_large(_looked_through, result, context.secrets)
    return _looked_through(result, context.secrets)


def _looked_through(result: ExecutionResult, secrets: Secrets) -> ExecutionResult:
    calls = tuple(
        dataclasses.replace(call, name=secrets.redact(call.name), args=secrets.shown(call.args))
        for call in result.calls
    )
    result = dataclasses.replace(result, calls=calls)
    if result.error is None or not result.error.frames:
        return result
    frames = tuple(
        dataclasses.replace(frame, locals={name: secrets.redact(text) for name, text in frame.locals.items()})
        for frame in result.error.frames
    )
    return dataclasses.replace(result, error=dataclasses.replace(result.error, frames=frames))
