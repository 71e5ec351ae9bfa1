"""Turns every way of writing a tool into `ToolSpec`s: functions, builders, records, and objects of both kinds.

Knows nothing of policy, hooks or order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

from toolcell.calls.arguments import Prepare
from toolcell.calls.context import ToolContext, new_view, setting, view_class
from toolcell.calls.definition import ToolDefinition, check_definition
from toolcell.calls.options import DEFAULT_TOOL_OPTIONS, ExecutionMode, ToolOptions
from toolcell.errors import RegistrationError
from toolcell.support.checks import brief, fields_known
from toolcell.tools.spec import ToolSpec, check_function
from toolcell_bridge.wire.frozen import frozen


@fields_known
@frozen
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


def specs_of(tool: Any, options: Mapping[str, Any]) -> list[ToolSpec]:
    """Return the specs of every function of a tool, in whatever form it is written.

    Raises:
        RegistrationError: it is not a tool in any of the known ways.
    """
    changes = dict(options)
    own = {name: changes.pop(name) for name in ("name", "description", "prepare") if name in changes}
    specs = [replace(spec, options=spec.options.changed(changes)) for spec in _specs(tool)]
    if own and len(specs) > 1:
        raise RegistrationError(f"{next(iter(own))}= is for a tool of one function, and this one has {len(specs)}")
    return [_with_own(spec, **own) for spec in specs]


def _with_own(
    spec: ToolSpec, name: str | None = None, description: str | None = None, prepare: Prepare | None = None
) -> ToolSpec:
    """Return a spec with what somebody calls the tool, and how the arguments are prepared."""
    was = spec.definition
    if name is not None or description is not None:
        was = ToolDefinition(name or was.name, description or was.description, was.checked_parameters)
    return replace(spec, definition=was, prepare=prepare or spec.prepare)


def _specs(tool: Any) -> Iterator[ToolSpec]:
    _check_spelling(tool)
    if isinstance(tool, ToolSpec):
        yield tool
    elif isinstance(tool, FunctionTool):
        yield replace(tool.spec, source=tool)
    elif isinstance(tool, type):
        raise RegistrationError(f"{tool.__name__} is a class, and a tool is an object; write {tool.__name__}(...)")
    elif hasattr(tool, "to_spec"):
        yield tool.to_spec()
    elif hasattr(tool, "to_specs"):
        yield from tool.to_specs()
    elif isinstance(tool, AgentTool):
        yield record_spec(tool)
    elif callable(getattr(tool, "definitions", None)) and callable(getattr(tool, "execute", None)):
        yield from _object_specs(tool)
    elif hasattr(tool, "parameters") and hasattr(tool, "description") and hasattr(tool, "name"):
        read = [each() if callable(each) else each for each in (tool.name, tool.description, tool.parameters)]
        yield _object_spec(tool, ToolDefinition(*read))
    elif callable(tool):
        yield ToolSpec.of_function(tool)
    else:
        other = "write .as_tool(name, description)" if hasattr(tool, "as_tool") else "write a function"
        cure = next((cure for kind, cure in _CURES.items() if isinstance(tool, kind)), other)
        members = [name for name in _MEMBERS if hasattr(tool, name)]
        what = "it is neither a function nor has it definitions or parameters"
        if not {"execute", "parameters", "definitions"}.isdisjoint(members):
            lacks = ["execute"] if "definitions" in members else [each for each in _MEMBERS[1:] if each not in members]
            what = f"it has {' and '.join(members)}, but no {' and no '.join(lacks)}"
        raise RegistrationError(f"{tool!r:.80} is not a tool: {what}; {cure}")


_MEMBERS = ("definitions", "name", "description", "parameters", "execute")
_SPELT = (*_MEMBERS, "definition", "prepare", "set_context", "set_callback")


def _check_spelling(tool: Any) -> None:
    """Raise RegistrationError for a method that other languages write with a capital: it would never be called."""
    if isinstance(tool, ToolSpec | FunctionTool | AgentTool | type) or inspect.isroutine(tool):
        return
    for name in _SPELT:
        other = "".join(part.capitalize() for part in name.split("_"))
        if not hasattr(tool, name) and inspect.isfunction(getattr(type(tool), other, None)):
            raise RegistrationError(f"{type(tool).__name__}.{other} is called {name} here")


_CURES: Mapping[type, str] = {
    Mapping: "write registry.register(name, description, schema, function)",
    list: "add each of them, or write ToolRegistry([...])",
    tuple: "add each of them, or write ToolRegistry([...])",
    str: "the name alone does not say what to call; write @registry.tool above the function",
}
"""What to write in place of something that is not a tool."""


# Records


_RECORD_ARGUMENTS: Mapping[str, Callable[[ToolContext], Any]] = {
    "ctx": lambda context: context.for_any_thread(),
    "call_id": lambda context: context.call_id,
    "args": lambda context: context.call.given,
    "on_update": lambda context: context.update,
    "callback": lambda context: context.callback,
}


def record_spec(tool: AgentTool) -> ToolSpec:
    """Return the spec of a record with an execute function."""
    options = replace(tool.options, label=tool.label or tool.options.label, mode=tool.mode or tool.options.mode)
    if tool.execute is None:
        return ToolSpec(definition=tool.definition, invoke=None, options=options, source=tool, prepare=tool.prepare)
    check_function(tool.definition.name, tool.execute)
    execute, names = tool.execute, _record_parameters(tool)

    def bind(context: ToolContext) -> Callable[[], Any]:
        return functools.partial(execute, **{name: _RECORD_ARGUMENTS[name](context) for name in names})

    return ToolSpec.bound(
        bind,
        execute,
        "args" if "args" in names else "",
        definition=tool.definition,
        options=options,
        source=tool,
        prepare=tool.prepare,
        requires_result=True,
    )


def _record_parameters(tool: AgentTool) -> list[str]:
    """Return what `execute` takes of the arguments that there are. What has a default of its own keeps it."""
    assert tool.execute is not None
    parameters = inspect.signature(tool.execute).parameters.values()
    others = [each for each in parameters if each.name not in _RECORD_ARGUMENTS]
    if unknown := [each.name for each in others if each.default is each.empty and each.kind is not each.VAR_KEYWORD]:
        raise RegistrationError(
            f"tool {tool.definition.name!r}: execute takes {unknown}; it may take: {', '.join(_RECORD_ARGUMENTS)}"
        )
    takes_all = any(each.kind is each.VAR_KEYWORD for each in others)
    return [*_RECORD_ARGUMENTS] if takes_all else [each.name for each in parameters if each.name in _RECORD_ARGUMENTS]


# Objects


def _object_specs(tool: Any) -> Iterator[ToolSpec]:
    definitions = tool.definitions()
    if not isinstance(definitions, list | tuple) or not all(isinstance(each, ToolDefinition) for each in definitions):
        raise RegistrationError(
            f"{type(tool).__name__}.definitions() must return a list of ToolDefinition, not {brief(definitions)}"
        )
    for definition in definitions:
        yield _object_spec(tool, definition, definition.name)


def _object_spec(tool: Any, definition: ToolDefinition, *names: str) -> ToolSpec:
    options = _options_of(tool, definition.name)
    if not callable(getattr(tool, "execute", None)):
        return ToolSpec(definition=definition, invoke=None, options=options, source=tool)
    takes = ("ctx", *(("name",) if names else ()), "args")
    check_function(definition.name, tool.execute, *takes)
    order = _argument_order(definition.name, tool.execute, takes)
    view = view_class(type(tool)) if hasattr(tool, "set_context") or hasattr(tool, "set_callback") else None

    def bind(context: ToolContext) -> Callable[[], Any]:
        bound = tool if view is None else _in_context(view, tool, context)
        given = (context.for_any_thread(), *names, context.call.given)
        return functools.partial(bound.execute, *(given[place] for place in order))

    return ToolSpec.bound(
        bind,
        tool.execute,
        order.index(len(takes) - 1),
        definition=definition,
        options=options,
        source=tool,
        prepare=getattr(tool, "prepare", None),
        requires_result=True,
    )


def _options_of(tool: Any, name: str) -> ToolOptions:
    """Return a tool's `options`: ToolOptions of all its functions, or a mapping from function name to ToolOptions."""
    known = getattr(tool, "options", None)
    if isinstance(known, Mapping):
        if known and not any(isinstance(each, ToolOptions) for each in known.values()):
            raise RegistrationError(f"tool {name!r}: options must be ToolOptions, not {brief(known)}")
        known = known.get(name)
    return known if isinstance(known, ToolOptions) else DEFAULT_TOOL_OPTIONS


