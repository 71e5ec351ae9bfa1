"""`Runtime`: one `async with` that owns the sandboxes and runs scripts and plans against a registry of tools.

Start reading here: every script goes through `execute_code`. Isolation, wire and policy are decided elsewhere: by the
backend, the connection and the registry.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from toolcell.config import Limits, LintProfile, Policy, PoolConfig, settings_of
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.results import ExecutionResult
from toolcell.run.connection import GuestConnection
from toolcell.run.monitor import RunMonitor
from toolcell.run.observer import NULL_OBSERVER, RunObserver
from toolcell.run.request import FileInput, RunRequest, fits, guest_files, run_message
from toolcell.run.run import Run
from toolcell.run.tool_bridge import ToolBridge
from toolcell.sandbox.backend import Backend
from toolcell.sandbox.pool import Pool
from toolcell.tools import Origin, RunContext, ToolRegistry
from toolcell.tools.call import CallableTools

if TYPE_CHECKING:
    from toolcell.audit.log import AuditLog
    from toolcell.audit.recorder import Recorder


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
        """`allow_unisolated`: take a backend without isolation. For tests of your own code, never for a model's."""
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
        self._fixed: Collection[str] = ()
        self.pool: Pool[GuestConnection] | None = None
        """The sandboxes; None before the runtime is opened."""
        self._stack: AsyncExitStack | None = None
        self._monitor = RunMonitor()
        self._numbers = itertools.count(1)

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
        self._fixed = getattr(self._backend, "fixed", ())
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        config = self.pool_config
        self.pool = Pool(
            self._connect,
            lambda connection: connection.sandbox.destroy(),
            lambda connection: connection.is_usable,
            lambda connection: connection.sandbox.freeze(),
            warm=config.warm,
            cap=config.cap,
            idle_s=config.idle_s,
        )
        stack.push_async_callback(self.pool.close)
        tasks.start_soon(self._monitor.tick)
        await self.pool.open(tasks)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._stack is not None
        stack, self._stack = self._stack, None
        # Close as if nothing had happened: the task group would wrap the caller's exception in a group.
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

    async def _connect(self, limits: Limits | None = None) -> GuestConnection:
        """Start a sandbox and wait for its Hello."""
        assert self._backend is not None
        connection = GuestConnection(await self._backend.start(limits or self.limits))
        await connection.hello()
        return connection

    # Running scripts.

    async def execute_code(
        self,
        source: str,
        *,
        inputs: Mapping[str, Any] | None = None,
        files: Iterable[FileInput] = (),
        tools: CallableTools | None = None,
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
        `clock` take precedence over the policy's; setting `cancel` ends the run with outcome `cancelled` and keeps what
        it had done until then.

        Raises:
            UsageError: an argument cannot be sent to a sandbox; names it.
            SandboxUnavailable: no sandbox could be started, so nothing ran.
            AuditError: the run could not be recorded; a call that could not be recorded was not made.
            Exception: `on_log` or `on_progress` raised this; the run was killed.

        Cancellation: the sandbox is killed with everything in it.
        """
        if self.pool is None or self._stack is None:
            raise UsageError("this Runtime is not open; use it as `async with Runtime(...) as runtime:`")
        wanted = self.limits if limits is None else settings_of(Limits, limits, "limits")
        registry: CallableTools = (tools if tools is not None else self.registry).snapshot()
        seed, clock = self._seed_and_clock(seed, clock)
        names, profile = registry.names(Origin.CODE), lint or self.policy.lint
        message = run_message(next(self._numbers), source, inputs, names, wanted, profile, seed, clock)
        context = context or RunContext(run_id=os.urandom(16).hex())
        request = RunRequest(message, wanted, guest_files(files), context.run_id, cancel, on_log, on_progress)
        observer = self._observer(request, registry, context)
        bridge = ToolBridge(registry, context, observer)
        try:
            result = await self._run(request, bridge, observer)
        except BaseException as exc:
            observer.on_failure(exc)
            raise
        observer.on_end(result)
        return result

    async def _run(self, request: RunRequest, bridge: ToolBridge, observer: RunObserver) -> ExecutionResult:
        waiting = time.perf_counter()
        assert self.pool is not None
        limits = request.limits
        # A sandbox of the pool will do if its limits can be lowered to those of the run.
        is_pooled = fits(limits, self.limits, self._fixed)
        connection = await (self.pool.acquire() if is_pooled else self._connect(limits))
        try:
            observer.on_sandbox(connection.sandbox)
            await connection.sandbox.prepare(limits)
            run = Run(connection, request, bridge.dispatch, observer, time.perf_counter() - waiting)
            self._monitor.add(run)
            try:
                return await run.execute()
            finally:
                self._monitor.discard(run)
        finally:
            if is_pooled:
                self.pool.release(connection)
            else:
                with anyio.CancelScope(shield=True):
                    await connection.sandbox.destroy()

    def _seed_and_clock(self, seed: int | None, clock: float | None) -> tuple[int | None, float | None]:
        if seed is None:
            seed = self.policy.seed
        if clock is None:
            clock = self.policy.clock
        return (seed, clock) if self._recorder is None else self._recorder.replay_seed(seed, clock)

    def _observer(self, request: RunRequest, registry: CallableTools, context: RunContext) -> RunObserver:
        """Return the observer that writes to the audit log, or the null one."""
        recorder = self._recorder
        if recorder is None:
            return NULL_OBSERVER
        from toolcell.audit.recorder import AuditRunObserver  # only a runtime with a log pays for it

        return AuditRunObserver(
            lambda sandbox: recorder.begin(
                request.message,
                limits=request.limits,
                policy=self.policy,
                registry=registry,
                context=context,
                files=request.files,
                sandbox=sandbox,
                environment=self._about_environment,
            )
        )

    # Running plans.

    async def execute_plan(
        self,
        steps: Sequence[Mapping[str, Any]],
        *,
        tools: ToolRegistry | None = None,
        context: RunContext | None = None,
    ) -> list[dict[str, Any]]:
        """Run independent tool calls at once, without a sandbox; return one row for each step, in order.

        Shape: {"tool": ..., "args": {...}} in; {"step": 0, "tool": ..., "status": "ok", "result": ...} out, or status
        "error" with "error". docs/tools.md has the further keys of a step.

        Raises:
            UsageError: the plan cannot run as written; no step ran. A step that fails is a row, not an exception.
        """
        registry = (tools if tools is not None else self.registry).snapshot()
        context = context or RunContext(run_id=os.urandom(16).hex())
        observed = self._recorder.observe(context, "plan") if self._recorder is not None else nullcontext(context)
        with observed as run:
            result = await registry.run_plan({"steps": [dict(step) for step in steps]}, run)
        if result.is_error:
            raise UsageError(result.text)
        rows: list[dict[str, Any]] = result.value
        return rows
