"""The one path that every call takes, wherever it comes from. Read `run_call`, then each step in its order.

Permission is asked before anything of the tool runs, its argument preparation included. In a batch only
`perform` runs concurrently, so there are three functions: `admit`, `perform`, `conclude`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable
from typing import Any

import anyio

from toolcell.errors import AuditError, ToolAbort
from toolcell.text import one_line
from toolcell.tools.arguments import ArgumentError, prepare_arguments
from toolcell.tools.call import Call, CallHook
from toolcell.tools.concurrency import maybe_await
from toolcell.tools.events import TOOL_END, TOOL_FINISHED, TOOL_START
from toolcell.tools.execution import ABORTED, cancelled, execute
from toolcell.tools.finalize import finalize, raised
from toolcell.tools.hooks import Approve, Modify, Rewrite, ask_after, ask_before, hook_turn, not_approved
from toolcell.tools.options import Origin
from toolcell.tools.problems import did_you_mean, listed
from toolcell.tools.registry_state import RegistryState, permits_all
from toolcell.tools.result import ErrorCode, Status, ToolResult
from toolcell.tools.spec import RegisteredTool

logger = logging.getLogger("toolcell.tools")

RECORD_S = 2.0
"""What an asynchronous observer may take to note the end of a call that was cancelled."""
MAX_LOGGED_CHARS = 500
MAX_NAME_CHARS = 80
MAX_REMEMBERED_FAILURES = 256
AGENT_PREFIX = "agent_"

_TOOL_OF_ORIGIN = {Origin.PLAN: "execute_plan", Origin.CODE: "execute_code"}


async def run_call(state: RegistryState, call: Call) -> ToolResult:
    """Make one call from start to end. Raises only `ToolAbort`, `AuditError` and cancellations."""
    try:
        admitted = await admit(state, call)
        result = await perform(state, call, admitted) if type(admitted) is RegisteredTool else admitted
        return await conclude(state, call, result)
    except BaseException as exc:
        await record_as_cancelled(call, exc)
        raise


async def admit(state: RegistryState, call: Call) -> RegisteredTool | ToolResult:
    """Do everything before the tool runs. Return the tool, or the result that says why it must not run."""
    _start(call)
    found = _find_permitted(state, call)
    if type(found) is RegisteredTool:
        refusal = await _take_arguments(call, found)
        hooks = (*call.run.hooks, *state.hooks) if call.run.hooks else state.hooks
        if refusal is None and (hooks or found.options.requires_approval):
            refusal = await _ask_hooks(hooks, call, found)
        found = refusal or found
    call.refusal = None if type(found) is RegisteredTool else found
    return found if call.run.observer is None else await _record_start(call, call.refusal) or found


async def perform(state: RegistryState, call: Call, tool: RegisteredTool) -> ToolResult:
    """Run the tool."""
    call.is_executed = True
    call.started_s = time.perf_counter()
    result, context = await execute(state, call, tool)
    job_id = context.completion.job_id if context.completion is not None else None
    if result.status is Status.PENDING:
        result = await _await_job(call, result, job_id, state.settings.pending_wait_s)
    call.duration_s = time.perf_counter() - call.started_s
    call.result = result = finalize(result, call, call.duration_s, job_id)
    if call.run.events.active:
        call.emit(TOOL_FINISHED, duration_ms=result.meta.duration_ms, is_error=result.is_error)
    return result


async def conclude(state: RegistryState, call: Call, result: ToolResult) -> ToolResult:
    """Do everything after the tool ran, or was refused."""
    run = call.run
    if not call.is_executed:
        result = finalize(result, call, 0.0)
    elif state.hooks or run.hooks:
        result = await _show_hooks((*run.hooks, *state.hooks), call, result)
    if not run.is_shared and (result.status is not Status.OK or run.state.failures):
        result = _note_repetition(state, call, result)
    await _end(call, result)
    return result


async def refuse(state: RegistryState, call: Call, refusal: ToolResult) -> ToolResult:
    """Give a call that is not even looked at its start, its result and its end."""
    _start(call)
    call.refusal = refusal
    return await conclude(state, call, await _record_start(call, refusal) or refusal)


async def answer_call(call: Call, answer: Awaitable[ToolResult], note: str) -> ToolResult:
    """Give a call an answer from elsewhere, as a replay does: no tool runs, and no rule or hook is asked."""
    try:
        _start(call)
        call.args, call.warnings = call.raw_args, (note,)
        unrecorded = await _record_start(call, None)
        result = finalize(unrecorded or await answer, call, 0.0)
        await _end(call, result)
        return result
    except BaseException as exc:
        await record_as_cancelled(call, exc)
        raise


async def record_as_cancelled(call: Call, exc: BaseException) -> None:
    """Conclude a call that is being cancelled from above or that ended its run: it has a result all the same."""
    if isinstance(exc, ToolAbort) and not call.run.is_shared:
        call.run.state.abort = exc
    if call.is_concluded:
        return
    if not call.started_at:
        _start(call)
    if call.result is None:  # else the tool was done, and only what comes after it was cut off
        is_cancelled = isinstance(exc, anyio.get_cancelled_exc_class())
        ended = cancelled(ABORTED) if is_cancelled or not call.is_executed else raised(call.name, exc)
        if call.is_executed:
            call.duration_s = time.perf_counter() - call.started_s
        call.result = finalize(ended, call, call.duration_s)
    _finish(call, call.result)
    if call.is_started and call.run.observer is not None:
        with anyio.move_on_after(RECORD_S, shield=True):
            await maybe_await(call.run.observer.call_ended(call))


# Start and permission


def _start(call: Call) -> None:
    call.started_at = time.time()
    if call.run.events.active:
        call.emit(TOOL_START, args=call.raw_args)
    if logger.isEnabledFor(logging.INFO):
        logger.info("tool %s started: %s", _name_for_log(call), _for_log(call, call.raw_args))


def _find_permitted(state: RegistryState, call: Call, *, is_counted: bool = True) -> RegisteredTool | ToolResult:
    """Return the tool, if the run goes on, the rules permit the call and the budget allows it."""
    run = call.run
    if run.state.cancel_reason is not None:
        return cancelled(ABORTED)
    tool = state.tools.get(call.name)
    if tool is None:
        return _unknown(state, call)
    call.options, call.aliases, call.identity = tool.options, tool.aliases, tool.identity
    is_permitted = state.permits(tool, call.origin)
    if run.policies or run.lineage.origins:
        is_permitted = is_permitted and _permitted_above(state, call, tool)
    if not is_permitted:
        message = f'tool "{call.name}" is not permitted'
        return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)
    if call.origin not in tool.options.callable_from and not tool.options.allows(call.origin):
        return _wrong_origin(call)
    budget = run.state.budget
    if budget is not None and is_counted and not budget.take_call():
        message = f"no tool calls left: the run's budget of {budget.tool_calls} is used up"
        return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, retryable=False, status=Status.BLOCKED)
    return tool


def _permitted_above(state: RegistryState, call: Call, tool: RegisteredTool) -> bool:
    """A call may do no more than the agents, plans and code that it was reached through."""
    origins = (call.origin, *call.run.lineage.origins)
    return all(state.permits(tool, origin) and permits_all(call.run.policies, tool, origin) for origin in origins)


def _unknown(state: RegistryState, call: Call) -> ToolResult:
    names = [tool.name for tool in state.visible(call.origin, call.run.policies)]
    available = f"; available tools: {listed(names)}" if names else "; no tools are available"
    asked = call.name[:MAX_NAME_CHARS]
    message = f"unknown tool: {asked}{did_you_mean(call.name, names)}{available}"
    if call.name.startswith(AGENT_PREFIX) and any(name.startswith(AGENT_PREFIX) for name in names):
        message = f'unknown agent "{asked.removeprefix(AGENT_PREFIX)}"; {message}'
    return ToolResult.fail(message, code=ErrorCode.UNKNOWN_TOOL, details={"available": names[:100]})


def _wrong_origin(call: Call) -> ToolResult:
    inside = _TOOL_OF_ORIGIN.get(call.origin)
    message = f"{call.name} cannot be called " + (f"from within {inside}" if inside else "by a model directly")
    return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)


# Arguments


async def _take_arguments(call: Call, tool: RegisteredTool) -> ToolResult | None:
    """Prepare and validate what was received: set `call.args`, or return what is wrong with it."""
    received = call.raw_args
    if tool.spec.prepare is not None or isinstance(received, str):
        try:
            received = await prepare_arguments(received, tool.spec.prepare)
        except ArgumentError as exc:
            return _unusable(tool, exc)
    return _validate(call, tool, received)


def _validate(call: Call, tool: RegisteredTool, received: Any) -> ToolResult | None:
    args = tool.checker.check_plain(received) if type(received) is dict else None
    try:
        if args is None:
            checked = tool.check(received)
            args = checked.args
            call.changes = (*call.changes, *checked.changes)
            call.warnings = (*call.warnings, *checked.warnings)
        call.args = args
        if tool.spec.decode is not None:
            call.decoded = tool.decode(args)
    except ArgumentError as exc:
        return _unusable(tool, exc)
    return None


def _unusable(tool: RegisteredTool, exc: ArgumentError) -> ToolResult:
    prefix = tool.spec.args_prefix
    message = str(exc) if prefix is None else prefix + str(exc).partition(": ")[2]
    return ToolResult.fail(message, code=exc.code, exc=exc.__cause__, details=exc.details)


async def examine(state: RegistryState, call: Call, *, with_arguments: bool = True) -> ToolResult | None:
    """Return what `admit` would refuse the call with, without hooks, events, records or a count of the call."""
    found = _find_permitted(state, call, is_counted=False)
    if type(found) is not RegisteredTool:
        return found
    return await _take_arguments(call, found) if with_arguments else None


# Hooks


async def _ask_hooks(hooks: tuple[CallHook, ...], call: Call, tool: RegisteredTool) -> ToolResult | None:
    """Outer to inner. The first that answers ends it; a rewrite is seen by the hooks further in."""
    async with hook_turn(call.run):
        for hook in hooks:
            refusal: ToolResult | None = None
            match await ask_before(hook, call):
                case Approve():
                    call.approved = True
                case Modify(args):
                    call.approved = True
                    refusal = _validate(call, tool, args)
                case Rewrite(args):
                    refusal = _validate(call, tool, args)
                case ToolResult() as answer:
                    refusal = answer
            if refusal is not None:
                return refusal
    return not_approved(call) if tool.options.requires_approval and not call.approved else None


async def _show_hooks(hooks: tuple[CallHook, ...], call: Call, result: ToolResult) -> ToolResult:
    """Inner to outer. A hook that fails changes nothing and is noted in the call's warnings."""
    async with hook_turn(call.run):
        for hook in reversed(hooks):
            result, warning = await ask_after(hook, call, result)
            if warning is not None:
                call.warnings = (*call.warnings, warning)
    return result


