"""The step of the pipeline that checks arguments with placeholders: what they stand for is checked when it is known.

Part of `pipeline`. What becomes of a call in a dry run is decided in `control.draft`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolcell.tools.arguments import ArgumentChecker, ArgumentError, parse_arguments
from toolcell.tools.call import Call
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.placeholders import effects_in
from toolcell.tools.result import ErrorCode, ToolResult
from toolcell.tools.spec import RegisteredTool
from toolcell.tools.validation import validate
from toolcell.tools.values import BadValue, copy_arguments

_CHECKED_AROUND = frozenset({
    "type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions", "$schema",
})  # fmt: skip
"""Keywords of a schema that says something about each argument by itself."""


def note_placeholders(call: Call) -> tuple[str, ...]:
    """Set and return the effects whose results the arguments of a call refer to."""
    assert call.run.dry_run is not None
    if key := call.run.dry_run.key:
        call.depends_on = effects_in(arguments_of(call), key)  # before anything else looks at them
    return call.depends_on


def arguments_of(call: Call) -> Any:
    """Return the arguments as they were received, or what their JSON text says."""
    if not isinstance(call.raw_args, str):
        return call.raw_args
    try:
        return parse_arguments(call.raw_args)
    except ArgumentError:
        return {}  # the call is refused for that


async def take_around(call: Call, tool: RegisteredTool) -> ToolResult | None:
    """Check the arguments that hold no placeholders: set `call.args`, or return what is wrong with them."""
    assert call.run.dry_run is not None
    received = arguments_of(call)
    try:
        args = copy_arguments(received).args
    except BadValue as exc:
        return ToolResult.fail(f"invalid tool arguments: {exc}", code=ErrorCode.INVALID_ARGUMENTS)
    key, schema = call.run.dry_run.key, tool.definition.parameters
    later = {name: value for name, value in args.items() if name in _properties(schema) and effects_in(value, key)}
    if schema.keys() <= _CHECKED_AROUND:
        others = {name: value for name, value in received.items() if name not in later}
        if (refusal := await validate(call, _without(tool, schema, later), others)) is not None:
            return refusal
        args = {**call.args, **later}
    call.args, call.decoded = {name: args[name] for name in dict.fromkeys([*received, *args]) if name in args}, None
    return None


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _without(tool: RegisteredTool, schema: dict[str, Any], names: Mapping[str, Any]) -> RegisteredTool:
    """Return the tool without some of its parameters."""
    schema["properties"] = {name: part for name, part in _properties(schema).items() if name not in names}
    schema["required"] = [name for name in schema.get("required", ()) if name not in names]
    definition = ToolDefinition(tool.name, tool.definition.description, schema)
    options = tool.options
    checker = ArgumentChecker(definition, options.coercion or "safe", options.extras or "drop", options.validate)
    spec = replace(tool.spec, definition=definition, decode=None, prepare=None)
    return RegisteredTool(spec, checker, tool.aliases, tool.identity)
