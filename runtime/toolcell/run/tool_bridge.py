"""`ToolBridge`: answers a script's tool calls, with as much of each result as a guest may see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.finalize import is_unexpected, told_failure
from toolcell.calls.options import Origin
from toolcell.calls.result import ErrorCode, ToolResult
from toolcell.calls.uploads import Uploads
from toolcell.errors import AuditError, ToolAbort, ToolError, UsageError
from toolcell.run.calls import Answer, unsendable
from toolcell.run.observer import RunObserver
from toolcell.support import daemon_threads
from toolcell.tools.detail import tools_text
from toolcell.tools.search import FOUND, MAX_FOUND, SMALL, find, named_of
from toolcell_bridge.guest.tools import LIST_TOOLS
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue
from toolcell_bridge.wire.messages import CallTool, ToolFail, ToolReturn
from toolcell_bridge.wire.requests import HTTP, HTTP_UPLOAD


class MakeCall(Protocol):
    """Makes one call, as `CallableTools.dispatch` does."""

    async def __call__(
        self,
        name: str,
        args: Mapping[str, Any] | str,
        *,
        call_id: str = ...,
        origin: Origin | None = ...,
        context: RunContext | None = ...,
    ) -> ToolResult:
        """Return its result."""
        ...


class ToolBridge:
    """Answers the calls of one run."""

    __slots__ = ("_context", "_make", "_observer", "_registry")

    def __init__(
        self, registry: CallableTools, context: RunContext, observer: RunObserver, make: MakeCall | None = None
    ) -> None:
        """`make` makes the calls; by default `registry` does."""
        self._registry = registry
        self._make = make or registry.dispatch
        self._context = context
        self._observer = observer

    def named(self, call: CallTool) -> CallTool:
        """Return a call by its tool's registered name: `github__search` in a script is `github.search` ever after."""
        name = self._registry.registered_name(call.name)
        if name == HTTP and (requests := self._context.scope.requests) is not None:
            return replace(call, name=name, args=requests.uploads.taken(call.args))
        return call if name == call.name else replace(call, name=name)

    async def dispatch(self, call: CallTool) -> Answer:
        """Make one call and return its answer.

        Raises:
            ToolAbort: the tool ended the run, or the call could not be recorded.
        """
        if call.name == LIST_TOOLS:
            return await self._answer_discovery(call)
        if call.name == HTTP_UPLOAD and (requests := self._context.scope.requests) is not None:
            return _add_to_upload(requests.uploads, call)
        call_id = f"call_{call.id}"
        context = self._observer.context_of(call, call_id, self._context)
        requests = self._context.scope.requests if call.name == HTTP else None
        args = call.args if requests is None else self._whole(requests.uploads, call.args)
        try:
            result = await self._make(call.name, args, call_id=call_id, origin=Origin.CODE, context=context)
        except AuditError as exc:
            self._observer.on_unrecorded(exc)
            raise ToolAbort("a tool call could not be recorded") from exc
        finally:
            if requests is not None:
                requests.uploads.drop(call.args)
        if result.error is not None and result.is_error:
            return failure(call.id, result)
        return ToolReturn(call.id, result.guest_value())

    def _whole(self, uploads: Uploads, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a request with the body that was uploaded for it."""
        made = uploads.whole(args)
        if made is not args and (work := self._context.scope.work) is not None:
            work.uploaded += len(made["body"])
        return made

    async def _answer_discovery(self, call: CallTool) -> Answer:
        """Answer `list_tools` and `search_tools`. Only words decide, so that a replay finds what its run has found."""
        definitions = self._registry.definitions(Origin.CODE)
        wanted: dict[str, Any] = call.args
        if not wanted:
            return ToolReturn(call.id, [tool_row(each) for each in definitions])
        try:
            if len(definitions) <= SMALL:
                return ToolReturn(call.id, self._choose_tools(definitions, wanted))
            return ToolReturn(call.id, await daemon_threads.run_sync(self._choose_tools, definitions, wanted))
        except UsageError as exc:
            return ToolFail(call.id, str(ErrorCode.INVALID_ARGUMENTS), str(exc), False, {})

    def _choose_tools(self, definitions: Sequence[ToolDefinition], wanted: Mapping[str, Any]) -> Any:
        """Return the tools that a script asked for, as rows or as text.

        Raises:
            UsageError: what it asked for cannot be answered.
        """
        if "query" in wanted:
            definitions = find(definitions, wanted["query"], wanted.get("limit", FOUND))
        elif "names" in wanted:
            definitions = named_of(definitions, _names(wanted["names"]))
        if (detail := wanted.get("detail")) is None:
            return [tool_row(each) for each in definitions]
        return tools_text([(each, self._registry.returns(each.name)) for each in definitions], detail)


def _add_to_upload(uploads: Uploads, call: CallTool) -> Answer:
    """Keep a part of a body. It has no effect, so it does not count as a call; the request that sends it is one."""
    try:
        return ToolReturn(call.id, uploads.add(call.args.get("upload"), call.args.get("data")))
    except ToolError as exc:
        return ToolFail(call.id, exc.code, exc.message, exc.retryable, {})


def _names(given: Any) -> list[str]:
    """Return a guest's list of names, which may be anything.

    Raises:
        UsageError: it is not a list of texts.
    """
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise UsageError("list_tools takes names of tools, as texts")
    if len(given) > MAX_FOUND:
        raise UsageError(f"list_tools takes at most {MAX_FOUND} names, not {len(given)}; without a name it takes all")
    return given


def failure(call_id: int, result: ToolResult) -> ToolFail:
    """Return a failed result as the guest may see it: never an exception's own text or traceback."""
    error = result.error
    assert error is not None
    if is_unexpected(result):
        return ToolFail(call_id, str(error.code), told_failure(result), error.retryable, {})
    try:
        details = to_plain(dict(error.details), "details")
    except (UnsendableValue, ValueError, TypeError) as exc:
        return unsendable(call_id, "no_result", exc)
    return ToolFail(call_id, str(error.code), result.text, error.retryable, details)


def tool_row(tool: ToolDefinition) -> dict[str, Any]:
    """Return a tool as `list_tools()` shows it."""
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
