"""Several calls of one model response: tools overlap, everything around them happens in the order they were asked.

Every call gets exactly one result, at its own place, also when others fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

import anyio

from toolcell.calls.call import Call
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.errors import AuditError, ToolAbort
from toolcell.support.event_loop import BegunCoroutine, TimeSlice
from toolcell.tools.pipeline import admit, conclude, perform, record_as_cancelled, refuse, run_call
from toolcell.tools.spec import RegisteredTool, RegistryState

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
            results = await _in_turn(state, allowed, on_result)
        else:
            results = await _overlapping(state, allowed, on_result)
        return results + await _refuse_surplus(state, surplus, limit, on_result)
    except BaseException as exc:
        for call in calls:
            await record_as_cancelled(call, exc)
        raise


async def _in_turn(state: RegistryState, calls: Sequence[Call], on_result: OnResult | None) -> list[ToolResult]:
    turn = TimeSlice()
    results = []
    for call in calls:
        results.append(await run_call(state, call))
        if on_result is not None:
            await on_result(call, results[-1])
        if len(calls) > 1:
            await turn.give_way()
    return results


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

    runnable = [(index, found) for index, found in enumerate(admitted) if isinstance(found, RegisteredTool)]
    if len(runnable) == 1:
        await perform_one(runnable[0])
    else:
        await together(perform_one, deque(runnable))
    concluded = []
    for call, result in zip(calls, results, strict=True):
        assert result is not None
        concluded.append(await conclude(state, call, result))
        if on_result is not None:
            await on_result(call, concluded[-1])
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
                    await BegunCoroutine(work, waits_for, context)

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


async def _refuse_surplus(
    state: RegistryState, surplus: Sequence[Call], limit: int | None, on_result: OnResult | None
) -> list[ToolResult]:
    message = f"not run: one response may ask for at most {limit} tool calls; ask for this one again"
    turn = TimeSlice()
    results = []
    for call in surplus:
        refusal = ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, status=Status.BLOCKED, retryable=True)
        results.append(await refuse(state, call, refusal))
        if on_result is not None:
            await on_result(call, results[-1])
        await turn.give_way()
    return results


def ends_run(results: Sequence[ToolResult]) -> bool:
    """True when every result of a batch asks to stop the run; an empty batch never does."""
    return bool(results) and all(result.terminate for result in results)