# Records


async def _record_start(call: Call, refusal: ToolResult | None) -> ToolResult | None:
    """Inform the observer. No record, no effect: a call that cannot be recorded is refused."""
    observer = call.run.observer
    if observer is None:
        return refusal
    try:
        if (noted := observer.call_started(call)) is not None:
            await maybe_await(noted)
        call.is_started = True
    except AuditError:
        raise
    except Exception as exc:
        logger.exception("call of %s could not be recorded", call.name)
        failure = ToolResult.fail("the call could not be recorded, so it was not made", code=ErrorCode.UNAVAILABLE)
        call.refusal = refusal = failure.with_error(exc)
    return refusal


async def _await_job(call: Call, result: ToolResult, job_id: str | None, wait_s: float) -> ToolResult:
    """Wait a while for background work, for plans and code; a model goes on without its result."""
    jobs = call.run.state.jobs
    job_id = result.job_id or job_id
    job = jobs.get(job_id) if jobs is not None and job_id is not None else None
    if job is None or call.origin not in _TOOL_OF_ORIGIN:
        return result
    with anyio.move_on_after(wait_s):
        return await job.wait()
    return result


def _note_repetition(state: RegistryState, call: Call, result: ToolResult) -> ToolResult:
    """Add a hint to the error of a call that a model repeats and that keeps failing."""
    failures = call.run.state.failures
    if not (failures or result.is_error):
        return result
    key = f"{call.name[:MAX_NAME_CHARS]} {_for_log(call, call.raw_args)}"
    if not result.is_error:
        failures.pop(key, None)
        return result
    failures[key] = count = failures.pop(key, 0) + 1
    if len(failures) > MAX_REMEMBERED_FAILURES:
        del failures[next(iter(failures))]
    if count < state.settings.repeat_hint or result.error is None:
        return result
    hint = f"this exact call has now failed {count} times; change its arguments or do something else"
    return result.with_message(f"{result.error.message}\n({hint})")


