"""`Runtime`: one `async with` that owns the sandboxes and runs scripts and plans against a registry of tools.

Start reading here: every script goes through `execute_code`. Isolation, wire and policy are decided elsewhere: by the
backend, the connection and the registry.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Unpack

import anyio

from toolcell.calls.call import CallableTools, ResumeDecision, RunContext
from toolcell.calls.checker_process import end_idle
from toolcell.calls.placeholders import DryRun
from toolcell.calls.reverts import Reverts
from toolcell.config import CheckTypes, Limits, OnApproval, Policy, PoolConfig, check_types_of
from toolcell.control.script_runs import ScriptChecks, ScriptRuns
from toolcell.errors import UsageError, warn_user
from toolcell.flows import unmatched
from toolcell.results import AbandonedThread, ExecutionResult, Outcome, Suspension
from toolcell.run.calls import finished_runs
from toolcell.run.connection import GuestConnection
from toolcell.run.options import ResumeKwargs, RunKwargs, RunOptions
from toolcell.run.runs import EgressRules, Runs
from toolcell.run.sandboxes import Sandboxes
from toolcell.sandbox.backend import Backend
from toolcell.sandbox.environment import Environment
from toolcell.sandbox.pool import Pool
from toolcell.settings import settings_of
from toolcell.support.checks import brief, check_does, check_kind, keywords_known
from toolcell.support.lifetime import Lifetime, OpenedInBlock
from toolcell.tools import ToolRegistry

if TYPE_CHECKING:
    from toolcell.audit.log import AuditLog
    from toolcell.control.draft import Approved, Draft
    from toolcell.control.dry_runs import DryRuns
    from toolcell.control.kept_drafts import EffectDecision
    from toolcell.control.map_stream import OnError, RunMap
    from toolcell.control.plans import PlanRows, PlanRuns
    from toolcell.control.resumption import Resumption
    from toolcell.journal.store import JournalStore
    from toolcell.quotas import Quotas
    from toolcell.results import CommitResult, Preflight, RevertResult
    from toolcell.run.streaming import RunStream
    from toolcell.sessions.session import Session
    from toolcell.sessions.sessions import Sessions
    from toolcell.sessions.settings import SessionKwargs


class Runtime(OpenedInBlock):
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
        record: str | os.PathLike[str] | AuditLog | None = None,
        quotas: Quotas | None = None,
        check_types: bool | CheckTypes | None = None,
        egress: EgressRules | None = None,
        allow_unisolated: bool = False,
    ) -> None:
        """`registry` may be a list of tools. `record`: a file, such as "runs.db", or a database, such as
        "postgresql://user@host/name", that holds what scripts did, and what suspended runs, sessions, drafts and maps
        need to outlive this process.
        `egress`: an `Egress` says where libraries of scripts may send HTTP requests; without one they have no network.
        `allow_unisolated`: take a backend without isolation, in tests of your own code, never for a model's."""
        self.environment = Environment(
            backend, python=python, packages=packages, preload=preload, allow_unisolated=allow_unisolated
        )
        self.registry = ToolRegistry.of(registry, "Runtime")
        if quotas is not None:
            from toolcell.quotas import Quotas

            check_kind("quotas=", quotas, Quotas, cure="write Quotas(Quota(runs=100), by=...)")
        if egress is not None:
            check_does("egress=", egress, EgressRules, "write Egress(Allow(...))")
        self.limits, self.quotas = settings_of(Limits, limits, "limits"), quotas
        policy = settings_of(Policy, policy, "policy")
        if (degree := check_types_of(check_types)) is not None:
            policy = policy.model_copy(update={"check_types": degree})
        self.environment.check_own(policy)
        self.pool_config = settings_of(PoolConfig, pool, "pool")
        self.record = None if record is None else _record_of(record)
        self._keeps = self.record if self.record is None or self.record.config.continue_bytes != 0 else None
        """What its runs go on from is in this record; None: it ends with the Runtime."""
        self._finished = finished_runs()
        self._lifetime = Lifetime("Runtime", self._open)
        self.sandboxes = Sandboxes(self.environment, self.pool_config, self.limits, lambda: self._lifetime.is_open)
        self.reverts = Reverts()
        self.runs = Runs(
            registry=self.registry,
            limits=self.limits,
            policy=policy,
            features=(self.reverts,) if quotas is None else (self.reverts, quotas),
            environment=self.environment,
            sandboxes=self.sandboxes,
            lifetime=self._lifetime,
            runtime=self,
            requests=egress.tools_for(self.limits) if egress is not None else None,
        )
        self.checks = ScriptChecks(self.runs, Runtime)
        self.scripts = ScriptRuns(
            runs=self.runs,
            checks=self.checks,
            finished=self._finished,
            journals=lambda: self.journals,
            is_durable=self._keeps is not None,
            dry_runs=lambda: self.dry_runs,
        )
        self._sessions: Sessions | None = None

    # Parts that are loaded when they are used first.

    @cached_property
    def journals(self) -> JournalStore:
        """The journals of its runs."""
        from toolcell.journal.store import JournalStore

        return JournalStore(self._keeps, self._finished)

    @cached_property
    def dry_runs(self) -> DryRuns:
        """Its dry runs, and their commits."""
        from toolcell.control.dry_runs import DryRuns

        return DryRuns(self.runs, self.journals, self.reverts)

    @cached_property
    def plans(self) -> PlanRuns:
        """Its plans."""
        from toolcell.control.plans import PlanRuns

        return PlanRuns(self.runs, self.journals, self.dry_runs, self.reverts)

    @cached_property
    def resumption(self) -> Resumption:
        """Carries its suspended and interrupted runs on."""
        from toolcell.control.resumption import Resumption

        return Resumption(self.runs, self.journals, self.scripts, self.plans)

    @property
    def sessions(self) -> Sessions:
        """Its sessions."""
        if self._sessions is None:
            from toolcell.sessions.sessions import Sessions
            from toolcell.sessions.state import SessionHost

            host = SessionHost(
                runs=self.runs,
                journals=self.journals,
                checks=self.checks,
                dry_runs=self.dry_runs,
                resumption=self.resumption,
            )
            self._sessions = Sessions(self.pool_config.cap, host)
        return self._sessions

    # What it was given, and has become.

    @property
    def policy(self) -> Policy:
        """The required isolation, and defaults for options that a caller does not set."""
        return self.runs.policy

    @property
    def packages(self) -> tuple[str, ...]:
        """What scripts may import besides the standard library; with versions once the runtime is open."""
        return self.environment.packages

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where libraries of scripts may send HTTP requests; none without `egress=`."""
        return self.runs.requests.hosts if self.runs.requests is not None else ()

    @property
    def installable(self) -> tuple[str, ...]:
        """Which packages scripts may install with `install_package`; none without `Egress(packages=)`."""
        return self.runs.requests.installable if self.runs.requests is not None else ()

    @property
    def pool(self) -> Pool[GuestConnection] | None:
        """The sandboxes; None before the runtime is opened."""
        return self.sandboxes.pool

    @property
    def on_end(self) -> Callable[[ExecutionResult | PlanRows], object] | None:
        """Called with the result of each script and each plan, also in sessions. Its exceptions are logged."""
        return self.runs.on_end

    @on_end.setter
    def on_end(self, function: Callable[[ExecutionResult | PlanRows], object] | None) -> None:
        self.runs.on_end = function

    # Opening and closing.

    async def open(self) -> None:
        """Start everything that runs need. `async with` does this and closes at the end of its block.

        Raises:
            UsageError: it is open already, or an argument cannot work.
            SandboxUnavailable: this machine cannot start sandboxes; the message says why.
        """
        await self._lifetime.open()

    async def close(self) -> None:
        """End every sandbox. Running scripts end with outcome `cancelled`. May be called from any task, and twice."""
        await self._lifetime.close()

    @property
    def is_open(self) -> bool:
        """True between `open` and `close`."""
        return self._lifetime.is_open

    def check_open(self) -> None:
        """Raise `UsageError` unless it is open in this event loop and process.

        Raises:
            Misconfigured: it is not open, or belongs to another event loop or to the parent process.
        """
        self._lifetime.check()

    async def _open(self, stack: AsyncExitStack) -> None:
        """Open the parts; `stack` closes them in the opposite order."""
        stack.callback(end_idle)
        self._warn_of_labels()
        runs, sandboxes = self.runs, self.sandboxes
        await self._open_record(stack)
        if runs.requests is not None:
            await runs.requests.open()
            stack.push_async_callback(runs.requests.aclose)
        await self.environment.open(runs.policy, self.limits, sandboxes.config.start_s, stack)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        runs.open(tasks)
        sandboxes.make_pool()
        stack.push_async_callback(sandboxes.close)
        stack.push_async_callback(self.checks.close)
        stack.push_async_callback(self._close_sessions)
        stack.push_async_callback(sandboxes.end_runs, "the Runtime was closed")
        await sandboxes.open(tasks)

    async def _close_sessions(self) -> None:
        if self._sessions is not None:
            await self._sessions.close()

    def _warn_of_labels(self) -> None:
        """Warn of a flow that is about no tool's label. Without any labels here, tools may come with each run."""
        options = [tool.options for tool in self.registry.state.tools.values()]
        options += self.runs.requests.options if self.runs.requests is not None else ()
        reads, sends = ({label for each in options for label in getattr(each, end)} for end in ("reads", "sends"))
        for problem in unmatched(self.policy.flows, reads, sends) if reads or sends else ():
            warn_user(f"Policy(flows=): {problem}")

    async def _open_record(self, stack: AsyncExitStack) -> None:
        if self.record is None:
            return
        from toolcell.audit.recorder import Recorder

        journals, record = self.journals, self.record
        if not record.is_open:
            stack.push_async_callback(journals.call, record.close)
            await journals.call(record.open)
        stack.push_async_callback(journals.call, journals.close)
        await journals.call(journals.open)
        self.runs.recorder = Recorder(self.record)
        if self.environment.is_built_in and self.runs.policy.hash_seed is None:
            self.runs.policy = self.runs.policy.model_copy(update={"hash_seed": self.journals.hash_seed})

    # Running scripts.

    @keywords_known
    async def execute_code(self, source: str, **options: Unpack[RunKwargs]) -> ExecutionResult:
        """Run a script in a fresh sandbox and return its result.

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
        return await self.scripts.execute(source, RunOptions.of("execute_code", options))

    def stream(self, source: str, **options: Unpack[RunKwargs]) -> RunStream:
        """Run a script as `execute_code` does, and return its events, for `async for`.

        Shape: `LogPrinted`, `ProgressReported`, `CallStarted`, `CallUpdated`, `CallOutput` and `CallEnded` as they
        happen; at the end each `FileReturned`, and `RunFinished` with the result. Leaving the loop early ends the run;
        `async with` around the loop also waits for that. `cancel`, if given, is set then. A reader that falls 256
        events behind holds the script up, and its `wall_s` goes on; no event but a `CallUpdated` is lost.

        Raises:
            UsageError: an argument is wrong, or this runtime is not open here.
            Exception: the loop raises what `execute_code` does.
        """
        from toolcell.run.streaming import RunStream

        self.check_open()
        return RunStream(partial(self.scripts.execute, source), RunOptions.of("stream", options), self.runs.task_group)

    @keywords_known
    def map(
        self,
        source: str,
        inputs: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        concurrency: int = 8,
        ordered: bool = True,
        retries: int = 0,
        retry_on: Collection[Outcome | str] | None = None,
        on_error: OnError = "yield",
        map_id: str | None = None,
        resume: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> RunMap:
        """Run a script once for each of many inputs, and return the results, for `async for`.

        Shape: a `MapItem` for each input, in order or (`ordered=False`) as they end. Inputs are pulled as needed; at
        most four for each of `concurrency` are in memory. `options` are those of `execute_code` for every run.

        `retries`: how often an item is tried again whose failure was the machine's (`retry_on`: other outcomes), if its
        run provably had no effect. `on_error`: "stop" begins no more items after one that failed, "raise" raises.
        `map_id` keeps it in the record: after a crash the same call with `resume=True` carries the map
        on; what had ended is answered from the record, and no call is made twice. docs/scale.md says more.

        Raises:
            UsageError: an argument is wrong, or this runtime is not open here.
        """
        self.check_open()
        from toolcell.control.map_runs import start_map

        return start_map(
            self.runs,
            self.journals,
            self.scripts,
            self.resumption,
            source,
            inputs,
            concurrency=concurrency,
            ordered=ordered,
            retries=retries,
            retry_on=retry_on,
            on_error=on_error,
            map_id=map_id,
            resume=resume,
            options=options,
        )

    @keywords_known
    async def preflight(
        self, source: str, *, tools: CallableTools | Iterable[Any] | None = None, limits: Limits | None = None
    ) -> Preflight:
        """Return the calls that are written out in a script. It is parsed in a sandbox and does not run.

        Raises:
            UsageError: `source` is not text, or too large.
            SandboxUnavailable: no sandbox could be started.
        """
        return await self.checks.preflight(source, self.runs.tools(tools), limits)

    # Plans.

    @keywords_known
    async def execute_plan(
        self,
        steps: Sequence[Mapping[str, Any]],
        *,
        tools: ToolRegistry | Iterable[Any] | None = None,
        context: RunContext | None = None,
        on_approval: OnApproval = "ask",
        dry_run: Draft | None = None,
    ) -> PlanRows:
        """Run independent tool calls at once, without a sandbox; return one row for each step, in order.

        Shape: {"tool": ..., "args": {...}} in; {"step": 0, "tool": ..., "status": "ok", "result": ...} out, or status
        "error" with "error". docs/plans.md has the further keys of a step. `on_approval="suspend"`: steps that need
        approval have the status "waiting", the others run, and the rows have a `suspension` for `resume`. `dry_run`:
        collects the calls that write.

        Raises:
            UsageError: the plan cannot run as written, or this runtime is not open here; no step ran. A step that
                fails is a row, not an exception.
        """
        self.check_open()
        if not (dry_run is None or isinstance(dry_run, DryRun)):
            raise UsageError(
                f"dry_run of a plan takes a Draft, not {brief(dry_run)}: draft = Draft(), then commit(draft)"
            )
        options = RunOptions(tools=tools, context=context, on_approval=on_approval, dry_run=dry_run or False)
        return await self.plans.execute(steps, options)

    # What waits: for a decision, for its host, for its commit.

    @keywords_known
    async def resume(
        self,
        token: str | Suspension,
        decisions: Mapping[str, ResumeDecision] | None = None,
        **options: Unpack[ResumeKwargs],
    ) -> ExecutionResult:
        """Resume a suspended run: its script runs again in a fresh sandbox, and its calls get their recorded answers.

        A plan is carried on too: the steps without a result run, and the rows of all are the `value`.

        `decisions`: by the id of the pending call; a call without one suspends the run again. A run that was
        interrupted, and has no token, is carried on with its id (`interrupted_runs`).

        Raises:
            ResumeError: the token is damaged, changed, foreign, expired or used; its run is unknown or under way; or
                the tools are not those that it began with. Nothing was made.
            UsageError: a decision is about a call that does not wait for one, or an argument is of the wrong kind.
            SandboxUnavailable, AuditError: as from `execute_code`. The run can be resumed with its id.
        """
        if self._sessions is not None and (session := self._sessions.waiting_for(token)) is not None:
            return await session.resume(token, decisions, **options)
        return await self.resumption.resume(token, decisions, RunOptions.of("resume", options, ResumeKwargs))

    def suspended_runs(self) -> list[Suspension]:
        """Return what each suspended run waits for, with its token, even if the token was lost with its host."""
        return self.journals.suspensions()

    def interrupted_runs(self) -> list[str]:
        """Return the ids of runs whose host was killed, or that were cancelled, and that `resume` accepts."""
        return self.journals.interrupted()

    def calls_of_interrupted(self, run_id: str) -> list[dict[str, Any]] | None:
        """Return the calls that an interrupted run had made or begun, in order; None if it has no journal.

        Shape: `tool`, `args`, and `state`: `answered`, `in doubt` (its tool had begun), or `not begun`.
        """
        return self.resumption.calls_of_interrupted(run_id)

    @keywords_known
    async def commit(
        self,
        draft: ExecutionResult | Draft | str,
        approve: Approved = "all",
        *,
        recheck: bool = False,
        decisions: Mapping[str, EffectDecision] | None = None,
        tools: CallableTools | Iterable[Any] | None = None,
        context: RunContext | None = None,
    ) -> CommitResult:
        """Make the effects of a dry run in order, as ordinary calls; stop at the first that fails.

        `approve`: "all" of a draft whose text shows it whole, the draft's digest, or the ids of the effects to make.
        This is the approval that tools with `requires_approval` need. `recheck`: make the reads of the dry run again
        first, and make nothing if one has another result now. `draft` may be a `draft_id`: with
        `Runtime(record=FILE)` another process commits a draft, with the same `tools`. A commit whose host was
        killed goes on when it is called again: what was made is not made again, and `decisions` say about each effect
        in doubt whether it was `AlreadyMade(result)` or is to be made (`Approve()`).

        Raises:
            UsageError: the draft is none, of another Runtime, committed, or expired; an id is unknown; an effect needs
                the result of one that is not approved; "all" would approve what the draft's text cuts; a read has
                changed; or this Runtime is not open. Nothing was made.

        Cancellation: the effects before it are made, and the draft is used up; one on disk can be committed on.
        """
        options = RunOptions(tools=tools, context=context)
        return await self.dry_runs.commit(draft, approve, recheck=recheck, decisions=decisions, options=options)

    def waiting_drafts(self) -> list[Draft]:
        """Return the drafts of this runtime's dry runs that can be committed, the oldest first."""
        return self.dry_runs.waiting()

    @keywords_known
    async def revert(
        self, result: ExecutionResult | CommitResult | PlanRows, *, context: RunContext | None = None
    ) -> RevertResult:
        """Undo the calls of a run or a commit with the `revert=` of their tools: the last call first, until one fails.

        Raises:
            UsageError: `result` is of neither, or this Runtime knows of nothing to revert, or is not open.

        Cancellation: what was reverted until then is reverted; a second call goes on with the rest.
        """
        from toolcell.control.revert import revert

        return await revert(self.runs, self.reverts, result, context)

    # Sessions.

    @keywords_known
    def session(self, name: str | None = None, **options: Unpack[SessionKwargs]) -> Session:
        """Return a session, to be opened with `async with`: its scripts share a sandbox, variables and files.

        `limits` are those of each script; a limit of the sandbox, such as memory, holds for all of them together.
        `cpu_s` and `tool_calls`: of all scripts together, by default ten times what one may use. `idle_s`: after so
        long without a script the sandbox is destroyed. `restore`: what the next script finds then, and after the
        sandbox was lost: the state, rebuilt from the journal without making any call again, or nothing. True goes on
        from the journal that an earlier session of this name has left, and opening the session fails if there is
        none; "if_kept" begins anew then.

        Raises:
            UsageError: an argument is wrong.
        """
        return self.sessions.make(name, options)

    def kept_sessions(self) -> list[str]:
        """Return the names of sessions with a journal here: each can be restored, or is open."""
        return self.sessions.kept_names()

    def forget_session(self, name: str) -> None:
        """Remove the journal of a closed session, which can then not be restored.

        Raises:
            UsageError: there is none of this name.
            SessionError: it is open.
        """
        self.sessions.forget(name)

    def abandoned_threads(self) -> tuple[AbandonedThread, ...]:
        """Return threads of synchronous tools that still run after their calls timed out or were cancelled.

        They are those of calls that scripts and plans of this runtime made. A closed runtime lists them too.
        """
        return self.runs.abandoned.list()


def _record_of(given: str | os.PathLike[str] | AuditLog) -> AuditLog:
    from toolcell.audit.log import AuditLog

    if isinstance(given, AuditLog):
        return given
    if not isinstance(given, str | os.PathLike):
        raise UsageError(
            f"record= takes a file, a postgresql:// URL or an AuditLog, not {type(given).__name__} {given!r:.80}"
        )
    return AuditLog(given)
