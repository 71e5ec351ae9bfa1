"""`RunOptions`: the one list of what a run may be given besides its script.

`Runtime`, sessions, maps and the service's client take these as keywords, and hand one checked object on.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict, get_args

import anyio

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.placeholders import DryRun
from toolcell.config import CheckTypes, Limits, LintProfile, check_types_of
from toolcell.errors import UsageError
from toolcell.results import ExecutionResult
from toolcell.run.callbacks import OnLog, OnProgress, RunHandlers
from toolcell.run.input_files import FileContent, FileInput
from toolcell.settings import settings_of
from toolcell.support.checks import brief, check_one_of
from toolcell.support.keywords import check_keywords
from toolcell_bridge.wire.frozen import frozen

OnApproval = Literal["ask", "deny", "suspend"]
Refresh = Literal["", "reads"]


class SessionRunKwargs(TypedDict, total=False):
    """What a script of a session may be given, as keywords: see `RunOptions`."""

    inputs: Mapping[str, Any] | None
    files: Iterable[FileInput] | Mapping[str, FileContent]
    tools: CallableTools | Iterable[Any] | None
    limits: Limits | None
    lint: LintProfile | None
    context: RunContext | None
    on_approval: OnApproval
    dry_run: bool | DryRun
    check_types: bool | CheckTypes | None
    cancel: anyio.Event | None
    on_log: OnLog | None
    on_progress: OnProgress | None


class RunKwargs(SessionRunKwargs, total=False):
    """What a run may be given, as keywords: see `RunOptions`."""

    seed: int | None
    clock: float | None
    repairs: ExecutionResult | str | None
    refresh: Refresh
    preflight: bool


@frozen(kw_only=True)
class RunOptions:
    """What one run is given, checked. Each method takes as many of these as it can use (`RunKwargs`).

    Raises:
        UsageError: names the option, its value and what it may be.
    """

    inputs: Mapping[str, Any] | None = None
    """Names that the script finds, and their values."""
    files: Iterable[FileInput] | Mapping[str, FileContent] = ()
    """For the workspace."""
    tools: CallableTools | Iterable[Any] | None = None
    """What the script may call. None: the tools of whoever runs it."""
    limits: Limits | None = None
    lint: LintProfile | None = None
    context: RunContext | None = None
    """Who the run is for, and what its calls are given."""
    seed: int | None = None
    clock: float | None = None
    """Where the script's clock starts, in seconds since 1970."""
    on_approval: OnApproval = "ask"
    """What becomes of a call that needs approval."""
    repairs: ExecutionResult | str | None = None
    """The run whose script this one mends."""
    refresh: Refresh = ""
    """What a repair makes again."""
    dry_run: bool | DryRun = False
    """Collect the calls that write, and make none."""
    preflight: bool = False
    """List the calls that are written in the script before it runs."""
    check_types: bool | CheckTypes | None = None
    cancel: anyio.Event | None = None
    """Setting it ends the run with outcome `cancelled`."""
    on_log: OnLog | None = None
    on_progress: OnProgress | None = None

    @classmethod
    def of(cls, door: str, given: Mapping[str, Any], known: type = RunKwargs) -> RunOptions:
        """Return the keywords that the method `door` was given, checked. `known`: a TypedDict of those that it has."""
        check_keywords(door, given, known.__annotations__)
        return cls(**given)

    def __post_init__(self) -> None:
        if self.lint is not None:
            check_one_of("lint=", self.lint, get_args(LintProfile))
        if self.limits is not None:
            settings_of(Limits, self.limits, "limits")
        if self.seed is not None or self.clock is not None:
            _check_seed_and_clock(self.seed, self.clock)
        if self.cancel is not None and not _is_async_event(self.cancel):
            raise UsageError(
                f"cancel= takes an anyio.Event, which does not block the event loop, not {brief(self.cancel)}"
            )
        if self.context is not None:
            _check_context(self.context)
        for name, function in (("on_log", self.on_log), ("on_progress", self.on_progress)):
            if function is not None and not callable(function):
                raise UsageError(f"{name}= takes a function, not {brief(function)}")
        if self.on_approval != "ask":
            check_on_approval(self.on_approval)
        if self.refresh not in ("", "reads"):
            raise UsageError(f'refresh must be "" or "reads", not {self.refresh!r:.40}')
        if self.refresh and self.repairs is None:
            raise UsageError("refresh= says what a repair makes again; pass repairs= too")
        if self.check_types is not None:
            check_types_of(self.check_types)

    @property
    def handlers(self) -> RunHandlers:
        """How the caller cancels the run, and hears from it."""
        return RunHandlers(self.cancel, self.on_log, self.on_progress)


def _check_seed_and_clock(seed: object, clock: object) -> None:
    if seed is not None and (type(seed) is not int or not -(1 << 63) <= seed < 1 << 63):
        raise UsageError(f"seed= must be a whole number of 64 bits, not {brief(seed)}")
    if clock is not None and (type(clock) not in (int, float) or not -1e15 < clock < 1e15):  # type: ignore[operator]
        raise UsageError(f"clock= must be a number of seconds since 1970, not {brief(clock)}; write time.time()")


def _check_context(context: object) -> None:
    if not isinstance(context, RunContext):
        raise UsageError(f"context= takes a RunContext, not {brief(context)}; write RunContext(user_id=...)")


def check_on_approval(value: object) -> None:
    """Check the argument `on_approval`.

    Raises:
        UsageError: it is not one of its values.
    """
    if value not in get_args(OnApproval):
        raise UsageError(f'on_approval must be "ask", "deny" or "suspend", not {brief(value)}')


def _is_async_event(event: object) -> bool:
    return callable(getattr(event, "is_set", None)) and inspect.iscoroutinefunction(getattr(event, "wait", None))
