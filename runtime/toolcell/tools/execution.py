"""The step of the pipeline that runs the tool: its deadline, its turn, and whatever the tool does, as a result.

Knows no policy and no hook. One result per call: nothing the tool raises gets out, except `ToolAbort`,
KeyboardInterrupt and a cancellation from above.
"""

from __future__ import annotations

import asyncio
import math
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any

import anyio

from toolcell.calls.call import Call
from toolcell.calls.concurrency import OF_THIS_PROCESS, Workers, exclusive_group, own_workers, passes_on
from toolcell.calls.context import ToolContext, current
from toolcell.calls.finalize import as_result, failure_of
from toolcell.calls.hooks import in_hook
from toolcell.calls.options import Origin
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.calls.text_data import with_data
from toolcell.errors import ToolAbort, ToolError
from toolcell.support.event_loop import clock
from toolcell.tools.registry_state import RegistryState
from toolcell.tools.spec import Middleware, RegisteredTool

ABORTED = "tool execution aborted"


async def execute(state: RegistryState, call: Call, tool: RegisteredTool) -> tuple[ToolResult, ToolContext]:
    """Run the tool of an admitted call.

    Cancellation: from above it passes through, after the tool was cancelled; from the run's own `cancel` or the
    deadline it becomes the result.
    """
    timeout_s = tool.timeout_s if tool.timeout_s is not None else state.settings.timeout_s
    if call.timeout_s is not None and call.timeout_s < timeout_s:
        timeout_s = call.timeout_s
    context = ToolContext(call)
    run = call.run.state
    if run.cancel_reason is not None:  # while the call waited for its task to start
        return cancelled(run.cancel_reason), context
    token, is_pending = current.set(context), False
    scope = run.scope_type(deadline=call.run.deadline)
    if run.scope_type is anyio.CancelScope and not call.run.scope.is_shared:
        run.scope_type = type(scope)
    try:
        with scope:
            context.scope = scope
            run.scopes[scope] = None
            try:
                wait = _in_its_turn if tool.has_own_limits else _with_worker
                result = await wait(state, context, tool, timeout_s)
            except ToolError as exc:  # there was no place for the call
                result = failure_of(call, exc)
            is_pending = result.status is Status.PENDING
            if result.status is Status.OK or not (scope.cancel_called and result.is_error):
                return result, context
        return cut_short(call, timeout_s), context
    finally:
        current.reset(token)
        run.scopes.pop(scope, None)
        context.is_over = True
        if context.completion is not None and not is_pending:
            context.completion.discard_job()
        if context.progress is not None:
            context.progress.close()


def cut_short(call: Call, timeout_s: float = math.inf) -> ToolResult:
    """Return the result of a call that ran into the end of its run, or into its own timeout."""
    if (reason := call.run.state.cancel_reason) is not None:
        return cancelled(reason)
    is_run_over = timeout_s == math.inf or clock()() >= call.run.deadline
    message = "timed out: the run's time is used up" if is_run_over else f"timed out after {timeout_s:g} s"
    return ToolResult.fail(message, code=ErrorCode.TIMEOUT, status=Status.TIMEOUT)


def cancelled(reason: str) -> ToolResult:
    """Return the result of a call that was cancelled before it was done, or before it began."""
    return ToolResult.fail(reason, code=ErrorCode.CANCELLED, status=Status.CANCELLED)


# Its turn


async def _in_its_turn(
    state: RegistryState, context: ToolContext, tool: RegisteredTool, timeout_s: float
) -> ToolResult:
    """Take the tool's exclusive group and one of its own places first: a call that waits for them keeps no worker."""
    call, taken = context.call, list[Workers]()
    try:
        for places in _own_places(call, tool):
            await places.take(timeout_s)
            taken.append(places)
        return await _with_worker(state, context, tool, timeout_s)
    finally:
        for places in reversed(taken):
            _give_back(places, call)


def _own_places(call: Call, tool: RegisteredTool) -> Iterator[Workers]:
    """Iterate over what the call must take, but not over what a call above has taken: that one waits for this call."""
    group, most = tool.options.exclusive_group, tool.options.max_concurrency
    if group is not None and group not in call.held_groups:
        yield exclusive_group(group)
    if most is not None and not any(above.identity is tool.identity for above in call.callers):
        yield own_workers(tool.identity, most)


async def _with_worker(
    state: RegistryState, context: ToolContext, tool: RegisteredTool, timeout_s: float
) -> ToolResult:
    workers = None if context.call.run.scope.is_shared else _workers(state, context.call)
    if workers is None:
        return await _through_middleware(state, context, tool, timeout_s)
    is_alone = tool.options.mode == "sequential" or state.in_turn(context.call.run)
    if is_alone:
        await workers.take_all(timeout_s)
    elif workers.free:
        workers.free -= 1
    else:
        await workers.take(timeout_s)
    context.call.holds_worker = not tool.options.orchestrates
    try:
        return await _through_middleware(state, context, tool, timeout_s)
    finally:
        for _ in range(workers.count if is_alone else 1):
            _give_back(workers, context.call)


def _give_back(workers: Workers, call: Call) -> None:
    """Free a place when the call's function is over, which may be long after the call."""
    if call.threads:
        workers.release(call.threads)
    else:
        workers.give_back()


