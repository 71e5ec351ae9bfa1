"""The one path that every call takes, wherever it comes from. Read `run_call`, then each step in its order.

Permission is asked before anything of the tool runs, its argument preparation included. In a batch only
`perform` runs concurrently, so there are three functions: `admit`, `perform`, `conclude`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import types
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import anyio
import msgpack

from toolcell.calls.arguments import ArgumentChecker, ArgumentError, InvalidArguments, prepare_arguments
from toolcell.calls.call import Approve, Block, Call, Decision, Deny, Edit, Hook, Rewrite, decided
from toolcell.calls.checker_process import CheckStopped, ask, pack, turns
from toolcell.calls.concurrency import (
    OF_THIS_PROCESS,
    ToolThread,
    Workers,
    first_leaf,
    loop_limits,
    maybe_await,
    passes_on,
)
from toolcell.calls.context import ToolContext, current
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.events import TOOL_END, TOOL_FINISHED, TOOL_START
from toolcell.calls.finalize import (
    MAX_NAME_CHARS,
    as_result,
    failure_of,
    finalize,
    finalize_soon,
    holds_much,
    log_end,
    log_start,
    logger,
    made_result,
    may_be_data,
    show_user,
    with_data,
    with_repeat_hint,
)
from toolcell.calls.hooks import (
    ask_before,
    hook_turn,
    in_hook,
    name_of,
    not_approved,
    refused_by_person,
    show_after_hooks,
)
from toolcell.calls.options import Origin
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.calls.schema_walk import CheckedArguments
from toolcell.calls.values import (
    MAX_NODES,
    SCALARS,
    BadValue,
    Change,
    ValueProblem,
    copy_arguments,
    count_values,
    is_large,
    list_names,
)
from toolcell.errors import AuditError, ToolAbort, ToolError
from toolcell.support import daemon_threads
from toolcell.support.checks import did_you_mean
from toolcell.support.event_loop import SteppedCoroutine, TimeSlice, clock, take_back_request
from toolcell.support.host_work import ELEMENT_WORK, HostWork
from toolcell.tools.spec import Middleware, RegisteredTool, RegistryState, permits_all
from toolcell_bridge.wire.tables import TABLES

RECORD_S = 2.0
"""What an asynchronous observer may take to note the end of a call that was cancelled."""
AGENT_PREFIX = "agent_"

Waited = TypeVar("Waited")

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
    if call.run.events.unheard:
        await call.run.events.hear()
    found = _find_permitted(state, call)
    if type(found) is RegisteredTool:
        hooks = (*call.run.scope.hooks, *state.hooks) if call.run.scope.hooks else state.hooks
        found = await _take_arguments(call, found) or found
        if type(found) is RegisteredTool and (hooks or call.approval_reason) and not call.is_settled:
            found = await _until_cut_short(call, _ask_hooks(hooks, call, found)) or found
        for replace in call.features.replace:
            found = replace(call, found) if type(found) is RegisteredTool else found
    call.refusal = None if type(found) is RegisteredTool else found
    for admitted in call.features.admitted:
        admitted(call)
    return await _record_start(call, call.refusal) or found if call.features.call_started else found


async def perform(state: RegistryState, call: Call, tool: RegisteredTool) -> ToolResult:
    """Run the tool."""
    call.is_executed = True
    call.started_s = time.perf_counter()
    result, context = await execute(state, call, tool)
    job_id = context.completion.job_id if context.completion is not None else None
    if result.status is Status.PENDING:
        result = await _await_job(call, result, job_id, state.settings.pending_wait_s)
    call.duration_s = time.perf_counter() - call.started_s
    result = await finalize_soon(result, call, call.duration_s, job_id)
    for made in call.features.made:
        made(call, result)
    if not (state.hooks or call.run.scope.hooks):  # else nobody gets it before the after hooks have seen it
        call.result = result
    if call.run.events.active:
        call.emit(TOOL_FINISHED, duration_ms=result.meta.duration_ms, is_error=result.is_error)
    return result


async def conclude(state: RegistryState, call: Call, result: ToolResult) -> ToolResult:
    """Do everything after the tool ran, or was refused."""
    run = call.run
    if not call.is_executed:
        result = finalize(result, call, 0.0)
    elif (state.hooks or run.scope.hooks) and not call.is_shown:
        shown = await _until_cut_short(call, show_after_hooks(call, result))
        result = result if shown is result else await finalize_soon(shown, call, call.duration_s)
    if run.scope.on_user is not None and call.is_executed and not call.is_shown and call.origin in _TOOL_OF_ORIGIN:
        await show_user(call, result)
    if not run.scope.is_shared and (result.status is not Status.OK or run.state.failures):
        result = with_repeat_hint(call, result, state.settings.repeat_hint)
    for concluded in call.features.concluded:
        concluded(call, result)
    await _end(call, result)
    return result


async def refuse(state: RegistryState, call: Call, refusal: ToolResult) -> ToolResult:
    """Give a call that is not even looked at its start, its result and its end."""
    _start(call)
    call.refusal = refusal
    return await conclude(state, call, await _record_start(call, refusal) or refusal)


async def answer_call(call: Call, answer: ToolResult | Awaitable[ToolResult], run: str = "") -> ToolResult:
    """Give a call an answer from elsewhere, as from the record of `run`: no tool runs, no rule or hook is asked."""
    try:
        _start(call)
        call.args = call.raw_args
        if run:
            call.note(answered_from=run)
        given = await _record_start(call, None)
        if given is None:
            given = answer if isinstance(answer, ToolResult) else await answer
        result = await finalize_soon(given, call, 0.0)
        await _end(call, result)
        return result
    except BaseException as exc:
        await record_as_cancelled(call, exc)
        raise


async def record_as_cancelled(call: Call, exc: BaseException) -> None:
    """Conclude a call that is being cancelled from above or that ended its run: it has a result all the same."""
    if isinstance(exc, ToolAbort) and not call.run.scope.is_shared:
        call.run.state.abort = exc
    if call.is_concluded:
        return
    if not call.started_at:
        _start(call)
    if call.result is None:  # else the tool was done, and only what comes after it was cut off
        # A tool that was done has a duration: its after hooks had not seen its result, so nobody gets it.
        is_cancelled = isinstance(exc, anyio.get_cancelled_exc_class()) or not call.is_executed or call.duration_s
        ended = cancelled(ABORTED) if is_cancelled else failure_of(call, exc)
        if call.is_executed:
            call.duration_s = time.perf_counter() - call.started_s
        call.result = finalize(ended, call, call.duration_s)
    _finish(call, call.result)
    with anyio.move_on_after(RECORD_S, shield=True):
        await _record_end(call)


async def _until_cut_short(call: Call, work: Awaitable[Waited]) -> Waited | ToolResult:
    """Wait for hooks and the like until the run is cancelled or its time is used up."""
    with call.run.state.cancellable(call.run.deadline) as scope:
        answer = await work
    return cut_short(call) if scope.cancelled_caught else answer


# Start and permission


def _start(call: Call) -> None:
    call.started_at = time.time()
    call.run.state.pending.append(call.call_id)
    if call.run.events.active:
        call.emit(TOOL_START, args=call.raw_args)
    if logger.isEnabledFor(logging.INFO):
        log_start(call)


def _find_permitted(state: RegistryState, call: Call, *, is_counted: bool = True) -> RegisteredTool | ToolResult:
    """Return the tool, if the run goes on, the rules permit the call and the budget allows it."""
    run = call.run
    if run.state.cancel_reason is not None:
        return cancelled(ABORTED)
    work = run.scope.work
    if work is not None and work.used > work.limit:
        return no_work_left(work)
    if run.deadline != math.inf and clock()() >= run.deadline:
        return cut_short(call)
    tool = state.tools.get(call.name)
    if tool is None:
        return _unknown(state, call)
    call.options, call.identity = tool.options, tool.identity
    if tool.spec.choose is not None:
        if type(chosen := tool.spec.choose(call.raw_args, call.run)) is not RegisteredTool:
            return chosen
        tool, call.options = chosen, chosen.options
    if tool.features:
        call.features = call.features.after(tool.features)
    is_permitted = state.permits(tool, call.origin)
    if is_permitted and (run.scope.policies or run.scope.lineage.origins):
        # A call may do no more than the agents, plans and code that it was reached through.
        origins = (call.origin, *run.scope.lineage.origins)
        is_permitted = all(state.permits(tool, o) and permits_all(run.scope.policies, tool, o) for o in origins)
    if not is_permitted:
        message = f'tool "{call.name}" is not permitted'
        return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)
    if call.origin not in tool.options.callable_from and not tool.options.allows(call.origin):
        return _wrong_origin(call)
    refusal: ToolResult | None
    for permit in call.features.permit:
        refusal = permit(call)
        if refusal is not None:
            return refusal
    budget = run.state.budget
    if budget is not None and is_counted and not budget.take_call():
        message = f"no tool calls left: the run's budget of {budget.tool_calls} is used up"
        return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, retryable=False, status=Status.BLOCKED)
    for count_call in call.features.count_call if is_counted else ():
        refusal = count_call(call)
        if refusal is not None:
            return refusal
    return tool


def _unknown(state: RegistryState, call: Call) -> ToolResult:
    names = [tool.name for tool in state.visible(call.origin, call.run.scope.policies)]
    if not names and call.message is not None:
        return ToolResult.fail("No tools available", code=ErrorCode.UNKNOWN_TOOL)
    asked = call.name[:MAX_NAME_CHARS]
    available = f"; available tools: {list_names(names)}" if names else "; no tools are available"
    message = f"unknown tool: {asked}{did_you_mean(call.name, names)}{available}"
    if call.name.startswith(AGENT_PREFIX) and any(name.startswith(AGENT_PREFIX) for name in names):
        message = f'unknown agent "{asked.removeprefix(AGENT_PREFIX)}"; {message}'
    return ToolResult.fail(message, code=ErrorCode.UNKNOWN_TOOL, facts={"available": names[:100]})


def _wrong_origin(call: Call) -> ToolResult:
    inside = _TOOL_OF_ORIGIN.get(call.origin)
    message = f"{call.name} cannot be called " + (f"from within {inside}" if inside else "by a model directly")
    return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)


# Arguments


async def _take_arguments(call: Call, tool: RegisteredTool) -> ToolResult | None:
    """Prepare and validate what was received: set `call.args`, or return what is wrong with it."""
    for take in call.features.take:
        if (taken := take(call, tool)) is not None:
            refusal: ToolResult | None = await taken
            return refusal
    received = call.raw_args
    if tool.spec.prepare is not None or received is None or isinstance(received, str):
        try:
            received = await _until_cut_short(call, prepare_arguments(received, tool.spec.prepare, tool.checker.tables))
        except ArgumentError as exc:
            return unusable(tool, exc)
        if isinstance(received, ToolResult):
            return received
    return await validate(call, tool, received)


async def validate(call: Call, tool: RegisteredTool, received: Any) -> ToolResult | None:
    """Set `call.args` to what the tool may be given, or return what is wrong with what was received.

    Cancellation: a checker process is killed; a thread goes on until it has made the tool's own types.
    """
    args = tool.checker.check_plain(received) if type(received) is dict else None
    if args is not None and tool.spec.decode is None:
        call.args, call.decoded = args, None
        return None
    steps = 0
    try:
        if args is not None:
            checked = CheckedArguments(args)
            decoded = tool.decode(args)
        elif tool.checker.fits_here(received):
            checked = tool.checker.check(received)
            steps = checked.steps
            decoded = tool.decode(checked.args)
        else:
            found = await _in_turn(call, tool, received)
            if found is None:
                return cut_short(call)
            checked, decoded = found
    except ArgumentError as exc:
        return _count(call, steps or exc.steps) or unusable(tool, exc)
    except BaseException as exc:  # the tool's own types failed while they were made, or a value's own code
        if passes_on(exc):
            raise
        return _count(call, steps) or failure_of(call, exc)
    if (refusal := _count(call, steps)) is not None:
        return refusal
    call.changes = (*call.changes, *checked.changes)
    call.warnings = (*call.warnings, *checked.warnings)
    call.args, call.decoded = checked.args, decoded
    return None


async def _in_turn(call: Call, tool: RegisteredTool, received: Any) -> tuple[CheckedArguments, Any] | None:
    """Check in a checker process, and make the tool's own types in a thread; None when the call was cut short."""
    work = call.run.scope.work
    found: list[tuple[CheckedArguments, Any]] = []
    with call.run.state.cancellable(call.run.deadline):
        async with _turn(work) as in_thread:
            checked = await _checked_elsewhere(tool.checker, received, in_thread, work)
            _count(call, checked.steps)
            if tool.spec.decode is None or not is_large(received):
                decoded = tool.decode(checked.args)
            else:
                decoded = await in_thread(partial(tool.decode, checked.args))
            found.append((checked, decoded))
    return found[0] if found else None