async def _end(call: Call, result: ToolResult) -> None:
    """Set the result, emit the end, and inform the observer."""
    _finish(call, result)
    if call.is_started and call.run.observer is not None:
        noted = call.run.observer.call_ended(call)
        if noted is not None:
            await maybe_await(noted)


def _finish(call: Call, result: ToolResult) -> None:
    call.result = result
    call.is_concluded = True
    if call.run.events.active:
        call.emit(
            TOOL_END,
            args=call.args if call.is_executed else call.raw_args,
            result=result,
            is_error=result.is_error,
            duration_ms=result.meta.duration_ms,
        )
    is_failure = result.status is not Status.OK and result.is_error
    if logger.isEnabledFor(logging.WARNING if is_failure else logging.INFO):
        _log_end(call, result)


def _for_log(call: Call, args: Any) -> str:
    text = args if isinstance(args, str) else json.dumps(args, default=repr, ensure_ascii=False)
    return one_line(call.run.secrets.redact(text), MAX_LOGGED_CHARS)


def _name_for_log(call: Call) -> str:
    return one_line(call.name, MAX_NAME_CHARS)


def _log_end(call: Call, result: ToolResult) -> None:
    name, duration_ms = _name_for_log(call), result.meta.duration_ms
    if result.is_error:
        message = one_line(result.message, MAX_LOGGED_CHARS)
        logger.warning("tool %s failed after %.1f ms: %s", name, duration_ms, message)
    elif result.status is Status.PENDING:
        logger.info("tool %s started (async) after %.1f ms", name, duration_ms)
    else:
        logger.info("tool %s completed in %.1f ms, %d characters", name, duration_ms, len(result.output))
