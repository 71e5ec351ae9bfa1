"""Tools that live with the caller, as a registry of the service, and the requests whose calls go out to the caller.

The caller is a stranger: all that it says is checked. The service's hooks and rules apply to its tools. Arguments are
checked here too, so that a suspended call or a draft has what the tool will receive; the caller checks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

import anyio

from toolcell.calls.checker_process import refused_schemas
from toolcell.calls.values import count_values
from toolcell.errors import RegistrationError, ToolAbort, ToolError, UsageError
from toolcell.service.socket.arguments import TOOL_OPTIONS
from toolcell.service.socket.connection import QUEUE_BYTES, REFUSED, Connection, Received
from toolcell.service.socket.messages import Notification, Request
from toolcell.service.socket.values import plain_answer, read_answer, sendable_value
from toolcell.support import daemon_threads
from toolcell.support.event_loop import ChangeEvent
from toolcell.support.foreign_definitions import bounded_schema, safe_text
from toolcell.tools import (
    Approve,
    Call,
    ErrorCode,
    Feature,
    Hook,
    ToolContext,
    ToolDefinition,
    ToolOptions,
    ToolRegistry,
    ToolResult,
    ToolSpec,
)
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge

MAX_TOOLS: Final = 5_000
MAX_DESCRIPTION_CHARS: Final = 16_000
MAX_LABELS: Final = 100
MAX_OFFERED_VALUES: Final = 200_000
"""Lists, dicts, and what is in them, of all tools of one offer."""
MESSAGE_COST: Final = 64
"""What a notification counts for besides its text."""
PROGRESS_COST: Final = 4096
"""What a notification with a value counts for."""
MAX_ABORT_CHARS: Final = 4_000
"""Most characters of why a caller's tool ends its run, as the caller's own end cuts it."""
MARGIN_S: Final = 5.0
"""The caller's own timeout comes first; this is what it may be late."""

served_here: ContextVar[ServedRequest | None] = ContextVar("toolcell_request_of_caller", default=None)
"""The request that this task serves."""


@dataclass(frozen=True, slots=True)
class RemoteTool:
    name: str

    async def run(self, kind: str, args: dict[str, Any], call: Call | None = None) -> ToolResult:
        request = served_here.get()
        if request is None:
            raise ToolError(f"the program that has the tool {self.name} is not connected", code="unavailable")
        return await request.call(kind, self.name, args, call)

    async def invoke(self, context: ToolContext) -> ToolResult:
        return await self.run("call", dict(context.call.args), context.call)

    async def preview(self, **args: Any) -> ToolResult:
        """Return what the tool would return, in a dry run."""
        return await self.run("preview", args)

    async def revert(self, args: Any, result: Any) -> None:
        """Undo a call.

        Raises:
            ToolError: it could not be undone.
        """
        undone = await self.run("revert", {"args": dict(args), "result": result})
        if undone.is_error:
            raise ToolError(undone.text)


async def remote_registry(offered: object, own: ToolRegistry, *, with_own: bool) -> ToolRegistry:
    """Return a caller's tools under the hooks and rules of the tenant's registry. `with_own`: and the tenant's tools.

    Raises:
        RegistrationError: a tool cannot be registered; names it.
        UsageError: what was offered is not a list of tools.
    """
    # Reading hundreds of tools takes a while, and other callers do not wait for it.
    specs = await daemon_threads.run_large(_specs, offered)
    schemas = [(spec, schema) for spec in specs for schema in (spec.definition.parameters, spec.options.returns or {})]
    refused = await refused_schemas([schema for _, schema in schemas])
    for (spec, _), problem in zip(schemas, refused, strict=True):
        if problem:
            raise RegistrationError(f"tool {spec.definition.name!r:.80}: {problem}")
    return await daemon_threads.run_large(_registered, offered, specs, own, with_own)


def _specs(offered: object) -> list[ToolSpec]:
    if not isinstance(offered, list) or len(offered) > MAX_TOOLS:
        raise UsageError(f"tools are offered as a list of at most {MAX_TOOLS}")
    if count_values(offered, MAX_OFFERED_VALUES) > MAX_OFFERED_VALUES:
        raise RegistrationError(
            f"all {len(offered)} tools together have more than {MAX_OFFERED_VALUES} lists, dicts, and items of them in "
            "their schemas; offer fewer, or describe them more briefly"
        )
    return [_spec(each) for each in offered]


