"""Tools that live with the caller, as a registry of the service. The caller is a stranger: all that it says is checked.

The service's hooks and rules apply to them. Arguments are checked here too, so that a suspended call or a draft has
what the tool will receive; the caller checks again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from toolcell.calls.checker_process import refused_schemas
from toolcell.calls.hooks import is_approved_later
from toolcell.calls.values import count_values
from toolcell.errors import RegistrationError, ToolError, UsageError
from toolcell.support import daemon_threads
from toolcell.support.foreign_definitions import bounded_schema, safe_text
from toolcell.tools import (
    NEEDS_APPROVAL,
    Approve,
    Call,
    ErrorCode,
    Hook,
    ToolContext,
    ToolDefinition,
    ToolOptions,
    ToolRegistry,
    ToolResult,
    ToolSpec,
    with_options,
)

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


class Line(Protocol):
    """The way to the caller of the request that is being served."""

    async def call(self, kind: str, tool: str, args: dict[str, Any], call: Call | None) -> ToolResult:
        """Have the caller call a tool, and return its result."""
        ...


line_of_request: ContextVar[Line | None] = ContextVar("toolcell_line", default=None)
"""Line of the request that this task serves."""


@dataclass(frozen=True, slots=True)
class RemoteTool:
    """A tool of a caller."""

    name: str

    async def run(self, kind: str, args: dict[str, Any], call: Call | None = None) -> ToolResult:
        """Have its caller run it."""
        line = line_of_request.get()
        if line is None:
            raise ToolError(f"the program that has the tool {self.name} is not connected", code="unavailable")
        return await line.call(kind, self.name, args, call)

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
    if call.approval_reason != NEEDS_APPROVAL or call.run.scope.approvals is not None or is_approved_later(call):
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