@asynccontextmanager
async def _turn(work: HostWork | None) -> AsyncIterator[Callable[[Callable[[], Any]], Awaitable[Any]]]:
    """Have a turn inside the block, which gets what calls a function in a thread.

    Cancellation: such a function runs on, and nobody else has its turn before it is over.
    """
    line, thread = turns(), None

    async def in_thread(function: Callable[[], Any]) -> Any:
        # Not that of `run_large`: others wait for the turn, and a tool's own types may wait for something.
        nonlocal thread
        thread = ToolThread(partial(daemon_threads.account.get().timed, function))
        return await daemon_threads.run_sync(thread, abandon_on_cancel=True, limiter=loop_limits().no_limit)

    await line.enter(work)
    try:
        yield in_thread
    finally:
        if thread is not None and thread.abandon():
            thread.when_over(partial(line.leave, work))
        else:
            line.leave(work)


async def check_arguments(definition: ToolDefinition, received: Any) -> None:
    """Check in a checker process what a tool may be called with later, whoever described it.

    Raises:
        InvalidArguments: it does not fit.
    """
    async with _turn(None) as in_thread:
        await _checked_elsewhere(ArgumentChecker(definition, is_foreign=True), received, in_thread)


async def _checked_elsewhere(
    checker: ArgumentChecker,
    received: Any,
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    work: HostWork | None = None,
) -> CheckedArguments:
    """Have a checker process do what `ArgumentChecker.check` does.

    Raises:
        InvalidArguments: the arguments do not fit, or checking them took too long.
    """
    if not isinstance(received, Mapping):
        received_kind = "null" if received is None else type(received).__name__
        raise InvalidArguments(checker.tool, [ValueProblem((), f"must be an object, not {received_kind}")], received)
    tables = {name: received[name] for name in checker.tables if type(received.get(name)) in TABLES}
    plain = {**received, **{name: {} for name in tables}} if tables else received
    packed = partial(_packed, plain, checker.tables)
    try:
        body = await in_thread(packed) if is_large(plain) else packed()
    except BadValue as exc:
        raise InvalidArguments(checker.tool, [exc.problem], received, exc.steps) from None
    try:
        outcome, *rest = await ask("arguments", checker.spec_text, body, work)
    except CheckStopped as exc:
        said = f"cannot be checked against its schema: the check {exc}; send less"
        raise InvalidArguments(checker.tool, [ValueProblem((), said)], received) from None
    if outcome == "refused":
        problems = [ValueProblem(tuple(path), message) for path, message in rest[0]]
        raise InvalidArguments(checker.tool, problems, received, rest[1])
    args, changes, warnings, steps = rest
    args |= {name: table for name, table in tables.items() if name in args}
    return CheckedArguments(args, tuple(Change(*each) for each in changes), tuple(warnings), steps)