_MEANINGS: Mapping[str, str] = {
    **dict.fromkeys(("ctx", "context", "tool_context"), "ctx"),
    **dict.fromkeys(("name", "tool_name", "function"), "name"),
    **dict.fromkeys(("args", "arguments", "params", "input"), "args"),
}
"""What a parameter of `execute` is for, by its name."""


def _argument_order(name: str, execute: Callable[..., Any], takes: tuple[str, ...]) -> tuple[int, ...]:
    """Return which of `takes` each positional parameter is: by its name or annotation where these say so.

    Raises:
        RegistrationError: they say something else than what is given.
    """
    in_order = tuple(range(len(takes)))
    try:
        signature = inspect.signature(execute)
    except ValueError:  # a builtin that does not say
        return in_order
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [each for each in signature.parameters.values() if each.kind in positional][: len(takes)]
    if len(parameters) < len(takes):  # the rest is taken by *args
        return in_order
    meant = [_meaning(each) for each in parameters]
    if all(each in (None, wanted) for each, wanted in zip(meant, takes, strict=True)):
        return in_order
    missing = [each for each in takes if each not in meant]
    if meant.count(None) == len(missing) == 1:
        meant[meant.index(None)] = missing[0]
    if sorted(map(str, meant)) != sorted(takes):
        raise RegistrationError(f"tool {name!r}: execute must take ({', '.join(takes)}), not {signature}")
    return tuple(takes.index(str(each)) for each in meant)


