"""`Runtime`: one `async with` that owns the sandboxes and runs scripts and plans against a registry of tools.

Start reading here: `execute_code` is the path every script takes. Decides nothing about isolation, wire or policy;
those are the backend's, the session's and the registry's.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
from anyio.abc import TaskGroup

from toolcell.config import Limits, LintProfile, Policy, PoolConfig, settings_of
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.results import ExecutionResult
from toolcell.run.request import FileInput, fits, guest_file, run_message
from toolcell.run.run import Run
from toolcell.run.session import Session
from toolcell.run.tool_bridge import answering
from toolcell.sandbox.backend import Backend, GuestFile
from toolcell.sandbox.pool import Pool
from toolcell.tools import Origin, RunContext, ToolRegistry
from toolcell.tools.plan import run_plan
from toolcell_bridge.wire.messages import RunScript

if TYPE_CHECKING:
    from toolcell.audit.log import AuditLog
    from toolcell.audit.recorder import Recorder
    from toolcell.audit.run_observer import AuditRunObserver
    from toolcell.audit.run_record import RunRecord

WATCH_S = 0.02
"""How often running sandboxes are measured. A run shorter than this is only measured at its end."""


class Runtime:
    """Runs scripts in single-use sandboxes, with the registry's tools as their only way out."""

    def __init__(
        self,
        registry: ToolRegistry | None = None,
        *,
        backend: str | Backend = "process",
        limits: Limits | None = None,
        python: str | None = None,
        packages: Sequence[str] = (),
        preload: Sequence[str] = (),
        pool: PoolConfig | None = None,
        policy: Policy | None = None,
        audit: str | os.PathLike[str] | AuditLog | None = None,
        allow_unisolated: bool = False,
    ) -> None:
        """`allow_unisolated`: take a backend that raises no walls. For tests of your own code, never for a model's."""
        self.registry = registry if registry is not None else ToolRegistry()
        self.limits = settings_of(Limits, limits, "limits")
        self.policy = settings_of(Policy, policy, "policy")
        self.pool_config = settings_of(PoolConfig, pool, "pool")
        self._python = python
        self._packages, self._preload = tuple(packages), tuple(preload)
        self._backend_choice = backend
        self._allow_unisolated = allow_unisolated
        self._audit = audit
        self._recorder: Recorder | None = None
        self._about_environment: dict[str, Any] = {"packages": self._packages, "preload": self._preload}
        self._backend: Backend | None = None
        self._pool: Pool[Session] | None = None
        self._stack: AsyncExitStack | None = None
        self._tasks: TaskGroup | None = None
        self._watched: set[Run] = set()
        self._something_runs = anyio.Event()
        self._runs = itertools.count(1)

    # Opening and closing.

    async def __aenter__(self) -> Self:
        if self._stack is not None:
            raise UsageError("this Runtime is already open; one Runtime is one `async with`")
        stack = AsyncExitStack()
        try:
            await self._open(stack)
        except BaseException as exc:
            if not await stack.__aexit__(type(exc), exc, exc.__traceback__):
                raise
        self._stack = stack
        return self

    async def _open(self, stack: AsyncExitStack) -> None:
        self._open_audit(stack)
        self._backend = await self._make_backend()
        if not (self._backend.isolates or self._allow_unisolated):
            raise UsageError(
                f"the backend {self._backend.name!r} isolates nothing; a test that means it says allow_unisolated=True"
            )
        await self._backend.open()
        stack.push_async_callback(self._backend.close)
        self._tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(self._tasks.cancel_scope.cancel)
        config = self.pool_config
        self._pool = Pool(
            self._start_session,
            self._end_session,
            lambda session: session.is_usable,
            lambda session: session.sandbox.freeze(),
            warm=config.warm,
            cap=config.cap,
            idle_s=config.idle_s,
        )
        stack.push_async_callback(self._pool.close)
        self._tasks.start_soon(self._watch)
        await self._pool.open(self._tasks)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._stack is not None
        stack, self._stack = self._stack, None
        # Closed as if nothing had happened: the task group would wrap the caller's exception in a group.
        await stack.__aexit__(None, None, None)
        return None

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

    async def _make_backend(self) -> Backend:
        choice = self._backend_choice
        if not isinstance(choice, str):
            return choice
        if choice == "process" and sys.platform != "linux":
            raise SandboxUnavailable(
                f'the process backend needs Linux namespaces, which {sys.platform} has not; use backend="docker"'
            )
        if choice == "process":
            from toolcell.sandbox.process.backend import ProcessBackend

            packages = await self._environment()
            return ProcessBackend(policy=self.policy, packages=packages, preload=self._preload, python=self._python)
        if choice == "docker":
            if self._python is not None:
                raise UsageError("a container runs its image's interpreter; python= is the process backend's")
            from toolcell.sandbox.docker.backend import DockerBackend

            return DockerBackend(policy=self.policy, packages=self._packages, preload=self._preload)
        raise UsageError(f'backend must be "process", "docker" or a Backend, not {choice!r}')

    async def _environment(self) -> Any:
        if not self._packages:
            return None
        from toolcell.sandbox.process import packages
        from toolcell.sandbox.process.root_filesystem import interpreter

        resolved = await anyio.to_thread.run_sync(
            lambda: packages.resolve(self._packages, python=interpreter(self._python).executable)
        )
        self._about_environment["digest"] = resolved.digest
        return resolved.path

    async def _start_session(self, limits: Limits | None = None) -> Session:
        assert self._backend is not None
        session = Session(await self._backend.start(limits or self.limits))
        await session.greet()
        return session

    @staticmethod
    async def _end_session(session: Session) -> None:
        await session.sandbox.destroy()

    # Running scripts.

    async def execute_code(
        self,
        source: str,
        *,
        inputs: Mapping[str, Any] | None = None,
        files: Iterable[FileInput] = (),
        tools: ToolRegistry | None = None,
        limits: Limits | None = None,
        lint: LintProfile | None = None,
        context: RunContext | None = None,
        seed: int | None = None,
        clock: float | None = None,
        cancel: anyio.Event | None = None,
        on_log: Callable[[str, str], None] | None = None,
        on_progress: Callable[[object], None] | None = None,
    ) -> ExecutionResult:
        """Run a script in a fresh sandbox and return everything it left behind.

        `inputs` become names in the script; `files` appear in its workspace; `tools` is what it may call; `seed` and
        `clock` go before the policy's; setting `cancel` ends the run with outcome `cancelled` and keeps what it had
        done until then.

        Raises:
            UsageError: an argument cannot cross into a sandbox; names it.
            SandboxUnavailable: no sandbox could be started, so nothing ran.
            AuditError: the run could not be recorded; a call that could not be recorded was not made.

        Cancellation: the sandbox is killed with everything in it.
        """
        if self._pool is None or self._stack is None:
            raise UsageError("this Runtime is not open; use it as `async with Runtime(...) as runtime:`")
        wanted = self.limits if limits is None else settings_of(Limits, limits, "limits")
        registry = (tools if tools is not None else self.registry).snapshot()
        seed = seed if seed is not None else self.policy.seed
        clock = clock if clock is not None else self.policy.clock
        if self._recorder is not None:
            seed, clock = self._recorder.beginnings(seed, clock)
        names, profile = registry.names(Origin.CODE), lint or self.policy.lint
        message = run_message(next(self._runs), source, inputs, names, wanted, profile, seed, clock)
        put = [guest_file(each) for each in files]
        context = context or RunContext(run_id=uuid.uuid4().hex)
        begin: Callable[[Session | None], RunRecord] | None = None
        if self._recorder is not None:
            begin = partial(self._begin_record, self._recorder, message, wanted, registry, context, put)
        waiting = time.perf_counter()
        is_warm = fits(wanted, self.limits, getattr(self._backend, "fixed", ()))
        try:
            session = await (self._pool.acquire() if is_warm else self._start_session(wanted))
        except SandboxUnavailable as exc:
            if begin is not None:
                begin(None).failed(exc)
            raise
        # Only when a sandbox is there are its walls known.
        witness = None if begin is None else self._witness(partial(begin, session))
        try:
            await session.sandbox.prepare(wanted)
            start_s = time.perf_counter() - waiting
            result = await session.execute(
                message,
                wanted,
                answering(registry, context, witness),
                files=put,
                watch=self._begin_watch,
                cancel=cancel,
                on_log=on_log,
                on_progress=on_progress,
                witness=witness,
                start_s=start_s,
                run_id=context.run_id,
            )
        except BaseException as exc:
            if witness is not None and witness.record is not None:
                witness.record.failed(exc)
            raise
        finally:
            if is_warm:
                self._pool.release(session)
            else:
                with anyio.CancelScope(shield=True):
                    await self._end_session(session)
        if witness is not None and witness.record is not None:
            witness.record.end(result)
        return result

    @staticmethod
    def _witness(begin: Callable[[], RunRecord]) -> AuditRunObserver:
        from toolcell.audit.run_observer import AuditRunObserver  # only a runtime with a log pays for it

        return AuditRunObserver(begin)

    def _begin_record(
        self,
        recorder: Recorder,
        message: RunScript,
        limits: Limits,
        registry: ToolRegistry,
        context: RunContext,
        files: Sequence[GuestFile],
        session: Session | None,
    ) -> RunRecord:
        return recorder.begin(
            message,
            limits=limits,
            policy=self.policy,
            registry=registry,
            context=context,
            files=files,
            sandbox=session.sandbox if session is not None else None,
            environment=self._about_environment,
        )

    # Running plans.

    async def execute_plan(
        self,
        steps: Sequence[Mapping[str, Any]],
        *,
        tools: ToolRegistry | None = None,
        context: RunContext | None = None,
    ) -> list[dict[str, Any]]:
        """Run independent tool calls at once, without a sandbox; one row for each step, in order.

        Shape: {"tool": ..., "args": {...}} in; {"step": 0, "tool": ..., "status": "ok", "result": ...} out, or status
        "error" with "error". docs/tools.md has the further keys of a step.

        Raises:
            UsageError: the plan cannot run as written; no step ran. A step that fails is a row, not an exception.
        """
        registry = (tools if tools is not None else self.registry).snapshot()
        context = context or RunContext(run_id=uuid.uuid4().hex)
        observed = self._recorder.observe(context, "plan") if self._recorder is not None else nullcontext(context)
        with observed as run:
            result = await run_plan(registry, {"steps": [dict(step) for step in steps]}, run)
        if result.is_error:
            raise UsageError(result.text)
        rows: list[dict[str, Any]] = result.value
        return rows

    # Watching.

    def _begin_watch(self, execution: Run) -> Callable[[], None]:
        self._watched.add(execution)
        self._something_runs.set()
        return lambda: self._watched.discard(execution)

    async def _watch(self) -> None:
        """Measure whatever has been running for a while; a run that ends sooner costs nothing here."""
        while True:
            if not self._watched:
                self._something_runs = anyio.Event()
                await self._something_runs.wait()
            await anyio.sleep(WATCH_S)
            for execution in tuple(self._watched):
                execution.check()