def _packed(plain: Mapping[str, Any], tables: Collection[str]) -> bytes:
    try:
        if count_values(plain, MAX_NODES) > MAX_NODES + 1:
            raise ValueError("more than arguments can hold")
        return pack(plain)
    except (TypeError, ValueError, OverflowError):  # not plain yet, or what no argument can be
        return pack(copy_arguments(plain, tables).args)


def _count(call: Call, steps: int) -> ToolResult | None:
    """Count values that were looked at for a guest; return a refusal when that was too much."""
    work = call.run.scope.work
    if work is None:
        return None
    work.used += ELEMENT_WORK * steps
    return no_work_left(work) if work.used > work.limit else None


def no_work_left(work: HostWork) -> ToolResult:
    """Return the refusal of a call whose run has made the host do too much."""
    message = f"the run has made the host do {work.used} units of work, limit {work.limit} (host_work); send less"
    return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, retryable=False, status=Status.BLOCKED)


def unusable(tool: RegisteredTool, exc: ArgumentError) -> ToolResult:
    """Return the refusal of arguments, in the words of the tool's adapter."""
    message = f"{tool.spec.args_prefix or exc.prefix}{exc}"
    return ToolResult.fail(message, code=exc.code, exc=exc.__cause__, facts=exc.details)


async def examine(state: RegistryState, call: Call, *, with_arguments: bool = True) -> ToolResult | None:
    """Return what `admit` would refuse the call with, without hooks, events, records or a count of the call."""
    found = _find_permitted(state, call, is_counted=False)
    if type(found) is not RegisteredTool:
        return found
    return await _take_arguments(call, found) if with_arguments else None