def _meaning(parameter: inspect.Parameter) -> str | None:
    if parameter.annotation is ToolContext or str(parameter.annotation).rpartition(".")[2] == "ToolContext":
        return "ctx"
    return _MEANINGS.get(parameter.name.strip("_"))


def _in_context(view: Any, tool: Any, context: ToolContext) -> Any:
    """Return the tool as one call sees it: with the chat and the callback of the call, and the author's own state."""
    seen = new_view(view, tool)
    if hasattr(tool, "set_context") and context.channel and context.chat_id:
        with setting(seen):
            seen.set_context(context.channel, context.chat_id)
    if hasattr(tool, "set_callback") and (callback := context.callback) is not None:
        with setting(seen):
            seen.set_callback(callback)
    return seen


PARAMETER_TYPES = ("string", "integer", "number", "boolean", "array", "object")


class Tool:
    """Collects parameters; `call` is last and makes it complete."""

    def __init__(self, name: str, description: str) -> None:
        self.name = name
        self._description = description
        self._properties: dict[str, Any] = {}
        self._required: list[str] = []
        self._function: Callable[[dict[str, Any]], Any] | None = None

    def param(self, name: str, type: str, description: str) -> Self:
        """Add a parameter that every call must give.

        Raises:
            RegistrationError: `type` is not a JSON Schema type, the name is taken, or the tool is already complete.
        """
        self._add(name, type, description)
        self._required.append(name)
        return self

    def param_opt(self, name: str, type: str, description: str) -> Self:
        """Add a parameter that a call may leave out.

        Raises:
            RegistrationError: as for `param`.
        """
        self._add(name, type, description)
        return self

    def _add(self, name: str, type: str, description: str) -> None:
        if self._function is not None:
            raise RegistrationError(f"tool {self.name!r}: call() comes last; {name!r} is after it")
        if type not in PARAMETER_TYPES:
            known = ", ".join(PARAMETER_TYPES)
            raise RegistrationError(f"tool {self.name!r}: {name!r} has type {type!r}, which is none of {known}")
        if name in self._properties:
            raise RegistrationError(f"tool {self.name!r}: two parameters are called {name!r}")
        self._properties[name] = {"type": type, "description": description}

    def call(self, function: Callable[[dict[str, Any]], Any]) -> Self:
        """Attach the function, which takes the arguments as one dict.

        Raises:
            RegistrationError: the definition is wrong.
        """
        self._function = function
        check_definition(self.definition)
        return self

    @property
    def definition(self) -> ToolDefinition:
        """What the model will see."""
        schema = {"type": "object", "properties": self._properties, "required": self._required}
        return ToolDefinition(self.name, self._description, schema)

    def to_spec(self) -> ToolSpec:
        """Return the spec that a registry stores.

        Raises:
            RegistrationError: there is no function yet.
        """
        if self._function is None:
            raise RegistrationError(f"tool {self.name!r} has no function; end with .call(function)")
        return ToolSpec.positional(self.definition, self._function, DEFAULT_TOOL_OPTIONS, source=self)
