"""Who a run is for and what its calls share: ids, secrets, budget, events, inherited rules.

A `RunContext` is frozen and passed along; a guest can neither read nor forge it. What changes during a run is in its
one `RunState`.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import anyio

from toolcell.errors import ToolAbort, UsageError
from toolcell.tools.events import EventBus
from toolcell.tools.hooks import Hook
from toolcell.tools.options import Origin
from toolcell.tools.policy import CallPolicy
from toolcell.tools.result import NO_USAGE, Part, TokenUsage, ToolResult

if TYPE_CHECKING:
    from toolcell.tools.call import Call
    from toolcell.tools.jobs import JobTable

LOGGER = logging.getLogger("toolcell.tools")
PLAN_ORCHESTRATORS = 2
"""Steps of plans that run code or sub-agents at once: each may start an interpreter or many model calls."""
REDACTED = "[redacted]"
_MIN_SECRET_CHARS = 4


class CallObserver(Protocol):
    """Sees every call of a run. `call_started` returns before the tool has any effect. Either may be async."""

    def call_started(self, call: Call, /) -> Awaitable[None] | None:
        """A call is about to run, or was just refused (`call.refusal` says why)."""

    def call_ended(self, call: Call, /) -> Awaitable[None] | None:
        """A call has its final `call.result`."""


class Secrets(Mapping[str, str]):
    """Values tools may use and nobody may read: never shown, and taken out of text for models and logs."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = dict(values or {})
        # Longest first, so that a secret containing another is removed whole.
        hidden = sorted((text for text in self._values.values() if len(text) >= _MIN_SECRET_CHARS), key=len)
        self._hidden = tuple(reversed(hidden))

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self._values)})"

    def redact(self, text: str) -> str:
        """`text` with every secret of at least four characters replaced."""
        for secret in self._hidden:
            if secret in text:
                text = text.replace(secret, REDACTED)
        return text

    def redact_value(self, value: Any) -> Any:
        """The same for every string in plain data."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, dict):
            return {self.redact_value(key): self.redact_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.redact_value(item) for item in value]
        return value


NO_SECRETS = Secrets()


@dataclass(slots=True)
class Budget:
    """What a run and all its sub-agents may use together. None is no limit."""

    tool_calls: int | None = None
    tokens: int | None = None
    used_calls: int = 0
    used: TokenUsage = NO_USAGE

    def take_call(self) -> bool:
        """Count one tool call; False when none is left."""
        if self.tool_calls is not None and self.used_calls >= self.tool_calls:
            return False
        self.used_calls += 1
        return True

    def add_tokens(self, usage: TokenUsage) -> None:
        """Count what a model used."""
        self.used = self.used + usage

    @property
    def is_out_of_tokens(self) -> bool:
        """True when the next model call may not be made."""
        return self.tokens is not None and self.used.total >= self.tokens


class RunState:
    """What changes during a run. One per run, shared by its sub-agents, plans and guests; used in one event loop."""

    def __init__(
        self, max_workers: int | None = None, budget: Budget | None = None, jobs: JobTable | None = None
    ) -> None:
        if max_workers is not None and max_workers < 1:
            raise UsageError(f"max_workers must be at least 1, not {max_workers}")
        self.max_workers = max_workers
        """None: what the registry of the first call says."""
        self.budget = budget
        self.cancel_reason: str | None = None
        self.abort: ToolAbort | None = None
        """Set when a tool ended the run, for those between it and the run who do not see its exception."""
        self.active: dict[int, Call] = {}
        """Calls being executed, by identity."""
        self.waiting: set[anyio.CancelScope] = set()
        """Other waits of the run, for a model's answer or a job."""
        self.failures: dict[str, int] = {}
        """How often the same call of the same arguments failed in a row, by digest."""
        self.jobs = jobs
        """Where tools may leave background work; None: nowhere."""
        self._leaves: anyio.CapacityLimiter | None = None
        self._orchestrators: dict[tuple[int, bool], anyio.CapacityLimiter] = {}
        self._hook_lock: anyio.Lock | None = None

    def fresh(self) -> RunState:
        """The state of another run with the same settings, budget and jobs."""
        return RunState(self.max_workers, self.budget, self.jobs)

    # Limiters and locks belong to the loop they are made in, so they are made at first use.

    def leaves(self, max_workers: int) -> anyio.CapacityLimiter:
        """Bounds tools that do the work themselves, over all batches, plans and guests of the run."""
        if self._leaves is None:
            self._leaves = anyio.CapacityLimiter(self._workers(max_workers))
        return self._leaves

    def orchestrators(self, level: int, in_plan: bool, max_workers: int) -> anyio.CapacityLimiter:
        """Bounds tools that wait for other tools, one limiter per level so that no level waits for itself."""
        key = (level, in_plan)
        if key not in self._orchestrators:
            workers = self._workers(max_workers)
            self._orchestrators[key] = anyio.CapacityLimiter(min(PLAN_ORCHESTRATORS, workers) if in_plan else workers)
        return self._orchestrators[key]

    def _workers(self, max_workers: int) -> int:
        return max_workers if self.max_workers is None else self.max_workers

    @property
    def hook_lock(self) -> anyio.Lock:
        """Held while hooks run: they never overlap within a run."""
        if self._hook_lock is None:
            self._hook_lock = anyio.Lock()
        return self._hook_lock

    @contextmanager
    def cancellable(self, deadline: float = math.inf) -> Iterator[anyio.CancelScope]:
        """A wait that the run's `cancel` ends, or its deadline."""
        with anyio.CancelScope(deadline=deadline) as scope:
            self.waiting.add(scope)
            if self.cancel_reason is not None:
                scope.cancel()
            try:
                yield scope
            finally:
                self.waiting.discard(scope)

    def cancel(self, reason: str) -> None:
        """Cancel every call in flight and refuse further ones; each still gets its result."""
        if self.cancel_reason is None:
            self.cancel_reason = reason
        for call in list(self.active.values()):
            if call.scope is not None:
                call.scope.cancel()
        for scope in list(self.waiting):
            scope.cancel()