def _registered(offered: Any, specs: list[ToolSpec], own: ToolRegistry, with_own: bool) -> ToolRegistry:
    registry = ToolRegistry()
    registry.add(SimpleNamespace(to_specs=lambda: specs))  # all together, or none
    for each, spec in zip(offered, specs, strict=True):
        if hidden := _texts(each, "hidden_from"):
            registry.policy.blacklist(spec.definition.name, origins=hidden)  # type: ignore[arg-type]
    found = own.merged(registry) if with_own else own.replaced(registry)
    found.add_hook(Hook(before=_leave_to_caller, name="approvals of the caller"))
    return found


def _leave_to_caller(call: Call) -> Approve | None:
    """Approve a call that its caller's own hooks are asked about. What the service's rules ask about is not theirs."""
    if call.approval_reason != call.NEEDS_APPROVAL or call.features.decide or call.is_approved_later:
        return None
    return Approve() if is_remote(call) else None


def is_remote(call: Call) -> bool:
    registry: Any = call.registry
    registered = registry.registered(call.name)
    return registered is not None and isinstance(registered.spec.source, RemoteTool)


def _spec(offered: Any) -> ToolSpec:
    if not isinstance(offered, dict) or not isinstance(name := offered.get("name"), str):
        raise RegistrationError("a tool is offered as a dict with a name")
    description, parameters = offered.get("description"), offered.get("parameters")
    if not isinstance(description, str) or not isinstance(parameters, dict):
        raise RegistrationError(f"tool {name!r:.80}: description and parameters are a text and a dict")
    tool = RemoteTool(name)
    schema = bounded_schema(parameters, f"tool {name!r:.80}: its schema")
    definition = ToolDefinition(name, safe_text(description, MAX_DESCRIPTION_CHARS), schema)
    options = _options(offered, tool)
    return ToolSpec(definition=definition, invoke=tool.invoke, options=options, source=tool, is_foreign=True)


def _options(offered: Mapping[str, Any], tool: RemoteTool) -> ToolOptions:
    given = offered.get("options", {})
    if not isinstance(given, dict) or (unknown := given.keys() - TOOL_OPTIONS.keys()):
        raise RegistrationError(f"tool {tool.name!r:.80}: unknown options {sorted(map(str, unknown))}"[:200])
    for name, value in given.items():
        if type(value) not in TOOL_OPTIONS[name]:
            raise RegistrationError(f"tool {tool.name!r:.80}: the option {name} is not a {type(value).__name__}")
    changes = dict(given)
    if (returns := changes.get("returns")) is not None:
        changes["returns"] = bounded_schema(returns, f"tool {tool.name!r:.80}: the schema of its result")
    for name in ("reads", "sends"):
        changes[name] = frozenset(_texts(given, name))
    timeout_s = changes.pop("timeout_s", math.inf)
    changes["timeout_s"] = timeout_s + MARGIN_S if timeout_s > 0 else None
    changes["label"] = safe_text(changes.get("label", ""), 120)
    changes["callable_from"] = _texts(offered, "callable_from")
    known = ToolOptions().changed(changes)
    preview = tool.preview if offered.get("has_preview") is True else None
    return replace(known, preview=preview, revert=tool.revert if offered.get("has_revert") is True else None)


def _texts(given: Mapping[str, Any], name: str) -> list[str]:
    found = given.get(name, [])
    if not isinstance(found, list) or len(found) > MAX_LABELS or not all(isinstance(each, str) for each in found):
        raise RegistrationError(f"{name} is a list of at most {MAX_LABELS} texts")
    return found


class CallLost(Exception):
    """The connection was lost while the caller made a call."""


