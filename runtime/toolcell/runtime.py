"""`Runtime`: one `async with` that owns the sandboxes and runs scripts and plans against a registry of tools.

Start reading here: every script goes through `execute_code`. Isolation, wire and policy are decided elsewhere: by the
backend, the connection and the registry.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from toolcell import daemon_threads
from toolcell.config import CheckTypes, Limits, LintProfile, Policy, PoolConfig, check_types_of, names_of, settings_of
from toolcell.control.before_run import PreflightRuntime
from toolcell.control.controlled import RunHandlers
from toolcell.control.draft import Draft
from toolcell.control.mapping import MappingRuntime
from toolcell.control.plans import PlanningRuntime
from toolcell.control.run_control import Begin, Refresh
from toolcell.control.scripts import Script, script_from
from toolcell.control.suspension import OnApproval
from toolcell.control.type_check import TypeChecker
from toolcell.errors import UsageError, warn_user
from toolcell.flows import unmatched
from toolcell.host_work import HostWork
from toolcell.journal.config import JournalConfig
from toolcell.journal.store import JournalStore
from toolcell.keywords import keywords_known
from toolcell.lifetime import Lifetime, OpenedInBlock
from toolcell.results import AbandonedThread, ExecutionResult
from toolcell.run.arguments import check_run_arguments
from toolcell.run.callbacks import OnLog, OnProgress
from toolcell.run.connection import GuestConnection
from toolcell.run.feed import OnRetract, ScriptFeed
from toolcell.run.held import HeldRuns, check_hold
from toolcell.run.input_files import FileContent, FileInput, guest_files
from toolcell.run.monitor import RunMonitor
from toolcell.run.nested import NestedRuns
from toolcell.run.observer import NULL_OBSERVER, RunObserver
from toolcell.run.request import RunRequest, are_large, run_message
from toolcell.run.tool_bridge import ToolBridge
from toolcell.sandbox.backend import Backend, check_choice
from toolcell.sandbox.built_in import built_in_backend
from toolcell.sandbox.pool import Pool
from toolcell.sandbox.shortages import check_supported, possible_cap
from toolcell.sandbox.start_clock import StartClock
from toolcell.sessions.keeper import SessionKeeper, SessionRuntime
from toolcell.tools import Origin, RunContext, ToolRegistry
from toolcell.tools.call import CallableTools
from toolcell.tools.checks import check_kind
from toolcell.tools.registry import registry_of
from toolcell.tools.reverts import MadeCalls
from toolcell.tools.threads import OF_THIS_PROCESS, AbandonedThreads

if TYPE_CHECKING:
    from toolcell.audit.log import AuditLog
    from toolcell.audit.recorder import Recorder
    from toolcell.quotas import Quotas
    from toolcell.run.streaming import RunStream
    from toolcell.sessions.eager_run import EagerRun


class Runtime(OpenedInBlock, SessionRuntime, PlanningRuntime, PreflightRuntime, MappingRuntime):
    """Runs scripts in single-use sandboxes, with the registry's tools as their only way out."""

    @keywords_known
    def __init__(
        self,
        registry: ToolRegistry | Iterable[Any] | None = None,
        *,
        backend: str | Backend = "process",
        limits: Limits | None = None,
        python: str | None = None,
        packages: Sequence[str] = (),
        preload: Sequence[str] = (),
        pool: PoolConfig | None = None,
        policy: Policy | None = None,
        audit: str | os.PathLike[str] | AuditLog | None = None,
        journal: str | os.PathLike[str] | JournalConfig | None = None,
        quotas: Quotas | None = None,
        check_types: bool | CheckTypes | None = None,
        allow_unisolated: bool = False,
    ) -> None:
        """`registry` may be a list of tools. `journal`: a directory in which the journals of runs outlive this process.
        `allow_unisolated`: take a backend without isolation, in tests of your own code, never for a model's."""
        check_choice(backend, python)
        if not (audit is None or isinstance(audit, str | os.PathLike) or hasattr(audit, "is_open")):
            raise UsageError(f"audit= takes a folder or an AuditLog, not {type(audit).__name__} {audit!r:.80}")
        self.registry = registry_of(registry, "Runtime")
        if quotas is not None:
            from toolcell.quotas import Quotas

            check_kind("quotas=", quotas, Quotas, cure="write Quotas(Quota(runs=100), by=...)")
        self.limits, self.quotas = settings_of(Limits, limits, "limits"), quotas
        self.policy = settings_of(Policy, policy, "policy")
        if (degree := check_types_of(check_types)) is not None:
            self.policy = self.policy.model_copy(update={"check_types": degree})
        self.pool_config = settings_of(PoolConfig, pool, "pool")
        self._python = python
        self._packages, self._preload = names_of(packages, "packages"), names_of(preload, "preload")
        self.packages = self._packages
        """What scripts may import besides the standard library; with versions once the runtime is open."""
        self._backend_choice = backend
        self._allow_unisolated = allow_unisolated
        self._audit = audit
        self._recorder: Recorder | None = None
        self._journals = JournalStore(journal)
        self._begin_drafting()
        self._about_environment: dict[str, Any] = {"packages": self._packages, "preload": self._preload}
        self._backend: Backend | None = None
        self._fixed: Collection[str] = ()
        self.pool: Pool[GuestConnection] | None = None
        """The sandboxes; None before the runtime is opened."""
        self._sessions = SessionKeeper(self.pool_config.cap)
        self._lifetime = Lifetime("Runtime", self._open)
        self._clock = StartClock(self.pool_config.start_s)
        self._monitor = RunMonitor()
        self._nested = NestedRuns()
        self._held = HeldRuns(self.pool_config.held, self._let_go)
        self._numbers = itertools.count(1)
        self._abandoned = AbandonedThreads(OF_THIS_PROCESS)
        self._type_checker = TypeChecker(Runtime, lambda: self._tasks)

    # Opening and closing.

    async def open(self) -> None:
        """Start everything that runs need. `async with` does this and closes at the end of its block.

        Raises:
            UsageError: it is open already, or an argument cannot work.
            SandboxUnavailable: this machine cannot start sandboxes; the message says why.
        """
        await self._lifetime.open()

    async def close(self) -> None:
        """End every sandbox. Runs under way end with outcome `cancelled`. May be called from any task, and twice."""
        await self._lifetime.close()

    def check_open(self) -> None:
        """Check that it can be used here and now.

        Raises:
            Misconfigured: it is not open, or belongs to another event loop or to the parent process.
        """
        self._lifetime.check()

    async def _open(self, stack: AsyncExitStack) -> None:
        self._warn_of_labels()
        self._open_audit(stack)
        self._journals.open()
        if isinstance(self._backend_choice, str) and self.policy.hash_seed is None:
            self.policy = self.policy.model_copy(update={"hash_seed": self._journals.hash_seed})
        self._backend = await built_in_backend(
            self._backend_choice, self.policy, self._python, self._packages, self._preload, self._environment
        )
        if not (self._backend.isolates or self._allow_unisolated):
            raise UsageError(
                f"the backend {self._backend.name!r} isolates nothing; a test that means it says allow_unisolated=True"
            )
        await self._backend.open()
        stack.push_async_callback(self._backend.close)
        self._fixed = self._backend.fixed
        check_supported(self._backend, self.limits)
        self._tasks = tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        config = self.pool_config
        self.pool = Pool(
            self._connect,
            lambda connection: connection.sandbox.destroy(),
            lambda connection: connection.is_usable,
            warm=config.warm,
            cap=possible_cap(config.cap, self._backend.descriptors_per_sandbox),
            idle_s=config.idle_s,
            clock=self._clock,
            make_room=self._held.make_room,
        )
        stack.push_async_callback(self.pool.close)
        stack.push_async_callback(self._type_checker.close)
        stack.push_async_callback(self._sessions.close)
        stack.push_async_callback(self._monitor.abort_all, "the Runtime was closed")
        self._held.open(tasks)
        stack.push_async_callback(self._held.close)
        stack.callback(self.pool.refuse)
        tasks.start_soon(self._monitor.tick)
        tasks.start_soon(self._sessions.tick)
        await self.pool.open(tasks)

    def _warn_of_labels(self) -> None:
        """Warn of a flow that is about no tool's label. Without any labels here, tools may come with each run."""
        options = [tool.options for tool in self.registry.state.tools.values()]
        reads, sends = ({label for each in options for label in getattr(each, end)} for end in ("reads", "sends"))
        for problem in unmatched(self.policy.flows, reads, sends) if reads or sends else ():
            warn_user(f"Policy(flows=): {problem}")

    def _open_audit(self, stack: AsyncExitStack) -> None:
        if self._audit is None:
            return
        from toolcell.audit.log import AuditLog
        from toolcell.audit.recorder import Recorder

        log = self._audit if isinstance(self._audit, AuditLog) else AuditLog(self._audit)
        if not log.is_open:
            stack.callback(log.open().close)
        self._recorder = Recorder(log)
        if isinstance(self._backend_choice, str):
            self.policy = self._recorder.policy(self.policy)

    async def _environment(self) -> Any:
        if not self._packages:
            return None
        from toolcell.sandbox.process import packages
        from toolcell.sandbox.process.root_filesystem import interpreter

        resolved = await daemon_threads.run_sync(
            lambda: packages.resolve(self._packages, python=interpreter(self._python).executable)
        )
        self._about_environment["digest"] = resolved.digest
        self.packages = resolved.versions(self._packages)
        return resolved.path

    # Running scripts.

    async def execute_code(
        self,
        source: str,
        *,
        inputs: Mapping[str, Any] | None = None,
        files: Iterable[FileInput] | Mapping[str, FileContent] = (),
        tools: CallableTools | Iterable[Any] | None = None,
        limits: Limits | None = None,
        lint: LintProfile | None = None,
        context: RunContext | None = None,
        seed: int | None = None,
        clock: float | None = None,
        on_approval: OnApproval = "ask",
        hold_s: float = 0.0,
        repairs: ExecutionResult | str | None = None,
        refresh: Refresh = "",
        dry_run: bool | Draft = False,
        preflight: bool = False,
        check_types: bool | CheckTypes | None = None,
        cancel: anyio.Event | None = None,
        on_log: OnLog | None = None,
        on_progress: OnProgress | None = None,
    ) -> ExecutionResult:
        """Run a script in a fresh sandbox and return everything it left behind.

        `inputs` become names in the script, `files` its workspace; `tools` is what it may call. docs/scripts.md has the
        other arguments. `on_approval="suspend"` ends the run at calls that need approval, for `resume`; `dry_run=True`
        collects the calls that write as `effects`, for `commit`. `on_log` gets (stream, text), `on_progress` values.

        Raises:
            UsageError: an argument cannot be sent to a sandbox; names it.
            SandboxUnavailable: no sandbox could be started, so nothing ran.
            AuditError: the run could not be recorded; a call that could not be recorded was not made.
            Exception: `on_log` or `on_progress` raised this; the run was killed.

        Cancellation: the sandbox is killed with everything in it.
        """
        registry = self._tools(tools)
        check_run_arguments(lint, seed, clock, cancel, context, on_log=on_log, on_progress=on_progress)
        hold_s = check_hold(hold_s, on_approval)
        context = self._drafting(dry_run, context, on_approval)
        if limits is not None:
            check_supported(self._backend, settings_of(Limits, limits, "limits"))
        seed, clock = self._seed_and_clock(seed, clock, self._journals.is_durable or on_approval == "suspend")
        own = (limits or self.limits, lint or self.policy.lint, seed, clock)
        script = script_from(source, inputs, guest_files(files), *own, hold_s=hold_s)
        control = (registry, on_approval, repairs, refresh)
        begin = self._first_run(script, *control)
        types = await self._checked_types(check_types, source, registry, inputs, context)
        if types.refuses:
            return types.refusal(context)
        planned = await self._planned(script, registry, context) if preflight else script
        if isinstance(planned, ExecutionResult):
            return planned
        begin = begin if planned is script else self._first_run(planned, *control)
        result = await self._execute(planned, registry, context, (cancel, on_log, on_progress), begin)
        if context is not None and context.dry_run is not None:
            self._keep_draft(context.dry_run, result)
        return types.with_result(result)

    def stream(self, source: str, **options: Any) -> RunStream:
        """Run a script as `execute_code` does, and return what happens as events, for `async for`.

        Shape: `LogPrinted`, `ProgressReported`, `CallStarted` and `CallEnded` as they happen; at the end each
        `FileReturned`, and `RunFinished` with the result. Leaving the loop early ends the run; `async with` around the
        loop also waits for that. `cancel`, if given, is set then. A reader that falls 256 events behind holds the
        script up, and its `wall_s` goes on; no event is lost.

        Raises:
            UsageError: an argument is wrong, or this runtime is not open here.
            Exception: the loop raises what `execute_code` does.
        """
        from toolcell.run.streaming import RunStream

        self._lifetime.check()
        return RunStream(partial(self.execute_code, source), options, self._open_tasks)

    def feed(self, *, speculate: bool = False, on_retract: OnRetract = "report", **options: Any) -> EagerRun:
        """Return a run whose script is written to it as a model streams it: each statement runs once it is complete.

        `speculate`: start calls of tools that only read early, where their arguments are literals. `on_retract`: what
        happens when text is replaced that has run. `options`: as of `execute_code`; docs/eager.md has the exceptions.

        Raises:
            UsageError: an argument is wrong, or this runtime is not open here.
        """
        from toolcell.sessions.eager_run import eager_run

        self._lifetime.check()
        return eager_run(self, self.execute_code, options, self.limits, speculate=speculate, on_retract=on_retract)

    def _tools(self, tools: CallableTools | Iterable[Any] | None) -> CallableTools:
        self._lifetime.check()
        given: CallableTools = self.registry if tools is None else registry_of(tools, "tools=")
        return given.snapshot()

    async def _execute(
        self, script: Script, tools: CallableTools, context: RunContext | None, handlers: RunHandlers, begin: Begin,
        held: GuestConnection | None = None,
    ) -> ExecutionResult:  # fmt: skip
        limits, settings = script.limits, (script.lint, script.seed, script.clock)
        names = tools.names(Origin.CODE)
        feed = script.feed or (ScriptFeed.whole(script.source) if script.is_fed else None)
        source = script.source if feed is None else ""
        given = (script.number or next(self._numbers), source, script.inputs, names, limits, *settings)
        is_large = are_large(script.inputs)
        message = await daemon_threads.run_sync(run_message, *given) if is_large else run_message(*given)
        above = context.scope.work if context is not None and context.scope.scripts else None
        work, abandoned = HostWork(limits.host_work, above=above), AbandonedThreads(self._abandoned)
        made = MadeCalls(context.scope.made if context is not None else None)
        context = context or RunContext(run_id=os.urandom(16).hex())
        context = context.within(work=work, abandoned=abandoned, made=made, runtime=self)
        if limits is not self.limits:
            context = context.child(limits=limits)  # of saved scripts that it calls, too
        control = begin(message, self._under_rules(context))
        context, journal = control.context, control.journal
        request = RunRequest(
            message, limits, script.files, context.run_id, *handlers, work, journal.id, journal.answer,
            context.dry_run.key if context.dry_run is not None else "", script.hold_s, control.held, feed, is_large,
        )  # fmt: skip
        observer, started = NULL_OBSERVER, time.perf_counter()
        try:
            observer = await self._observer(request, tools, context)
            if feed is not None and feed.speculates and context.dry_run is None:
                feed.early = control.start_early(observer.context_of, limits, work)
            bridge = ToolBridge(control.tools, context, observer)
            result = control.finish(await self._run(request, bridge, observer, abandoned, held))
            if script.preflight is not None:
                result = dataclasses.replace(result, preflight=script.preflight)
        except BaseException as exc:
            self._held.drop(journal.id)
            self._count_run(context, min(limits.cpu_s, time.perf_counter() - started))  # nobody measured it
            control.abandon()
            observer.on_failure(exc)
            raise
        self._count_run(context, result.usage.cpu_s - (control.held.cpu_s if control.held is not None else 0.0))
        self._reverts.keep(result.journal_id, made)
        observer.on_end(result)
        if self.on_end is not None:
            self._tell_end(result)
        return result

    async def _observer(self, request: RunRequest, registry: CallableTools, context: RunContext) -> RunObserver:
        """Return the observer that writes to the audit log, or the null one."""
        if self._recorder is None:
            return NULL_OBSERVER
        return await self._recorder.run_observer(
            request.message, request.limits, request.files, registry, context, self.policy, self._about_environment,
            request.feed,
        )  # fmt: skip

    def abandoned_threads(self) -> tuple[AbandonedThread, ...]:
        """Return threads of synchronous tools that still run although their calls timed out or were cancelled.

        They are those of calls that scripts and plans of this runtime made. A closed runtime lists them too.
        """
        return self._abandoned.list()

    def _observed(self, context: RunContext, kind: str) -> AbstractContextManager[RunContext]:
        return self._recorder.observe(context, kind) if self._recorder is not None else nullcontext(context)