CompletionCallback = Callable[["RunContext", ToolResult], Awaitable[None] | None]


def new_id() -> str:
    """A fresh id for a run."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Everything calls of one run have in common."""

    run_id: str = field(default_factory=new_id)
    user_id: str = ""
    thread_id: str = ""
    channel: str = ""
    chat_id: str = ""
    custom: Mapping[str, Any] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=lambda: NO_SECRETS)
    deadline: float = math.inf
    """On the event loop's clock (`anyio.current_time()`); no call outlasts it."""
    limits: Any = None
    """What the run's sandboxes may use; passed through, not looked at."""
    events: EventBus = field(default_factory=EventBus)
    observer: CallObserver | None = None
    hooks: tuple[Hook, ...] = ()
    """Of the agents above; they see calls before the registry's own."""
    policies: tuple[CallPolicy, ...] = ()
    """Of the agents above: a child may never call more than its parent."""
    on_complete: CompletionCallback | None = None
    """Receives the final results of background work."""
    logger: logging.Logger = LOGGER
    attachments: tuple[Part, ...] = ()
    """What the user gave with the task, handed down to sub-agents."""
    via: frozenset[Origin] = frozenset()
    """Plans, code and sub-agents this part of the run was reached through: rules about them hold here too."""
    parent_call_id: str | None = None
    """The call this part of the run belongs to."""
    depth: int = 0
    """Agents above this one."""
    agents: tuple[int, ...] = ()
    """Which, by identity, outermost first."""
    level: int = 0
    """Orchestrating tools above this call."""
    borrowed_worker: anyio.CapacityLimiter | None = None
    """The one worker of a call above that waits for this part of the run; calls here take turns with it."""
    held_groups: frozenset[str] = frozenset()
    """Exclusive groups the calls above hold."""
    state: RunState = field(default_factory=RunState)
    is_shared: bool = False
    """Stands in where no run was given: unrelated calls share it, so it bounds and orders nothing."""

    def child(self, **changes: Any) -> Self:
        """The same run with some fields replaced; state, events and budget stay shared."""
        return replace(self, **changes)

    def cancel(self, reason: str = "run cancelled") -> None:
        """Cancel the run's tool calls; see `RunState.cancel`.

        Raises:
            UsageError: this stands for no run, so nothing in it belongs together.
        """
        if self.is_shared:
            raise UsageError("calls made without a run of their own cannot be cancelled together")
        self.state.cancel(reason)

    @property
    def has_task(self) -> bool:
        """True when the run is for somebody: a user, a thread, a chat."""
        return bool(self.user_id or self.thread_id or self.chat_id or self.channel or self.custom)