class Channel:
    """The way to a caller, over one connection after the other. What waits for none is lost with a connection."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self._changed = ChangeEvent()
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}

    def use(self, connection: Connection | None) -> None:
        """Go on with another connection, or with none."""
        if self.connection is not None and connection is not None:
            self.connection.end(REFUSED, "another connection of this client took its place")
        self.connection = connection
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(CallLost())
        self._answers.clear()
        self._changed.notify()

    def tell(self, method: str, params: dict[str, Any]) -> None:
        """Tell the caller something, if it is connected.

        Raises:
            UnsendableValue, ValueTooLarge: it cannot be sent.
        """
        if self.connection is not None:
            self.connection.post(Notification(method, params))

    async def call(self, method: str, params: dict[str, Any]) -> Any:
        """Have the caller do something, when it is connected, and return its answer.

        Raises:
            CallLost: it may have done it.
            UnsendableValue, ValueTooLarge: it cannot be sent.

        Cancellation: the caller is told that nobody waits any more.
        """
        while (connection := self.connection) is None:
            await self._changed.wait()
        ident = next(self._ids)
        answer = self._answers[ident] = asyncio.get_running_loop().create_future()
        try:
            await connection.send(Request(ident, method, params))
            return await answer
        except asyncio.CancelledError:
            connection.post(Notification("drop", {"request": params["request"], "id": ident}))
            raise
        finally:
            self._answers.pop(ident, None)

    def answered(self, ident: int, result: Any) -> None:
        """Take an answer of the caller. One that nobody waits for is dropped."""
        if (answer := self._answers.pop(ident, None)) is not None and not answer.done():
            answer.set_result(result)


class ServedRequest:
    """A request of a caller, until the caller forgets it."""

    def __init__(self, channel: Channel, ask: Request, connection: Connection, received: Received) -> None:
        """`connection`: over which it came; it counts its size."""
        self._channel, self.id, self.method = channel, ask.id, ask.method
        self._came_over, self._counted = connection, received.size
        self.arguments: dict[str, Any] = dict(ask.params)
        self.was_free = received.was_free
        self.cancel = anyio.Event()
        """Ends its run with outcome `cancelled`."""
        self.scope = anyio.CancelScope()
        self.answer = b""
        """It is kept: the connection may be lost before the caller has it."""
        self._unacknowledged = 0

    def admitted(self) -> None:
        """Note that its bytes do not count any more as being received. Safe to call twice."""
        self._came_over.give_back(self._counted)
        self._counted = 0

    # What the caller is told.

    def tell(self, method: str, size: int = 0, /, **params: Any) -> Awaitable[Any] | None:
        """Tell the caller something. What this returns is to be awaited, until the caller has caught up."""
        params["request"] = self.id
        self._unacknowledged += size
        if self._unacknowledged > QUEUE_BYTES and self._channel.connection is not None:
            self._unacknowledged = 0
            return self._acknowledged(method, params)
        self._channel.tell(method, params)
        return None

    async def _acknowledged(self, method: str, params: dict[str, Any]) -> None:
        with contextlib.suppress(CallLost):
            await self._channel.call(method, params)

    def log(self, stream: str, text: str) -> Awaitable[Any] | None:
        return self.tell("log", len(text) + MESSAGE_COST, stream=stream, text=text)

    def progress(self, value: object) -> Awaitable[Any] | None:
        return self.tell("progress", PROGRESS_COST, value=sendable_value(value, "progress"))

    # Calls

    async def call(self, kind: str, tool: str, args: dict[str, Any], call: Call | None) -> ToolResult:
        """Have the caller call a tool, and return its result.

        Raises:
            ToolAbort: the tool ended its run.

        Cancellation: the caller is told that nobody waits any more.
        """
        params = {"request": self.id, "kind": kind, "tool": tool, "arguments": args}
        if call is not None:
            # Without `approvals`, it was the service's own hook that let it pass: the caller's hooks decide.
            is_approved = call.is_approved_later or (call.approved and bool(call.features.decide))
            params |= {"origin": str(call.origin), "is_approved": is_approved, "run_id": call.run.run_id}
            params |= {"call_id": call.call_id, "step": call.step}
        try:
            plain = await self._channel.call("tool", params)
            if isinstance(plain, dict) and isinstance(abort := plain.get("abort"), str):
                raise ToolAbort(abort[:MAX_ABORT_CHARS])
            return read_answer(plain)
        except (UnsendableValue, ValueTooLarge, RemoteProtocolError) as exc:
            text = f"the call could not be sent to its tool: {exc}"
            return ToolResult.fail(text, code=ErrorCode.TOO_LARGE)
        except CallLost:
            again = call is not None and call.options.is_repeatable
            known = "" if again else "; whether the call was carried out is not known"
            text = f"the connection to the program that has the tool {tool} was lost during the call{known}"
            return ToolResult.fail(text, code=ErrorCode.UNAVAILABLE, retryable=again)


class CallTeller(Feature):
    """Tells the caller of calls that its tools do not see."""

    def __init__(self, request: ServedRequest) -> None:
        self._request = request

    def call_ended(self, call: Call, /) -> Awaitable[Any] | None:
        if (call.is_executed and is_remote(call)) or call.result is None:
            return None
        args = sendable_value(call.args if call.refusal is None else call.raw_args, "arguments")
        return self._request.tell(
            "note",
            PROGRESS_COST,
            call_id=call.call_id,
            tool=call.name,
            origin=str(call.origin),
            arguments=args,
            result=plain_answer(call.result),
        )
