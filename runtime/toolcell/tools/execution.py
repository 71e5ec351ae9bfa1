"""Running one admitted call: its deadline, its place in the queue, and whatever the tool does, as a result.

Knows no policy and no hook. Promises one result per call: nothing the tool raises gets out, except `ToolAbort`,
KeyboardInterrupt and a cancellation from above.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import CoroutineType
from typing import Any

import anyio

from toolcell.errors import ToolAbort
from toolcell.tools.call import Call, current
from toolcell.tools.concurrency import has_own_gates, own_gates, take_worker, worker_limiter
from toolcell.tools.finalize import as_result, raised
from toolcell.tools.result import ErrorCode, Status, ToolResult
from toolcell.tools.spec import Middleware, RegisteredTool

DEFAULT_TIMEOUT_S = 60.0
ABORTED = "tool execution aborted"


class _StepByStep:
    """Awaits a coroutine, and says so the first time it really waits.

    A deadline costs a timer of the event loop, several microseconds to set and drop. Most quick tools never wait, so
    the timer is set at the first wait. The cancel scope itself is entered *before* the tool's first step: scopes and
    task groups the tool opens nest inside it properly, and only the scope's deadline is moved later, which both
    asyncio and trio allow. A tool that never waits could not have been cancelled in either case.
    """

    __slots__ = ("_coroutine", "_on_wait")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], on_wait: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._on_wait = on_wait

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine
        try:
            waiting_for = coroutine.send(None)
            self._on_wait()
            while True:
                try:
                    answer = yield waiting_for
                except BaseException as exc:
                    waiting_for = coroutine.throw(exc)
                else:
                    waiting_for = coroutine.send(answer)
        except StopIteration as done:
            return done.value


async def execute(call: Call, middleware: tuple[Middleware, ...], default_timeout_s: float) -> ToolResult:
    """Run the tool of an admitted call.

    Cancellation: from above it passes through, after the tool was cancelled; from the run's own `cancel` or the
    deadline it becomes the result.
    """
    tool = call.tool
    assert tool is not None
    own_s = tool.timeout_s if tool.timeout_s is not None else default_timeout_s
    call.timeout_s = own_s if call.timeout_s is None else min(own_s, call.timeout_s)
    if call.run.state.cancel_reason is not None:  # while it waited for its task to start
        return _cut_short(call)
    token = current.set(call)
    active = call.run.state.active
    try:
        with anyio.CancelScope() as scope:
            call.scope = scope
            active[id(call)] = call
            result = await _admitted(call, tool, middleware)
            if not (scope.cancel_called and result.is_error):
                return result
        return _cut_short(call)
    finally:
        current.reset(token)
        active.pop(id(call), None)
        if call.progress is not None:
            call.progress.close()


def _cut_short(call: Call) -> ToolResult:
    if (reason := call.run.state.cancel_reason) is not None:
        return cancelled(reason)
    is_run_over = anyio.current_time() >= call.run.deadline
    message = "timed out: the run's time is used up" if is_run_over else f"timed out after {call.timeout_s:g} s"
    return ToolResult.fail(message, code=ErrorCode.TIMEOUT, status=Status.TIMEOUT)


def cancelled(reason: str) -> ToolResult:
    """The result of a call that was cancelled before it was done, or before it began."""
    return ToolResult.fail(reason, code=ErrorCode.CANCELLED, status=Status.CANCELLED)


async def _admitted(call: Call, tool: RegisteredTool, middleware: tuple[Middleware, ...]) -> ToolResult:
    if has_own_gates(tool):
        async with own_gates(call, tool):
            return await _with_worker(call, middleware)
    return await _with_worker(call, middleware)


async def _with_worker(call: Call, middleware: tuple[Middleware, ...]) -> ToolResult:
    limiter = worker_limiter(call)
    if limiter is None:
        return await _run(call, middleware)
    await take_worker(call, limiter)
    try:
        return await _run(call, middleware)
    finally:
        limiter.release_on_behalf_of(call)


async def _run(call: Call, middleware: tuple[Middleware, ...]) -> ToolResult:
    if not middleware:
        return await _invoke(call)
    proceed = partial(_invoke, call)
    for wrap in reversed(middleware):
        proceed = partial(_wrapped, wrap, call, proceed)
    return await proceed()


async def _wrapped(wrap: Middleware, call: Call, proceed: Callable[[], Coroutine[Any, Any, ToolResult]]) -> ToolResult:
    try:
        return as_result(await wrap(call, proceed), requires_result=True)
    except ToolAbort:
        raise
    except (Exception, SystemExit) as exc:
        return _contained(call, exc)


async def _invoke(call: Call) -> ToolResult:
    spec = call.tool.spec  # type: ignore[union-attr]
    try:
        if spec.invoke is None:
            message = f'tool "{call.name}" has no Execute function'
            return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, retryable=False)
        value = spec.invoke(call)
        if type(value) is CoroutineType:
            value = await _StepByStep(value, partial(_start_clock, call))
        if hasattr(value, "__await__"):  # a future, or what a plain function made of an async one
            _start_clock(call)
            value = await value
        return as_result(value, spec.requires_result)
    except ToolAbort:
        raise
    except (Exception, SystemExit) as exc:
        return _contained(call, exc)
    except BaseExceptionGroup as group:
        return _contained_group(call, group)
    except anyio.get_cancelled_exc_class() as exc:
        if _is_cancelled_from_above():
            raise
        return raised(call.name, exc)


def _start_clock(call: Call) -> None:
    """Set the call's deadline: its own timeout from now, or the run's end if that is sooner."""
    timeout_s, deadline = call.timeout_s or math.inf, call.run.deadline
    if timeout_s != math.inf:
        deadline = min(deadline, anyio.current_time() + timeout_s)
    if deadline != math.inf and call.scope is not None:
        call.scope.deadline = deadline


def _contained(call: Call, exc: BaseException) -> ToolResult:
    if isinstance(exc, BaseExceptionGroup) and (aborts := exc.subgroup(ToolAbort)) is not None:
        raise _first_leaf(aborts)
    return raised(call.name, exc)


def _contained_group(call: Call, group: BaseExceptionGroup[BaseException]) -> ToolResult:
    """Cancellations and interrupts in a group go on their way; ordinary errors beside them are lost with the call."""
    ours, others = group.split((Exception, SystemExit))
    if others is not None:
        raise others
    assert ours is not None
    return _contained(call, ours)


def _first_leaf(group: BaseExceptionGroup[Any]) -> BaseException:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


def _is_cancelled_from_above() -> bool:
    """False when a tool let out a CancelledError nobody sent to it, as when it awaits a future that was cancelled."""
    if anyio.current_effective_deadline() == -math.inf:
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio: only real cancellations raise there
        return True
    return task is not None and task.cancelling() > 0
