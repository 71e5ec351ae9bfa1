"""Every way a tool can be written, turned into `ToolSpec`s: functions, builders, records, and objects of both kinds.

Knows how to call each shape; knows nothing of policy, hooks or order.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from toolcell.errors import RegistrationError
from toolcell.tools.call import Call, ToolContext
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.docstrings import read_docstring
from toolcell.tools.options import DEFAULT_TOOL_OPTIONS, ExecutionMode, ToolOptions
from toolcell.tools.result import ToolResult
from toolcell.tools.schema import Signature, read_signature
from toolcell.tools.spec import Decode, Invoke, Prepare, ToolSpec
from toolcell.tools.threads import ABANDONED, run_in_thread

_OPTION_NAMES = frozenset(entry.name for entry in fields(ToolOptions))


class ToolObject(Protocol):
    """A tool with several functions."""

    def definitions(self) -> list[ToolDefinition]:
        """Its functions."""

    def execute(self, ctx: ToolContext, name: str, args: dict[str, Any], /) -> ToolResult | Awaitable[ToolResult]:
        """Run the function called `name`."""


class SimpleTool(Protocol):
    """A tool with one function. Each of the first three may be an attribute or a method."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def execute(self, ctx: ToolContext, args: dict[str, Any], /) -> ToolResult | Awaitable[ToolResult]:
        """Run it."""


@dataclass(frozen=True, slots=True)
class AgentTool:
    """A tool as a record."""

    definition: ToolDefinition
    execute: Callable[..., Any] | None = None
    """Takes any of `ctx`, `call_id`, `args`, `on_update` and `callback`, by these names."""
    label: str = ""
    """For a user interface only."""
    prepare: Prepare | None = None
    """Rewrites the raw arguments before they are validated."""
    mode: ExecutionMode = ""
    options: ToolOptions = DEFAULT_TOOL_OPTIONS


class FunctionTool:
    """A function with the definition derived from it. Calling it calls the function."""

    def __init__(self, function: Callable[..., Any], spec: ToolSpec) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.spec = spec

    @property
    def definition(self) -> ToolDefinition:
        """What the model sees."""
        return self.spec.definition

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def with_options(options: ToolOptions, changes: Mapping[str, Any]) -> ToolOptions:
    """ToolOptions with keyword changes; unknown names are refused.

    Raises:
        RegistrationError: there is no such option.
    """
    for name in changes.keys() - _OPTION_NAMES:
        raise RegistrationError(f"no option is called {name!r}; there are: {', '.join(sorted(_OPTION_NAMES))}")
    if "callable_from" in changes:
        changes = {**changes, "callable_from": frozenset(changes["callable_from"])}
    return replace(options, **changes) if changes else options


def specs_of(tool: Any, options: Mapping[str, Any] | None = None) -> list[ToolSpec]:
    """Every function of a tool, whichever way it is written.

    Raises:
        RegistrationError: it is not a tool in any of the known ways.
    """
    changes = options or {}
    return [replace(spec, options=with_options(spec.options, changes)) for spec in _specs(tool)]


def _specs(tool: Any) -> Iterator[ToolSpec]:
    if isinstance(tool, ToolSpec):
        yield tool
    elif isinstance(tool, FunctionTool):
        yield replace(tool.spec, source=tool)
    elif hasattr(tool, "to_spec"):
        yield tool.to_spec()
    elif isinstance(tool, AgentTool):
        yield record_spec(tool)
    elif callable(getattr(tool, "definitions", None)) and callable(getattr(tool, "execute", None)):
        yield from (_object_spec(tool, definition) for definition in tool.definitions())
    elif hasattr(tool, "parameters") and hasattr(tool, "description") and hasattr(tool, "name"):
        yield _simple_spec(tool)
    elif callable(tool):
        yield function_spec(tool)
    else:
        raise RegistrationError(f"{tool!r:.200} is not a tool: it is no function, and has no definitions or parameters")


# Functions


def function_spec(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    prepare: Prepare | None = None,
    options: ToolOptions | None = None,
) -> ToolSpec:
    """A plain function: its name, docstring and signature are the definition."""
    prose, parameters = read_docstring(function)
    signature = read_signature(function, ToolContext, ToolResult, parameters)
    chosen = name or str(getattr(function, "__name__", type(function).__name__))
    definition = ToolDefinition(chosen, description or prose, signature.parameters)
    known = options or DEFAULT_TOOL_OPTIONS
    if known.returns is None:
        known = replace(known, returns=signature.returns)
    return ToolSpec(
        definition=definition,
        invoke=_keyword_invoke(function, signature.context_parameter, known.blocking),
        options=known,
        source=function,
        prepare=prepare,
        decode=_decoder(signature),
        requires_result=signature.wants_result,
    )


def _decoder(signature: Signature) -> Decode | None:
    converters = tuple(signature.converters.items())
    if not converters:
        return None

    def decode(args: dict[str, Any]) -> dict[str, Any]:
        decoded = dict(args)
        for name, convert in converters:
            if name in decoded:
                decoded[name] = convert(decoded[name])
        return decoded

    return decode