# Hooks, and those who approve calls: they may refuse a call, answer it, or give it other arguments


async def _ask_hooks(hooks: tuple[Hook, ...], call: Call, tool: RegisteredTool) -> ToolResult | None:
    """Ask outer to inner. The first that answers ends it; a rewrite is seen by the hooks further in."""
    approved: bytes | None = None
    async with hook_turn(call.run):
        for hook in hooks:
            refusal: ToolResult | None = None
            asked_about = _fingerprint(call)
            match await ask_before(hook, call):
                case Approve() | Edit() | Deny() as given:
                    refusal = await _decided(call, tool, given, name_of(hook, hook.before))
                    if not isinstance(given, Deny):
                        approved = asked_about if isinstance(given, Approve) else _fingerprint(call)
                case Rewrite(args):
                    call.note(rewritten_by=[*call.facts.get("rewritten_by", ()), name_of(hook, hook.before)])
                    refusal = await validate(call, tool, args)
                case ToolResult() as answer:
                    refusal = answer
            if refusal is not None:
                return refusal
    call.approved = approved is not None and approved == _fingerprint(call)
    if call.approved or not call.approval_reason or call.is_approved_later:
        return None
    # Not in the turn of the hooks: an answer may take as long as the run.
    for decide in call.features.decide:
        match await decide(call):
            case Approve() | Edit() | Deny() as given:
                refusal = await _decided(call, tool, given)
            case Block(reason):  # nobody was asked
                refusal = refused_by_person(call, reason)
            case _:
                refusal = not_approved(call, False)
        call.approved = refusal is None
        return refusal
    return not_approved(call, approved is not None)


