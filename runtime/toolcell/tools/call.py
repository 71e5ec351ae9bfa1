"""One call on its way: what was asked, what it became, what came of it; and the tool's own view of it.

A `Call` is written by `dispatch` alone. Hooks and observers read it; a tool gets a `ToolContext`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import anyio

from toolcell.errors import ToolError, UsageError
from toolcell.tools.coercion import Change
from toolcell.tools.context import RunContext, RunState, new_id
from toolcell.tools.jobs import Completion, Work, completion_for
from toolcell.tools.options import DEFAULT_TOOL_OPTIONS, Origin, ToolOptions
from toolcell.tools.progress import ProgressReporter
from toolcell.tools.result import ToolResult

if TYPE_CHECKING:
    from toolcell.tools.spec import RegisteredTool
    from toolcell.tools.view import RegistryView


class Call:
    """The record of one call."""

    # Most of these keep their default in most calls, so they are set once, on the class.

    args: Mapping[str, Any] = MappingProxyType({})
    """Validated: what the tool receives. Empty until validation."""
    decoded: dict[str, Any] | None = None
    """The same as the Python types the tool declares, where these are more than JSON."""
    tool: RegisteredTool | None = None
    changes: tuple[Change, ...] = ()
    """What coercion mended."""
    warnings: tuple[str, ...] = ()
    approved = False
    refusal: ToolResult | None = None
    """Set when the tool was not run: unknown, invalid, blocked, substituted."""
    result: ToolResult | None = None
    scope: anyio.CancelScope | None = None
    timeout_s: float | None = None
    """Of this call; None is the tool's own or the registry's."""
    is_started = False
    """An observer knows of it."""
    is_executed = False
    is_concluded = False
    holds_worker = False
    """Of those that do work; tools that wait for others hold none."""
    started_at = 0.0
    """Seconds since the epoch."""
    started_s = 0.0
    """Monotonic."""
    duration_s = 0.0
    progress: ProgressReporter | None = None
    completion: Completion | None = None
    _context: ToolContext | None = None
    _nested: RunContext | None = None
    _lent: anyio.CapacityLimiter | None = None

    def __init__(
        self,
        registry: RegistryView,
        name: str,
        raw_args: Any,
        call_id: str,
        origin: Origin,
        run: RunContext,
        parent: Call | None = None,
        step: int | None = None,
        message: Any = None,
    ) -> None:
        self.registry = registry
        self.name = name
        self.raw_args = raw_args
        """As received; never changed."""
        self.call_id = call_id
        self.origin = origin
        self.run = run
        self.parent = parent
        self.parent_call_id = run.parent_call_id if parent is None else parent.call_id
        self.step = step
        """Of a plan."""
        self.message = message
        """The assistant message that asked for it, where there is one."""

    @property
    def options(self) -> ToolOptions:
        """Of the tool; of no tool in particular when there is none by that name."""
        return self.tool.options if self.tool is not None else DEFAULT_TOOL_OPTIONS

    @property
    def origin_label(self) -> str:
        """Shape: model, plan[2], code, subagent."""
        return str(self.origin) if self.step is None else f"{self.origin}[{self.step}]"

    @property
    def coerced(self) -> list[dict[str, Any]]:
        """Shape: [{"path", "from", "to"}]."""
        return [change.to_dict() for change in self.changes]

    @property
    def is_error(self) -> bool:
        """True when there is a result and it is a failure."""
        return self.result is not None and self.result.is_error

    @property
    def context(self) -> ToolContext:
        """The tool's view of this call."""
        if self._context is None:
            self._context = ToolContext(self)
        return self._context

    def nested_run(self) -> RunContext:
        """The run as calls made by this call's tool see it."""
        if self._nested is None:
            self._nested = self._make_nested_run() if self.options.orchestrates else self.run
        return self._nested

    def _make_nested_run(self) -> RunContext:
        run = self.run
        # Not MODEL: what a model may not call directly, its code may well be meant to call.
        via = run.via if self.origin is Origin.MODEL else run.via | {self.origin}
        changes: dict[str, Any] = {
            "parent_call_id": self.call_id,
            "level": run.level + 1,
            "via": via,
            "borrowed_worker": self.borrowed_worker,
            "held_groups": self.held_groups,
        }
        if run.is_shared:  # what this tool starts is a run of its own, with bounds of its own
            changes |= {"is_shared": False, "run_id": new_id(), "state": RunState()}
        return run.child(**changes)

    @property
    def callers(self) -> Iterator[Call]:
        """The calls above, innermost first, as far as they were made in this task or its children."""
        above = self.parent
        while above is not None:
            yield above
            above = above.parent

    @property
    def borrowed_worker(self) -> anyio.CapacityLimiter | None:
        """The worker of the nearest call above that holds one: it waits for this call, so its worker is free for it.

        Waiting for another would be a deadlock when all are held by calls that wait; taking none would break the cap.
        """
        for above in self.callers:
            if above.holds_worker:
                if above._lent is None:
                    above._lent = anyio.CapacityLimiter(1)
                return above._lent
        return self.run.borrowed_worker

    @property
    def held_groups(self) -> frozenset[str]:
        """Exclusive groups that calls above hold, and so this one need not wait for."""
        own = {above.options.exclusive_group for above in self.callers} - {None}
        return self.run.held_groups | frozenset(group for group in own if group is not None)

    def emit(self, kind: str, **fields: Any) -> None:
        """Emit an event of this call."""
        self.run.events.emit(
            type=kind,
            run_id=self.run.run_id,
            origin=self.origin_label,
            call_id=self.call_id,
            parent_call_id=self.parent_call_id,
            tool=self.name,
            **fields,
        )

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data; arguments are not redacted."""
        plain: dict[str, Any] = {
            "call_id": self.call_id,
            "parent_call_id": self.parent_call_id,
            "run_id": self.run.run_id,
            "tool": self.name,
            "origin": self.origin_label,
            "args": self.args if self.refusal is None else self.raw_args,
            "coerced": self.coerced,
            "warnings": list(self.warnings),
            "started_at": self.started_at,
            "duration_s": self.duration_s,
        }
        if self.result is not None:
            plain["result"] = self.result.to_dict()
        return plain


class ToolContext:
    """What a tool may know about the call it serves. Read-only; one per call, never shared between calls."""

    __slots__ = ("_call", "update")

    def __init__(self, call: Call) -> None:
        self._call = call
        if call.progress is None:
            call.progress = ProgressReporter(call)
        self.update = call.progress
        """Report progress: `ctx.update("half way")`, `ctx.update(details={...})`. Works from any thread."""

    @property
    def run(self) -> RunContext:
        """The run, for passing on to other registries and agents."""
        return self._call.nested_run()

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self._call.run.run_id

    @property
    def call_id(self) -> str:
        """The model's id of this call, unchanged."""
        return self._call.call_id

    @property
    def tool(self) -> str:
        """The name that was called."""
        return self._call.name

    @property
    def origin(self) -> Origin:
        """Where the call comes from."""
        return self._call.origin

    @property
    def parent_call_id(self) -> str | None:
        """The call this one was made in."""
        return self._call.parent_call_id

    @property
    def user_id(self) -> str:
        """Empty when the run is for nobody in particular."""
        return self._call.run.user_id

    @property
    def thread_id(self) -> str:
        """Empty when there is none."""
        return self._call.run.thread_id

    @property
    def channel(self) -> str:
        """Empty when there is none."""
        return self._call.run.channel

    @property
    def chat_id(self) -> str:
        """Empty when there is none."""
        return self._call.run.chat_id

    @property
    def custom(self) -> Mapping[str, Any]:
        """The application's own keys."""
        return self._call.run.custom

    @property
    def limits(self) -> Any:
        """Limits of the run's sandboxes, as given with the run."""
        return self._call.run.limits

    @property
    def logger(self) -> logging.Logger:
        """The run's logger."""
        return self._call.run.logger

    @property
    def scope(self) -> anyio.CancelScope | None:
        """Cancelled when the call times out or the run is cancelled."""
        return self._call.scope

    @property
    def deadline(self) -> float:
        """On the event loop's clock; `math.inf` when nothing bounds the call yet."""
        scope = self._call.scope
        return min(self._call.run.deadline, scope.deadline if scope is not None else self._call.run.deadline)

    def secret(self, name: str) -> str:
        """A secret registered with the run.

        Raises:
            ToolError: there is none of that name.
        """
        if (value := self._call.run.secrets.get(name)) is None:
            raise ToolError(f"no secret named {name!r} is configured", code="unavailable")
        return value

    def require_task(self) -> RunContext:
        """The run, when it is for somebody.

        Raises:
            ToolError: `no task context`.
        """
        if not self._call.run.has_task:
            raise ToolError("no task context", code="unavailable")
        return self._call.run

    def emit(self, kind: str, **data: Any) -> None:
        """Emit an event of the tool's own."""
        self._call.emit(kind, data=data)

    @property
    def callback(self) -> Completion | None:
        """To be called once with the final result of work that goes on after the call; None when nobody listens."""
        return completion_for(self._call)

    def start_job(self, work: Work, *, ack: str = "started", timeout_s: float | None = None) -> ToolResult:
        """Hand work to the run's job state and return the pending result to give back.

        Raises:
            ToolError: the run keeps no job state.
        """
        jobs = self._call.run.state.jobs
        if jobs is None:
            raise ToolError("this run keeps no background jobs", code="unavailable")
        return ToolResult.async_(ack, job_id=jobs.start(self._call, work, timeout_s).id)

    async def call_tool(self, name: str, args: Mapping[str, Any] | None = None) -> ToolResult:
        """Call another tool on the same path, with the caller's rights."""
        call = self._call
        return await call.registry.dispatch(name, args or {}, origin=call.origin, context=call.nested_run())


current: ContextVar[Call | None] = ContextVar("toolcell_call", default=None)
"""The call being executed in this task or thread."""


def current_context() -> ToolContext:
    """The context of the call being executed, for code that is not handed one.

    Raises:
        UsageError: no tool call is being executed here.
    """
    call = current.get()
    if call is None:
        raise UsageError("no tool call is being executed here")
    return call.context
