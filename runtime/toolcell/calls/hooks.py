"""Hooks look at calls before and after they run: they block, rewrite, substitute, approve, override.

One hook at a time within a run. A hook never brings a run down by accident, and it writes no call: it returns what it
wants, and the pipeline does it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal, get_args

import anyio

from toolcell.calls.call import Call, CallHook, RunContext
from toolcell.calls.concurrency import maybe_await, passes_on
from toolcell.calls.finalize import as_result
from toolcell.calls.parts import Text
from toolcell.calls.result import ErrorCode, Status, ToolFailure, ToolResult
from toolcell.errors import ToolAbort, UsageError
from toolcell.support.checks import brief, check_kind, check_one_of, check_seconds, text_of
from toolcell.support.log import logger_of
from toolcell_bridge.wire.frozen import frozen

logger = logger_of("toolcell.tools")

BLOCKED = "tool call blocked"


@frozen
class Block:
    """Do not run the call; the model reads `reason`."""

    reason: str = ""
    code: str = ErrorCode.BLOCKED

    def __post_init__(self) -> None:
        check_kind("Block(reason)", self.reason, str)
        check_kind("Block(code)", self.code, str)


@frozen
class Rewrite:
    """Run the call with other arguments, which are validated again."""

    args: Mapping[str, Any]

    def __post_init__(self) -> None:
        check_kind("Rewrite(args)", self.args, Mapping)


@frozen
class Substitute:
    """Do not run the call; this is its result: a cached or made-up one."""

    result: ToolResult

    def __post_init__(self) -> None:
        check_kind("Substitute(result)", self.result, ToolResult, cure="wrap it: ToolResult.ok(text) or .of(data)")


@frozen
class Override:
    """What an after hook changes about a result; None leaves a field as it is."""

    content: str | None = None
    """Replaces everything the tool answered with: text, data, files and an error's facts, for whoever reads it."""
    details: Any = None
    is_error: bool | None = None
    terminate: bool | None = None

    def __post_init__(self) -> None:
        check_kind("Override(content)", self.content, str, type(None))
        check_kind("Override(is_error)", self.is_error, bool, type(None))
        check_kind("Override(terminate)", self.terminate, bool, type(None))

    def apply(self, result: ToolResult) -> ToolResult:
        """The result with the set fields replaced."""
        changed = result
        if self.content is not None:
            for_user = self.content if result.for_user is not None else None
            changed = replace(
                changed, parts=(Text(self.content),), value=None, has_value=False, files=(), for_user=for_user, exc=None
            )
            if changed.error is not None:
                failure = replace(changed.error, message=self.content, details={})
                changed = replace(changed, parts=(), error=failure)
        if self.details is not None:
            changed = replace(changed, details=self.details)
        if self.terminate is not None:
            changed = replace(changed, terminate=self.terminate)
        return changed if self.is_error in (None, changed.is_error) else _flipped(changed)


def _flipped(result: ToolResult) -> ToolResult:
    if result.is_error:
        return replace(result, status=Status.OK, error=None, parts=result.parts or (Text(result.text),))
    failure = ToolFailure(ErrorCode.TOOL_ERROR, result.output)
    return replace(result, status=Status.ERROR, error=failure, parts=(), value=None, has_value=False)


@frozen
class Approve:
    """Let the call run."""

    reason: str = ""
    """Why, for the record."""
    by: str = ""
    """Who decided, for the record. Empty: whoever the context of a `resume` is for, or the hook."""

    def __post_init__(self) -> None:
        check_decision(self)


@frozen
class Deny:
    """Refuse the call; the model reads the reason."""

    reason: str = ""
    by: str = ""

    def __post_init__(self) -> None:
        check_decision(self)


@frozen
class Edit:
    """Let the call run with other arguments."""

    args: Mapping[str, Any]
    reason: str = ""
    by: str = ""

    def __post_init__(self) -> None:
        check_kind("Edit(args)", self.args, Mapping)
        check_decision(self)


def check_decision(decision: Any) -> None:
    """Check the texts of a decision.

    Raises:
        UsageError: one is not a text.
    """
    for name in ("reason", "by"):
        check_kind(f"{type(decision).__name__}({name})", getattr(decision, name), str)