async def _decided(call: Call, tool: RegisteredTool, given: Decision, by: str = "") -> ToolResult | None:
    """Note a decision. Return the refusal of a call that was denied, or that cannot have other arguments."""
    if call.approval_reason or not isinstance(given, Approve):
        call.note(decided=decided(type(given).__name__.lower(), given.by or by, given.reason))
    match given:
        case Edit(args):
            return await validate(call, tool, args)
        case Deny(reason):
            return refused_by_person(call, reason)
    return None


def _fingerprint(call: Call) -> bytes:
    """Identify the arguments that somebody was asked about: an approval counts for these only."""
    try:
        packed: bytes = msgpack.packb(call.args)  # ten times as fast as JSON, for arguments of any size
        return packed
    except (TypeError, ValueError, OverflowError):  # a hook has put something else into them
        return json.dumps(call.args, sort_keys=True, default=repr).encode()


# Running the tool: its deadline, its turn, and whatever it does, as a result. One result per call: nothing that the
# tool raises gets out, except ToolAbort, KeyboardInterrupt and a cancellation from above


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
        yield loop_limits().groups.setdefault(group, Workers(1))
    if most is not None and not any(above.identity is tool.identity for above in call.callers):
        yield loop_limits().tools.setdefault(tool.identity, Workers(most))


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
        proceed = partial(_wrapped, wrap, context, proceed)
    return proceed()