def _keyword_invoke(function: Callable[..., Any], context_parameter: str | None, blocking: bool) -> Invoke:
    threaded = blocking and not is_async(function)
    if context_parameter is None and not threaded:
        return lambda call: function(**(call.args if call.decoded is None else call.decoded))

    def invoke(call: Call) -> Any:
        kwargs = call.args if call.decoded is None else call.decoded
        if context_parameter is not None:
            kwargs = {**kwargs, context_parameter: call.context}
        if not threaded:
            return function(**kwargs)
        call.context  # noqa: B018  made here: the tool's thread has no event loop to make it in
        return run_in_thread(lambda: function(**kwargs), ABANDONED)

    return invoke


def is_async(function: Callable[..., Any]) -> bool:
    """True when calling it gives something to await, as far as can be told beforehand."""
    target = inspect.unwrap(function)
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004


def positional_spec(
    definition: ToolDefinition, function: Callable[..., Any] | None, options: ToolOptions, source: Any = None
) -> ToolSpec:
    """A function that takes all arguments as one dict."""
    if function is None:
        return ToolSpec(definition=definition, invoke=None, options=options, source=source)
    called = function
    invoke = _threaded(lambda call: called(call.args), function, options)
    return ToolSpec(definition=definition, invoke=invoke, options=options, source=source or function)


def _threaded(invoke: Invoke, function: Callable[..., Any], options: ToolOptions) -> Invoke:
    """Move a synchronous function off the event loop."""
    if is_async(function) or not options.blocking:
        return invoke

    def in_thread(call: Call) -> Any:
        call.context  # noqa: B018  made here: the tool's thread has no event loop to make it in
        return run_in_thread(lambda: invoke(call), ABANDONED)

    return in_thread


# Records


_RECORD_ARGUMENTS: Mapping[str, Callable[[Call], Any]] = {
    "ctx": lambda call: call.context,
    "call_id": lambda call: call.call_id,
    "args": lambda call: call.args,
    "on_update": lambda call: call.context.update,
    "callback": lambda call: call.context.callback,
}


def record_spec(tool: AgentTool) -> ToolSpec:
    """A record with an execute function."""
    options = replace(tool.options, label=tool.label or tool.options.label, mode=tool.mode or tool.options.mode)
    if tool.execute is None:
        return ToolSpec(definition=tool.definition, invoke=None, options=options, source=tool, prepare=tool.prepare)
    execute, names = tool.execute, _record_parameters(tool)

    def invoke(call: Call) -> Any:
        return execute(**{name: _RECORD_ARGUMENTS[name](call) for name in names})

    return ToolSpec(
        definition=tool.definition,
        invoke=_threaded(invoke, execute, options),
        options=options,
        source=tool,
        prepare=tool.prepare,
        requires_result=True,
    )


def _record_parameters(tool: AgentTool) -> list[str]:
    assert tool.execute is not None
    names = list(inspect.signature(tool.execute).parameters)
    if unknown := [name for name in names if name not in _RECORD_ARGUMENTS]:
        raise RegistrationError(
            f"tool {tool.definition.name!r}: execute takes {unknown}; it may take: {', '.join(_RECORD_ARGUMENTS)}"
        )
    return names


# Objects


def _object_spec(tool: Any, definition: ToolDefinition) -> ToolSpec:
    name = definition.name
    return _bound_spec(tool, definition, lambda bound, call: bound.execute(call.context, name, call.args))


def _simple_spec(tool: Any) -> ToolSpec:
    definition = ToolDefinition(_read(tool.name), _read(tool.description), _read(tool.parameters))
    return _bound_spec(tool, definition, lambda bound, call: bound.execute(call.context, call.args))


def _read(attribute: Any) -> Any:
    return attribute() if callable(attribute) else attribute


def _bound_spec(tool: Any, definition: ToolDefinition, run: Callable[[Any, Call], Any]) -> ToolSpec:
    options = _options_of(tool, definition.name)
    if not callable(getattr(tool, "execute", None)):
        return ToolSpec(definition=definition, invoke=None, options=options, source=tool)
    is_personal = hasattr(tool, "set_context") or hasattr(tool, "set_callback")

    def invoke(call: Call) -> Any:
        return run(_personal_copy(tool, call) if is_personal else tool, call)

    return ToolSpec(
        definition=definition,
        invoke=_threaded(invoke, tool.execute, options),
        options=options,
        source=tool,
        prepare=getattr(tool, "prepare", None),
        requires_result=True,
    )


def _options_of(tool: Any, name: str) -> ToolOptions:
    """A tool may have `options`: ToolOptions of all its functions, or a mapping from function name to ToolOptions."""
    known = getattr(tool, "options", None)
    if isinstance(known, Mapping):
        known = known.get(name)
    return known if isinstance(known, ToolOptions) else DEFAULT_TOOL_OPTIONS


def _personal_copy(tool: Any, call: Call) -> Any:
    """A copy of a tool that keeps its chat or callback in itself: concurrent calls must not see each other's."""
    run = call.run
    clone = copy.copy(tool)
    if hasattr(clone, "set_context") and run.channel and run.chat_id:
        clone.set_context(run.channel, run.chat_id)
    if hasattr(clone, "set_callback") and (callback := call.context.callback) is not None:
        clone.set_callback(callback)
    return clone
