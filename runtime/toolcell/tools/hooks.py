"""Looking at calls before and after: block, rewrite, substitute, approve, override.

Data and small adapters only; `dispatch` runs the hooks, one at a time within a run, on every path a call can take.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from toolcell.tools.result import ErrorCode, Status, Text, ToolFailure, ToolResult

if TYPE_CHECKING:
    from toolcell.tools.call import Call


@dataclass(frozen=True, slots=True)
class Block:
    """Do not run the call; the model reads `reason`."""

    reason: str = ""
    code: str = ErrorCode.BLOCKED


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Run the call with other arguments, which are validated again."""

    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Substitute:
    """Do not run the call; this is its result: a cached or made-up one."""

    result: ToolResult


@dataclass(frozen=True, slots=True)
class Override:
    """What an after hook changes about a result; None leaves a field as it is."""

    content: str | None = None
    """Replaces everything the tool answered with: text, data and files, for the model and for scripts."""
    details: Any = None
    is_error: bool | None = None
    terminate: bool | None = None

    def apply(self, result: ToolResult) -> ToolResult:
        """The result with the set fields replaced."""
        changed = result
        if self.content is not None:
            changed = replace(changed, parts=(Text(self.content),), value=None, has_value=False, files=())
            if changed.error is not None:
                failure = replace(changed.error, message=self.content)
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


Verdict = Block | Rewrite | Substitute | tuple[bool, str] | None
BeforeHook = Callable[["Call"], Verdict | Awaitable[Verdict]]
Change = Override | ToolResult | None
AfterHook = Callable[["Call", ToolResult], Change | Awaitable[Change]]


@dataclass(frozen=True, slots=True)
class Hook:
    """A pair of functions around calls. Outer hooks were added first: they see a call first and its result last."""

    before: BeforeHook | None = None
    after: AfterHook | None = None
    timeout_s: float | None = None
    on_error: Literal["block", "abort"] = "block"
    """A before hook that fails blocks its call; `abort` ends the whole run instead."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Approve:
    """A person lets the call pass."""


@dataclass(frozen=True, slots=True)
class Reject:
    """A person refuses the call."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Modify:
    """A person lets the call pass with other arguments."""

    args: Mapping[str, Any]


Decision = Approve | Reject | Modify
Approver = Callable[["Call"], Decision | Awaitable[Decision]]


async def maybe_await(value: Any) -> Any:
    """Await what needs awaiting; hooks may be either kind of function."""
    return await value if inspect.isawaitable(value) else value


def approval_hook(approver: Approver, *, timeout_s: float | None = None) -> Hook:
    """A hook that asks `approver` about every call of a tool that `requires_approval`.

    No answer in `timeout_s` blocks the call.
    """

    async def before(call: Call) -> Verdict:
        if not call.options.requires_approval:
            return None
        match await maybe_await(approver(call)):
            case Approve():
                call.approved = True
                return None
            case Modify(args):
                call.approved = True
                return Rewrite(args)
            case Reject(reason):
                return Block(reason or f"a person refused this call of {call.name}")
            case answer:
                return Block(f"no valid approval decision for {call.name}: {answer!r:.80}")

    return Hook(before=before, timeout_s=timeout_s, name="approval")