async def _wrapped(
    wrap: Middleware, context: ToolContext, proceed: Callable[[], Coroutine[Any, Any, ToolResult]]
) -> ToolResult:
    try:
        value = await maybe_await(wrap(context.call, proceed))
        if not holds_much(value):
            return as_result(value, requires_result=True)
        with context.untimed():
            return await made_result(value, requires_result=True)
    except BaseException as exc:
        if passes_on(exc):
            raise
        return _contained(context.call, exc)


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
        if type(value) in SCALARS or not holds_much(value):
            result = as_result(value, spec.requires_result)
        else:
            with context.untimed():
                result = await made_result(value, spec.requires_result)
        if not may_be_data(spec.options, result):
            return result
        with context.untimed():
            return await with_data(name, spec.options, result, is_foreign=spec.is_foreign)
    except ToolAbort:
        raise
    except (Exception, SystemExit) as exc:
        return _contained(context.call, exc)
    except BaseExceptionGroup as group:
        return _contained_group(context.call, group)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        is_cancelled = isinstance(exc, anyio.get_cancelled_exc_class()) and _is_cancelled_from_above()
        if is_cancelled or (isinstance(exc, GeneratorExit) and context.is_closing):
            raise
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
                take_back_request(coroutine, exc)
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
        raise first_leaf(aborts)
    return failure_of(call, exc)


def _contained_group(call: Call, group: BaseExceptionGroup[BaseException]) -> ToolResult:
    """Cancellations and interrupts in a group go on their way; ordinary errors beside them are lost with the call."""
    others, ours = group.split(lambda exc: not isinstance(exc, (BaseExceptionGroup, ToolAbort)) and passes_on(exc))
    if others is not None:
        raise others
    assert ours is not None
    return _contained(call, ours)


def _is_cancelled_from_above() -> bool:
    """False when a tool let out a CancelledError nobody sent to it, as when it awaits a future that was cancelled."""
    if anyio.current_effective_deadline() == -math.inf:
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio: only real cancellations raise there
        return True
    return task is not None and task.cancelling() > 0


# Records


async def _record_start(call: Call, refusal: ToolResult | None) -> ToolResult | None:
    """Inform the observer. No record, no effect: a call that cannot be recorded is refused."""
    try:
        for started in call.features.call_started:
            if (noted := started(call)) is not None:
                await maybe_await(noted)
        call.is_started = True
    except AuditError:
        for unrecorded in call.features.unrecorded:
            unrecorded(call)
        raise
    except BaseException as exc:
        if passes_on(exc):
            raise
        logger.exception("call of %s could not be recorded", call.name)
        said = exc.message if isinstance(exc, ToolError) else "the call could not be recorded, so it was not made"
        call.refusal = refusal = ToolResult.fail(said, code=ErrorCode.UNAVAILABLE).with_error(exc)
    return refusal


async def _await_job(call: Call, result: ToolResult, job_id: str | None, wait_s: float) -> ToolResult:
    """Wait for background work, but not for that of a model's call, which goes on, nor for ever."""
    if (work := call.last_step) is not None:
        call.is_shown = True
        return await _until_cut_short(call, work())
    jobs = call.run.state.jobs
    job_id = result.job_id or job_id
    job = jobs.get(job_id) if jobs is not None and job_id is not None else None
    if job is None or call.origin not in _TOOL_OF_ORIGIN:
        return result
    with anyio.move_on_after(wait_s):
        result = await job.wait()
        call.is_shown = True
    return result


async def _end(call: Call, result: ToolResult) -> None:
    """Set the result, emit the end, and inform the observer."""
    _finish(call, result)
    if call.is_started and call.features.call_ended:
        await _record_end(call)
    if call.run.events.unheard:
        await call.run.events.hear()


async def _record_end(call: Call) -> None:
    """Inform the observer. The call was made, so its result stands, whatever an observer raises."""
    if not call.is_started:
        return
    try:
        for ended in call.features.call_ended:
            if (noted := ended(call)) is not None:
                await maybe_await(noted)
    except AuditError:
        raise
    except BaseException as exc:
        if passes_on(exc):
            raise
        logger.exception("the end of a call of %s could not be recorded", call.name)


def _finish(call: Call, result: ToolResult) -> None:
    call.result = result
    call.is_concluded = True
    call.run.state.pending.remove(call.call_id)
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
        log_end(call, result)


# Several calls of one model response: tools overlap, everything around them happens in the order they were asked. Every
# call gets exactly one result, at its own place, also when others fail