Decision = Approve | Deny | Edit
Approver = Callable[[Call], Decision | Awaitable[Decision]]
OnHookError = Literal["block", "abort", "keep"]
HookAnswer = Block | Rewrite | Substitute | Decision | None
BeforeHook = Callable[[Call], HookAnswer | Awaitable[HookAnswer]]
Change = Override | ToolResult | None
AfterHook = Callable[[Call, ToolResult], Change | Awaitable[Change]]


@frozen
class Hook:
    """A pair of functions around calls. Outer hooks were added first: they see a call first and its result last."""

    before: BeforeHook | None = None
    after: AfterHook | None = None
    timeout_s: float | None = None
    on_error: OnHookError = "block"
    """What a hook does that raises, is too slow or answers with something else. `block`: a before hook blocks its call,
    and an after hook withholds the result, which is an error then. `abort`: the whole run ends. `keep`: an after hook
    leaves the result as it was; a before hook still blocks."""
    name: str = ""

    def __post_init__(self) -> None:
        for moment, function in (("before", self.before), ("after", self.after)):
            if function is not None and not callable(function):
                raise UsageError(f"Hook({moment}) must be a function, not {brief(function)}")
        check_seconds("Hook(timeout_s)", self.timeout_s, optional=True)
        check_one_of("Hook(on_error)", self.on_error, get_args(OnHookError))
        check_kind("Hook(name)", self.name, str)


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


async def ask_before(hook: CallHook, call: Call) -> ToolResult | Rewrite | Decision | None:
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
            return as_result(result)
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


def name_of(hook: CallHook, function: Callable[..., Any] | None) -> str:
    """Return what logs and records call a function of a hook."""
    return hook.name or getattr(function, "__qualname__", "without a name")


def _hook_failed(hook: CallHook, call: Call, exc: BaseException) -> ToolResult:
    said = "timed out" if isinstance(exc, TimeoutError) else f"{type(exc).__name__}: {text_of(exc)}"
    message = f"blocked: a hook failed while looking at this call ({said})"
    logger.warning("before hook %s failed on %s", name_of(hook, hook.before), call.name, exc_info=exc)
    if hook.on_error == "abort":
        failed = "timed out" if isinstance(exc, TimeoutError) else f"failed: {type(exc).__name__}"
        raise ToolAbort(f"hook {hook.name or hook.before!r} {failed}, on {call.name}") from exc
    return ToolResult.fail(message, code=ErrorCode.HOOK_ERROR, status=Status.BLOCKED, exc=exc)


def after_hooks(call: Call) -> list[CallHook]:
    """Return the hooks that see the result of a call, outer to inner."""
    return [hook for hook in (*call.run.scope.hooks, *call.registry.hooks) if hook.after is not None]


async def show_after_hooks(call: Call, result: ToolResult) -> ToolResult:
    """Return a result as the after hooks want it, inner to outer. Without the word of one that fails nobody gets it."""
    hooks = after_hooks(call)
    if not hooks:
        return result
    async with hook_turn(call.run):
        for hook in reversed(hooks):
            result = await _ask_after(hook, call, result)
    return result


async def _ask_after(hook: CallHook, call: Call, result: ToolResult) -> ToolResult:
    assert hook.after is not None
    try:
        change = await _within(hook.timeout_s, hook.after, call, result)
        match change:
            case None:
                return result
            case ToolResult():
                return replace(as_result(change), meta=result.meta)
            case Override():
                return change.apply(result)
        raise TypeError(f"after hook returned {brief(change)}; {_AFTER_ANSWERS}")
    except BaseException as exc:
        if passes_on(exc):
            raise
        failed = "timed out" if isinstance(exc, TimeoutError) else f"failed: {type(exc).__name__}"
        logger.warning("after hook %s failed on %s", name_of(hook, hook.after), call.name, exc_info=exc)
        if hook.on_error == "abort":
            raise ToolAbort(f"after hook {hook.name or hook.after!r} {failed}, on {call.name}") from exc
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
