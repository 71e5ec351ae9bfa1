"""Hooks look at calls before and after they run: they block, rewrite, substitute, approve, override.

One hook at a time within a run. A hook never brings a run down by accident, and it writes no call: it returns what it
wants, and the pipeline does it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import anyio

from toolcell.calls.call import (
    Approve,
    Approver,
    Block,
    Call,
    Decision,
    Deny,
    Edit,
    Hook,
    HookAnswer,
    Override,
    Rewrite,
    RunContext,
    Substitute,
)
from toolcell.calls.concurrency import maybe_await, passes_on
from toolcell.calls.finalize import made_result
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.errors import ToolAbort
from toolcell.support.checks import brief, text_of
from toolcell.support.log import logger_of

logger = logger_of("toolcell.tools")

BLOCKED = "tool call blocked"


APPROVAL_CURE = 'its program may add approval_hook(...), or run it with on_approval="suspend"'
"""What decides about calls that need approval."""


def approval_hook(approver: Approver, *, timeout_s: float | None = None) -> Hook:
    """Return a hook that asks `approver` about every call that needs approval; `call.approval_reason` says why.

    No answer in `timeout_s` blocks the call.
    """

    async def before(call: Call) -> HookAnswer:
        if not call.approval_reason or call.features.decide or call.is_approved_later:
            return None
        match await maybe_await(approver(call)):
            case Approve() | Edit() | Deny() as decision:
                return decision
            case decision:
                return Block(f"no valid approval decision for {call.name}: {brief(decision)}")

    return Hook(before=before, timeout_s=timeout_s, name="approval")


# Running them

in_hook: ContextVar[bool] = ContextVar("toolcell_in_hook", default=False)
"""True in a hook and in what it calls."""


@asynccontextmanager
async def hook_turn(run: RunContext) -> AsyncIterator[None]:
    """Wait until no other hook of the run is running. Calls that a hook itself makes are part of its turn."""
    if run.scope.is_shared or in_hook.get():
        yield
        return
    async with run.state.hook_lock:
        token = in_hook.set(True)
        try:
            yield
        finally:
            in_hook.reset(token)


_BEFORE_ANSWERS = (
    "it may return None, Block(reason), Rewrite(args), Substitute(result), Approve(), Edit(args) or Deny()"
)
_AFTER_ANSWERS = "it may return None, Override(...) or a ToolResult"


async def ask_before(hook: Hook, call: Call) -> ToolResult | Rewrite | Decision | None:
    """Return what a hook wants done about a call; a result answers the call in the tool's place."""
    if hook.before is None:
        return None
    try:
        answer = await _within(hook.timeout_s, hook.before, call)
    except BaseException as exc:
        if passes_on(exc):
            raise
        return _hook_failed(hook, call, exc)
    match answer:
        case None:
            return None
        case Rewrite() | Approve() | Edit() | Deny():
            return answer
        case Substitute(result):
            return await made_result(result)
        case Block(reason, code):
            return _blocked(reason, code)
        case _:
            return _hook_failed(hook, call, TypeError(f"before hook returned {brief(answer)}; {_BEFORE_ANSWERS}"))


def refused_by_person(call: Call, reason: str) -> ToolResult:
    """Return the result of a call that a person refused."""
    return _blocked(reason or f"a person refused this call of {call.name}", ErrorCode.BLOCKED)


def not_approved(call: Call, other_arguments: bool) -> ToolResult:
    """Refuse a call that needs approval and that no hook approved, or only with other arguments."""
    message = f'tool "{call.name}" {call.approval_reason}, and nobody approved this call'
    if other_arguments:
        message += " with these arguments: a later hook changed them; add the hook that approves last"
    else:
        message += f"; {APPROVAL_CURE}"
    return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)


def _blocked(reason: str, code: str) -> ToolResult:
    return ToolResult.fail(reason or BLOCKED, code=code, status=Status.BLOCKED)


def name_of(hook: Hook, function: Callable[..., Any] | None) -> str:
    """Return what logs and records call a function of a hook."""
    return hook.name or getattr(function, "__qualname__", "without a name")


def _hook_failed(hook: Hook, call: Call, exc: BaseException) -> ToolResult:
    failed = _noted_failure("before hook", hook, hook.before, call, exc)
    said = failed if isinstance(exc, TimeoutError) else f"{type(exc).__name__}: {text_of(exc)}"
    message = f"blocked: a hook failed while looking at this call ({said})"
    return ToolResult.fail(message, code=ErrorCode.HOOK_ERROR, status=Status.BLOCKED, exc=exc)


def _noted_failure(kind: str, hook: Hook, function: Callable[..., Any] | None, call: Call, exc: BaseException) -> str:
    """Log that a hook failed, and end the run where that is asked for; return what is said of it."""
    failed = "timed out" if isinstance(exc, TimeoutError) else f"failed: {type(exc).__name__}"
    logger.warning("%s %s failed on %s", kind, name_of(hook, function), call.name, exc_info=exc)
    if hook.on_error == "abort":
        raise ToolAbort(f"{kind} {hook.name or function!r} {failed}, on {call.name}") from exc
    return failed


def after_hooks(call: Call) -> list[Hook]:
    """Return the hooks that see the result of a call, outer to inner."""
    return [hook for hook in (*call.run.scope.hooks, *call.registry.hooks) if hook.after is not None]


async def show_after_hooks(call: Call, result: ToolResult) -> ToolResult:
    """Return a result as the after hooks want it, inner to outer. If one fails, nobody gets the result, unless its
    `on_error` is "keep"."""
    hooks = after_hooks(call)
    if not hooks:
        return result
    async with hook_turn(call.run):
        for hook in reversed(hooks):
            result = await _ask_after(hook, call, result)
    return result


async def _ask_after(hook: Hook, call: Call, result: ToolResult) -> ToolResult:
    assert hook.after is not None
    try:
        change = await _within(hook.timeout_s, hook.after, call, result)
        match change:
            case None:
                return result
            case ToolResult():
                return replace(await made_result(change), meta=result.meta)
            case Override():
                return change.apply(result)
        raise TypeError(f"after hook returned {brief(change)}; {_AFTER_ANSWERS}")
    except BaseException as exc:
        if passes_on(exc):
            raise
        failed = _noted_failure("after hook", hook, hook.after, call, exc)
        call.warnings = (*call.warnings, f"after hook {failed}")
        return result if hook.on_error == "keep" else withheld(call, result, f"an after hook {failed}")


def withheld(call: Call, result: ToolResult, why: str) -> ToolResult:
    """Return the result of a call that was made and whose answer nobody may see: what should have looked at it failed.

    `why` must not have the text of an exception: it may have the answer in it.
    """
    message = f'the result of "{call.name}" is withheld: {why}; the tool itself has run'
    return ToolResult.fail(message, code=ErrorCode.HOOK_ERROR, retryable=False, usage=result.usage, meta=result.meta)


async def _within(timeout_s: float | None, function: Callable[..., Any], *args: Any) -> Any:
    if timeout_s is None:
        return await maybe_await(function(*args))
    with anyio.fail_after(timeout_s) as scope:
        answer = await maybe_await(function(*args))
    if anyio.current_time() > scope.deadline:  # a plain function is not interrupted
        raise TimeoutError
    return answer