Item = TypeVar("Item")

OnResult = Callable[[Call, ToolResult], Awaitable[None]]
"""Called with each result in source order, right after the end of its call."""

ENDS_RUN = (ToolAbort, AuditError, KeyboardInterrupt, SystemExit)


async def run_batch(
    state: RegistryState,
    calls: Sequence[Call],
    *,
    sequential: bool = False,
    limit: int | None = None,
    on_result: OnResult | None = None,
) -> list[ToolResult]:
    """Run calls; result i belongs to call i. Those past `limit` are refused, not dropped.

    Raises:
        ToolAbort: a tool or hook ended the run; every call has its `result` all the same.

    Cancellation: from above it passes through, with every call's end emitted and `result` set. `RunContext.cancel`
    makes calls in flight and those to come return cancelled results.
    """
    allowed, surplus = calls[:limit], calls[limit:] if limit is not None else ()
    try:
        tools = (state.tools.get(call.name) for call in allowed)
        if len(allowed) == 1 or sequential or any(tool and tool.options.mode == "sequential" for tool in tools):
            results = await _one_by_one(allowed, partial(run_call, state), on_result)
        else:
            results = await _overlapping(state, allowed, on_result)
        message = f"not run: one response may ask for at most {limit} tool calls; ask for this one again"
        refusal = ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, status=Status.BLOCKED, retryable=True)
        return results + await _one_by_one(surplus, lambda call: refuse(state, call, refusal), on_result)
    except BaseException as exc:
        for call in calls:
            await record_as_cancelled(call, exc)
        raise


async def _one_by_one(
    calls: Sequence[Call], make: Callable[[Call], Awaitable[ToolResult]], on_result: OnResult | None
) -> list[ToolResult]:
    turn = TimeSlice()
    results = []
    for call in calls:
        results.append(await _told(on_result, call, await make(call)))
        if len(calls) > 1:
            await turn.give_way()
    return results


async def _told(on_result: OnResult | None, call: Call, result: ToolResult) -> ToolResult:
    """Return a result that whoever asked for it has."""
    if on_result is not None:
        await on_result(call, result)
    return result


async def _overlapping(state: RegistryState, calls: Sequence[Call], on_result: OnResult | None) -> list[ToolResult]:
    turn = TimeSlice()
    admitted = []
    for call in calls:
        admitted.append(await admit(state, call))
        await turn.give_way()
    results = [found if isinstance(found, ToolResult) else None for found in admitted]

    async def perform_one(found: tuple[int, RegisteredTool]) -> None:
        index, tool = found
        await turn.give_way()
        results[index] = await perform(state, calls[index], tool)

    await together(
        perform_one, deque((index, found) for index, found in enumerate(admitted) if isinstance(found, RegisteredTool))
    )
    concluded = []
    for call, result in zip(calls, results, strict=True):
        assert result is not None
        concluded.append(await _told(on_result, call, await conclude(state, call, result)))
        await turn.give_way()
    return concluded


async def together(perform: Callable[[Item], Coroutine[Any, Any, None]], ready: deque[Item]) -> None:
    """Perform what is ready, each at once, and what becomes ready meanwhile.

    One task takes one after another, until it has to wait: then another task goes on. What does not wait needs neither
    a task nor a turn of the event loop. Each has a context of its own.
    """
    try:
        async with anyio.create_task_group() as group:

            async def go_on() -> None:
                while ready:
                    work, context = perform(ready.popleft()), copy_context()
                    try:
                        waits_for = context.run(work.send, None)
                    except StopIteration:
                        continue
                    group.start_soon(go_on)
                    await SteppedCoroutine(work, waits_for, context)

            await go_on()
    except BaseExceptionGroup as failures:
        raise _first_that_ends_run(failures) from None


def _first_that_ends_run(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the exception of a group that ends the run, or the group itself when there is none."""
    for exc in group.exceptions:
        if isinstance(exc, BaseExceptionGroup):
            inner = _first_that_ends_run(exc)
            if isinstance(inner, ENDS_RUN):
                return inner
        elif isinstance(exc, ENDS_RUN):
            return exc
    return group
