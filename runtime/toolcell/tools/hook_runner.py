"""Running hooks: in order, never two at once within a run, and never able to bring a run down by accident."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import anyio

from toolcell.errors import ToolAbort
from toolcell.tools.call import Call
from toolcell.tools.hooks import Block, Hook, Override, Rewrite, Substitute, maybe_await
from toolcell.tools.result import ErrorCode, Status, ToolResult

logger = logging.getLogger("toolcell.tools")

BLOCKED = "tool call blocked"

Recheck = Callable[[Call, Mapping[str, Any]], ToolResult | None]

in_hook: ContextVar[bool] = ContextVar("toolcell_in_hook", default=False)
"""True in a hook and in what it calls."""


@asynccontextmanager
async def _turn(call: Call) -> AsyncIterator[None]:
    """Wait until no other hook of the run is running. Calls a hook itself makes are part of its turn."""
    if call.run.is_shared or in_hook.get():
        yield
        return
    async with call.run.state.hook_lock:
        token = in_hook.set(True)
        try:
            yield
        finally:
            in_hook.reset(token)


async def run_before_hooks(hooks: tuple[Hook, ...], call: Call, recheck: Recheck) -> ToolResult | None:
    """Outer to inner. The first that refuses or answers ends it; a rewrite is seen by the hooks further in."""
    async with _turn(call):
        for hook in hooks:
            if hook.before is not None and (refusal := await _before(hook, call, recheck)) is not None:
                return refusal
    if call.options.requires_approval and not call.approved:
        message = f'tool "{call.name}" needs approval, and nobody approved this call'
        return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)
    return None


async def _before(hook: Hook, call: Call, recheck: Recheck) -> ToolResult | None:
    try:
        verdict = await _within(hook.timeout_s, hook.before, call)
    except ToolAbort:
        raise
    except Exception as exc:
        return _hook_failed(hook, call, exc)
    match verdict:
        case None | (False, _):
            return None
        case Rewrite(args):
            return recheck(call, args)
        case Substitute(result):
            return result
        case Block(reason, code):
            return _blocked(reason, code)
        case (True, reason):
            return _blocked(reason, ErrorCode.BLOCKED)
        case _:
            return _hook_failed(hook, call, TypeError(f"before hook returned {verdict!r:.80}"))


def _blocked(reason: str, code: str) -> ToolResult:
    return ToolResult.fail(reason or BLOCKED, code=code, status=Status.BLOCKED)


def _hook_failed(hook: Hook, call: Call, exc: Exception) -> ToolResult:
    said = "timed out" if isinstance(exc, TimeoutError) else f"{type(exc).__name__}: {exc}"
    message = f"blocked: a hook failed while looking at this call ({said})"
    if hook.on_error == "abort":
        raise ToolAbort(f"hook {hook.name or hook.before!r} failed on {call.name}: {said}") from exc
    logger.warning("before hook %s failed on %s", hook.name, call.name, exc_info=exc)
    return ToolResult.fail(message, code=ErrorCode.HOOK_ERROR, status=Status.BLOCKED, exc=exc)


async def run_after_hooks(hooks: tuple[Hook, ...], call: Call, result: ToolResult) -> ToolResult:
    """Inner to outer. A hook that fails changes nothing and is noted in the call's warnings."""
    async with _turn(call):
        for hook in reversed(hooks):
            if hook.after is not None:
                result = await _after(hook, call, result)
    return result


async def _after(hook: Hook, call: Call, result: ToolResult) -> ToolResult:
    try:
        change = await _within(hook.timeout_s, hook.after, call, result)
    except ToolAbort:
        raise
    except Exception as exc:
        if hook.on_error == "abort":
            raise ToolAbort(f"after hook {hook.name or hook.after!r} failed on {call.name}: {exc}") from exc
        call.warnings = (*call.warnings, f"after hook failed: {type(exc).__name__}: {exc}")
        logger.warning("after hook %s failed on %s", hook.name, call.name, exc_info=exc)
        return result
    match change:
        case None:
            return result
        case ToolResult():
            return change.with_meta_of(result)
        case Override():
            return change.apply(result)
        case _:
            call.warnings = (*call.warnings, f"after hook returned {type(change).__name__}; ignored")
            return result


async def _within(timeout_s: float | None, function: Callable[..., Any] | None, *args: Any) -> Any:
    assert function is not None
    if timeout_s is None:
        return await maybe_await(function(*args))
    with anyio.fail_after(timeout_s):
        return await maybe_await(function(*args))
