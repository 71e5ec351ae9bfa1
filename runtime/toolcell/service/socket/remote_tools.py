"""Tools that live with the caller, as a registry of the service, and the requests on whose streams their calls go out.

The caller is a stranger: all that it says is checked. The service's hooks and rules apply to its tools. Arguments are
checked here too, so that a suspended call or a draft has what the tool will receive; the caller checks again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

import anyio

from toolcell.calls.checker_process import refused_schemas
from toolcell.calls.values import count_values
from toolcell.errors import RegistrationError, ToolAbort, ToolError, UsageError
from toolcell.service.socket.messages import (
    AnswerTool,
    Ask,
    AskTool,
    DropTool,
    NoteCall,
    Printed,
    Reported,
    StopRun,
)
from toolcell.service.socket.streams import Stream, StreamLost
from toolcell.service.socket.values import plain_answer, read_answer, sendable_value
from toolcell.support import daemon_threads
from toolcell.support.foreign_definitions import bounded_schema, safe_text
from toolcell.tools import (
    NEEDS_APPROVAL,
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
    with_options,
)
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge

MAX_TOOLS: Final = 5_000
MAX_DESCRIPTION_CHARS: Final = 16_000
MAX_LABELS: Final = 100
MAX_OFFERED_VALUES: Final = 200_000
"""Lists, dicts, and what is in them, of all tools of one offer."""
MARGIN_S: Final = 5.0
"""The caller's own timeout comes first; this is what it may be late."""

_OPTIONS: Final[Mapping[str, tuple[type, ...]]] = {
    "label": (str,), "read_only": (bool,), "idempotent": (bool,), "requires_approval": (bool,),
    "timeout_s": (float,), "returns": (dict, type(None)), "orchestrates": (bool,), "is_agent": (bool,),
    "coercion": (str,), "extras": (str,), "reads": (list,), "sends": (list,), "validate": (bool,),
}  # fmt: skip


served_here: ContextVar[ServedRequest | None] = ContextVar("toolcell_request_of_caller", default=None)
"""The request that this task serves."""


@dataclass(frozen=True, slots=True)
class RemoteTool:
    """A tool of a caller."""

    name: str

    async def run(self, kind: str, args: dict[str, Any], call: Call | None = None) -> ToolResult:
        """Have its caller run it."""
        request = served_here.get()
        if request is None:
            raise ToolError(f"the program that has the tool {self.name} is not connected", code="unavailable")
        return await request.call(kind, self.name, args, call)

    async def invoke(self, context: ToolContext) -> ToolResult:
        """Make a call."""
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


@dataclass(frozen=True, slots=True)
class _Offered:
    """Specs that are registered all together, or not at all."""

    specs: Iterable[ToolSpec]

    def to_specs(self) -> Iterable[ToolSpec]:
        return self.specs


async def remote_registry(offered: object, own: ToolRegistry, *, with_own: bool) -> ToolRegistry:
    """Return a caller's tools under the hooks and rules of the tenant's registry. `with_own`: and the tenant's tools.

    Raises:
        RegistrationError: a tool cannot be registered; names it.
        UsageError: what was offered is not a list of tools.
    """
    # Reading hundreds of tools takes a while, and other callers do not wait for it.
    specs = await daemon_threads.run_sync(_specs, offered)
    schemas = [(spec, schema) for spec in specs for schema in (spec.definition.parameters, spec.options.returns or {})]
    refused = await refused_schemas([schema for _, schema in schemas])
    for (spec, _), problem in zip(schemas, refused, strict=True):
        if problem:
            raise RegistrationError(f"tool {spec.definition.name!r:.80}: {problem}")
    return await daemon_threads.run_sync(_registered, offered, specs, own, with_own)


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
    registry.add(_Offered(specs))
    for each, spec in zip(offered, specs, strict=True):
        if hidden := _texts(each, "hidden_from"):
            registry.policy.blacklist(spec.definition.name, origins=hidden)  # type: ignore[arg-type]
    found = own.merged(registry) if with_own else own.replaced(registry)
    found.add_hook(Hook(before=_leave_to_caller, name="approvals of the caller"))
    return found


def _leave_to_caller(call: Call) -> Approve | None:
    """Approve a call that its caller's own hooks are asked about. What the service's rules ask about is not theirs."""
    if call.approval_reason != NEEDS_APPROVAL or call.features.decide or call.is_approved_later:
        return None
    return Approve() if is_remote(call) else None


