"""Validate the arguments of one call: small ones here, large ones and those of strangers' tools in a checker process.

Part of `pipeline`. How arguments are checked is said in `arguments`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any

from toolcell.calls.arguments import ArgumentChecker, ArgumentError, InvalidArguments
from toolcell.calls.call import Call
from toolcell.calls.checker_process import CheckStopped, Request, ask, pack, turns
from toolcell.calls.concurrency import ToolThread, passes_on
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.finalize import failure_of
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.calls.schema_walk import CheckedArguments
from toolcell.calls.values import MAX_NODES, BadValue, Change, ValueProblem, copy_arguments, count_values, is_large
from toolcell.support import daemon_threads
from toolcell.support.host_work import ELEMENT_WORK, HostWork
from toolcell.tools.execution import cut_short
from toolcell.tools.spec import RegisteredTool
from toolcell_bridge.wire.tables import TABLES


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
            decoded = _decoded(tool, checked)
        elif tool.checker.fits_here(received):
            checked = tool.checker.check(received)
            steps = checked.steps
            decoded = _decoded(tool, checked)
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


def _decoded(tool: RegisteredTool, checked: CheckedArguments) -> Any:
    """Return the tool's own types of valid arguments, if it has any."""
    return None if tool.spec.decode is None else tool.decode(checked.args)


async def _in_turn(call: Call, tool: RegisteredTool, received: Any) -> tuple[CheckedArguments, Any] | None:
    """Check in a checker process, and make the tool's own types in a thread; None when the call was cut short."""
    work, line = call.run.scope.work, turns()
    found: list[tuple[CheckedArguments, Any]] = []
    with call.run.state.cancellable(call.run.deadline):
        await line.enter(work)
        threads: list[ToolThread] = []

        async def in_thread(function: Callable[[], Any]) -> Any:
            threads.append(ToolThread(function))
            return await daemon_threads.run_sync(threads[-1], abandon_on_cancel=True, limiter=line.threads)

        try:
            checked = await _checked_elsewhere(tool.checker, received, in_thread, work)
            _count(call, checked.steps)
            if tool.spec.decode is None or not is_large(received):
                found.append((checked, _decoded(tool, checked)))
            else:
                found.append((checked, await in_thread(partial(_decoded, tool, checked))))
        finally:
            if threads and threads[-1].abandon():  # it runs on, and nobody else has its turn before it is over
                threads[-1].when_over(partial(line.leave, work))
            else:
                line.leave(work)
    return found[0] if found else None


async def check_arguments(definition: ToolDefinition, received: Any) -> None:
    """Check in a checker process what a tool may be called with later, whoever described it.

    Raises:
        InvalidArguments: it does not fit.
    """
    line = turns()
    await line.enter(None)
    try:
        await _checked_elsewhere(ArgumentChecker(definition, is_foreign=True), received, daemon_threads.run_sync)
    finally:
        line.leave(None)


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
    try:
        body = await in_thread(partial(_packed, plain, checker.tables))
    except BadValue as exc:
        raise InvalidArguments(checker.tool, [exc.problem], received, exc.steps) from None
    try:
        ((outcome, *rest),) = await ask(Request("arguments", checker.spec_text, body), work)
    except CheckStopped as exc:
        said = f"cannot be checked against its schema: the check {exc.args[0]}; send less"
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