def _workers(state: RegistryState, call: Call) -> Workers | None:
    """Choose whose worker the call needs: of tools that work, of tools that wait for others, or none."""
    run, default = call.run, state.settings.max_workers
    if call.options.orchestrates:
        return run.state.orchestrators(run.scope.lineage.level, call.origin is Origin.PLAN, default)
    if in_hook.get():  # calls that hold all workers may be waiting for this hook to end
        return None
    borrowed = run.scope.lineage.borrowed_worker if call.parent is None else call.borrowed_worker
    return borrowed or run.state.workers or run.state.open_workers(default)


# Middleware and tool


def _through_middleware(
    state: RegistryState, context: ToolContext, tool: RegisteredTool, timeout_s: float
) -> Coroutine[Any, Any, ToolResult]:
    proceed: Callable[[], Coroutine[Any, Any, ToolResult]] = partial(_invoke, state, context, tool, timeout_s)
    for wrap in reversed(state.middleware):
        proceed = partial(_wrapped, wrap, context.call, proceed)
    return proceed()


async def _wrapped(wrap: Middleware, call: Call, proceed: Callable[[], Coroutine[Any, Any, ToolResult]]) -> ToolResult:
    try:
        return as_result(await wrap(call, proceed), requires_result=True)
    except BaseException as exc:
        if passes_on(exc):
            raise
        return _contained(call, exc)


async def _invoke(state: RegistryState, context: ToolContext, tool: RegisteredTool, timeout_s: float) -> ToolResult:
    spec, name = tool.spec, context.call.name
    try:
        if OF_THIS_PROCESS.any and (refusal := _turned_away(state, tool)) is not None:
            return refusal
        if spec.invoke is None:
            message = f'tool "{name}" has no execute function'
            return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, retryable=False)
        value = spec.invoke(context)
        if type(value) is types.CoroutineType:
            value = await _step_by_step(value, context, timeout_s)
        if type(value) not in _NOT_AWAITABLE and hasattr(value, "__await__"):
            # a future, or what a plain function made of an async one
            _start_clock(context, timeout_s)
            value = await value
        result = as_result(value, spec.requires_result)
        if result.has_value or not result.parts:
            return result
        return await with_data(name, spec.options, result, is_foreign=spec.is_foreign)
    except ToolAbort:
        raise
    except (Exception, SystemExit) as exc:
        return _contained(context.call, exc)
    except BaseExceptionGroup as group:
        return _contained_group(context.call, group)
    except anyio.get_cancelled_exc_class() as exc:
        if _is_cancelled_from_above():
            raise
        return failure_of(context.call, exc)
    except GeneratorExit as exc:
        if context.is_closing:
            raise
        return failure_of(context.call, exc)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        return failure_of(context.call, exc)


def _turned_away(state: RegistryState, tool: RegisteredTool) -> ToolResult | None:
    """Refuse a tool whose threads were given up and still run, when the process has too many such threads."""
    most, abandoned = state.settings.max_abandoned_threads, OF_THIS_PROCESS.list()
    own = OF_THIS_PROCESS.of(tool.identity)
    if not own or len(abandoned) < most:
        return None
    message = (
        f'tool "{tool.name}" is not started: {own} of its calls were given up and still run, of {len(abandoned)} such '
        f"threads in all (max_abandoned_threads = {most}); try again when one has ended"
    )
    return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE)


_NOT_AWAITABLE = frozenset({str, int, float, bool, type(None), dict, list, ToolResult})


@types.coroutine
def _step_by_step(
    coroutine: Coroutine[Any, Any, Any], context: ToolContext, timeout_s: float
) -> Generator[Any, Any, Any]:
    """Await a coroutine, and start its clock the first time it really waits.

    A deadline costs a timer of the event loop, several microseconds to set and drop. Most quick tools never wait, so
    the timer is set at the first wait. The cancel scope itself is entered *before* the tool's first step: scopes and
    task groups the tool opens nest inside it properly, and only the scope's deadline is moved later, which both
    asyncio and trio allow. A tool that never waits could not have been cancelled in either case.
    """
    try:
        waiting_for = coroutine.send(None)
        _start_clock(context, timeout_s)
        while True:
            try:
                answer = yield waiting_for
            except BaseException as exc:
                context.is_closing = isinstance(exc, GeneratorExit)
                waiting_for = coroutine.throw(exc)
            else:
                waiting_for = coroutine.send(answer)
    except StopIteration as done:
        return done.value


def _start_clock(context: ToolContext, timeout_s: float) -> None:
    """Set the call's deadline: its own timeout from now, or the run's end if that is sooner."""
    deadline = context.call.run.deadline
    if timeout_s != math.inf:
        deadline = min(deadline, clock()() + timeout_s)
    if deadline != math.inf and context.scope is not None:
        context.scope.deadline = deadline


# Whatever it raises


def _contained(call: Call, exc: BaseException) -> ToolResult:
    if isinstance(exc, BaseExceptionGroup) and (aborts := exc.subgroup(ToolAbort)) is not None:
        raise _first_leaf(aborts)
    return failure_of(call, exc)


def _contained_group(call: Call, group: BaseExceptionGroup[BaseException]) -> ToolResult:
    """Cancellations and interrupts in a group go on their way; ordinary errors beside them are lost with the call."""
    others, ours = group.split(_is_leaf_that_passes)
    if others is not None:
        raise others
    assert ours is not None
    return _contained(call, ours)


def _is_leaf_that_passes(exc: BaseException) -> bool:
    return not isinstance(exc, (BaseExceptionGroup, ToolAbort)) and passes_on(exc)


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