def is_remote(call: Call) -> bool:
    """Return whether the tool of a call lives with the caller."""
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
    if not isinstance(given, dict) or (unknown := given.keys() - _OPTIONS.keys()):
        raise RegistrationError(f"tool {tool.name!r:.80}: unknown options {sorted(map(str, unknown))}"[:200])
    for name, value in given.items():
        if type(value) not in _OPTIONS[name]:
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
    known = with_options(ToolOptions(), changes)
    preview = tool.preview if offered.get("has_preview") is True else None
    return replace(known, preview=preview, revert=tool.revert if offered.get("has_revert") is True else None)


def _texts(given: Mapping[str, Any], name: str) -> list[str]:
    found = given.get(name, [])
    if not isinstance(found, list) or len(found) > MAX_LABELS or not all(isinstance(each, str) for each in found):
        raise RegistrationError(f"{name} is a list of at most {MAX_LABELS} texts")
    return found


def not_sent(problem: object) -> ToolResult:
    """Return the failure of a call that could not be sent to its tool."""
    return ToolResult.fail(f"the call could not be sent to its tool: {problem}", code=ErrorCode.TOO_LARGE)


class ServedRequest:
    """A request that is under way."""

    def __init__(self, stream: Stream, ask: Ask) -> None:
        self.stream, self.method = stream, ask.method
        self.arguments: dict[str, Any] = dict(ask.arguments)
        self.cancel = anyio.Event()
        """Ends its run with outcome `cancelled`."""
        self.scope = anyio.CancelScope()
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    # What the caller says.

    async def listen(self) -> None:
        """Take what comes until the request is over. What breaks the rules ends the request."""
        try:
            while True:
                match await self.stream.receive():
                    case AnswerTool(ident, result):
                        if (answer := self._answers.pop(ident, None)) is not None and not answer.done():
                            answer.set_result(result)
                    case StopRun(is_abort):
                        self.cancel.set()
                        if is_abort:
                            self.scope.cancel()
                    case _:
                        raise RemoteProtocolError("a request is asked for once")
        except (StreamLost, RemoteProtocolError):
            self.scope.cancel()

    # What the caller is told.

    def log(self, stream: str, text: str) -> Awaitable[None] | None:
        """Tell what was printed."""
        self.stream.send(Printed(stream, text))
        return self.stream.wait_for_room()

    def progress(self, value: object) -> Awaitable[None] | None:
        """Tell what was reported."""
        self.stream.send(Reported(sendable_value(value, "progress")))
        return self.stream.wait_for_room()

    # Calls

    async def call(self, kind: str, tool: str, args: dict[str, Any], call: Call | None) -> ToolResult:
        """Have the caller call a tool, and return its result.

        Raises:
            ToolAbort: the tool ended its run.

        Cancellation: the caller is told that nobody waits any more.
        """
        ident = next(self._ids)
        known = ("code", False, "", "", None)
        if call is not None:
            # Without `approvals`, it was the service's own hook that let it pass: the caller's hooks decide.
            is_approved = call.is_approved_later or (call.approved and bool(call.features.decide))
            known = str(call.origin), is_approved, call.run.run_id, call.call_id, call.step  # type: ignore[assignment]
        try:
            self.stream.send(AskTool(ident, kind, tool, args, *known))
        except (UnsendableValue, ValueTooLarge) as exc:
            return not_sent(exc)
        answer = self._answers[ident] = asyncio.get_running_loop().create_future()
        try:
            plain = await answer
        except asyncio.CancelledError:
            if self._answers.pop(ident, None) is not None:
                self.stream.send(DropTool(ident))
            raise
        if isinstance(abort := plain.get("abort"), str):
            raise ToolAbort(abort)
        try:
            return read_answer(plain)
        except RemoteProtocolError as exc:
            return not_sent(exc)


class CallTeller(Feature):
    """Tells the caller of calls that its tools do not see."""

    def __init__(self, request: ServedRequest) -> None:
        self._request = request

    def call_ended(self, call: Call, /) -> Awaitable[None] | None:
        """Tell what became of a call."""
        if (call.is_executed and is_remote(call)) or call.result is None:
            return None
        args = sendable_value(call.args if call.refusal is None else call.raw_args, "arguments")
        said = NoteCall(call.call_id, call.name, str(call.origin), args, plain_answer(call.result))
        self._request.stream.send(said)
        return self._request.stream.wait_for_room()
