"""The one path every call takes, wherever it comes from: resolve, permit, prepare, mend and validate, ask the hooks,
execute, show the hooks the result, tell everybody.

Three steps, so that a batch can overlap the middle one alone: `preflight`, `perform`, `conclude`. Permission is asked
before anything of the tool runs, its argument preparation included.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import anyio

from toolcell.errors import AuditError, ToolAbort
from toolcell.text import one_line
from toolcell.tools.argument_parsing import ArgumentError, prepare_arguments
from toolcell.tools.call import Call
from toolcell.tools.events import TOOL_END, TOOL_FINISHED, TOOL_START
from toolcell.tools.execution import ABORTED, cancelled, execute
from toolcell.tools.finalize import finalize, raised
from toolcell.tools.hook_runner import run_after_hooks, run_before_hooks
from toolcell.tools.hooks import maybe_await
from toolcell.tools.options import Origin
from toolcell.tools.registry_state import RegistryState, is_permitted
from toolcell.tools.result import ErrorCode, Status, ToolResult
from toolcell.tools.suggestions import did_you_mean, listed

logger = logging.getLogger("toolcell.tools")

RECORD_S = 2.0
"""What an asynchronous observer may take to note the end of a call that was cancelled."""
MAX_LOGGED_CHARS = 500
MAX_NAME_CHARS = 80
MAX_REMEMBERED_FAILURES = 256
AGENT_PREFIX = "agent_"

_SUSPECT_ORIGINS = {Origin.PLAN: "execute_plan", Origin.CODE: "execute_code"}


async def run_call(state: RegistryState, call: Call) -> ToolResult:
    """One call from start to end. Raises only `ToolAbort`, `AuditError` and cancellations."""
    try:
        result = await preflight(state, call)
        if result is None:
            result = await perform(state, call)
        return await conclude(state, call, result)
    except BaseException as exc:
        await record_as_cancelled(call, exc)
        raise


async def preflight(state: RegistryState, call: Call) -> ToolResult | None:
    """Everything before the tool runs. None: it may. A result: it was refused, and this is why."""
    _start(call)
    refusal = _permission(state, call)
    if refusal is None:
        refusal = _arguments(call, call.raw_args) if _are_ready(call) else await _prepared_arguments(call)
    hooks = (*call.run.hooks, *state.hooks) if call.run.hooks else state.hooks
    if refusal is None and (hooks or call.options.requires_approval):
        refusal = await run_before_hooks(hooks, call, _arguments)
    call.refusal = refusal
    return refusal if call.run.observer is None else await _record_start(call, refusal)


async def refuse(state: RegistryState, call: Call, refusal: ToolResult) -> ToolResult:
    """The whole life of a call that is not even looked at."""
    _start(call)
    call.refusal = refusal
    if call.run.observer is not None:
        await _record_start(call, refusal)
    return await conclude(state, call, refusal)


def _start(call: Call) -> None:
    call.started_at = time.time()
    if call.run.events.active:
        call.emit(TOOL_START, args=call.raw_args)
    if logger.isEnabledFor(logging.INFO):
        logger.info("tool %s started: %s", _name_for_log(call), _for_log(call, call.raw_args))


async def perform(state: RegistryState, call: Call) -> ToolResult:
    """Run the tool."""
    call.is_executed = True
    call.started_s = time.perf_counter()
    settings = state.settings
    result = await execute(call, state.middleware, settings.timeout_s)
    if result.status is Status.PENDING:
        result = await _pending(call, result, settings.pending_wait_s)
    call.duration_s = time.perf_counter() - call.started_s
    call.result = result = finalize(result, call, call.duration_s)
    if call.run.events.active:
        call.emit(TOOL_FINISHED, duration_ms=result.meta.duration_ms, is_error=result.is_error)
    return result


async def conclude(state: RegistryState, call: Call, result: ToolResult) -> ToolResult:
    """Everything after the tool ran, or was refused."""
    run = call.run
    if call.is_executed:
        if state.hooks or run.hooks:
            result = await run_after_hooks((*run.hooks, *state.hooks), call, result)
    else:
        result = finalize(result, call, 0.0)
    if not run.is_shared:
        result = _note_repetition(state, call, result)
    _finish(call, result)
    noted = run.observer.call_ended(call) if call.is_started and run.observer is not None else None
    if noted is not None:
        await maybe_await(noted)
    return result


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
    if logger.isEnabledFor(logging.WARNING if result.is_error else logging.INFO):
        _log_end(call, result)


async def record_as_cancelled(call: Call, exc: BaseException) -> None:
    """Close the books on a call that is being cancelled from above or ended its run: it has a result all the same."""
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


# Permission


def _permission(state: RegistryState, call: Call) -> ToolResult | None:
    run = call.run.state
    if run.cancel_reason is not None:
        return cancelled(ABORTED)
    if (refusal := _lookup(state, call)) is not None:
        return refusal
    if run.budget is not None and not run.budget.take_call():
        message = f"no tool calls left: the run's budget of {run.budget.tool_calls} is used up"
        return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, retryable=False, status=Status.BLOCKED)
    return None


def _lookup(state: RegistryState, call: Call) -> ToolResult | None:
    tool = state.tools.get(call.name)
    if tool is None:
        return _unknown(state, call)
    call.tool = tool
    policies = (*call.run.policies, *state.policies) if call.run.policies else state.policies
    is_free = is_permitted(tool, call.origin, policies)
    if not is_free or any(not is_permitted(tool, origin, policies) for origin in call.run.via):
        message = f'tool "{call.name}" is not permitted'
        return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)
    if not tool.options.allows(call.origin):
        return _wrong_origin(call)
    return None


def _unknown(state: RegistryState, call: Call) -> ToolResult:
    names = [tool.name for tool in state.visible(call.origin, call.run.policies)]
    available = f"; available tools: {listed(names)}" if names else "; no tools are available"
    asked = call.name[:MAX_NAME_CHARS]
    message = f"unknown tool: {asked}{did_you_mean(call.name, names)}{available}"
    if call.name.startswith(AGENT_PREFIX) and any(name.startswith(AGENT_PREFIX) for name in names):
        message = f'unknown agent "{asked.removeprefix(AGENT_PREFIX)}"; {message}'
    return ToolResult.fail(message, code=ErrorCode.UNKNOWN_TOOL, details={"available": names[:100]})


def _wrong_origin(call: Call) -> ToolResult:
    inside = _SUSPECT_ORIGINS.get(call.origin)
    message = f"{call.name} cannot be called " + (f"from within {inside}" if inside else "by a model directly")
    return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)


# Arguments


def _are_ready(call: Call) -> bool:
    return not isinstance(call.raw_args, str) and call.tool.spec.prepare is None  # type: ignore[union-attr]


async def _prepared_arguments(call: Call) -> ToolResult | None:
    try:
        received = await prepare_arguments(call)
    except ArgumentError as exc:
        return _unusable(call, exc)
    return _arguments(call, received)


def _arguments(call: Call, received: Any) -> ToolResult | None:
    """Mend, validate and decode: fill `call.args`, or say what is wrong with what was received."""
    tool = call.tool
    assert tool is not None
    try:
        checked = tool.check(received)
        call.args = checked.args
        if checked.changes or checked.warnings:
            call.changes = (*call.changes, *checked.changes)
            call.warnings = (*call.warnings, *checked.warnings)
        if tool.spec.decode is not None:
            call.decoded = tool.decode(checked.args)
    except ArgumentError as exc:
        return _unusable(call, exc)
    return None


def _unusable(call: Call, exc: ArgumentError) -> ToolResult:
    prefix = call.tool.spec.args_prefix if call.tool is not None else None
    message = str(exc) if prefix is None else prefix + str(exc).partition(": ")[2]
    return ToolResult.fail(message, code=exc.code, exc=exc.__cause__, details=exc.details)


async def examine(state: RegistryState, call: Call, *, with_arguments: bool = True) -> ToolResult | None:
    """What `preflight` would say, without asking hooks, telling anybody or counting the call."""
    return _lookup(state, call) or (await _prepared_arguments(call) if with_arguments else None)


# Records


async def _record_start(call: Call, refusal: ToolResult | None) -> ToolResult | None:
    """No record, no effect: a call that cannot be recorded is not made."""
    observer = call.run.observer
    assert observer is not None
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


async def _pending(call: Call, result: ToolResult, wait_s: float) -> ToolResult:
    """Background work: a model goes on without it, plans and code wait a while for its result."""
    jobs = call.run.state.jobs
    job_id = result.job_id or (call.completion.job_id if call.completion is not None else None)
    job = jobs.get(job_id) if jobs is not None and job_id is not None else None
    if job is None or call.origin not in _SUSPECT_ORIGINS:
        return result
    with anyio.move_on_after(wait_s):
        return await job.wait()
    return result


def _note_repetition(state: RegistryState, call: Call, result: ToolResult) -> ToolResult:
    """Tell a model that goes round in circles."""
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
